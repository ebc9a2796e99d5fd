"""The reductions of the contract as helpers that kernels inline: ``lane_sum``, ``tree`` and keys for ``max``.

``tree`` adds neighbours pairwise, lower index on the left. The helpers ping-pong between two buffers, so that a level
reads one buffer and writes the other: LLVM then vectorises it, and the bits stay those of the definition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import float32 as f32
from numba import int32 as i32

from rlkernel.kernels.cpu.jit import device_function
from rlkernel.kernels.cpu.primitives import bits_float_signed, float_bits_signed, fma

LANES = 256
"""The largest number of lanes of ``lane_sum``: how long the two buffers of a kernel must be."""


@device_function
def order_key(x):
    """An int32 that orders float32 as ``max`` does: -0 below +0. Only for values that are not NaN."""
    bits = float_bits_signed(x)
    return i32(bits ^ (i32(bits >> i32(31)) & i32(0x7FFFFFFF)))


@device_function
def key_value(key):
    """The float32 that has this :func:`order_key`."""
    return bits_float_signed(i32(key ^ (i32(key >> i32(31)) & i32(0x7FFFFFFF))))


LOWEST_KEY = np.int32(-0x7F800001)  # order_key(-inf)


@device_function
def lane_width(n):
    """Number of lanes for n elements: the smallest power of two >= n, at most 256."""
    width = 1
    while width < n and width < LANES:
        width *= 2
    return width


@device_function
def tree(values, other, width):
    """Sum of ``values[:width]`` (a power of two) by neighbours; both buffers are overwritten."""
    source, target = values, other
    while width > 1:
        width //= 2
        for j in range(width):
            target[j] = source[2 * j] + source[2 * j + 1]
        source, target = target, source
    return source[0]


@device_function
def lane_dot(a, b, lanes, other):
    """``lane_sum(a * b)`` over two vectors of equal length; ``lanes`` and ``other`` have 256 elements."""
    n = a.size
    width = lane_width(n)
    for j in range(width):
        lanes[j] = f32(0.0)
    for start in range(0, n, width):
        a_part = a[start : start + width]
        b_part = b[start : start + width]
        for j in range(min(width, n - start)):
            lanes[j] = fma(a_part[j], b_part[j], lanes[j])
    return tree(lanes, other, width)


def tree_of_array(values: npt.NDArray[np.float32]) -> np.float32:
    """``tree`` over any number of values: padded with +0 to the next power of two. Host code, for few values.

    Args:
        values: float32 [n], n >= 0.

    Returns:
        The sum; +0 for no values.
    """
    width = 1
    while width < values.size:
        width *= 2
    level = np.zeros(width, dtype=np.float32)
    level[: values.size] = values
    while level.size > 1:
        level = level[0::2] + level[1::2]
    return np.float32(level[0])
