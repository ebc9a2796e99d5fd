"""Arrays that begin on a cache line.

A vector of 64 bytes that lies across two lines takes two loads. NumPy's larger arrays begin 16 bytes behind a line, so
that every load of such a vector from them is one of these: products ran at two thirds of their speed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

_LINE = 64  # bytes
_SMALL = 4096  # bytes: less is not worth the time that it takes to align


def _aligned(
    make: Callable[..., np.ndarray[Any, Any]], shape: int | tuple[int, ...], dtype: DTypeLike
) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    size = (prod(shape) if isinstance(shape, tuple) else shape) * kind.itemsize
    if size < _SMALL:
        return make(shape, kind)
    raw = make(size + _LINE, np.uint8)
    first = -raw.ctypes.data % _LINE
    return raw[first : first + size].view(kind).reshape(shape)


def aligned_empty(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> np.ndarray[Any, Any]:
    """An array of this shape, C-contiguous, that begins on a cache line if it is large; its values are not set."""
    return _aligned(np.empty, shape, dtype)


def aligned_zeros(shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> np.ndarray[Any, Any]:
    """:func:`aligned_empty` with every element 0; memory is taken as it is written."""
    return _aligned(np.zeros, shape, dtype)


def aligned_scratch(workers: int, size: int) -> np.ndarray[Any, Any]:
    """float32 ``[workers, size or more]``; rows begin on cache lines if all are large; values are not set."""
    return aligned_empty((workers, -(-size // 16) * 16))
