"""Arithmetic as 64-bit symbols: two values have one symbol when they are the same expression over the same inputs.

A symbol is a hash of the expression that made a value: of the input elements it reads and of every rounding operation
in between, in order. ``fma``, ``add`` and ``mul`` are commutative in their operands, as their roundings are; nothing is
associative. So the symbol of an output names the order of summation, the place where each leaf starts, and every
operation that rounds. A bfloat16 value and its exact widening to float32 have one symbol.

Two different expressions have one symbol with a probability of about 2^-64 for each pair compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Symbols = NDArray[np.uint64]

_A, _B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_SIGN = np.uint64(0xA5A5D1B54A32D193)
NONE = np.uint64(0)


def mix(x: Any) -> Symbols:
    """A 64-bit finaliser, elementwise."""
    x = np.atleast_1d(x)  # NumPy warns of wrapping products of scalars, and of scalars alone
    x = (x ^ (x >> _30)) * _A
    x = (x ^ (x >> _27)) * _B
    return np.asarray(x ^ (x >> _31))


def _salt(text: str) -> np.uint64:
    value = np.zeros(1, dtype=np.uint64)
    for character in text.encode():
        value = mix(value * np.uint64(257) + np.uint64(character))
    return np.uint64(value[0])


_ELEMENT, _CONSTANT, _PACKED, _LOW = _salt("element"), _salt("constant"), _salt("packed"), _salt("low")
_FACTOR, _PRODUCT, _SUM, _STEP = _salt("factor"), _salt("product"), _salt("sum"), _salt("step")
_CAST, _ADDEND, _FUSED, _UNIT = _salt("cast"), _salt("addend"), _salt("fused"), _salt("unit")


def element(buffer: int, index: Any) -> Symbols:
    """Input element ``index`` of argument number ``buffer``."""
    return mix(mix(np.asarray(index, dtype=np.uint64) + _ELEMENT) + mix(np.uint64(buffer) ^ _ELEMENT))


def constant(bits: Any) -> Symbols:
    """A float32 constant, by its bits."""
    return mix(np.asarray(bits, dtype=np.uint64) ^ _CONSTANT)


def negative(x: Symbols) -> Symbols:
    """The value with the other sign."""
    return np.asarray(x ^ _SIGN)


def low_mark(x: Symbols) -> Symbols:
    """What the lower half of a register carries that holds a float32 with symbol x in full."""
    return mix(x ^ _LOW)


def packed(low: Symbols, high: Symbols) -> Symbols:
    """A register whose halves are unrelated."""
    return mix(mix(low ^ _PACKED) + high)


def add(a: Symbols, b: Symbols) -> Symbols:
    """add.rn.f32. Constants: x + -0 is x (compilers fill vectors with -0), 0 + 0 is 0."""
    total = mix((mix(a ^ _SUM) + mix(b ^ _SUM)) * _A)
    zero, minus_zero = constant(0), constant(0x80000000)
    total = np.where((a == zero) & (b == zero), zero, total)
    return np.asarray(np.where(a == minus_zero, b, np.where(b == minus_zero, a, total)))


def _factors(a: Symbols, b: Symbols) -> Symbols:
    # the sign of a product is that of its factors: -a * b and a * -b are one value
    plain = np.minimum(a, negative(a)), np.minimum(b, negative(b))
    flipped = (a != plain[0]) ^ (b != plain[1])
    product = mix(plain[0] ^ _FACTOR) * (mix(plain[1] ^ _FACTOR) | np.uint64(1)) + mix(plain[1] ^ _FACTOR) * (
        mix(plain[0] ^ _FACTOR) | np.uint64(1)
    )
    return np.asarray(np.where(flipped, negative(product), product))


def mul(a: Symbols, b: Symbols) -> Symbols:
    """mul.rn.f32."""
    exact = _factors(a, b)
    plain = np.minimum(exact, negative(exact))
    rounded = mix(plain ^ _PRODUCT)
    return np.asarray(np.where(exact != plain, negative(rounded), rounded))


def fma(a: Symbols, b: Symbols, c: Symbols) -> Symbols:
    """fma.rn.f32: ``a * b + c``. The padding -0 * +0 leaves every c as it is."""
    fused = mix(mix(_factors(a, b) ^ _FUSED) + mix(c ^ _ADDEND) * _B)
    zero, minus_zero = constant(0), constant(0x80000000)
    padding = ((a == minus_zero) & (b == zero)) | ((a == zero) & (b == minus_zero))
    return np.asarray(np.where(padding, c, fused))


def operation(name: str, *operands: Symbols) -> Symbols:
    """Any other operation by name (div.rn, sqrt.rn, ex2.approx, ...): its operands are ordered."""
    total = np.full(np.shape(operands[0]), _salt(name), dtype=np.uint64)
    for x in operands:
        total = mix(total * _A + x)
    return total


def div(a: Symbols, b: Symbols, divisor_bits: Any, is_constant: Any) -> Symbols:
    """div.rn.f32. By a constant power of two it is the product with the reciprocal: one real value, one rounding.

    By a negative constant it is the quotient by the positive one, with the other sign.
    """
    bits = np.asarray(divisor_bits, dtype=np.uint32)
    flipped = is_constant & (bits >> np.uint32(31) == 1)
    size = bits & np.uint32(0x7FFFFFFF)
    exponent = size >> np.uint32(23)
    power = is_constant & (bits & np.uint32(0x7FFFFF) == 0) & (exponent > 0) & (exponent < 254)
    reciprocal = (np.uint32(254) - np.minimum(exponent, 254)) << np.uint32(23)
    plain = operation("div.rn.f32", a, np.where(flipped, constant(size), b))
    quotient = np.where(power, mul(a, constant(reciprocal)), plain)
    return np.asarray(np.where(flipped, negative(quotient), quotient))


def cast_bf16(x: Symbols) -> Symbols:
    """Rounding to bfloat16, nearest even."""
    return mix(x ^ _CAST)


def unit_products(a: Symbols, b: Symbols) -> Symbols:
    """Sum over k of the exact products of a [M, k] and b [N, k] inside one step of a matrix unit -> [M, N].

    The unit adds the products of a step exactly, so their order has no meaning and the sum of hashes is commutative.
    A product with a zero constant (padding) contributes nothing.
    """
    left, right = (np.where((x == constant(0)) | (x == constant(0x80000000)), NONE, mix(x ^ _UNIT)) for x in (a, b))
    return np.asarray(np.matmul(left, right.T))


def unit_step(products: Symbols, c: Symbols, padding_keeps_c: bool) -> Symbols:
    """One step of a matrix unit: all products of :func:`unit_products` onto c.

    ``padding_keeps_c``: a step of padding alone leaves c as it is. So it is on sm_90, whose steps never give -0. On
    gfx942 it would turn an accumulator that is -0 into +0.
    """
    stepped = mix(mix(products ^ _STEP) + mix(c ^ _ADDEND) * _B)
    return np.asarray(np.where(products == 0, c, stepped)) if padding_keeps_c else stepped


def tree(values: Symbols) -> Symbols:
    """Balanced binary tree of additions over the first axis (a power of two)."""
    while len(values) > 1:
        values = add(values[0::2], values[1::2])
    return np.asarray(values[0])
