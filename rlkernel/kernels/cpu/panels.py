"""Weights packed for the GEMM: panels of PANEL_WIDTH outputs, ``[depth][PANEL_WIDTH]`` each, and back.

And the columns of several matrices in one, in a given order: what the backward of a fused projection starts from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import float32 as f32
from numba import types, uint32
from numba.extending import overload

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.memory import aligned_empty
from rlkernel.kernels.cpu.microkernel import PANEL_WIDTH, copy_panel_row
from rlkernel.kernels.cpu.primitives import bits_float
from rlkernel.kernels.cpu.threads import Workers

Array = np.ndarray[Any, Any]

_PACK_PANELS = 16  # panels that are packed together: 4 KiB of a row at the widest panel


@dataclass(frozen=True)
class Panels:
    """A packed matrix of ``rows`` outputs by ``depth`` reduced elements.

    Attributes:
        data: float32 ``[ceil(rows / PANEL_WIDTH), depth, PANEL_WIDTH]``; element (row, k) lies at
            ``[row // PANEL_WIDTH, k, row % PANEL_WIDTH]``; columns after the last row are +0.
        rows: N, the number of outputs.
        depth: K, the length of a chain.
    """

    data: Array
    rows: int
    depth: int


def panel_count(rows: int) -> int:
    """Number of panels that ``rows`` outputs need."""
    return -(-rows // PANEL_WIDTH)


def _as_float32(value):
    raise NotImplementedError("compiled only")


@overload(_as_float32, inline="never")
def _overload_as_float32(value):
    """float32 as it is; uint16 as the bfloat16 whose bits it holds."""
    if value == types.uint16:
        return lambda value: bits_float(uint32(uint32(value) << uint32(16)))
    return lambda value: value


@kernel
def _pack_rows(first, last, w, data):
    """w float32 or uint16 (bfloat16 bits) [rows, depth]; blocks of 32 k keep the written lines near."""
    rows, depth = w.shape
    for p in range(first, last):
        base = p * PANEL_WIDTH
        width = min(PANEL_WIDTH, rows - base)
        for k_base in range(0, depth, 32):
            k_end = min(k_base + 32, depth)
            for j in range(width):
                for k in range(k_base, k_end):
                    data[p, k, j] = _as_float32(w[base + j, k])
            if width < PANEL_WIDTH:
                for k in range(k_base, k_end):
                    data[p, k, width:] = f32(0.0)


@kernel
def _pack_columns(first, last, w, depth, rows, data):
    """w float32 or uint16 (bfloat16 bits), flat [depth, rows]; data flat panels."""
    for p_base in range(first, last, _PACK_PANELS):  # reads go along rows, page after page
        for k in range(depth):
            for p in range(p_base, min(p_base + _PACK_PANELS, last)):
                source = k * rows + p * PANEL_WIDTH
                target = (p * depth + k) * PANEL_WIDTH
                width = min(PANEL_WIDTH, rows - p * PANEL_WIDTH)
                if width == PANEL_WIDTH:
                    copy_panel_row(w, source, data, target)
                    continue
                for j in range(PANEL_WIDTH):
                    data[target + j] = f32(0.0)
                for j in range(width):
                    data[target + j] = _as_float32(w[source + j])


@kernel
def _unpack_rows(first, last, data, row_ids, out):
    depth = data.shape[1]
    for i in range(first, last):
        p = row_ids[i] // PANEL_WIDTH
        j = row_ids[i] % PANEL_WIDTH
        for k in range(depth):
            out[i, k] = data[p, k, j]


@kernel
def _place_columns(first, last, source, target, runs):
    """Copy runs (first column in source, in target, count) of rows first..last."""
    for row in range(first, last):
        for i in range(runs.shape[0]):
            at, to, count = runs[i, 0], runs[i, 1], runs[i, 2]
            for j in range(count):
                target[row, to + j] = source[row, at + j]


def join_columns(parts: Sequence[Array], order: Array, workers: Workers) -> Array:
    """Matrices float32 ``[M, n_i]`` side by side, columns in another order: float32 ``[M, len(order)]``.

    ``order`` int64: column i of the result is column ``order[i]`` of the matrices laid side by side.

    Raises:
        ContractError: matrices that are not C-contiguous float32 of equal height, or an order that names a column
            that does not exist.
    """
    rows = parts[0].shape[0]
    for part in parts:
        if part.ndim != 2 or part.shape[0] != rows or part.dtype != np.float32 or not part.flags.c_contiguous:
            raise ContractError(
                f"matrices to join are C-contiguous float32 of {rows} rows; this one is {part.dtype} of shape "
                f"{list(part.shape)}"
            )
    bounds = np.cumsum([0, *(part.shape[1] for part in parts)])
    if order.size and (int(order.min()) < 0 or int(order.max()) >= int(bounds[-1])):
        raise ContractError(
            f"an order of columns from {int(order.min())} to {int(order.max())} for {int(bounds[-1])} columns"
        )
    out = aligned_empty((rows, order.size))
    owner = np.searchsorted(bounds, order, side="right") - 1
    begins = np.flatnonzero(np.r_[True, (np.diff(order) != 1) | (np.diff(owner) != 0)][: order.size])
    counts = np.diff(np.r_[begins, order.size])
    grain = 1 + 50_000 // max(1, order.size)
    for index, part in enumerate(parts):
        mine = owner[begins] == index
        runs = np.stack((order[begins[mine]] - bounds[index], begins[mine], counts[mine]), axis=1)
        workers.run(_place_columns, rows, part, out, runs, grain=grain)
    return out


def _check_weight(w: Array) -> None:
    if w.ndim != 2 or w.dtype not in (np.float32, np.uint16):
        raise ContractError(
            f"a weight to pack is a matrix of float32, or of uint16 that holds bfloat16 bits; "
            f"this one has {w.ndim} axes and dtype {w.dtype}"
        )


def _pack(w: Array, rows: int, depth: int, columns: bool, workers: Workers, out: Panels | None) -> Panels:
    if out is None:
        out = Panels(aligned_empty((panel_count(rows), depth, PANEL_WIDTH)), rows, depth)
    elif (out.rows, out.depth) != (rows, depth):
        raise ContractError(
            f"panels of {out.rows} rows and depth {out.depth} cannot take a weight of {rows} rows and depth {depth}"
        )
    grain = 1 + 100_000 // max(1, depth * PANEL_WIDTH)
    w = np.ascontiguousarray(w)
    if columns:
        workers.run(_pack_columns, panel_count(rows), w.reshape(-1), depth, rows, out.data.reshape(-1), grain=grain)
    else:
        workers.run(_pack_rows, panel_count(rows), w, out.data, grain=grain)
    return out


def pack_rows(w: Array, workers: Workers, out: Panels | None = None) -> Panels:
    """Pack ``w[N, K]`` for ``x @ w.T`` (chains over K).

    Args:
        w: float32, or uint16 holding bfloat16 bits (widened exactly).
        out: panels of the same shape to write into, so that no memory is allocated.

    Raises:
        ContractError: another dtype or rank, or ``out`` of another shape.
    """
    _check_weight(w)
    return _pack(w, w.shape[0], w.shape[1], False, workers, out)


def pack_columns(w: Array, workers: Workers, out: Panels | None = None) -> Panels:
    """Pack ``w[N, K]`` for ``dy @ w`` (chains over N): panels of K rows and depth N. Otherwise as :func:`pack_rows`."""
    _check_weight(w)
    return _pack(w, w.shape[1], w.shape[0], True, workers, out)


def unpack_row(panels: Panels, row_ids: Array) -> Array:
    """Rows of the packed matrix, exactly as they were packed: ``row_ids[n]`` -> float32 ``[n, depth]``.

    Raises:
        ContractError: an id below 0, or not below ``panels.rows``.
    """
    ids = np.ascontiguousarray(row_ids, dtype=np.int64).reshape(-1)
    if ids.size and (ids.min() < 0 or ids.max() >= panels.rows):
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise ContractError(f"row {wrong} was asked of a packed matrix of {panels.rows} rows (0 to {panels.rows - 1})")
    out = np.empty((ids.size, panels.depth), np.float32)
    _unpack_rows(0, ids.size, panels.data, ids, out)
    return out
