"""Slow, exact reference arithmetic for tests: binary32, round to nearest even, in NumPy's float64.

Nothing here is shared with the kernels. Every function works elementwise over broadcast arrays and returns
float32. Compare results as integers with :func:`bits` (or :func:`canonical`, where NaN may occur).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

F32 = np.ndarray[Any, np.dtype[np.float32]]


def fma32(a: Any, b: Any, c: Any) -> F32:
    """``fma.rn.f32``, exact: the float64 product of two float32 is exact, the sum is rounded to odd, then once more.

    Rounding to odd in 53 bits keeps enough (53 >= 24 + 2) that the final rounding to float32, subnormals
    included, equals one rounding of the exact value.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
        addend = np.asarray(c, np.float32).astype(np.float64)
        total = np.asarray(product + addend)
        part = total - product
        error = (product - (total - part)) + (addend - part)  # TwoSum: product + addend = total + error, exactly
        inexact = np.isfinite(total) & (error != 0)
        pattern = total.view(np.int64) if total.ndim else total.reshape(1).view(np.int64).reshape(())
        step = np.where((error > 0) == (total > 0), 1, -1)  # the neighbour on the exact value's side
        odd = np.where(inexact & (pattern & 1 == 0), pattern + step, pattern)
        return np.asarray(odd, np.int64).view(np.float64).astype(np.float32)


def add32(a: Any, b: Any) -> F32:
    """``add.rn.f32``."""
    with np.errstate(all="ignore"):
        return np.add(np.asarray(a, np.float32), np.asarray(b, np.float32))


def mul32(a: Any, b: Any) -> F32:
    """``mul.rn.f32``."""
    with np.errstate(all="ignore"):
        return np.multiply(np.asarray(a, np.float32), np.asarray(b, np.float32))


def div32(a: Any, b: Any) -> F32:
    """``div.rn.f32``."""
    with np.errstate(all="ignore"):
        return np.divide(np.asarray(a, np.float32), np.asarray(b, np.float32))


def round_bf16(x: Any) -> F32:
    """``cast.bf16``, held in float32; a NaN keeps its upper bits and becomes quiet."""
    value = np.asarray(x, np.float32)
    pattern = np.atleast_1d(value).view(np.uint32).astype(np.uint64)
    rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) & 0xFFFF0000
    quiet = (pattern | 0x00400000) & 0xFFFF0000
    chosen = np.where(np.isnan(np.atleast_1d(value)), quiet, rounded).astype(np.uint32)
    return chosen.view(np.float32).reshape(value.shape)


def cast(x: Any, bf16: bool) -> F32:
    """Round to the dtype: bfloat16 if ``bf16``, else unchanged."""
    return round_bf16(x) if bf16 else np.asarray(x, np.float32)


def chain(a: Any, b: Any, start: Any = 0.0) -> F32:
    """``acc = fma(a[k], b[k], acc)`` over the LAST axis of both, ascending, from ``start`` (default +0)."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    shape = np.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    total: F32 = np.broadcast_to(np.asarray(start, np.float32), shape).astype(np.float32)
    for k in range(a.shape[-1]):
        total = fma32(a[..., k], b[..., k], total)
    return total


def matmul_chain(a: Any, b: Any, start: Any = 0.0) -> F32:
    """Chain over k of a[M,K] and b[N,K] -> [M,N] (the product ``a @ b.T``)."""
    return chain(np.asarray(a)[:, None, :], np.asarray(b)[None, :, :], start)


def add_chain(values: Any, start: Any = 0.0) -> F32:
    """``acc = add(acc, v)`` over the FIRST axis, ascending, from ``start``."""
    values = np.asarray(values, np.float32)
    total: F32 = np.broadcast_to(np.asarray(start, np.float32), values.shape[1:]).astype(np.float32)
    for value in values:
        total = add32(total, value)
    return total


def tree(values: Any) -> F32:
    """Balanced binary tree of adds over the LAST axis (a power of two), neighbours first, lower index left."""
    level = np.asarray(values, np.float32)
    if level.shape[-1] & (level.shape[-1] - 1) or level.shape[-1] == 0:
        raise ValueError(f"a tree needs a power of two of values, not {level.shape[-1]}")
    while level.shape[-1] > 1:
        level = add32(level[..., 0::2], level[..., 1::2])
    return level[..., 0]


def lane_sum(a: Any, b: Any) -> F32:
    """``lane_sum(a*b)`` over the LAST axis: min(256, next power of two) fma lanes, then a tree."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    n = a.shape[-1]
    width = 1
    while width < min(n, 256):
        width *= 2
    lanes = np.zeros((*a.shape[:-1], width), np.float32)
    for first in range(0, n, width):
        count = min(width, n - first)
        lanes[..., :count] = fma32(a[..., first : first + count], b[..., first : first + count], lanes[..., :count])
    return tree(lanes)


def bits(x: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The bit patterns of float32 values."""
    return np.ascontiguousarray(np.asarray(x, np.float32)).view(np.uint32)


def canonical(x: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Bit patterns with every NaN mapped to 0x7FC00000 (targets produce different NaNs)."""
    value = np.ascontiguousarray(np.asarray(x, np.float32))
    return np.where(np.isnan(value), np.uint32(0x7FC00000), value.view(np.uint32))


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Fail with the number of differing elements and the first of them; NaNs are compared as one pattern."""
    left, right = canonical(actual), canonical(expected)
    assert left.shape == right.shape, f"shapes differ: {left.shape} and {right.shape}"
    wrong = np.argwhere(left != right)
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {left.size} elements differ; first at {at}: 0x{left[at]:08X} and 0x{right[at]:08X}"
        )


def differs(actual: Any, other: Any) -> bool:
    """Whether at least one element has other bits (negative twins)."""
    return bool(np.any(canonical(actual) != canonical(other)))


def hazards(generator: np.random.Generator, shape: tuple[int, ...], kind: str) -> F32:
    """Random float32 of a hazard class; ``HAZARDS`` lists the names."""
    return HAZARDS[kind](generator, shape)


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> F32:
    return generator.standard_normal(shape).astype(np.float32)


def _spread(generator: np.random.Generator, shape: tuple[int, ...]) -> F32:
    return np.ldexp(_normal(generator, shape), generator.integers(-30, 31, shape)).astype(np.float32)


def _subnormal(generator: np.random.Generator, shape: tuple[int, ...]) -> F32:
    exponents = generator.integers(-80, -60, shape)  # products straddle the smallest subnormal
    tiny = np.ldexp(_normal(generator, shape), exponents).astype(np.float32)
    raw = generator.integers(0, 1 << 23, shape).astype(np.uint32).view(np.float32)
    return np.where(generator.random(shape) < 0.2, raw, tiny).astype(np.float32)


def _zeros(generator: np.random.Generator, shape: tuple[int, ...]) -> F32:
    choices = np.array([0.0, -0.0, 1.0, -1.0], np.float32)
    return choices[generator.integers(0, 4, shape)]


def _special(generator: np.random.Generator, shape: tuple[int, ...]) -> F32:
    value = _normal(generator, shape)
    chance = generator.random(shape)
    value[chance < 0.01] = np.inf
    value[(chance >= 0.01) & (chance < 0.02)] = -np.inf
    value[(chance >= 0.02) & (chance < 0.03)] = np.nan
    value[(chance >= 0.03) & (chance < 0.05)] = np.float32(3e38)
    return value


def _cancel(generator: np.random.Generator, shape: tuple[int, ...]) -> F32:
    value = _normal(generator, shape)
    half = shape[-1] // 2
    if half:
        value[..., half : 2 * half] = -value[..., :half] * np.float32(1 + 2**-20)
    return value


HAZARDS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], F32]] = {
    "normal": _normal,
    "spread": _spread,
    "subnormal": _subnormal,
    "signed_zeros": _zeros,
    "special": _special,
    "cancellation": _cancel,
}
