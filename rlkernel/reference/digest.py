"""Tensor digests in plain NumPy: the definition that fast ones are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
CANONICAL_NAN = np.uint32(0x7FC00000)


def _mix(value: Words, shifts: tuple[int, int, int], multipliers: tuple[int, int]) -> Words:
    first, second, third = (np.uint64(s) for s in shifts)
    value = (value ^ (value >> first)) * np.uint64(multipliers[0])
    value = (value ^ (value >> second)) * np.uint64(multipliers[1])
    return value ^ (value >> third)


def lanes(bits: Words, index: Words) -> tuple[Words, Words]:
    """Both lanes of every element, before summation."""
    one = np.uint64(1)
    first = (index + one) * np.uint64(0x9E3779B97F4A7C15) + bits
    second = (index + one) * np.uint64(0xD1B54A32D192ED03) + bits
    return (
        _mix(first, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)),
        _mix(second, (33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)),
    )


def tensor_lanes(array: NDArray[Any], index_offset: int = 0) -> tuple[int, int]:
    """Digest lanes of a tensor's raw bits, row-major."""
    flat = np.ascontiguousarray(array).reshape(-1)
    bits = flat.view(f"u{flat.dtype.itemsize}").astype(np.uint64)
    index = np.arange(index_offset, index_offset + bits.size, dtype=np.uint64)
    first, second = lanes(bits, index)
    return int(first.sum(dtype=np.uint64)), int(second.sum(dtype=np.uint64))


def rows_digest(z: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Distribution digests of rows of logits [R, V]: uint64 [R, 2], every NaN as one pattern."""
    z = np.ascontiguousarray(z)
    bits = np.where(np.isnan(z), CANONICAL_NAN, z.view(np.uint32)).astype(np.uint64)
    first, second = lanes(bits, np.arange(z.shape[1], dtype=np.uint64)[None, :])
    return np.stack([first.sum(axis=1, dtype=np.uint64), second.sum(axis=1, dtype=np.uint64)], axis=1)
