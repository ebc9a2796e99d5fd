"""Gradient of the logits for sm_90 in Gluon: made from recomputed logits beside the GEMM that makes the next ones.

The division of work is that of :mod:`rlkernel.kernels.triton.logprob_hopper`, the arithmetic that of
``logprob_gradient.linear_gradient``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rlkernel.kernels.triton.logprob_hopper import (
    _LOG2E,
    _barrier,
    _divided,
    _exp2_of_difference,
    _loader,
    _multiplier,
    _place,
)


@gluon.jit
def _exp2_full(x):
    """``exp2.full``: outside of its range as in primitives."""
    y, _ = _exp2_of_difference(gl.where(x > 128.0, 128.0, x))
    y = gl.where(x >= 128.0, float("inf"), y)
    return gl.where(x == x, y, x)


@gluon.jit
def _differentiator(
    logits, maxima, log_sums, targets, coefficients, dz, made, taken, M, N, first, count, programs, temperature,
    divisor, DIVISION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    # a thread holds 8 neighbouring columns of two rows
    ROWS: gl.constexpr = 2048 // BLOCK_N
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [4, 1], [1, 0])
    line = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    for tile in range(gl.program_id(0), count, programs):
        first_row, first_column = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        mbarrier.wait(made.index(0), tile // programs & 1)
        for part in range(BLOCK_M // ROWS):
            z = _divided(logits.index(part).load(layout), temperature, DIVISION)
            row = first_row + part * ROWS + line
            v = first_column + column
            present = row < M
            top = gl.load(maxima + row, mask=present, other=0.0)
            log_sum = gl.load(log_sums + row, mask=present, other=0.0)
            target = gl.load(targets + row, mask=present, other=-1)
            coefficient = gl.load(coefficients + row, mask=present, other=0.0)
            c = gl.div_rn(coefficient, gl.full_like(coefficient, divisor))
            p = _exp2_full(((z - top[:, None]) - log_sum[:, None]) * _LOG2E)
            hot = (target - first)[:, None] == v[None, :]
            value = (gl.where(hot, gl.full_like(p, 1.0), 0.0) - p) * c[:, None]
            place = dz + row.to(gl.int64)[:, None] * N + v[None, :]
            gl.store(place, value.to(dz.dtype.element_ty), mask=present[:, None] & (v < N)[None, :])
        # every warp has read before one thread says so
        _barrier()
        mbarrier.arrive(taken.index(0))


@gluon.jit
def linear_gradient_hopper(
    a, b, maxima, log_sums, targets, coefficients, dz, M, N, K, first, programs, temperature, divisor,
    DIVISION: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """``linear_gradient`` for bfloat16: dz [M, N] of the N columns of the vocabulary from ``first`` on.

    Args:
        a, b: descriptors of x [M, K] in tiles of [BLOCK_M, BLOCK_K] and w [N, K] in tiles of [BLOCK_N, BLOCK_K].
        The rest as for ``linear_gradient``.
    """
    unit: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N, 16]
    )
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK_M, BLOCK_K], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b.layout)
    parted: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=8, order=[1, 0])
    ROWS: gl.constexpr = 2048 // BLOCK_N
    logits = gl.allocate_shared_memory(gl.float32, [BLOCK_M // ROWS, ROWS, BLOCK_N], parted)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    mbarrier.init(made.index(0), count=1)
    mbarrier.init(taken.index(0), count=1)
    fence_async_shared()
    tiles_k = gl.cdiv(K, BLOCK_K)
    count = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    gl.warp_specialize(
        [
            (
                _multiplier,
                (
                    logits, a_tiles, b_tiles, full, empty, made, taken, tiles_k, count, programs, STAGES,
                    BLOCK_M, BLOCK_N, unit,
                ),
            ),
            (
                _differentiator,
                (
                    logits, maxima, log_sums, targets, coefficients, dz, made, taken, M, N, first, count, programs,
                    temperature, divisor, DIVISION, BLOCK_M, BLOCK_N, GROUP_M,
                ),
            ),
            (
                _loader,
                (
                    a, b, a_tiles, b_tiles, full, empty, M, N, tiles_k, count, programs, STAGES,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
