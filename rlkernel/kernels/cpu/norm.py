"""RMSNorm, forward and backward, and the residual addition. Definitions: docs/numerics.md."""

from __future__ import annotations

import numpy as np
from numba import float32 as f32

from rlkernel.kernels.cpu.convert import Float32, require
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.memory import aligned_empty
from rlkernel.kernels.cpu.primitives import cast, fma
from rlkernel.kernels.cpu.reductions import LANES, lane_dot
from rlkernel.kernels.cpu.threads import Workers

_ELEMENTS = 1 << 14  # a thread gets at least this many elements: below it, handing work over costs more


@kernel
def _rms_norm(first, last, x, w, eps, y, inv_rms, bf16):
    lanes = np.empty(LANES, dtype=np.float32)
    other = np.empty(LANES, dtype=np.float32)
    columns = x.shape[1]
    for i in range(first, last):
        row = x[i]
        out = y[i]
        mean = lane_dot(row, row, lanes, other) / f32(columns)
        r = f32(1.0) / np.sqrt(mean + eps)
        inv_rms[i] = r
        for j in range(columns):
            out[j] = cast(row[j] * r * w[j], bf16)


@kernel
def _rms_norm_dx(first, last, dy, x, w, inv_rms, dx, bf16):
    lanes = np.empty(LANES, dtype=np.float32)
    other = np.empty(LANES, dtype=np.float32)
    columns = x.shape[1]
    g = np.empty(columns, dtype=np.float32)
    xh = np.empty(columns, dtype=np.float32)
    for i in range(first, last):
        row = x[i]
        row_dy = dy[i]
        out = dx[i]
        r = inv_rms[i]
        for j in range(columns):
            g[j] = row_dy[j] * w[j]
            xh[j] = row[j] * r
        c = lane_dot(g, xh, lanes, other) / f32(columns)
        for j in range(columns):
            out[j] = cast(r * fma(-xh[j], c, g[j]), bf16)


@kernel
def _rms_norm_dw(first, last, dy, x, inv_rms, dw):
    part = dw[first:last]
    for i in range(x.shape[0]):
        row = x[i, first:last]
        row_dy = dy[i, first:last]
        r = inv_rms[i]
        for j in range(part.size):
            part[j] = fma(row_dy[j], row[j] * r, part[j])


@kernel
def _add(first, last, a, b, out, bf16):
    a_part = a[first:last]
    b_part = b[first:last]
    out_part = out[first:last]
    for j in range(out_part.size):
        out_part[j] = cast(a_part[j] + b_part[j], bf16)


def rms_norm(x: Float32, w: Float32, eps: float | np.float32, workers: Workers, bf16: bool) -> tuple[Float32, Float32]:
    """RMSNorm of each row; for qk_norm pass x as [N * heads, D].

    Args:
        x: float32 [N, H].
        w: float32 [H].
        eps: rounded once to float32.
        bf16: round y to bfloat16.

    Returns:
        y float32 [N, H] and the inverse root mean square of each row, float32 [N], which the backward takes.

    Raises:
        ContractError: an array of another dtype, shape or layout.
    """
    require("x of rms_norm", x, np.float32, None, None)
    rows, columns = x.shape
    require("w of rms_norm", w, np.float32, columns)
    y = aligned_empty(x.shape)
    inv_rms = np.empty(rows, dtype=np.float32)
    grain = 1 + _ELEMENTS // max(1, columns)
    workers.run(_rms_norm, rows, x, w, np.float32(eps), y, inv_rms, bf16, grain=grain)
    return y, inv_rms


def rms_norm_backward(
    dy: Float32, x: Float32, w: Float32, inv_rms: Float32, dw_acc: Float32, workers: Workers, bf16: bool
) -> Float32:
    """Gradients of :func:`rms_norm`; the chain over rows in ``dw_acc`` is continued in place.

    Args:
        dy: float32 [N, H], gradient of y.
        x: float32 [N, H]; ``w``: float32 [H]; ``inv_rms``: float32 [N], from the forward.
        dw_acc: float32 [H], updated over rows in ascending order.
        bf16: round dx to bfloat16.

    Returns:
        dx float32 [N, H].

    Raises:
        ContractError: an array of another dtype, shape or layout.
    """
    require("x of rms_norm_backward", x, np.float32, None, None)
    rows, columns = x.shape
    require("dy of rms_norm_backward", dy, np.float32, rows, columns)
    require("w of rms_norm_backward", w, np.float32, columns)
    require("inv_rms of rms_norm_backward", inv_rms, np.float32, rows)
    require("dw_acc of rms_norm_backward", dw_acc, np.float32, columns)
    dx = aligned_empty(x.shape)
    workers.run(_rms_norm_dx, rows, dy, x, w, inv_rms, dx, bf16, grain=1 + _ELEMENTS // max(1, columns))
    # a cache line of columns at least, so that two threads do not write the same one
    workers.run(_rms_norm_dw, columns, dy, x, inv_rms, dw_acc, grain=max(16, _ELEMENTS // max(1, rows)))
    return dx


def residual_add(a: Float32, b: Float32, workers: Workers, bf16: bool) -> Float32:
    """``cast(a + b)`` for two float32 arrays of one shape: stream and branch, or two gradients that meet.

    Raises:
        ContractError: an array of another dtype, shape or layout.
    """
    require("a of residual_add", a, np.float32, *a.shape)
    require("b of residual_add", b, np.float32, *a.shape)
    out = aligned_empty(a.shape)
    workers.run(_add, a.size, a.reshape(-1), b.reshape(-1), out.reshape(-1), bf16, grain=_ELEMENTS)
    return out
