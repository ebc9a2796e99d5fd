"""Gradients of a matmul's weights and bias: chains over tokens that go on from call to call. Definitions:
docs/numerics.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32 as f32

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.gemm import DEPTH_BLOCK, check_float32, grain_of
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.microkernel import MAX_ROWS, PANEL_WIDTH, fma_tile
from rlkernel.kernels.cpu.panels import pack_columns
from rlkernel.kernels.cpu.threads import Workers

Array = np.ndarray[Any, Any]

_CACHE = 128 * 1024  # float32 elements of x that stay in the second-level cache meanwhile
_SCRATCH = 16 * 1024 * 1024  # float32 elements of dy or x packed at a time


@kernel
def _weight_gradient(first, last, dy, rows, tokens, x, columns, column_parts, grad):
    """Tasks first..last, task = group of panels of x * panels of dy + panel of dy. Panels packed; all arrays flat."""
    row_panels = -(-rows // PANEL_WIDTH)
    panels = -(-columns // PANEL_WIDTH)
    ragged = np.empty(MAX_ROWS * PANEL_WIDTH, np.float32)
    for task in range(first, last):
        group = task // row_panels
        row_panel = task - group * row_panels
        panel_first, panel_last = panels * group // column_parts, panels * (group + 1) // column_parts
        row_first = row_panel * PANEL_WIDTH
        panel_rows = min(PANEL_WIDTH, rows - row_first)
        tiles = -(-panel_rows // MAX_ROWS)
        for t_first in range(0, tokens, DEPTH_BLOCK):
            t_count = min(DEPTH_BLOCK, tokens - t_first)
            dy_base = (row_panel * tokens + t_first) * PANEL_WIDTH
            for tile in range(tiles):
                r = panel_rows * tile // tiles
                count = panel_rows * (tile + 1) // tiles - r
                for p in range(panel_first, panel_last):
                    column = p * PANEL_WIDTH
                    width = min(PANEL_WIDTH, columns - column)
                    place = (row_first + r) * columns + column
                    x_base = (p * tokens + t_first) * PANEL_WIDTH
                    if width == PANEL_WIDTH:
                        fma_tile(
                            count, dy, dy_base + r, 1, PANEL_WIDTH, x, x_base, 0, grad, place, columns, t_count, True
                        )
                        continue
                    for i in range(count):
                        for j in range(PANEL_WIDTH):
                            ragged[i * PANEL_WIDTH + j] = grad[place + i * columns + j] if j < width else f32(0.0)
                    fma_tile(
                        count, dy, dy_base + r, 1, PANEL_WIDTH, x, x_base, 0, ragged, 0, PANEL_WIDTH, t_count, True
                    )
                    for i in range(count):
                        for j in range(width):
                            grad[place + i * columns + j] = ragged[i * PANEL_WIDTH + j]


def weight_gradient(dy: Array, x: Array, grad: Array, workers: Workers) -> None:
    """Continue ``grad[n, k]`` over tokens: ``grad = fma(dy[t, n], x[t, k], grad)``, t ascending.

    Args:
        dy: float32 ``[T, N]``.
        x: float32 ``[T, K]``.
        grad: float32 ``[N, K]``, updated in place.

    Raises:
        ContractError: shapes or dtypes do not fit.
    """
    if dy.ndim != 2 or x.ndim != 2:
        raise ContractError(f"dy and x of a weight gradient have 2 axes, not {dy.ndim} and {x.ndim}")
    all_tokens, rows, columns = dy.shape[0], dy.shape[1], x.shape[1]
    check_float32("dy of a weight gradient", dy, (all_tokens, rows))
    check_float32("x of a weight gradient", x, (all_tokens, columns))
    check_float32("the weight gradient", grad, (rows, columns))
    if rows == 0 or columns == 0:
        return
    step = max(DEPTH_BLOCK, _SCRATCH // max(rows, columns))
    for start in range(0, all_tokens, step):
        tokens = min(step, all_tokens - start)
        packed_dy = pack_columns(dy[start : start + tokens], workers).data
        packed_x = pack_columns(x[start : start + tokens], workers).data
        group = max(1, _CACHE // (PANEL_WIDTH * min(tokens, DEPTH_BLOCK)))
        column_parts = -(-packed_x.shape[0] // group)
        panels_of_part = -(-packed_x.shape[0] // column_parts)
        workers.run(
            _weight_gradient, column_parts * packed_dy.shape[0], packed_dy.reshape(-1), rows, tokens,
            packed_x.reshape(-1), columns, column_parts, grad.reshape(-1),
            grain=grain_of(min(rows, PANEL_WIDTH), tokens * panels_of_part),
        )  # fmt: skip


@kernel
def _bias_gradient(first, last, dy, grad):
    for t in range(dy.shape[0]):
        for n in range(first, last):
            grad[n] = grad[n] + dy[t, n]


def bias_gradient(dy: Array, grad: Array, workers: Workers) -> None:
    """Continue ``grad[n] = add(grad[n], dy[t, n])`` over tokens, t ascending; dy float32 ``[T, N]``, grad ``[N]``.

    Raises:
        ContractError: shapes or dtypes do not fit.
    """
    check_float32("dy of a bias gradient", dy, (dy.shape[0], dy.shape[1]))
    check_float32("the bias gradient", grad, (dy.shape[1],))
    if dy.size:
        workers.run(_bias_gradient, dy.shape[1], dy, grad, grain=1 + 200_000 // dy.shape[0])
