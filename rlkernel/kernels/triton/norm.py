"""RMSNorm in Triton. Definition: docs/numerics.md."""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.triton.reductions import lane_dot


@triton.jit
def rms_norm(x, w, y, inv_rms, row_count, eps, N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """``r = 1 / sqrt(lane_sum(x*x) / N + eps)``, ``y = cast((x * r) * w)``.

    Args:
        x: [row_count, N] float32 or bfloat16; ``w``: [N]; ``y``: [row_count, N], its dtype is that of the cast.
        inv_rms: float32 [row_count], r of each row (the backward takes it).
        eps: float32.
        ROWS: rows of a program; LANES: min(256, smallest power of two >= N).
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = rows < row_count
    total = lane_dot(x, x, rows, present, N, ROWS, LANES)
    mean = tl.div_rn(total, tl.full((ROWS,), N, tl.float32))
    root = tl.sqrt_rn(mean + eps)
    r = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), root)
    tl.store(inv_rms + rows, r, mask=present)
    lane = tl.arange(0, LANES)
    start = rows[:, None] * N + lane[None, :]
    for first in range(0, N, LANES):
        inside = present[:, None] & (lane + first < N)[None, :]
        row = tl.load(x + start + first, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(w + first + lane, mask=lane + first < N, other=0.0).to(tl.float32)
        scaled = row * r[:, None]
        value = scaled * weight[None, :]
        tl.store(y + start + first, value.to(y.dtype.element_ty), mask=inside)
