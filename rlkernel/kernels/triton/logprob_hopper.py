"""The head's leaves for sm_90 in Gluon: loading, multiplying and statistics side by side in one program.

As in :mod:`rlkernel.kernels.triton.gemm_hopper` one warp loads tiles through the TMA and eight multiply. They hand a
finished tile of logits to four more through shared memory, and go on with the next tile while those make the leaves'
statistics: integer and fp32 units work where otherwise only the matrix unit would. The statistics are those of
:mod:`rlkernel.kernels.triton.logprob_leaf`, written for Gluon's layouts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rlkernel.contract import constants

# renamed after Triton 3.6
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_UNDERSCORED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))

_LOG2E = gl.constexpr(constants.LOG2E)
_ROUND = gl.constexpr(constants.ROUND_TO_INTEGER)
_E1, _E2, _E3, _E4, _E5, _E6 = (gl.constexpr(value) for value in constants.EXP2_FULL[1:])
_LOWEST_KEY = gl.constexpr(-0x7F800001)  # order_key of -inf
_FIRST = gl.constexpr(0x9E3779B97F4A7C15)
_SECOND = gl.constexpr(0xD1B54A32D192ED03)


@gluon.jit
def _place(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """First row and column of a tile: GROUP_M tiles of M share a tile of N before the next one."""
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    group = tile // (GROUP_M * tiles_n)
    group_size = min(tiles_m - group * GROUP_M, GROUP_M)
    place = tile % (GROUP_M * tiles_n)
    row = (group * GROUP_M + place % group_size) * BLOCK_M
    return row, (place // group_size) * BLOCK_N


@gluon.jit
def _loader(
    a, b, a_tiles, b_tiles, full, empty, M, N, tiles_k, count, programs, STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), count, programs):
        row, column = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        for k in range(tiles_k):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            ready = full.index(slot)
            mbarrier.expect(ready, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            _load(a, [row, k * BLOCK_K], ready, a_tiles.index(slot))
            _load(b, [column, k * BLOCK_K], ready, b_tiles.index(slot))
            step += 1


@gluon.jit
def _chain(acc, step, tiles, a_tiles, b_tiles, full, empty, STAGES: gl.constexpr):
    """One chain from +0 over ``tiles`` loaded tiles, from the step-th on."""
    for k in range(tiles):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        x, y = a_tiles.index(slot), b_tiles.index(slot).permute((1, 0))
        acc = warpgroup_mma(x, y, acc, use_acc=k > 0, is_async=True)
        # the product before this one is done: its tile may be loaded over
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc, step


@gluon.jit
def _multiplier(
    logits, a_tiles, b_tiles, full, empty, made, taken, tiles_k, count, programs, STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, unit: gl.constexpr,
):  # fmt: skip
    whole: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=8, order=[1, 0])
    if _UNDERSCORED:
        tile_logits = logits._reinterpret(gl.float32, [BLOCK_M, BLOCK_N], whole)
    else:
        tile_logits = logits.reinterpret(gl.float32, [BLOCK_M, BLOCK_N], whole)
    step = 0
    for tile in range(gl.program_id(0), count, programs):
        turn = tile // programs
        total = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, unit)
        total, step = _chain(total, step, tiles_k, a_tiles, b_tiles, full, empty, STAGES)
        mbarrier.wait(taken.index(0), (turn & 1) ^ 1)
        tile_logits.store(total)
        # every warp has written before one thread says so
        _barrier()
        mbarrier.arrive(made.index(0))


@gluon.jit
def _mix_first(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@gluon.jit
def _mix_second(value):
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD
    value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53
    return value ^ (value >> 33)


@gluon.jit
def _fma(x, y, value: gl.constexpr):
    return gl.fma(x, y, gl.full_like(x, value))


@gluon.jit
def _exp2_of_difference(x):
    """(``exp2.full(x)``, whether it is not +0) for x <= 0, as in logprob_leaf."""
    shifted = x + _ROUND
    r = x - (shifted - _ROUND)
    q = _fma(r, gl.full_like(x, _E6), _E5)
    q = _fma(r, q, _E4)
    q = _fma(r, q, _E3)
    q = _fma(r, q, _E2)
    q = _fma(r, q, _E1)
    p = _fma(r, q, 1.0)
    n = shifted.to(gl.int32, bitcast=True)
    y = (p.to(gl.int32, bitcast=True) + (n << 23)).to(gl.float32, bitcast=True)
    live = x >= -126.0
    return gl.where(live, y, 0.0), live


@gluon.jit
def _tree_last(values, OUTER: gl.constexpr, WIDTH: gl.constexpr):
    """Sum of the last axis by neighbours: [OUTER, 8, WIDTH] -> [OUTER, 8]; a thread holds the axis."""
    for level in gl.static_range(WIDTH.bit_length() - 1):
        left, right = gl.split(gl.reshape(values, (OUTER, 8, WIDTH >> (level + 1), 2)))
        values = left + right
    return gl.reshape(values, (OUTER, 8))


@gluon.jit
def _tree_eight(s, u, OUTER: gl.constexpr, thread: gl.constexpr):
    """Sums of [OUTER, 8] by neighbours -> [OUTER] each; ``thread``: a layout of [OUTER, 8, 2] whose last axes a thread
    holds."""
    values = gl.convert_layout(gl.join(s, u), thread)
    for level in gl.static_range(3):
        pairs = gl.permute(gl.reshape(values, (OUTER, 8 >> (level + 1), 2, 2)), (0, 1, 3, 2))
        left, right = gl.split(pairs)
        values = left + right
    return gl.split(gl.reshape(values, (OUTER, 2)))


@gluon.jit
def _divided(z, temperature, DIVISION: gl.constexpr):
    """As ``logprob.divided``, and every NaN as 0x7FC00000."""
    if DIVISION == "quotient":
        z = gl.div_rn(z, gl.full_like(z, temperature))
    elif DIVISION == "product":
        z = z * temperature
    return gl.where(z == z, z.to(gl.uint32, bitcast=True), 0x7FC00000).to(gl.float32, bitcast=True)


@gluon.jit
def _order_key(z):
    bits = z.to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _leaves(outer, first_row, first_column, M, leaves, PARTS: gl.constexpr):
    """Row and leaf of each entry of [OUTER], and whether they exist."""
    row = first_row + outer // PARTS
    leaf = first_column // 128 + outer % PARTS
    return row, leaf, (row < M) & (leaf < leaves)


@gluon.jit
def _statistician(
    logits, targets, maxima, sums, moments, lanes, chosen, made, taken, M, N, leaves, count, programs,
    temperature, nothing, DIVISION: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    # a thread holds 16 neighbouring columns, eight threads a leaf; neighbouring threads hold neighbouring rows, which
    # the swizzle of the tile keeps apart in the banks of shared memory
    PARTS: gl.constexpr = BLOCK_N // 128
    ROWS: gl.constexpr = 16 // PARTS
    OUTER: gl.constexpr = ROWS * PARTS
    loading: gl.constexpr = gl.BlockedLayout([1, 16], [4 // PARTS, 8 * PARTS], [4, 1], [0, 1])
    thread: gl.constexpr = gl.BlockedLayout([1, 8, 2], [32, 1, 1], [4, 1, 1], [2, 1, 0])
    for tile in range(gl.program_id(0), count, programs):
        turn = tile // programs
        first_row, first_column = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        mbarrier.wait(made.index(0), turn & 1)
        for part in range(BLOCK_M // ROWS):
            start = part * ROWS
            z = _divided(logits.index(part).load(loading), temperature, DIVISION)
            z = gl.reshape(z, (OUTER, 8, 16))
            layout: gl.constexpr = z.type.layout
            outer = gl.arange(0, OUTER, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
            lane = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
            c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
            row, leaf, real_leaf = _leaves(outer, first_row + start, first_column, M, leaves, PARTS)
            target = gl.load(targets + row, mask=real_leaf, other=-1)
            # vocabulary ids of each thread's first column
            place = first_column + (outer % PARTS * 128)[:, None] + (lane * 16)[None, :]
            key = _order_key(z)
            if MASKED:
                real = (place[:, :, None] + c) < N
                key = gl.where(real, key, _LOWEST_KEY)
                z = gl.where(real, z, float("-inf"))
            top = gl.max(gl.max(key, 2), 1)
            top = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)
            bits = z.to(gl.uint32, bitcast=True).to(gl.uint64)
            # the same for every pass, but not to be kept in registers from pass to pass: nothing is 0
            base = (place + 1 + (start & nothing)).to(gl.uint64)
            d1 = _mix_first((base * _FIRST)[:, :, None] + c.to(gl.uint64) * _FIRST + bits).to(gl.int64)
            d2 = _mix_second((base * _SECOND)[:, :, None] + c.to(gl.uint64) * _SECOND + bits).to(gl.int64)
            if MASKED:
                d1 = gl.where(real, d1, 0)
                d2 = gl.where(real, d2, 0)
            d1 = gl.sum(gl.sum(d1, 2), 1)
            d2 = gl.sum(gl.sum(d2, 2), 1)
            difference = z - top[:, None, None]
            e, live = _exp2_of_difference(difference * _LOG2E)
            moment = gl.where(live, e * difference, 0.0)
            s, u = _tree_eight(_tree_last(e, OUTER, 16), _tree_last(moment, OUTER, 16), OUTER, thread)

            at = leaf.to(gl.int64) * M + row
            gl.store(maxima + at, top, mask=real_leaf)
            gl.store(lanes + at, d1, mask=real_leaf)
            gl.store(lanes + (leaf + leaves).to(gl.int64) * M + row, d2, mask=real_leaf)
            offset = gl.where(target < N, target - leaf.to(gl.int64) * 128, -1).to(gl.int32)
            hit = (offset >= 0) & (offset < 128)
            if gl.max(hit.to(gl.int32), 0) != 0:  # few tiles hold a target
                here = (lane * 16)[None, :, None] + c == offset[:, None, None]
                # a sum of patterns, only one of them not 0: as floats a -0 would be lost
                found = gl.sum(gl.sum(gl.where(here, z.to(gl.int32, bitcast=True), 0), 2), 1)
                gl.store(chosen + row, found.to(gl.float32, bitcast=True), mask=hit)
            outer = gl.arange(0, OUTER, s.type.layout)
            row, leaf, real_leaf = _leaves(outer, first_row + start, first_column, M, leaves, PARTS)
            at = leaf.to(gl.int64) * M + row
            gl.store(sums + at, s, mask=real_leaf)
            gl.store(moments + at, u, mask=real_leaf)
        # every warp has read before one thread says so
        _barrier()
        mbarrier.arrive(taken.index(0))


@gluon.jit
def linear_leaves_hopper(
    a, b, targets, maxima, sums, moments, lanes, chosen, M, N, K, leaves, programs, temperature, nothing,
    DIVISION: gl.constexpr, MASKED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """``linear_leaves`` for bfloat16.

    Args:
        a, b: descriptors of x [M, K] in tiles of [BLOCK_M, BLOCK_K] and w [N, K] in tiles of [BLOCK_N, BLOCK_K].
        nothing: int32 0. BLOCK_N: 128 or 256. REGISTERS: of a thread that makes statistics.
        The rest as for ``linear_leaves``, with R = M and V = N.
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
                _statistician,
                (
                    logits, targets, maxima, sums, moments, lanes, chosen, made, taken, M, N, leaves, count,
                    programs, temperature, nothing, DIVISION, MASKED, BLOCK_M, BLOCK_N, GROUP_M,
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
