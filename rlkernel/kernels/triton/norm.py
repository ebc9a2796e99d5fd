"""RMSNorm in Triton, alone and after a residual addition. Definition: docs/numerics.md."""

# ruff: noqa: RUF005  (Triton joins tuples by +, it knows no unpacking)
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlkernel.kernels.triton.primitives import widen
from rlkernel.kernels.triton.reductions import lane_step, tree


@triton.jit
def inverse_root(total, eps, N: tl.constexpr, ROWS: tl.constexpr):
    """``div(1, sqrt(add(div(total, N), eps)))`` -> float32 [ROWS]."""
    mean = tl.div_rn(total, tl.full((ROWS,), N, tl.float32))
    root = tl.sqrt_rn(mean + eps)
    return tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), root)


@triton.jit
def rms_norm(
    x, branch, w, stream, y, inv_rms, row_count, eps,
    N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, ADDS: tl.constexpr,
    HOLDS: tl.constexpr = False, OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """``r = 1 / sqrt(lane_sum(x*x) / N + eps)``, ``y = cast((x * r) * w)``.

    Args:
        x: [row_count, N] float32 or bfloat16; ``w``: [N]; ``y``: [row_count, N], its dtype is that of the cast.
        branch, stream: read with ADDS only: the norm is that of ``stream = cast(x + branch)``, which is stored.
        inv_rms: float32 [row_count], r of each row (the backward takes it).
        eps: float32.
        ROWS: rows of a program; LANES: min(256, smallest power of two >= N).
        HOLDS: everything is loaded at once and held in registers, for few rows, where a row's latency counts.
        OVERLAPS: on sm_90, with HOLDS: programs start while the kernel before runs, and wait for it here.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = rows < row_count
    lane = tl.arange(0, LANES)
    start = rows[:, None] * N + lane[None, :]
    # the weights of every row, read where the row's elements are: moving one copy costs more
    weights = tl.broadcast_to(lane[None, :], (ROWS, LANES))
    acc = tl.zeros((ROWS, LANES), tl.float32)
    if HOLDS:
        scales = ()
        for first in tl.static_range(0, N, LANES):
            scales = scales + (tl.load(w + first + weights, mask=weights + first < N, other=0.0),)
        if OVERLAPS:
            gdc_launch_dependents()
            gdc_wait()
        held = _summed(x, branch, start, present, lane, N, LANES, ADDS)
        for part in tl.static_range(len(held)):
            inside = present[:, None] & (lane + part * LANES < N)[None, :]
            row = held[part].to(tl.float32)
            acc = tl.fma(row, row, acc) if (part + 1) * LANES <= N else lane_step(acc, row, row, inside)
        r = inverse_root(tree(acc, ROWS, LANES), eps, N, ROWS)
        for part in tl.static_range(len(held)):
            inside = present[:, None] & (lane + part * LANES < N)[None, :]
            scaled = held[part].to(tl.float32) * r[:, None]
            value = scaled * scales[part].to(tl.float32)
            if ADDS:
                tl.store(stream + start + part * LANES, held[part], mask=inside)
            tl.store(y + start + part * LANES, value.to(y.dtype.element_ty), mask=inside)
        tl.store(inv_rms + rows, r, mask=present)
    else:
        tl.static_assert(not OVERLAPS, "only a kernel that holds its row starts early")
        for first in tl.static_range(0, N, LANES):
            inside = present[:, None] & (lane + first < N)[None, :]
            row = tl.load(x + start + first, mask=inside, other=0.0)
            if ADDS:
                other = tl.load(branch + start + first, mask=inside, other=0.0)
                row = (widen(row) + widen(other)).to(x.dtype.element_ty)
                tl.store(stream + start + first, row, mask=inside)
            row = row.to(tl.float32)
            acc = tl.fma(row, row, acc) if first + LANES <= N else lane_step(acc, row, row, inside)
        r = inverse_root(tree(acc, ROWS, LANES), eps, N, ROWS)
        tl.store(inv_rms + rows, r, mask=present)
        for first in tl.static_range(0, N, LANES):
            inside = present[:, None] & (lane + first < N)[None, :]
            row = tl.load(x + start + first, mask=inside, other=0.0)
            if ADDS:
                # added again rather than read back: the same bits, without waiting for the store
                other = tl.load(branch + start + first, mask=inside, other=0.0)
                row = (widen(row) + widen(other)).to(x.dtype.element_ty)
            weight = tl.load(w + first + weights, mask=weights + first < N, other=0.0).to(tl.float32)
            scaled = row.to(tl.float32) * r[:, None]
            value = scaled * weight
            tl.store(y + start + first, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _summed(x, branch, start, present, lane, N: tl.constexpr, LANES: tl.constexpr, ADDS: tl.constexpr):
    """The parts of a row of LANES elements, with ADDS ``cast(x + branch)``, as a tuple; all loads come first."""
    loaded = ()
    others = ()
    for first in tl.static_range(0, N, LANES):
        inside = present[:, None] & (lane + first < N)[None, :]
        loaded = loaded + (tl.load(x + start + first, mask=inside, other=0.0),)
        if ADDS:
            others = others + (tl.load(branch + start + first, mask=inside, other=0.0),)
    if not ADDS:
        return loaded
    summed = ()
    for part in tl.static_range(len(loaded)):
        summed = summed + ((widen(loaded[part]) + widen(others[part])).to(x.dtype.element_ty),)
    return summed
