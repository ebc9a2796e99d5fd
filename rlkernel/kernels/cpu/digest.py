"""Tensor digests on a CPU: two lanes of sums mod 2^64 of mixed (index, bits). Definition: docs/numerics.md.

Sums mod 2^64 commute, so work may be cut and vectorised anywhere: unlike floating point, nothing here depends on order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint32, uint64
from numpy.typing import NDArray

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.panels import Panels
from rlkernel.kernels.cpu.primitives import canonical_bits, digest_first, digest_second, float_bits
from rlkernel.kernels.cpu.threads import Workers

_CHUNK = 1 << 14
_GRAIN = 4  # chunks (about 10 us each) that are worth another thread


@kernel
def _flat(first, last, bits, offset, lanes):
    for chunk in range(first, last):
        begin = chunk * _CHUNK
        a = uint64(0)
        b = uint64(0)
        part = bits[begin : min(begin + _CHUNK, bits.size)]
        start = uint64(offset + uint64(begin))
        for i in range(part.size):
            a += digest_first(start + uint64(i), uint64(part[i]))
            b += digest_second(start + uint64(i), uint64(part[i]))
        lanes[chunk, 0] = a
        lanes[chunk, 1] = b


@kernel
def _panels(first, last, data, first_row, rows, shift, lanes):
    """Items are (panels from first_row's on): lanes[item]; the index of row r, column k is r * depth + k."""
    depth, width = data.shape[1], data.shape[2]
    for item in range(first, last):
        panel = first_row // width + item
        row = panel * width - first_row  # logical row of the panel's column 0; may be negative
        j_first = max(0, -row)
        j_last = min(width, rows - row)
        a = uint64(0)
        b = uint64(0)
        for k in range(depth):
            values = data[panel, k, j_first:j_last]
            base = uint64((row + j_first) * depth + k)
            for j in range(values.size):
                index = base + uint64(j) * uint64(depth)
                bits = uint64(float_bits(values[j]) >> uint32(shift))
                a += digest_first(index, bits)
                b += digest_second(index, bits)
        lanes[item, 0] = a
        lanes[item, 1] = b


@kernel
def _rows(first, last, z, out):
    for r in range(first, last):
        a = uint64(0)
        b = uint64(0)
        row = z[r]
        for v in range(row.size):
            bits = canonical_bits(row[v])
            a += digest_first(uint64(v), bits)
            b += digest_second(uint64(v), bits)
        out[r, 0] = a
        out[r, 1] = b


def _total(lanes: NDArray[np.uint64]) -> tuple[int, int]:
    total = lanes.sum(axis=0, dtype=np.uint64)
    return int(total[0]), int(total[1])


def tensor_digest(array: NDArray[Any], workers: Workers, *, index_offset: int = 0) -> tuple[int, int]:
    """Both lanes of a tensor's raw bits.

    Args:
        array: any shape, elements of 1, 2, 4 or 8 bytes; bits are zero-extended, the index is row-major.
        index_offset: index of the first element, so that the lanes of consecutive parts add up (mod 2^64).

    Raises:
        ContractError: elements of another size.
    """
    size = array.dtype.itemsize
    if size not in (1, 2, 4, 8):
        raise ContractError(f"a tensor digest takes elements of 1, 2, 4 or 8 bytes; {array.dtype} has {size}")
    bits = np.ascontiguousarray(array).reshape(-1).view(f"u{size}")
    chunks = -(-bits.size // _CHUNK)
    lanes = np.zeros((chunks, 2), np.uint64)
    if chunks:
        workers.run(_flat, chunks, bits, np.uint64(index_offset), lanes, grain=_GRAIN)
    return _total(lanes)


def panels_digest(panels: Panels, first_row: int, rows: int, workers: Workers, bf16: bool) -> tuple[int, int]:
    """Lanes of the logical ``[rows, depth]`` tensor in rows ``first_row..`` of panels, read off the packed bytes.

    Args:
        bf16: the tensor's dtype is bfloat16: an element's bits are the upper 16 of the packed float32.

    Raises:
        ContractError: rows that the panels do not have.
    """
    if first_row < 0 or rows < 0 or first_row + rows > panels.rows:
        raise ContractError(f"rows {first_row} to {first_row + rows - 1} are not all in panels of {panels.rows} rows")
    if rows == 0 or panels.depth == 0:
        return 0, 0
    width = panels.data.shape[2]
    count = (first_row + rows - 1) // width - first_row // width + 1
    lanes = np.zeros((count, 2), np.uint64)
    grain = 1 + _GRAIN * _CHUNK // (width * panels.depth)
    workers.run(_panels, count, panels.data, first_row, rows, 16 if bf16 else 0, lanes, grain=grain)
    return _total(lanes)


def float32_rows_digest(z: NDArray[np.float32], workers: Workers | None = None) -> NDArray[np.uint64]:
    """Distribution digests of rows of logits: float32 ``[R, V]`` -> uint64 ``[R, 2]``; every NaN is one pattern.

    Without ``workers`` the calling thread computes all rows.

    Raises:
        ContractError: another dtype or rank.
    """
    if z.dtype != np.float32 or z.ndim != 2:
        raise ContractError(f"row digests take a float32 matrix; this is {z.dtype} with {z.ndim} axes")
    z = np.ascontiguousarray(z)
    out = np.zeros((len(z), 2), np.uint64)
    if workers is None:
        _rows(0, len(z), z, out)
    elif len(z):
        workers.run(_rows, len(z), z, out, grain=1 + _GRAIN * _CHUNK // max(1, z.shape[1]))
    return out
