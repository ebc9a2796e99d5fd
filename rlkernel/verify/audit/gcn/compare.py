"""Comparisons, selections, and the sequences that gfx942 makes a division and a square root of.

LLVM expands ``div.rn.f32`` and ``sqrt.rn.f32`` into about ten instructions around ``v_rcp_f32`` and ``v_sqrt_f32``. The
machine recognises the whole sequence from the symbols of its intermediate results and replaces it by the correctly
rounded operation. That the sequence rounds correctly is LLVM's claim, not shown here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hardware.listing import Instruction
from rlkernel.verify.audit import symbols, words
from rlkernel.verify.audit.gcn.state import LANES, WaveState
from rlkernel.verify.audit.gcn.vector import _selected, condition
from rlkernel.verify.audit.symbols import Symbols
from rlkernel.verify.audit.words import NotModelled, Word

_ORDERED: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}
_NEGATED = {"neq": "eq", "nlg": "lg", "ngt": "gt", "nge": "ge", "nlt": "lt", "nle": "le"}
_ROOT_SCALE = 0x37800000  # 2^-16
_CLASSES = 0x260  # +0, -0, +inf


def compare(w: WaveState, opcode: str, operands: Sequence[str]) -> None:
    """``v_cmp_OP_TYPE``: a mask of lanes."""
    name, _, kind = opcode.removeprefix("v_cmp_").removesuffix("_e32").removesuffix("_e64").rpartition("_")
    target, left, right = operands
    if name == "class" and kind == "f32":
        _classify(w, target, left, right)
        return
    if kind == "f32":
        a, b = w.vector(left).floats(), w.vector(right).floats()
        ordered = ~(np.isnan(a) | np.isnan(b))
        if name in ("o", "u"):
            result = ordered if name == "o" else ~ordered
        elif name in _ORDERED:
            result = _ORDERED[name](a, b) & ordered
        elif name in _NEGATED:
            result = ~(_ORDERED[_NEGATED[name]](a, b) & ordered)
        else:
            raise NotModelled("this comparison has no model")
    elif kind in ("i32", "u32", "i64", "u64"):
        sources: list[Any] = [w.wide(t) if kind.endswith("64") else w.vector(t).bits for t in (left, right)]
        if kind.startswith("i"):
            sources = [np.ascontiguousarray(x).view(np.int64 if kind == "i64" else np.int32) for x in sources]
        name = "lg" if name == "ne" else name
        if name not in _ORDERED:
            raise NotModelled("this comparison has no model")
        result = _ORDERED[name](*sources)
    else:
        raise NotModelled("a comparison of this type")
    w.set_mask(target, result)


def _classify(w: WaveState, target: str, left: str, right: str) -> None:
    x, classes = w.vector(left), w.vector(right).bits
    if (classes != _CLASSES)[w.exec_lanes].any():
        raise NotModelled("a classification other than zero or infinity")
    value = x.floats()
    w.set_mask(target, (value == 0) | (value == np.inf))
    w.classified[target] = x.value()


def select(w: WaveState, operands: Sequence[str], instruction: Instruction) -> None:
    """``v_cndmask_b32``."""
    modifiers = instruction.modifiers
    target, otherwise, chosen, mask = operands
    if modifiers.get("dst_sel", "DWORD") != "DWORD":
        raise NotModelled("a result in a part of a register")
    a = _selected(w, otherwise, modifiers.get("src0_sel", ""))
    b = _selected(w, chosen, modifiers.get("src1_sel", ""))
    if mask in w.classified:
        operand = w.classified[mask]
        if _is_root_of(a.value(), operand, w.exec_lanes):
            picked = words.select(condition(w, mask), b, a)
            root = symbols.operation("sqrt.rn.f32", operand)
            w.set_vector(target, Word(picked.bits, symbols.low_mark(root), root))
            return
    w.set_vector(target, words.select(condition(w, mask), b, a))


def _root_candidates(operand: Symbols) -> list[Symbols]:
    root = symbols.operation("v_sqrt_f32", operand)
    neighbours = [root, symbols.operation("unit below", root), symbols.operation("unit above", root)]
    scale = np.full(LANES, symbols.constant(_ROOT_SCALE)[0])
    return neighbours + [symbols.mul(scale, x) for x in neighbours]


def _is_root_of(found: Symbols, operand: Symbols, active: Any) -> bool:
    matches = ~active
    for candidate in _root_candidates(operand):
        matches |= found == candidate
    return bool(matches.all())


def step_unit(w: WaveState, operands: Sequence[str]) -> bool:
    """``v_add_u32 +-1`` on an approximate root: the neighbouring float32. False where it is something else."""
    if operands[1] not in ("1", "-1"):
        return False
    x = w.vector(operands[2])
    if not x.has_symbol():
        return False
    value = x.value()
    name = "unit above" if operands[1] == "1" else "unit below"
    symbol = symbols.operation(name, value)
    bits = x.bits + np.uint32(int(operands[1]) & 0xFFFFFFFF)
    w.set_vector(operands[0], Word(bits, symbols.low_mark(symbol), symbol))
    return True


def approximate_root(w: WaveState, operands: Sequence[str]) -> None:
    """``v_sqrt_f32``: bits as if correctly rounded, a symbol of its own."""
    x = w.vector(operands[1])
    w.set_vector(operands[0], words.of_value(words.rooted(x).floats(), symbols.operation("v_sqrt_f32", x.value())))


def approximate_reciprocal(w: WaveState, operands: Sequence[str]) -> None:
    """``v_rcp_f32``: bits as if correctly rounded, a symbol of its own."""
    x = w.vector(operands[1])
    with np.errstate(all="ignore"):
        bits = np.float32(1) / x.floats()
    if x.has_symbol():
        w.set_vector(operands[0], words.of_value(bits, symbols.operation("v_rcp_f32", x.value())))
    else:
        w.set_bits(operands[0], bits.view(np.uint32))


def _scaled_symbols(denominator: Symbols, numerator: Symbols) -> tuple[Symbols, Symbols]:
    return (
        symbols.operation("v_div_scale denominator", denominator, numerator),
        symbols.operation("v_div_scale numerator", denominator, numerator),
    )


def scale(w: WaveState, operands: Sequence[str]) -> None:
    """``v_div_scale_f32``: as if nothing had to be scaled."""
    target, flags, chosen, denominator, numerator = operands
    x = w.vector(chosen)
    pair = _scaled_symbols(w.vector(denominator).value(), w.vector(numerator).value())
    if chosen not in (denominator, numerator):
        raise NotModelled("v_div_scale_f32 of something else than its denominator or numerator")
    w.set_mask(flags, np.zeros(LANES, dtype=np.bool_))
    w.set_vector(target, words.of_value(x.floats(), pair[0] if chosen == denominator else pair[1]))


def _fmas_symbol(denominator: Symbols, numerator: Symbols) -> Symbols:
    """The quotient before ``v_div_fixup_f32``, in the sequence that LLVM writes."""
    d, n = _scaled_symbols(denominator, numerator)
    negative, one = symbols.negative(d), np.full(LANES, symbols.constant(0x3F800000)[0])
    r = symbols.operation("v_rcp_f32", d)
    refined = symbols.fma(symbols.fma(negative, r, one), r, r)
    quotient = symbols.mul(n, refined)
    better = symbols.fma(symbols.fma(negative, quotient, n), refined, quotient)
    return symbols.operation("v_div_fmas_f32", symbols.fma(negative, better, n), refined, better)


def last_step(w: WaveState, operands: Sequence[str]) -> None:
    """``v_div_fmas_f32``."""
    a, b, c = (w.vector(text) for text in operands[1:4])
    symbol = symbols.operation("v_div_fmas_f32", a.value(), b.value(), c.value())
    w.set_vector(operands[0], words.of_value(words.fused(a, b, c).floats(), symbol))


def fixup(w: WaveState, operands: Sequence[str]) -> None:
    """``v_div_fixup_f32``: the correctly rounded quotient, if everything before it is LLVM's sequence."""
    quotient, denominator, numerator = (w.vector(text) for text in operands[1:4])
    expected = _fmas_symbol(denominator.value(), numerator.value())
    if (quotient.value() != expected)[w.exec_lanes].any():
        raise NotModelled("a quotient that does not come from the sequence of a correctly rounded division")
    w.set_vector(operands[0], words.divided(numerator, denominator))
