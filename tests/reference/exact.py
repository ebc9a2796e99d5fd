"""Exact arithmetic for tests: rationals, rounded to float32 by integers. Shares nothing with the product."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np


def value(pattern: int) -> Fraction:
    """The rational that a finite float32 pattern stands for (zeros lose their sign)."""
    number = np.uint32(pattern).view(np.float32)
    assert np.isfinite(number)
    return Fraction(float(number))


def exponent(x: Fraction, smallest: int = -126) -> int:
    """floor(log2 |x|) of a rational that is not 0, at least ``smallest``."""
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if Fraction(2) ** e > abs(x):
        e -= 1
    return max(e, smallest)


def toward_zero(x: Fraction, unit: int) -> Fraction:
    """x truncated to a multiple of 2^unit."""
    return math.trunc(x / Fraction(2) ** unit) * Fraction(2) ** unit


def down(x: Fraction, unit: int) -> Fraction:
    """x rounded down to a multiple of 2^unit."""
    return math.floor(x / Fraction(2) ** unit) * Fraction(2) ** unit


def nearest(x: Fraction) -> float:
    """x rounded to the nearest float32, ties to even; infinite from 2^128 - 2^103; what rounds to 0 keeps its sign."""
    if x == 0:
        return 0.0
    unit = Fraction(2) ** (exponent(x) - 23)
    rounded = round(x / unit) * unit  # Fraction rounds halves to even
    if abs(rounded) >= 2**128:
        return math.copysign(math.inf, x)
    return math.copysign(float(abs(rounded)), x)
