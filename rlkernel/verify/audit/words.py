"""Registers and memory that carry symbols beside their bits, for the machines that execute listings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hardware.listing import Location
from hardware.matrix import fused_multiply_add
from rlkernel.verify.audit import symbols
from rlkernel.verify.audit.symbols import NONE, Symbols

Bits = NDArray[np.uint32]
_16, _HALF = np.uint32(16), np.uint32(0xFFFF)


class NotModelled(Exception):
    """The machine met an instruction, an operand or an access that it has no model of: nothing is proven then."""


@dataclass(frozen=True)
class Word:
    """A 32-bit register of every thread: bits, and the symbols of its two halves (0: none).

    A float32 with symbol s has ``high`` = s and ``low`` = ``low_mark(s)``; two bfloat16 have one symbol each.
    """

    bits: Bits
    low: Symbols
    high: Symbols

    def value(self) -> Symbols:
        """The symbol of the float32 in it; a register without symbols is the constant of its bits."""
        whole = np.where(self.low == symbols.low_mark(self.high), self.high, symbols.packed(self.low, self.high))
        return np.asarray(np.where((self.low == NONE) & (self.high == NONE), symbols.constant(self.bits), whole))

    def floats(self) -> NDArray[np.float32]:
        return self.bits.view(np.float32)

    def halves(self) -> tuple[Symbols, Symbols]:
        """Symbols of the two bfloat16 in it; a half without one is the constant of its widened bits."""
        low = np.where(self.low == NONE, symbols.constant(self.bits << _16), self.low)
        high = np.where(self.high == NONE, symbols.constant(self.bits & ~_HALF), self.high)
        return np.asarray(low), np.asarray(high)

    def has_symbol(self) -> bool:
        return bool(np.any(self.low != NONE) or np.any(self.high != NONE))


def plain(bits: Any, shape: int) -> Word:
    """A register of bits alone."""
    full = np.broadcast_to(np.asarray(bits, dtype=np.uint32), (shape,))
    none = np.zeros(shape, dtype=np.uint64)
    return Word(np.ascontiguousarray(full), none, none)


def of_value(result: NDArray[np.float32], symbol: Symbols) -> Word:
    """A register that holds a float32."""
    return Word(np.ascontiguousarray(result, dtype=np.float32).view(np.uint32), symbols.low_mark(symbol), symbol)


def select(condition: NDArray[np.bool_], a: Word, b: Word) -> Word:
    return Word(
        np.where(condition, a.bits, b.bits), np.where(condition, a.low, b.low), np.where(condition, a.high, b.high)
    )


def widen_low(x: Word) -> Word:
    """The lower bfloat16 as float32. A constant stays one."""
    bits = x.bits << _16
    return Word(bits, np.where(x.low == NONE, NONE, symbols.low_mark(x.low)), x.low)


def widen_high(x: Word) -> Word:
    """The upper bfloat16 as float32."""
    bits = x.bits & ~_HALF
    return Word(bits, np.where(x.high == NONE, NONE, symbols.low_mark(x.high)), x.high)


def pack(low: Word, high: Word, low_half: int, high_half: int) -> Word:
    """Two halves (0: lower, 1: upper) of two registers in one."""
    bits = ((low.bits >> np.uint32(16 * low_half)) & _HALF) | (
        ((high.bits >> np.uint32(16 * high_half)) & _HALF) << _16
    )
    return Word(bits, low.high if low_half else low.low, high.high if high_half else high.low)


def joined(a: Word, b: Word) -> Word:
    """Bitwise or: the halves keep their symbols where the other operand's half is 0."""
    low = np.where((b.bits & _HALF) == 0, a.low, np.where((a.bits & _HALF) == 0, b.low, NONE))
    high = np.where(b.bits >> _16 == 0, a.high, np.where(a.bits >> _16 == 0, b.high, NONE))
    return Word(a.bits | b.bits, low, high)


def fused(a: Word, b: Word, c: Word) -> Word:
    """fma.rn.f32."""
    with np.errstate(all="ignore"):  # signalling NaN
        x, y, z = (torch.from_numpy(np.array(w.floats(), dtype=np.float64)) for w in (a, b, c))
    return of_value(fused_multiply_add(x * y, z).numpy(), symbols.fma(a.value(), b.value(), c.value()))


def added(a: Word, b: Word) -> Word:
    """add.rn.f32."""
    with np.errstate(all="ignore"):
        return of_value(a.floats() + b.floats(), symbols.add(a.value(), b.value()))


def multiplied(a: Word, b: Word) -> Word:
    """mul.rn.f32."""
    with np.errstate(all="ignore"):
        return of_value(a.floats() * b.floats(), symbols.mul(a.value(), b.value()))


def divided(a: Word, b: Word) -> Word:
    """div.rn.f32."""
    symbol = symbols.div(a.value(), b.value(), b.bits, (b.low == NONE) & (b.high == NONE))
    with np.errstate(all="ignore"):
        return of_value(a.floats() / b.floats(), symbol)


def rooted(a: Word) -> Word:
    """sqrt.rn.f32."""
    with np.errstate(all="ignore"):
        root = np.sqrt(a.floats().astype(np.float64)).astype(np.float32)
    return of_value(root, symbols.operation("sqrt.rn.f32", a.value()))


def negated(a: Word) -> Word:
    bits = a.bits ^ np.uint32(0x80000000)
    if not a.has_symbol():
        return Word(bits, a.low, a.high)
    symbol = symbols.negative(a.value())
    return Word(bits, symbols.low_mark(symbol), symbol)


def narrowed_bf16(a: Word) -> tuple[NDArray[np.uint32], Symbols]:
    """cast.bf16 of a float32: bits of the bfloat16 and its symbol. NaN becomes 0x7FFF."""
    bits = a.bits
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> _16) & np.uint32(1))) >> _16
    return np.where(np.isnan(a.floats()), np.uint32(0x7FFF), rounded), symbols.cast_bf16(a.value())


@dataclass(frozen=True)
class MatrixEvent:
    """One matrix instruction as it ran: what it added to the accumulators of one warp or warpgroup.

    ``a`` [M, k] and ``b`` [N, k] are the symbols of the operands; ``fresh``: the accumulators were constants before;
    ``unit``: (block, warp, warpgroup or wave) that executed it.
    """

    opcode: str
    location: Location
    a: Symbols
    b: Symbols
    fresh: bool
    unit: tuple[int, int]
