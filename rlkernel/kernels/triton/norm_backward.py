"""RMSNorm's gradients in Triton. Definition: docs/numerics.md.

The weight's gradient is one chain over all rows, so only its columns run side by side: a program owns a few columns
and reads blocks of rows ahead of the chain.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.triton.primitives import negative
from rlkernel.kernels.triton.reductions import lane_step, tree


@triton.jit
def rms_norm_dx(
    dy, x, w, inv_rms, dx, row_count, N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """``g = dy*w; xh = x*r; c = lane_sum(g*xh) / N; dx = cast(r * fma(-xh, c, g))``.

    Args:
        dy, x: [row_count, N]; ``w``: [N]; ``inv_rms``: float32 [row_count]; ``dx``: [row_count, N].
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = rows < row_count
    lane = tl.arange(0, LANES)
    start = rows[:, None] * N + lane[None, :]
    weights = tl.broadcast_to(lane[None, :], (ROWS, LANES))
    r = tl.load(inv_rms + rows, mask=present, other=0.0)[:, None]
    acc = tl.zeros((ROWS, LANES), tl.float32)
    for first in tl.static_range(0, N, LANES):
        inside = present[:, None] & (lane + first < N)[None, :]
        weight = tl.load(w + first + weights, mask=weights + first < N, other=0.0).to(tl.float32)
        g = tl.load(dy + start + first, mask=inside, other=0.0).to(tl.float32) * weight
        xh = tl.load(x + start + first, mask=inside, other=0.0).to(tl.float32) * r
        acc = tl.fma(g, xh, acc) if first + LANES <= N else lane_step(acc, g, xh, inside)
    c = tl.div_rn(tree(acc, ROWS, LANES), tl.full((ROWS,), N, tl.float32))
    c = negative(c)[:, None]  # -xh * c is xh * -c: the sign costs one operation a row instead of one an element
    for first in tl.static_range(0, N, LANES):
        inside = present[:, None] & (lane + first < N)[None, :]
        weight = tl.load(w + first + weights, mask=weights + first < N, other=0.0).to(tl.float32)
        g = tl.load(dy + start + first, mask=inside, other=0.0).to(tl.float32) * weight
        xh = tl.load(x + start + first, mask=inside, other=0.0).to(tl.float32) * r
        inner = tl.fma(xh, tl.broadcast_to(c, (ROWS, LANES)), g)
        value = r * inner
        tl.store(dx + start + first, value.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_dw(
    dy, x, inv_rms, dw, row_count, N,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dw[i] = fma(dy[t, i], x[t, i] * r[t], dw[i])`` over rows t ascending, dw float32 [N] continued in place.

    A program owns COLUMNS columns; BLOCK rows are read before their steps of the chain are taken.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    stride = tl.full((COLUMNS,), N, tl.int64)
    acc = tl.load(dw + column, mask=inside, other=0.0)
    whole = row_count // BLOCK * BLOCK
    for first in tl.range(0, whole, BLOCK, num_stages=STAGES):
        for t in tl.static_range(BLOCK):
            place = (first + t) * stride + column
            xh = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * tl.load(inv_rms + first + t)
            acc = tl.fma(tl.load(dy + place, mask=inside, other=0.0).to(tl.float32), xh, acc)
    for row in range(whole, row_count):
        place = row * stride + column
        xh = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * tl.load(inv_rms + row)
        acc = tl.fma(tl.load(dy + place, mask=inside, other=0.0).to(tl.float32), xh, acc)
    tl.store(dw + column, acc, mask=inside)


@triton.jit
def column_sum(
    dy, total, row_count, N, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """``total[i] = add(total[i], dy[t, i])`` over rows t ascending, float32 [N] continued in place (a bias)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    stride = tl.full((COLUMNS,), N, tl.int64)
    acc = tl.load(total + column, mask=inside, other=0.0)
    whole = row_count // BLOCK * BLOCK
    for first in tl.range(0, whole, BLOCK, num_stages=STAGES):
        for t in tl.static_range(BLOCK):
            place = (first + t) * stride + column
            acc = acc + tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    for row in range(whole, row_count):
        place = row * stride + column
        acc = acc + tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + column, acc, mask=inside)
