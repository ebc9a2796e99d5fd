"""PTX arithmetic, integer and float, comparisons and logic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hardware.cuda.exp2 import ex2_approx_ftz_sm90
from rlkernel.verify.audit import symbols, words
from rlkernel.verify.audit.ptx.state import INTEGERS, PtxState
from rlkernel.verify.audit.words import NotModelled, Word

_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


class PtxArithmetic(PtxState):
    """Handlers are found by name: ``_op_`` and the instruction up to its first dot."""

    def _arithmetic(self, parts: list[str], operands: Sequence[str], active: Any, f: Callable[..., Any]) -> None:
        kind = parts[-1]
        with np.errstate(all="ignore"):
            self._result(kind, operands[0], f(*self._integers(kind, operands[1:])), active)

    def _float(self, parts: list[str], operands: Sequence[str], active: Any, f: Callable[..., Word]) -> None:
        if "ftz" in parts or any(part in parts for part in ("approx", "full", "rz", "rm", "rp", "sat")):
            raise NotModelled("an approximate, flushing or directed operation")
        self._set(operands[0], f(*(self._word(text) for text in operands[1:])), active)

    def _op_add(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if parts[-1] == "f32":
            self._float(parts, operands, active, words.added)
        else:
            self._arithmetic(parts, operands, active, np.add)

    def _op_sub(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if parts[-1] == "f32":
            self._float(parts, operands, active, lambda a, b: words.added(a, words.negated(b)))
        else:
            self._arithmetic(parts, operands, active, np.subtract)

    def _op_mul(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if parts[-1] == "f32":
            self._float(parts, operands, active, words.multiplied)
        elif "wide" in parts:
            wide = np.int64 if parts[-1] == "s32" else np.uint64
            a, b = (x.astype(wide) for x in self._integers(parts[-1], operands[1:]))
            self._result("b64", operands[0], a * b, active)
        elif "hi" in parts:
            if parts[-1] != "u32":
                raise NotModelled("the upper half of a product of this type")
            a, b = (x.astype(np.uint64) for x in self._integers(parts[-1], operands[1:]))
            self._set_bits(operands[0], (a * b) >> np.uint64(32), active)
        else:
            self._arithmetic(parts, operands, active, np.multiply)

    def _op_mad(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if "wide" in parts:
            wide = np.int64 if parts[-1] == "s32" else np.uint64
            a, b = (x.astype(wide) for x in self._integers(parts[-1], operands[1:3]))
            self._result("b64", operands[0], a * b + self._wide_value(operands[3]).view(wide), active)
        else:
            self._arithmetic(parts, operands, active, lambda a, b, c: a * b + c)

    def _op_fma(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        self._float(parts, operands, active, words.fused)

    def _op_div(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if parts[-1] == "f32":
            self._float(parts, operands, active, words.divided)
            return
        a, b = (x.astype(np.int64) for x in self._integers(parts[-1], operands[1:]))
        if np.any(b == 0):
            raise NotModelled("an integer division by zero")
        quotient = np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
        self._result(parts[-1], operands[0], quotient.astype(INTEGERS[parts[-1]]), active)

    def _op_rem(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        a, b = (x.astype(np.int64) for x in self._integers(parts[-1], operands[1:]))
        if np.any(b == 0):
            raise NotModelled("an integer division by zero")
        self._result(parts[-1], operands[0], np.fmod(a, b).astype(INTEGERS[parts[-1]]), active)

    def _op_sqrt(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        self._float(parts, operands, active, words.rooted)

    def _op_neg(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if parts[-1] == "f32":
            self._float(parts, operands, active, words.negated)
        else:
            self._arithmetic(parts, operands, active, np.negative)

    def _op_min(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        self._integer_only(parts)
        self._arithmetic(parts, operands, active, np.minimum)

    def _op_max(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        self._integer_only(parts)
        self._arithmetic(parts, operands, active, np.maximum)

    def _integer_only(self, parts: list[str]) -> None:
        if parts[-1].startswith("f"):
            raise NotModelled("this operation has no model for floats")

    def _op_and(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if parts[-1] == "b32" and self._masks_upper_half(operands):
            source = operands[1] if operands[1] in self._registers else operands[2]
            self._set(operands[0], words.widen_high(self._word(source)), active)
        else:
            self._logic(parts, operands, active, np.bitwise_and)

    def _masks_upper_half(self, operands: Sequence[str]) -> bool:
        return any(self._literal(text) in (-65536, 0xFFFF0000) for text in operands[1:])

    def _op_or(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if parts[-1] == "b32":
            self._set(operands[0], words.joined(self._word(operands[1]), self._word(operands[2])), active)
        else:
            self._logic(parts, operands, active, np.bitwise_or)

    def _op_xor(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        self._logic(parts, operands, active, np.bitwise_xor)

    def _op_not(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        self._logic(parts, operands, active, np.invert)

    def _logic(self, parts: list[str], operands: Sequence[str], active: Any, f: Callable[..., Any]) -> None:
        if parts[1] == "pred":
            self._predicates[operands[0]] = f(*(self._predicate(text) for text in operands[1:]))
        else:
            self._arithmetic(parts, operands, active, f)

    def _op_shl(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        amount = self._word(operands[2]).bits.astype(np.uint64)
        if parts[-1] == "b32" and (amount == 16).all() and self._word(operands[1]).has_symbol():
            self._set(operands[0], words.widen_low(self._word(operands[1])), active)
            return
        self._shift(parts, operands, active, lambda x, n: x << n, amount)

    def _op_shr(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        amount = self._word(operands[2]).bits.astype(np.uint64)
        if parts[-1] in ("b64", "u64") and (amount == 32).all() and operands[1] in self._pairs:
            high = self._pairs[operands[1]][1]
            self._set_pair(operands[0], high, words.plain(0, self._threads), active)
            return
        if parts[-1].endswith("32") and (amount == 16).all() and self._word(operands[1]).has_symbol():
            word = self._word(operands[1])
            none = np.zeros(self._threads, dtype=np.uint64)
            self._set(operands[0], Word(word.bits >> np.uint32(16), word.high, none), active)
            return
        self._shift(parts, operands, active, lambda x, n: x >> n, amount)

    def _shift(self, parts: list[str], operands: Sequence[str], active: Any, f: Any, amount: Any) -> None:
        (x,) = self._integers(parts[-1], operands[1:2])
        width = 64 if parts[-1].endswith("64") else 32
        clamped = np.minimum(amount, np.uint64(width - 1)).astype(x.dtype)
        value = f(x, clamped)
        signed = parts[-1].startswith("s")
        if not signed:
            value = np.where(amount >= width, np.zeros_like(x), value)
        self._result(parts[-1], operands[0], value, active)

    def _op_bfe(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        position, length = int(operands[2], 0), int(operands[3], 0)
        if parts[-1] not in ("u32", "s32") or position + length > 32 or length == 0:
            raise NotModelled("a bit field of this type")
        field = (self._word(operands[1]).bits >> np.uint32(position)) & np.uint32((1 << length) - 1)
        if parts[-1] == "s32":
            field = np.where(field >> np.uint32(length - 1), field | np.uint32(-(1 << length) & 0xFFFFFFFF), field)
        self._set_bits(operands[0], field, active)

    def _op_setp(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        kind, comparison = parts[-1], parts[1]
        if kind.startswith("f"):
            if kind != "f32" or "ftz" in parts:
                raise NotModelled("a comparison of this type")
            a, b = (self._word(text).floats() for text in operands[1:3])
            unordered = np.isnan(a) | np.isnan(b)
            if comparison in ("num", "nan"):
                result = unordered if comparison == "nan" else ~unordered
            elif comparison.endswith("u") and comparison[:-1] in _COMPARE:
                result = _COMPARE[comparison[:-1]](a, b) | unordered
            else:
                result = _COMPARE[comparison](a, b) & ~unordered
        else:
            a, b = self._integers(kind, operands[1:3])
            result = _COMPARE[comparison](a, b)
        if len(parts) > 3 and parts[2] in ("and", "or"):
            other = self._predicate(operands[3])
            result = result & other if parts[2] == "and" else result | other
        target = operands[0].split("|")[0]
        old = self._predicates.get(target)
        self._predicates[target] = result if old is None else np.where(active, result, old)

    def _op_ex2(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if parts[1:] != ["approx", "ftz", "f32"]:
            raise NotModelled("an exponential other than ex2.approx.ftz.f32")
        word = self._word(operands[1])
        if bool((word.floats() > 0).any()):
            raise NotModelled("ex2.approx.ftz.f32 of a positive number, where it was not measured")
        result = ex2_approx_ftz_sm90(torch.from_numpy(word.floats().copy())).numpy()
        symbol = symbols.operation("ex2.approx.ftz.f32", word.value())
        self._set(operands[0], words.of_value(result, symbol), active)
