"""Scalars that the host computes once, each the correctly rounded float32 of an exact value."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from math import isqrt

import numpy as np

# log2(e) to 40 digits; the product below needs far fewer
_LOG2E = Fraction(14426950408889634073599246810018921374266, 10**40)


def round_to_float32(value: Fraction) -> np.float32:
    """Nearest float32 (ties to even) of a positive rational in the normal range."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    scaled = value / Fraction(2) ** (exponent - 23)
    mantissa = round(scaled)  # Fraction.__round__ rounds half to even
    return np.float32(np.ldexp(np.float64(mantissa), exponent - 23))


@cache
def attention_scales(head_dim: int) -> tuple[np.float32, np.float32]:
    """(head_dim^-1/2, head_dim^-1/2 * log2 e), each rounded once from the exact value."""
    digits = 10**40
    root = Fraction(isqrt(digits * digits // head_dim), digits)
    return round_to_float32(root), round_to_float32(root * _LOG2E)
