"""Number formats of summands, accumulators and outputs: rounding to them, and exact fused operations, in NumPy.

Values travel in *carriers*: NumPy arrays of float32 (float64 for ``float64``) that hold values of the format. Widening
is exact, so bits of carriers are equal exactly when bits of the format are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlkernel.errors import ContractError

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
_ODD = np.int64(1)
_SPLITTER = 134217729.0  # 2^27 + 1: cuts a float64 into two halves of 26 bits


@dataclass(frozen=True)
class Format:
    """A binary format: ``bits`` of significand (the hidden one included), range, and the dtype that carries it.

    ``mask`` and ``unit`` are the summands M and u of a probe. ``countable``: how many u may be added at once, so that
    their sum is exact, and vanishes beside M, in every accumulator that is at least as wide as the format.
    """

    name: str
    bits: int
    smallest_exponent: int
    carrier: type[np.floating[Any]]
    mask: float
    unit: float
    countable: int

    def round(self, values: Float64) -> Array:
        """Round float64 values to nearest even; returns the carrier dtype."""
        if self.name == "float64":
            return values
        if self.name == "float32":
            return values.astype(np.float32)
        if self.name == "float16":
            return values.astype(np.float16).astype(np.float32)
        return round_to_bits(values, self.bits, self.smallest_exponent).astype(np.float32)


FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        Format("float64", 53, -1022, np.float64, 2.0**900, 1.0, 1 << 40),
        Format("float32", 24, -126, np.float32, 2.0**100, 1.0, 1 << 22),
        Format("bfloat16", 8, -126, np.float32, 2.0**100, 1.0, 1 << 7),
        Format("float16", 11, -14, np.float32, 2.0**15, 2.0**-17, 1 << 6),
    )
}


def number_format(name: str) -> Format:
    """The format of that name. Raises ContractError for an unknown one."""
    if name not in FORMATS:
        raise ContractError(f"dtype {name!r} cannot be probed; accepted: {', '.join(FORMATS)}")
    return FORMATS[name]


def round_to_bits(values: Float64, bits: int, smallest_exponent: int, mode: str = "nearest") -> Float64:
    """Round float64 values to ``bits`` of significand; a multiple of 2^(smallest_exponent - bits + 1) below the range.

    Args:
        mode: ``nearest`` (even) or ``truncate`` (toward zero).
    """
    _, exponent = np.frexp(values)
    quantum = np.maximum(exponent - 1, smallest_exponent) - (bits - 1)
    scaled = np.ldexp(values, -quantum)
    whole = np.rint(scaled) if mode == "nearest" else np.trunc(scaled)
    result: Float64 = np.ldexp(whole, quantum)
    return np.where(np.isfinite(values), result, values)


def add_to_odd(a: Float64, b: Float64) -> Float64:
    """``a + b`` rounded to odd: where the sum is not exact, the neighbour with an odd last bit.

    Rounding such a value to at most 51 bits gives what rounding the exact sum gives.
    """
    total = a + b
    rest = total - a
    error = (a - (total - rest)) + (b - rest)
    bits = total.view(np.int64)
    even = (bits & _ODD) == 0
    wrong = even & (error != 0) & np.isfinite(total)
    if not wrong.any():
        return total
    # an even neighbour was chosen: step one towards the error
    away = (error > 0) == (total > 0)
    step = np.where(away, np.int64(1), np.int64(-1))
    moved: Float64 = np.where(wrong, bits + step, bits).view(np.float64)
    return moved


def exact_product(a: Float64, b: Float64) -> tuple[Float64, Float64]:
    """``a * b`` as an unevaluated sum high + low (Dekker); exact while nothing over- or underflows."""
    high = a * b
    a_top = _SPLITTER * a
    a_top = a_top - (a_top - a)
    b_top = _SPLITTER * b
    b_top = b_top - (b_top - b)
    a_low, b_low = a - a_top, b - b_top
    low = ((a_top * b_top - high) + a_top * b_low + a_low * b_top) + a_low * b_low
    return high, low


def fma64(a: Float64, b: Float64, c: Float64) -> Float64:
    """``a * b + c`` rounded once to float64 (Boldo and Melquiond 2008: the low parts are added to odd)."""
    high, low = exact_product(a, b)
    total = c + low
    rest = total - c
    first = (c - (total - rest)) + (low - rest)
    upper = high + total
    rest = upper - high
    second = (high - (upper - rest)) + (total - rest)
    return upper + add_to_odd(first, second)


def add_to_float32(a: Float64, b: Float64) -> npt.NDArray[np.float32]:
    """``a + b`` rounded once to float32. Only where the float64 sum is a tie of float32 can rounding twice be wrong."""
    total = a + b
    tie = (total.view(np.int64) & np.int64(0x1FFFFFFF)) == np.int64(0x10000000)
    tie |= np.abs(total) < 2.0**-126  # ties of subnormals have other bits
    if tie.any():
        total[tie] = add_to_odd(a[tie], b[tie])
    return total.astype(np.float32)


def float32_fma(a: Array, b: Array, c: Array) -> npt.NDArray[np.float32]:
    """``a * b + c`` of float32 values, rounded once."""
    return add_to_float32(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))


def bits_of(carriers: Array) -> npt.NDArray[Any]:
    """The bits of carriers as unsigned integers."""
    values = np.ascontiguousarray(carriers)
    return values.view(np.uint64 if values.dtype == np.float64 else np.uint32)
