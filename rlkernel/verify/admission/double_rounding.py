"""Operands on which a fused multiply-add differs from one through float64, which rounds twice.

``a * b + c`` lies so close beside a tie of float32 that rounding it to float64 first gives the tie, and rounding that
to even the wrong neighbour. Needed are sums whose bits span more than 53 places. A product of two bfloat16 values has
16 bits and an accumulator 24, which is too few: a chain over bfloat16 values cannot show the mistake, and none is made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlkernel.verify.admission.values import Array, Generator

HAZARD = "double rounding"
_TAIL = 40  # a tail lies this many binary places below the factor that it belongs to
Wide = NDArray[np.float64]
Integers = NDArray[np.int64]


def side(odd: Integers) -> Integers:
    """+1 for 1 modulo 4, -1 for 3: on which side of a product of 25 bits its even neighbour does not lie."""
    return np.where(odd % 4 == 1, 1, -1)


def factors(rng: Generator, shape: tuple[int, ...]) -> Integers:
    """Odd numbers of 13 bits. A product of any two, and of one with 4095 or 4097, has 25: it is a tie of float32."""
    return 2 * rng.integers(2052, 2896, shape) + 1


def pairs(rng: Generator, shape: tuple[int, ...], exponent: int = 6) -> tuple[Array, Array]:
    """(tails, factors): of any two pairs the product of the tails puts the tie that the product of the factors is off
    by 2^-80, to the side to which a rounded tie does not go.

    Both signs, exponents up to +-``exponent``; both directions, by the factors modulo 4.
    """
    odd = factors(rng, shape)
    scale = np.where(rng.random(shape) < 0.5, 1.0, -1.0) * 2.0 ** rng.integers(-exponent, exponent + 1, shape)
    return (side(odd) * scale * 2.0**-_TAIL).astype(np.float32), (odd * scale * 2.0**-12).astype(np.float32)


def integers_of(values: Array) -> tuple[Integers, Integers]:
    """Magnitudes as 24-bit integers, and the exponents that they are scaled by."""
    mantissa, exponent = np.frexp(np.abs(values.astype(np.float64)))
    return (mantissa * 2.0**24).astype(np.int64), exponent.astype(np.int64) - 24


def partners(constants: Array) -> tuple[Integers, Integers]:
    """For each constant a small odd number whose product with it is a tie (0: there is none), and the side to leave."""
    numbers, _ = integers_of(constants)
    found, sides = np.zeros_like(numbers), np.ones_like(numbers)
    for odd in range(3, 64, 2):
        product = numbers * odd
        significant = product // np.maximum(product & -product, 1)
        fits = (significant >= 1 << 24) & (significant < 1 << 25) & (found == 0)
        found, sides = np.where(fits, odd, found), np.where(fits, side(significant), sides)
    return found, sides


def near_ties(rng: Generator, constant: np.float32, count: int) -> tuple[Array, Wide]:
    """At most ``count`` values whose product with a positive constant lies just below a tie, and how far below.

    An addend about a unit of its last place away from the second puts the sum a float64's rounding beside the tie.
    """
    (number,), (exponent,) = integers_of(np.array([constant], np.float32))
    values = rng.integers(1 << 23, 1 << 24, 1024 * count)
    product = values * number
    ulp = np.where(product < 1 << 47, 1 << 23, 1 << 24)
    missing = ulp // 2 - product % ulp
    place = np.flatnonzero((missing > 0) & (missing < 1 << 15))[:count]
    return (values[place] * 2.0**-23).astype(np.float32), missing[place] * 2.0 ** (float(exponent) - 23)


def beside(constant: np.float32, values: Array, missing: Wide, addends: Array) -> NDArray[np.bool_]:
    """Whether one and two roundings of ``constant * values + addends`` differ, for :func:`near_ties`."""
    (number,), (exponent,) = integers_of(np.array([constant], np.float32))
    unit = 2.0 ** (float(exponent) - 23)
    product = (values.astype(np.float64) * 2.0**23).astype(np.int64) * number
    ulp = np.where(product < 1 << 47, 1 << 23, 1 << 24)
    off = (addends.astype(np.float64) - missing) / unit  # exact: both are multiples of small powers of two
    odd = product // ulp % 2 == 1
    return (np.abs(off) > 0) & (np.abs(off) < 2.0**-7) & ((off > 0) != odd)


def norm_rows(rng: Generator, rows: int, width: int, lanes: int) -> Array:
    """``[rows, width]``: in one lane of each row a small element, then one whose square is a tie; a few others.

    Without the others the root of the sum would be the element itself, whichever way its square is rounded.
    """
    x = np.zeros((rows, width), np.float32)
    for row, (odd, exponent) in enumerate(zip(factors(rng, (rows,)), rng.integers(-6, 7, rows), strict=True)):
        lane = int(rng.integers(0, width - lanes))
        x[row, rng.integers(0, width, 4)] = rng.uniform(0.1, 0.4, 4) * 2.0 ** int(exponent)
        x[row, lane] = 2.0 ** (int(exponent) - _TAIL)  # squares of odd numbers are 1 modulo 4: only upwards
        x[row, lane + lanes] = rng.choice([-1.0, 1.0]) * int(odd) * 2.0 ** (int(exponent) - 12)
    return x


def norm_gradient_rows(rng: Generator, rows: int, width: int) -> tuple[Array, Array, Array]:
    """(x, dy, start) of a norm's gradient with weights 1, in float32; ``width`` is a multiple of 4, at least 8.

    The mean square of every row of x is 2^24, so that its normed values are exact. Row 0 continues the weight's chain
    from ``start`` over ties; of the other rows the fused multiply-add of dx is put beside ties.
    """
    numbers = np.tile(np.array([4097, 4095], np.int64), width // 2)
    numbers[:4] = 4096
    x = numbers * rng.choice([-1.0, 1.0], (rows, width))
    odd = factors(rng, (rows, width))
    scale = rng.choice([-1.0, 1.0], (rows, width)) * 2.0 ** rng.integers(-6, 7, (rows, 1))
    dy = odd * scale * 2.0**-12
    start = side(numbers) * side(odd[0]) * np.sign(x[0]) * scale[0] * 2.0**-70
    start[:4] = 1.0
    first = odd[:, :1] * scale[:, :1] * 2.0**-12  # what the mean of dy * xh is to be
    others = -np.sign(x) * side(numbers) * np.sign(first) * side(odd[:, :1]) * np.abs(scale) * 2.0**-70
    others[:, :4] = 0.0
    others[:, 0] = (width * first[:, 0]) * np.sign(x[:, 0])
    dy[1:] = others[1:]
    return x.astype(np.float32), dy.astype(np.float32), start.astype(np.float32)


def rotated_rows(rng: Generator, heads: int, cos: Array, sin: Array) -> Array:
    """``[N, heads, D]`` for rotary tables ``[N, D/2]`` (of the rows' positions): even heads hit the first half."""
    rows, half = cos.shape
    x = np.empty((rows, heads, 2 * half))
    odd, sides = partners(cos)
    ties = np.where(odd == 0, 1.5, odd)
    for head in range(heads):
        value = ties * rng.choice([-1.0, 1.0], (rows, half)) * 2.0 ** rng.integers(-6, 7, (rows, half))
        tail = np.sign(value * cos) * sides * np.where(sin < 0, -1.0, 1.0) * 2.0**-70
        x[:, head] = np.concatenate([value, -tail] if head % 2 == 0 else [tail, value], axis=-1)
    return x.astype(np.float32)
