"""Vector instructions of gfx942 that stay in registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hardware.listing import Instruction
from rlkernel.verify.audit import symbols, words
from rlkernel.verify.audit.gcn.state import LANES, MASK32, WaveState, to_lanes
from rlkernel.verify.audit.words import NotModelled, Word

Handler = Callable[[WaveState, Sequence[str], Instruction], None]
_U64 = np.uint64


def _none() -> Any:
    return np.zeros(LANES, dtype=np.uint64)


def _signed_bit_field(x: Any, offset: Any, width: Any) -> Any:
    offset, width = offset.astype(np.int64) & 31, width.astype(np.int64) & 31
    field = (x.astype(np.int64) >> offset) & ((1 << width) - 1)
    signed = field - ((field >> np.maximum(width - 1, 0)) << width)
    return np.where(width > 0, signed, 0).astype(np.int32).view(np.uint32)


def _integer(f: Callable[..., Any]) -> Handler:
    def run(w: WaveState, o: Sequence[str], _: Instruction) -> None:
        with np.errstate(all="ignore"):
            w.set_bits(o[0], f(*(w.vector(text).bits for text in o[1:])))

    return run


def _float(f: Callable[..., Word]) -> Handler:
    def run(w: WaveState, o: Sequence[str], i: Instruction) -> None:
        if i.modifiers:
            raise NotModelled(f"modifiers {sorted(i.modifiers)} of a float operation")
        w.set_vector(o[0], f(*(w.vector(text) for text in o[1:])))

    return run


def _sub(a: Word, b: Word) -> Word:
    return words.added(a, words.negated(b))


def _fmac(w: WaveState, o: Sequence[str], i: Instruction) -> None:
    if i.modifiers:
        raise NotModelled(f"modifiers {sorted(i.modifiers)} of a float operation")
    w.set_vector(o[0], words.fused(w.vector(o[1]), w.vector(o[2]), w.vector(o[0])))


def _packed(f: Callable[..., Word]) -> Handler:
    def run(w: WaveState, o: Sequence[str], i: Instruction) -> None:
        def choice(name: str, default: int) -> list[int]:
            text = i.modifiers.get(name, "")
            return [int(x) for x in text.strip("[]").split(",")] if text else [default] * (len(o) - 1)

        if not set(i.modifiers) <= {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"}:
            raise NotModelled(f"modifiers {sorted(i.modifiers)} of a packed operation")
        results = []
        for select, negate, default in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
            halves = [w.half_of_pair(text, part) for text, part in zip(o[1:], choice(select, default), strict=True)]
            signs = choice(negate, 0)
            results.append(f(*(words.negated(x) if s else x for x, s in zip(halves, signs, strict=True))))
        w.set_range(o[0], results)

    return run


def _xor(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    a, b = (w.vector(text) for text in o[1:])
    for sign, other in ((a, b), (b, a)):
        if bool(np.all(sign.bits == np.uint32(0x80000000))):  # the other sign of a float32, and the same symbol
            w.set_vector(o[0], words.negated(other))
            return
    w.set_bits(o[0], a.bits ^ b.bits)


def _packed_move(w: WaveState, o: Sequence[str], i: Instruction) -> None:
    chosen = [int(x) for x in i.modifiers.get("op_sel", "[0,0]").strip("[]").split(",")]
    w.set_range(o[0], [w.half_of_pair(text, part) for text, part in zip(o[1:], chosen, strict=True)])


def _move(w: WaveState, o: Sequence[str], i: Instruction) -> None:
    if i.modifiers:
        raise NotModelled(f"modifiers {sorted(i.modifiers)} of a move")
    w.set_vector(o[0], w.vector(o[1]))


def _move_pair(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    if o[1][0] == "v" and o[1] != "vcc":
        w.set_range(o[0], w.vector_range(o[1], 2))
    else:
        w.set_wide(o[0], w.wide(o[1]))


def _constant(text: str) -> int | None:
    try:
        return int(text, 0) & MASK32
    except ValueError:
        return None


def _shift_left(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    x = w.vector(o[2])
    if _constant(o[1]) == 16 and x.has_symbol():
        w.set_vector(o[0], words.widen_low(x))
    else:
        w.set_bits(o[0], x.bits << (w.vector(o[1]).bits & np.uint32(31)))


def _shift_right(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    x = w.vector(o[2])
    if _constant(o[1]) == 16 and x.has_symbol():
        w.set_vector(o[0], Word(x.bits >> np.uint32(16), x.high, _none()))
    else:
        w.set_bits(o[0], x.bits >> (w.vector(o[1]).bits & np.uint32(31)))


def _selected(w: WaveState, text: str, selector: str) -> Word:
    x = w.vector(text)
    if selector in ("", "DWORD"):
        return x
    if selector == "WORD_1":
        return Word(x.bits >> np.uint32(16), x.high, _none())
    if selector == "WORD_0":
        return Word(x.bits & np.uint32(0xFFFF), x.low, _none())
    raise NotModelled(f"the operand selector {selector}")


def _set_bit_16(w: WaveState, target: str, x: Word) -> None:
    """Bit 16 of a traced float32: the first half of its rounding to bfloat16 by integers."""
    bit = symbols.operation("bit 16", x.value())
    w.set_vector(target, Word((x.bits >> np.uint32(16)) & np.uint32(1), symbols.low_mark(bit), bit))


def _and(w: WaveState, o: Sequence[str], i: Instruction) -> None:
    for text, selector, other in ((o[1], "src0_sel", o[2]), (o[2], "src1_sel", o[1])):
        if (
            i.modifiers.get(selector) == "WORD_1"
            and w.vector(text).has_symbol()
            and (w.vector(other).bits == 1)[w.exec_lanes].all()
        ):
            _set_bit_16(w, o[0], w.vector(text))
            return
    a = _selected(w, o[1], i.modifiers.get("src0_sel", ""))
    b = _selected(w, o[2], i.modifiers.get("src1_sel", ""))
    if i.modifiers.get("dst_sel", "DWORD") != "DWORD":
        raise NotModelled("a result in a part of a register")
    for x, mask in ((a, b), (b, a)):
        if x.has_symbol() and not mask.has_symbol():
            if (mask.bits == 0xFFFF0000)[w.exec_lanes].all():
                w.set_vector(o[0], words.widen_high(x))
                return
            if (mask.bits == 0xFFFF)[w.exec_lanes].all():
                w.set_vector(o[0], Word(x.bits & np.uint32(0xFFFF), x.low, _none()))
                return
    w.set_bits(o[0], a.bits & b.bits)


def _or(w: WaveState, o: Sequence[str], i: Instruction) -> None:
    a = _selected(w, o[1], i.modifiers.get("src0_sel", ""))
    b = _selected(w, o[2], i.modifiers.get("src1_sel", ""))
    if i.modifiers.get("dst_sel", "DWORD") != "DWORD":
        raise NotModelled("a result in a part of a register")
    w.set_vector(o[0], words.joined(a, b))


def _shift_or(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    x = w.vector(o[1])
    if _constant(o[2]) == 16 and x.has_symbol():
        w.set_vector(o[0], words.joined(words.widen_low(x), w.vector(o[3])))
    else:
        w.set_bits(o[0], (x.bits << (w.vector(o[2]).bits & np.uint32(31))) | w.vector(o[3]).bits)


def _and_or(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    x, mask, other = (w.vector(text) for text in o[1:4])
    if x.has_symbol() and (mask.bits == 0xFFFF0000)[w.exec_lanes].all():
        w.set_vector(o[0], words.joined(Word(mask.bits & x.bits, _none(), x.high), other))
    else:
        w.set_bits(o[0], (x.bits & mask.bits) | other.bits)


def _permute(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    upper, lower, selector = w.vector(o[1]), w.vector(o[2]), w.vector(o[3]).bits
    chosen = int(selector[0])
    if (selector != chosen).any():
        raise NotModelled("a byte permutation that differs by lane")
    halves = []
    for part in (chosen & 0xFFFF, chosen >> 16):
        low_byte, high_byte = part & 0xFF, part >> 8
        if high_byte != low_byte + 1 or low_byte % 2 or high_byte > 7:
            raise NotModelled(f"a byte permutation ({chosen:#x}) that splits halves")
        halves.append((lower if low_byte < 4 else upper, low_byte // 2 % 2))
    (low, low_half), (high, high_half) = halves
    w.set_vector(o[0], words.pack(low, high, low_half, high_half))


def _bit_field(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    x, position, length = (w.vector(text) for text in o[1:4])
    width = length.bits & np.uint32(31)
    bits = (x.bits >> (position.bits & np.uint32(31))) & ((np.uint32(1) << width) - np.uint32(1))
    if x.has_symbol() and _constant(o[2]) == 16 and _constant(o[3]) == 1:
        _set_bit_16(w, o[0], x)
    else:
        w.set_bits(o[0], bits)


def _add_three(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    a, b, c = (w.vector(text) for text in o[1:4])
    bits = a.bits + b.bits + c.bits
    rounding = [x for x in (a, b, c) if not x.has_symbol()]
    traced = [x for x in (a, b, c) if x.has_symbol()]
    if len(traced) == 2 and (rounding[0].bits == 0x7FFF)[w.exec_lanes].all():
        for x, bit in (traced, traced[::-1]):
            if (bit.value() == symbols.operation("bit 16", x.value()))[w.exec_lanes].all():
                rest = symbols.operation("below bfloat16", x.value())
                w.set_vector(o[0], Word(bits, rest, symbols.cast_bf16(x.value())))
                return
    w.set_bits(o[0], bits)


def _shift_add_wide(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    amount = w.vector(o[2]).bits.astype(_U64)
    w.set_wide(o[0], (w.wide(o[1]) << amount) + w.wide(o[3]))


def _multiply_add_wide(signed: bool) -> Handler:
    def run(w: WaveState, o: Sequence[str], _: Instruction) -> None:
        a, b = w.vector(o[2]).bits, w.vector(o[3]).bits
        if signed:
            product = (a.view(np.int32).astype(np.int64) * b.view(np.int32).astype(np.int64)).view(np.uint64)
        else:
            product = a.astype(_U64) * b.astype(_U64)
        w.set_wide(o[0], product + w.wide(o[4]))

    return run


def _shift_wide(w: WaveState, o: Sequence[str], i: Instruction) -> None:
    amount, x = w.vector(o[1]).bits.astype(_U64) & _U64(63), w.wide(o[2])
    if i.opcode.startswith("v_lshlrev"):
        w.set_wide(o[0], x << amount)
    elif i.opcode.startswith("v_ashrrev"):
        w.set_wide(o[0], (x.view(np.int64) >> amount.astype(np.int64)).view(np.uint64))
    else:
        w.set_wide(o[0], x >> amount)


def _read_first_lane(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    active = np.flatnonzero(w.exec_lanes)
    word = w.vector(o[1])
    if word.has_symbol():
        raise NotModelled("a traced number in a scalar register")
    w.set_scalar(o[0], int(word.bits[active[0] if len(active) else 0]))


def _i32(x: Any) -> Any:
    return np.ascontiguousarray(x).view(np.int32)


def _low24(x: Any) -> Any:
    return x & np.uint32(0xFFFFFF)


def _signed24(x: Any) -> Any:
    return (_i32(x) << np.int32(8)) >> np.int32(8)


def _convert_to_float(signed: bool) -> Handler:
    def run(w: WaveState, o: Sequence[str], _: Instruction) -> None:
        bits = w.vector(o[1]).bits
        w.set_bits(o[0], (_i32(bits) if signed else bits).astype(np.float32).view(np.uint32))

    return run


def _convert_to_unsigned(w: WaveState, o: Sequence[str], _: Instruction) -> None:
    x = w.vector(o[1]).floats().astype(np.float64)
    w.set_bits(o[0], np.clip(np.nan_to_num(np.trunc(x)), 0, MASK32).astype(np.uint32))


def condition(w: WaveState, text: str) -> Any:
    """One boolean a lane from a mask register."""
    return to_lanes(w.scalar(text, 2))


HANDLERS: Mapping[str, Handler] = {
    "v_mov_b32": _move,
    "v_mov_b64": _move_pair,
    "v_accvgpr_read_b32": _move,
    "v_accvgpr_write_b32": _move,
    "v_accvgpr_mov_b32": _move,
    "v_readfirstlane_b32": _read_first_lane,
    "v_add_f32": _float(words.added),
    "v_sub_f32": _float(_sub),
    "v_subrev_f32": _float(lambda a, b: _sub(b, a)),
    "v_mul_f32": _float(words.multiplied),
    "v_fma_f32": _float(words.fused),
    "v_fmaak_f32": _float(words.fused),
    "v_fmamk_f32": _float(words.fused),
    "v_fmac_f32": _fmac,
    "v_pk_mov_b32": _packed_move,
    "v_pk_fma_f32": _packed(words.fused),
    "v_pk_mul_f32": _packed(words.multiplied),
    "v_pk_add_f32": _packed(words.added),
    "v_add_u32": _integer(lambda a, b: a + b),
    "v_sub_u32": _integer(lambda a, b: a - b),
    "v_subrev_u32": _integer(lambda a, b: b - a),
    "v_mul_lo_u32": _integer(lambda a, b: a * b),
    "v_mul_u32_u24": _integer(lambda a, b: _low24(a) * _low24(b)),
    "v_mad_u32_u24": _integer(lambda a, b, c: _low24(a) * _low24(b) + c),
    "v_mad_i32_i24": _integer(lambda a, b, c: (_signed24(a) * _signed24(b) + _i32(c)).view(np.uint32)),
    "v_lshl_add_u32": _integer(lambda a, n, c: (a << (n & np.uint32(31))) + c),
    "v_add_lshl_u32": _integer(lambda a, b, n: (a + b) << (n & np.uint32(31))),
    "v_xad_u32": _integer(lambda a, b, c: (a ^ b) + c),
    "v_or3_b32": _integer(lambda a, b, c: a | b | c),
    "v_xor_b32": _xor,
    "v_bfe_i32": _integer(_signed_bit_field),
    "v_not_b32": _integer(lambda a: ~a),
    "v_bfrev_b32": _integer(lambda a: np.array([int(f"{int(x):032b}"[::-1], 2) for x in a], dtype=np.uint32)),
    "v_ashrrev_i32": _integer(lambda n, x: (_i32(x) >> _i32(n & np.uint32(31))).view(np.uint32)),
    "v_min_u32": _integer(np.minimum),
    "v_max_u32": _integer(np.maximum),
    "v_min_i32": _integer(lambda a, b: np.minimum(_i32(a), _i32(b)).view(np.uint32)),
    "v_max_i32": _integer(lambda a, b: np.maximum(_i32(a), _i32(b)).view(np.uint32)),
    "v_lshlrev_b32": _shift_left,
    "v_lshrrev_b32": _shift_right,
    "v_and_b32": _and,
    "v_or_b32": _or,
    "v_lshl_or_b32": _shift_or,
    "v_and_or_b32": _and_or,
    "v_perm_b32": _permute,
    "v_bfe_u32": _bit_field,
    "v_add3_u32": _add_three,
    "v_lshl_add_u64": _shift_add_wide,
    "v_mad_u64_u32": _multiply_add_wide(False),
    "v_mad_i64_i32": _multiply_add_wide(True),
    "v_lshlrev_b64": _shift_wide,
    "v_lshrrev_b64": _shift_wide,
    "v_ashrrev_i64": _shift_wide,
    "v_cvt_f32_i32": _convert_to_float(True),
    "v_cvt_f32_u32": _convert_to_float(False),
    "v_cvt_u32_f32": _convert_to_unsigned,
}
