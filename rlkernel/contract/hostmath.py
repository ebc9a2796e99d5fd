"""Float64 sin, cos, exp, log and pow of our own, for RoPE tables and host scalars.

Only correctly rounded IEEE-754 operations are used (add, mul, sub, div, comparisons, bit views), on NumPy float64
arrays: one operation a ufunc call, so that nothing can be contracted, and never a transcendental function of libm,
NumPy or torch. The same bits therefore come out on every machine. Where more than 53 bits are needed, values are
unevaluated sums ``high + low`` of two float64 (Dekker's and Knuth's error-free transformations).

The series are Taylor series; their truncation errors lie below 2^-62 of the result on the reduced intervals.
Results are within 1 ulp of the exact value (measured against mpmath by the tests).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlkernel.errors import ContractError

Float64s = NDArray[np.float64]
Pair = tuple[Float64s, Float64s]

# pi/2 and ln 2 as sums of parts with 30 (38) significant bits: products with integers below 2^23 (2^15) are exact
_HALF_PI = tuple(
    map(
        float.fromhex,
        ("0x1.921fb54000000p+0", "0x1.10b4611800000p-30", "0x1.313198a000000p-61", "0x1.701b839800000p-92"),
    )
)
_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
_LN2 = tuple(map(float.fromhex, ("0x1.62e42fefa0000p-1", "0x1.cf79abc9e0000p-40", "0x1.d9cc01f978000p-79")))
_ONE_OVER_LN2 = float.fromhex("0x1.71547652b82fep+0")

_ROUND = 6755399441055744.0  # 1.5 * 2^52: adding and subtracting it rounds |x| < 2^51 to an integer, ties to even
_SPLIT = 134217729.0  # 2^27 + 1
MAX_ANGLE = 4194304.0  # 2^22


def _factorial(n: int) -> float:
    result = 1
    for i in range(2, n + 1):
        result *= i
    return float(result)  # one rounding of the exact integer


# sin r = r + r^3 S(r^2), cos r = 1 - r^2/2 + r^4 C(r^2) for |r| <= pi/4;  exp r = 1 + r + r^2 E(r) for |r| <= ln2/2
_SIN = tuple((-1.0) ** ((n - 1) // 2) / _factorial(n) for n in range(3, 20, 2))
_COS = tuple((-1.0) ** (n // 2) / _factorial(n) for n in range(4, 21, 2))
_EXP = tuple(1.0 / _factorial(n) for n in range(2, 16))
# atanh s = s + s^3/3 + s^5 A(s^2) for |s| <= 0.1716
_ATANH = tuple(1.0 / n for n in range(5, 32, 2))


def _array(x: ArrayLike) -> Float64s:
    return np.asarray(x, dtype=np.float64)


def _polynomial(coefficients: tuple[float, ...], x: Float64s) -> Float64s:
    """Horner's scheme, coefficients ascending."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result


def _two_sum(a: Float64s, b: Float64s) -> Pair:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _fast_two_sum(a: Float64s, b: Float64s) -> Pair:
    """Like :func:`_two_sum`, for |a| >= |b|."""
    total = a + b
    return total, b - (total - a)


def _two_product(a: Float64s, b: Float64s) -> Pair:
    """The exact product, by Dekker's splitting (no fma needed). |a|, |b| < 2^990."""
    product = a * b
    t = a * _SPLIT
    a_high = t - (t - a)
    a_low = a - a_high
    t = b * _SPLIT
    b_high = t - (t - b)
    b_low = b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _pair_add(a: Pair, b: Pair) -> Pair:
    high, low = _two_sum(a[0], b[0])
    return _fast_two_sum(high, low + (a[1] + b[1]))


def _pair_times(a: Pair, b: Pair) -> Pair:
    high, low = _two_product(a[0], b[0])
    return _fast_two_sum(high, low + (a[0] * b[1] + a[1] * b[0]))


def _pair_over(a: Pair, b: Pair) -> Pair:
    quotient = a[0] / b[0]
    product, error = _two_product(quotient, b[0])
    rest = ((a[0] - product) - error) + a[1] - quotient * b[1]
    return _fast_two_sum(quotient, rest / b[0])


def _power_of_two(n: Float64s) -> Float64s:
    """2^n for integers -1022 <= n <= 1023, as bits."""
    return ((n.astype(np.int64) + 1023) << 52).view(np.float64)


def _reduce_angle(x: Float64s) -> tuple[NDArray[np.int64], Pair]:
    if x.size and not bool((np.abs(x) <= MAX_ANGLE).all()):
        raise ContractError(
            f"an angle is beyond {MAX_ANGLE:.0f} (2^22) or not a number: sin and cos are not defined there"
        )
    turns = (x * _TWO_OVER_PI + _ROUND) - _ROUND
    # exact: turns has at most 22 bits and each part 30; the first difference cancels to multiples of its ulp
    first = x - turns * _HALF_PI[0]
    reduced = _two_sum(first, -(turns * _HALF_PI[1]))
    for part in _HALF_PI[2:]:
        reduced = _pair_add(reduced, (-(turns * part), np.zeros_like(x)))
    return turns.astype(np.int64), reduced


def _sin_reduced(r: Pair) -> Float64s:
    square = r[0] * r[0]
    cubic = (square * r[0]) * _polynomial(_SIN, square)
    # d/dr sin = cos: the low part enters as low * (1 - r^2/2)
    return r[0] + (cubic + (r[1] - r[1] * (square * 0.5)))


def _cos_reduced(r: Pair) -> Float64s:
    square, square_low = _two_product(r[0], r[0])
    half = square * 0.5
    leading = 1.0 - half
    rest = (1.0 - leading) - half
    quartic = (square * square) * _polynomial(_COS, square)
    return leading + (rest + (quartic - (square_low * 0.5 + r[0] * r[1])))


def sin_cos(x: ArrayLike) -> Pair:
    """Sine and cosine of float64 angles with |x| <= 2^22. Raises ContractError beyond, and for NaN."""
    values = _array(x)
    turns, reduced = _reduce_angle(values)
    sine, cosine = _sin_reduced(reduced), _cos_reduced(reduced)
    odd = (turns & 1) == 1
    sin_value = np.where(odd, cosine, sine)
    cos_value = np.where(odd, sine, cosine)
    sin_value = np.where((turns & 2) == 2, -sin_value, sin_value)
    cos_value = np.where(((turns + 1) & 2) == 2, -cos_value, cos_value)
    # sin(-0) = -0: the reduction loses the sign of zero
    return np.where(values == 0.0, values, sin_value), cos_value


def sin(x: ArrayLike) -> Float64s:
    """Sine; see :func:`sin_cos`."""
    return sin_cos(x)[0]


def cos(x: ArrayLike) -> Float64s:
    """Cosine; see :func:`sin_cos`."""
    return sin_cos(x)[1]


def _log_pair(x: Float64s) -> Pair:
    """Natural logarithm as a pair (relative error about 2^-62). x is positive and finite."""
    tiny = x < 2.2250738585072014e-308
    scaled = x * np.where(tiny, 18014398509481984.0, 1.0)  # 2^54
    bits = scaled.view(np.int64)
    # m in [sqrt(1/2), sqrt(2)): subtract the bits of sqrt(1/2); the exponent is what is left above 52 bits
    exponent = (bits - np.int64(0x3FE6A09E667F3BCD)) >> np.int64(52)
    m = (bits - (exponent << np.int64(52))).view(np.float64)
    zero = np.zeros_like(m)
    # m - 1 is exact; m + 1 may not be
    s = _pair_over((m - 1.0, zero), _two_sum(m, np.ones_like(m)))
    square = _pair_times(s, s)
    cube = _pair_times(square, s)
    third = _pair_over(cube, (np.full_like(m, 3.0), zero))
    tail = (cube[0] * square[0]) * _polynomial(_ATANH, square[0])
    series = _pair_add(_pair_add(s, third), (tail, zero))
    result = (series[0] * 2.0, series[1] * 2.0)
    count = exponent.astype(np.float64) - np.where(tiny, 54.0, 0.0)
    large = _two_sum(count * _LN2[0], count * _LN2[1])
    large = _pair_add(large, (count * _LN2[2], zero))
    return _pair_add(large, result)


def log(x: ArrayLike) -> Float64s:
    """Natural logarithm of positive finite float64. Raises ContractError otherwise."""
    return _log_pair(_positive(x))[0]


def _positive(x: ArrayLike) -> Float64s:
    values = np.ascontiguousarray(_array(x))
    if values.size and not bool(((values > 0.0) & (values < np.inf)).all()):
        raise ContractError("the logarithm of a value that is not positive and finite is not defined")
    return values.reshape(np.shape(x))


def _exp_pair(x: Pair) -> Float64s:
    """exp of a pair, rounded to float64."""
    if x[0].size and not bool((np.abs(x[0]) <= 700.0).all()):
        raise ContractError("exp is defined here for arguments from -700 to 700")
    count = (x[0] * _ONE_OVER_LN2 + _ROUND) - _ROUND
    reduced = _two_sum(x[0] - count * _LN2[0], -(count * _LN2[1]))
    reduced = _pair_add(reduced, (x[1] - count * _LN2[2], np.zeros_like(count)))
    r, low = reduced
    square = r * r
    high, rest = _fast_two_sum(np.ones_like(r), r)
    return (high + (rest + (square * _polynomial(_EXP, r) + (low + low * r)))) * _power_of_two(count)


def exp(x: ArrayLike) -> Float64s:
    """e^x for -700 <= x <= 700. Raises ContractError beyond, and for NaN."""
    values = _array(x)
    return _exp_pair((values, np.zeros_like(values)))


def rational_power(base: float, numerators: ArrayLike, denominator: int) -> Float64s:
    """``base ** (numerator / denominator)`` without rounding the exponent, for integers below 2^53.

    Within 1 ulp; raises ContractError where |exponent * ln base| exceeds 700.
    """
    n = _array(numerators)
    zero = np.zeros_like(n)
    logarithm = _log_pair(_positive(np.full(n.shape, base)))
    product = _pair_times(logarithm, (n, zero))
    return _exp_pair(_pair_over(product, (np.full_like(n, float(denominator)), zero)))


def power(base: float, exponent: float) -> float:
    """``base ** exponent`` for a positive base, as exp(exponent * log(base)) with a two-word logarithm."""
    zero = _array(0.0)
    logarithm = _log_pair(_positive(base))
    return float(_exp_pair(_pair_times(logarithm, (_array(exponent), zero))))


PI = float.fromhex("0x1.921fb54442d18p+1")
