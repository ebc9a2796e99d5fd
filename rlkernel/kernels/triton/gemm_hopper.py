"""GEMM for sm_90 in Gluon: one warp loads tiles through the TMA, the others multiply. The matrix unit's chain only.

``c = cast(tree over LEAVES of chain(a, b) [+ bias])``, the sums of :mod:`rlkernel.kernels.triton.gemm`, on a fixed
number of programs that take tiles in turn. The loading warp runs ahead over the borders of leaves and tiles, so that a
leaf costs its merge and nothing else. A leaf waits for its right neighbour in registers, a pair in shared memory, the
first four of eight in global memory: more registers than that, and the compiler makes the products wait for each other.

Operands come as descriptors: a of [M, K], or [K, M] with A_DEPTH_FIRST; b of [N, K], or [K, N] with B_DEPTH_FIRST.
Elements beyond a matrix load as +0, which a step of the matrix unit ignores; leaves must be whole tiles of K.

With SWIGLU a tile's columns are as many of the gate and then of up, and what is stored is their SwiGLU, each of the two
rounded first as the product would be. With OVERLAPS the programs start while the kernel before still runs, and load
tiles of b, which it must not write; they wait for it before they touch anything else.
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

from rlkernel.kernels.triton.gluon_parts import launch_dependents, swiglu, wait_for_prior

# renamed after Triton 3.6
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store = tma.async_store if hasattr(tma, "async_load") else tma.async_copy_shared_to_global


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
def _load_b(
    b, column, k, ready, tile, pred, slice_width, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    B_DEPTH_FIRST: gl.constexpr, SWIGLU: gl.constexpr,
):  # fmt: skip
    if B_DEPTH_FIRST:
        _load(b, [k * BLOCK_K, column], ready, tile, pred=pred)
    elif SWIGLU:
        # as many columns of the gate as of up, which lie a slice apart
        HALF: gl.constexpr = BLOCK_N // 2
        half = column // 2
        gate = half // slice_width * (2 * slice_width) + half % slice_width
        _load(b, [gate, k * BLOCK_K], ready, tile.slice(0, HALF, 0), pred=pred)
        _load(b, [gate + slice_width, k * BLOCK_K], ready, tile.slice(HALF, HALF, 0), pred=pred)
    else:
        _load(b, [column, k * BLOCK_K], ready, tile, pred=pred)


@gluon.jit
def _turn(step, tiles_k, LEAVES: gl.constexpr, PAIRED: gl.constexpr):
    """Which tile of K comes as the step-th of a tile: with PAIRED those of two leaves in turn."""
    if PAIRED:
        size = tiles_k // LEAVES
        pair = step // (2 * size)
        rest = step % (2 * size)
        return (2 * pair + rest % 2) * size + rest // 2
    else:
        return step


@gluon.jit
def _loader(
    a, b, a_tiles, b_tiles, full, empty, M, N, tiles_k, count, programs, slice_width, STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, A_ROWS: gl.constexpr, GROUP_M: gl.constexpr,
    A_DEPTH_FIRST: gl.constexpr, B_DEPTH_FIRST: gl.constexpr, SWIGLU: gl.constexpr, OVERLAPS: gl.constexpr,
    WIDE: gl.constexpr, LEAVES: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    LOADED: gl.constexpr = (A_ROWS + WIDE * BLOCK_N) * BLOCK_K * 2
    step = 0
    ahead = 0
    if OVERLAPS:
        ahead = min(tiles_k, STAGES)
        _, column = _place(gl.program_id(0), M, N, BLOCK_M, WIDE * BLOCK_N, GROUP_M)
        for k in range(ahead):
            mbarrier.expect(full.index(k), LOADED)
            for part in gl.static_range(WIDE):
                _load_b(
                    b, column + part * BLOCK_N, _turn(k, tiles_k, LEAVES, PAIRED), full.index(k),
                    b_tiles.index(k * WIDE + part), True, slice_width, BLOCK_N, BLOCK_K, B_DEPTH_FIRST, SWIGLU,
                )  # fmt: skip
        wait_for_prior()
    for tile in range(gl.program_id(0), count, programs):
        row, column = _place(tile, M, N, BLOCK_M, WIDE * BLOCK_N, GROUP_M)
        for turn in range(tiles_k):
            k = _turn(turn, tiles_k, LEAVES, PAIRED)
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            ready = full.index(slot)
            mbarrier.expect(ready, LOADED, pred=step >= ahead)
            if A_DEPTH_FIRST:
                _load(a, [k * BLOCK_K, row], ready, a_tiles.index(slot))
            else:
                # rows that no row of c comes of stay what they were: they enter nothing that is stored
                _load(a, [row, k * BLOCK_K], ready, a_tiles.index(slot).slice(0, A_ROWS, 0))
            for part in gl.static_range(WIDE):
                _load_b(
                    b, column + part * BLOCK_N, k, ready, b_tiles.index(slot * WIDE + part), step >= ahead, slice_width,
                    BLOCK_N, BLOCK_K, B_DEPTH_FIRST, SWIGLU,
                )  # fmt: skip
            step += 1


@gluon.jit
def _chain(
    acc, step, tiles, a_tiles, b_tiles, full, empty, STAGES: gl.constexpr,
    A_DEPTH_FIRST: gl.constexpr, B_DEPTH_FIRST: gl.constexpr, CONTINUES: gl.constexpr,
):  # fmt: skip
    """Continue acc over ``tiles`` loaded tiles, from the step-th on; without CONTINUES from +0, whatever acc is."""
    for k in range(tiles):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        x, y = _operands(a_tiles.index(slot), b_tiles.index(slot), A_DEPTH_FIRST, B_DEPTH_FIRST)
        acc = warpgroup_mma(x, y, acc, use_acc=CONTINUES or k > 0, is_async=True)
        # the product before this one is done: its tile may be loaded over
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc, step


@gluon.jit
def _three_chains(step, tiles, a_tiles, b_tiles, full, empty, STAGES: gl.constexpr, start):
    """Chains from +0 of three tiles of columns side by side: none waits for its own step before."""
    one, two, three = start, start, start
    for k in range(tiles):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        x = a_tiles.index(slot)
        one = warpgroup_mma(x, b_tiles.index(slot * 3).permute((1, 0)), one, use_acc=k > 0, is_async=True)
        two = warpgroup_mma(x, b_tiles.index(slot * 3 + 1).permute((1, 0)), two, use_acc=k > 0, is_async=True)
        three = warpgroup_mma(x, b_tiles.index(slot * 3 + 2).permute((1, 0)), three, use_acc=k > 0, is_async=True)
        one, two, three = warpgroup_mma_wait(3, deps=[one, two, three])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    one, two, three = warpgroup_mma_wait(0, deps=[one, two, three])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return one, two, three, step


@gluon.jit
def _two_chains(
    step, tiles, a_tiles, b_tiles, full, empty, STAGES: gl.constexpr,
    A_DEPTH_FIRST: gl.constexpr, B_DEPTH_FIRST: gl.constexpr, start,
):  # fmt: skip
    """Chains from +0 of two leaves of ``tiles`` tiles each, side by side, which are loaded in turn."""
    one, two = start, start
    for k in range(tiles):
        slot, other = step % STAGES, (step + 1) % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        x, y = _operands(a_tiles.index(slot), b_tiles.index(slot), A_DEPTH_FIRST, B_DEPTH_FIRST)
        one = warpgroup_mma(x, y, one, use_acc=k > 0, is_async=True)
        mbarrier.wait(full.index(other), (step + 1) // STAGES & 1)
        x, y = _operands(a_tiles.index(other), b_tiles.index(other), A_DEPTH_FIRST, B_DEPTH_FIRST)
        two = warpgroup_mma(x, y, two, use_acc=k > 0, is_async=True)
        one, two = warpgroup_mma_wait(2, deps=[one, two])
        mbarrier.arrive(empty.index((step + STAGES - 2) % STAGES), pred=k > 0)
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 2
    one, two = warpgroup_mma_wait(0, deps=[one, two])
    mbarrier.arrive(empty.index((step + STAGES - 2) % STAGES))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return one, two, step


@gluon.jit
def _operands(x, y, A_DEPTH_FIRST: gl.constexpr, B_DEPTH_FIRST: gl.constexpr):
    if A_DEPTH_FIRST:
        x = x.permute((1, 0))
    if not B_DEPTH_FIRST:
        y = y.permute((1, 0))
    return x, y


@gluon.jit
def _multiplier_of_pairs(
    c, bias, a_tiles, b_tiles, c_tile, full, empty, M, N, tiles_k, count, programs, STAGES: gl.constexpr,
    LEAVES: gl.constexpr, HAS_BIAS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    A_DEPTH_FIRST: gl.constexpr, B_DEPTH_FIRST: gl.constexpr, OVERLAPS: gl.constexpr, unit: gl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait_for_prior()
    step = 0
    for tile in range(gl.program_id(0), count, programs):
        row, column = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        start = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, unit)
        total, pair, four = start, start, start
        for index in gl.static_range(LEAVES // 2):
            one, two, step = _two_chains(
                step, tiles_k // LEAVES, a_tiles, b_tiles, full, empty, STAGES, A_DEPTH_FIRST, B_DEPTH_FIRST, start
            )  # fmt: skip
            # the tree: what waits for its right neighbour stays in registers
            total = one + two
            if index % 2 == 0:
                pair = total
            else:
                total = pair + total
            if index % 4 == 1:
                four = total
            elif index % 4 == 3:
                total = four + total
        if HAS_BIAS:
            columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, unit))
            total = total + gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        tma.store_wait(0)
        _stored(c, total, c_tile, row, column, BLOCK_M, BLOCK_N, False)
    tma.store_wait(0)


@gluon.jit
def _halves(total, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Left and right columns of a tile."""
    return gl.split(gl.permute(gl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@gluon.jit
def _stored(c, total, c_tile, row, column, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SWIGLU: gl.constexpr):
    """Store a tile whose part of shared memory is free; ``column``: of the product."""
    if SWIGLU:
        gate, up = _halves(total.to(c.dtype), BLOCK_M, BLOCK_N)
        c_tile.store(swiglu(gate.to(gl.float32), up.to(gl.float32)).to(c.dtype))
        fence_async_shared()
        _store(c, [row, column // 2], c_tile)
    else:
        c_tile.store(total.to(c.dtype))
        fence_async_shared()
        _store(c, [row, column], c_tile)


@gluon.jit
def _multiplier_of_three(
    c, a_tiles, b_tiles, c_tile, full, empty, M, N, tiles_k, count, programs, STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, SWIGLU: gl.constexpr,
    OVERLAPS: gl.constexpr, unit: gl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait_for_prior()
    step = 0
    for tile in range(gl.program_id(0), count, programs):
        row, column = _place(tile, M, N, BLOCK_M, 3 * BLOCK_N, GROUP_M)
        start = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, unit)
        one, two, three, step = _three_chains(step, tiles_k, a_tiles, b_tiles, full, empty, STAGES, start)
        tma.store_wait(0)
        _stored(c, one, c_tile.index(0), row, column, BLOCK_M, BLOCK_N, SWIGLU)
        _stored(c, two, c_tile.index(1), row, column + BLOCK_N, BLOCK_M, BLOCK_N, SWIGLU)
        _stored(c, three, c_tile.index(2), row, column + 2 * BLOCK_N, BLOCK_M, BLOCK_N, SWIGLU)
    tma.store_wait(0)


@gluon.jit
def _elements(row, column, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, unit: gl.constexpr):
    """(rows, columns, places in a [*, N] matrix) of a tile, where the matrix unit's layout has them."""
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, unit))
    columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, unit))
    return rows, columns, rows.to(gl.int64)[:, None] * N + columns[None, :]


@gluon.jit
def _start(
    grad, tile, count, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, unit: gl.constexpr
):  # fmt: skip
    """A tile of grad, where the chain of its elements starts; zeros beyond the last tile."""
    row, column = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows, columns, places = _elements(row, column, N, BLOCK_M, BLOCK_N, unit)
    inside = (rows < M)[:, None] & (columns < N)[None, :] & (tile < count)
    return gl.load(grad + places, mask=inside, other=0.0)


@gluon.jit
def _multiplier(
    c, bias, grad, workspace, a_tiles, b_tiles, c_tile, waiting, full, empty, M, N, tiles_k, count, programs,
    STAGES: gl.constexpr, LEAVES: gl.constexpr, HAS_BIAS: gl.constexpr,
    CONTINUES: gl.constexpr, PARTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    A_DEPTH_FIRST: gl.constexpr, B_DEPTH_FIRST: gl.constexpr, SWIGLU: gl.constexpr, OVERLAPS: gl.constexpr,
    FOUR_SHARED: gl.constexpr, unit: gl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait_for_prior()
    step = 0
    total = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, unit)
    ahead = total
    if CONTINUES:
        ahead = _start(grad, gl.program_id(0), count, M, N, BLOCK_M, BLOCK_N, GROUP_M, unit)
    for tile in range(gl.program_id(0), count, programs):
        row, column = _place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        if CONTINUES:
            total = ahead
            # what the next tile starts from arrives while this one is multiplied
            ahead = _start(grad, tile + programs, count, M, N, BLOCK_M, BLOCK_N, GROUP_M, unit)
        one = total
        for leaf in gl.static_range(LEAVES):
            total, step = _chain(
                total, step, tiles_k // LEAVES, a_tiles, b_tiles, full, empty, STAGES,
                A_DEPTH_FIRST, B_DEPTH_FIRST, CONTINUES,
            )  # fmt: skip
            # the tree: a sum waits for its right neighbour, lower leaf on the left
            if LEAVES > 1:
                if leaf % 2 == 0:
                    one = total
                else:
                    total = one + total
            if LEAVES > 2:
                if leaf % 4 == 1:
                    waiting.index(0).store(total)
                elif leaf % 4 == 3:
                    total = waiting.index(0).load(unit) + total
            if LEAVES > 4:
                if FOUR_SHARED:
                    if leaf == 3:
                        waiting.index(1).store(total)
                    elif leaf == 7:
                        total = waiting.index(1).load(unit) + total
                else:
                    _, _, own = _elements(gl.program_id(0) * BLOCK_M, 0, BLOCK_N, BLOCK_M, BLOCK_N, unit)
                    if leaf == 3:
                        gl.store(workspace + own, total)
                    elif leaf == 7:
                        # every element is read by the thread that wrote it
                        total = gl.load(workspace + own) + total
        if HAS_BIAS:
            columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, unit))
            total = total + gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        if SWIGLU or PARTS == 1:
            tma.store_wait(0)
            _stored(c, total, c_tile, row, column, BLOCK_M, BLOCK_N, SWIGLU)
        else:
            left, right = _halves(total.to(c.dtype), BLOCK_M, BLOCK_N)
            tma.store_wait(0)
            c_tile.store(left)
            fence_async_shared()
            _store(c, [row, column], c_tile)
            tma.store_wait(0)
            c_tile.store(right)
            fence_async_shared()
            _store(c, [row, column + BLOCK_N // 2], c_tile)
    tma.store_wait(0)


@gluon.jit
def gemm_hopper(
    a, b, c, bias, grad, workspace, M, N, K, programs, slice_width,
    LEAVES: gl.constexpr, HAS_BIAS: gl.constexpr, CONTINUES: gl.constexpr,
    A_DEPTH_FIRST: gl.constexpr, B_DEPTH_FIRST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, A_ROWS: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    SWIGLU: gl.constexpr, OVERLAPS: gl.constexpr, FOUR_SHARED: gl.constexpr, WIDE: gl.constexpr,
    PAIRED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """``c = cast(tree over LEAVES of chain(a, b) [+ bias])``, or one chain from grad, or the SwiGLU of such a c.

    Args:
        a, b: descriptors (see the module); ``c``: descriptor of [M, N] in tiles of [BLOCK_M, BLOCK_N / PARTS], its
            dtype is that of the cast; ``bias``: [N], read with HAS_BIAS.
        grad: float32 [M, N], read with CONTINUES as the start of the chain (one leaf); c may be the same matrix.
        workspace: float32 [programs, BLOCK_M, BLOCK_N], used with eight leaves without FOUR_SHARED.
        SWIGLU: rows of b are blocks of [slice_width of the gate, slice_width of up], the former a multiple of
            BLOCK_N / 2; c: [M, N / 2] in tiles of BLOCK_N / 2 columns, boxes of b have BLOCK_N / 2 rows. One leaf.
        FOUR_SHARED: the first four of eight leaves wait in shared memory.
        PAIRED: two leaves are multiplied side by side, and all that waits stays in registers.
        WIDE: 1, or 3: a program multiplies three tiles of columns side by side; one leaf, b of [N, K], no bias.
        A_ROWS: rows of a tile of a that are loaded: BLOCK_M, or fewer where M is not larger (a of [M, K]).
        STAGES: tiles of K in shared memory; GROUP_M: tiles of M that neighbouring programs share a tile of N with.
    """
    gl.static_assert(LEAVES == 1 or LEAVES == 2 or LEAVES == 4 or LEAVES == 8, "LEAVES is 1, 2, 4 or 8")
    gl.static_assert(LEAVES == 1 or not CONTINUES, "only one chain is continued")
    gl.static_assert(not SWIGLU or not (CONTINUES or HAS_BIAS or A_DEPTH_FIRST or B_DEPTH_FIRST), "a forward, no bias")
    gl.static_assert(
        WIDE == 1 or (WIDE == 3 and LEAVES == 1 and PARTS == 1 and not (CONTINUES or HAS_BIAS or B_DEPTH_FIRST)),
        "three tiles are a forward of one chain without a bias, stored whole",
    )
    gl.static_assert(not PAIRED or (LEAVES > 1 and WIDE == 1 and PARTS == 1), "pairs are of leaves, stored whole")
    if OVERLAPS:
        launch_dependents()
    unit: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N, 16]
    )
    a_tiles = gl.allocate_shared_memory(
        a.dtype, [STAGES, BLOCK_K, BLOCK_M] if A_DEPTH_FIRST else [STAGES, BLOCK_M, BLOCK_K], a.layout
    )
    b_tiles = gl.allocate_shared_memory(
        b.dtype, [STAGES, BLOCK_K, BLOCK_N] if B_DEPTH_FIRST else [STAGES * WIDE, BLOCK_N, BLOCK_K], b.layout
    )
    if WIDE == 1:
        c_tile = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    else:
        c_tile = gl.allocate_shared_memory(c.dtype, [WIDE, c.block_type.shape[0], c.block_type.shape[1]], c.layout)
    waiting = c_tile
    if LEAVES > 2 and not PAIRED:
        plain: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
        waiting = gl.allocate_shared_memory(gl.float32, [2 if FOUR_SHARED else 1, BLOCK_M, BLOCK_N], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    tiles_k = gl.cdiv(K, BLOCK_K)
    count = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, WIDE * BLOCK_N)
    if WIDE == 3:
        gl.warp_specialize(
            [
                (
                    _multiplier_of_three,
                    (
                        c, a_tiles, b_tiles, c_tile, full, empty, M, N, tiles_k, count, programs, STAGES,
                        BLOCK_M, BLOCK_N, GROUP_M, SWIGLU, OVERLAPS, unit,
                    ),
                ),
                (
                    _loader,
                    (
                        a, b, a_tiles, b_tiles, full, empty, M, N, tiles_k, count, programs, slice_width, STAGES,
                        BLOCK_M, BLOCK_N, BLOCK_K, A_ROWS, GROUP_M, A_DEPTH_FIRST, B_DEPTH_FIRST, SWIGLU, OVERLAPS,
                        WIDE, LEAVES, PAIRED,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif PAIRED:
        gl.warp_specialize(
            [
                (
                    _multiplier_of_pairs,
                    (
                        c, bias, a_tiles, b_tiles, c_tile, full, empty, M, N, tiles_k, count, programs, STAGES, LEAVES,
                        HAS_BIAS, BLOCK_M, BLOCK_N, GROUP_M, A_DEPTH_FIRST, B_DEPTH_FIRST, OVERLAPS, unit,
                    ),
                ),
                (
                    _loader,
                    (
                        a, b, a_tiles, b_tiles, full, empty, M, N, tiles_k, count, programs, slice_width, STAGES,
                        BLOCK_M, BLOCK_N, BLOCK_K, A_ROWS, GROUP_M, A_DEPTH_FIRST, B_DEPTH_FIRST, SWIGLU, OVERLAPS,
                        WIDE, LEAVES, PAIRED,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiplier,
                    (
                        c, bias, grad, workspace, a_tiles, b_tiles, c_tile, waiting, full, empty, M, N, tiles_k, count,
                        programs, STAGES, LEAVES, HAS_BIAS, CONTINUES, PARTS, BLOCK_M, BLOCK_N, GROUP_M,
                        A_DEPTH_FIRST, B_DEPTH_FIRST, SWIGLU, OVERLAPS, FOUR_SHARED, unit,
                    ),
                ),
                (
                    _loader,
                    (
                        a, b, a_tiles, b_tiles, full, empty, M, N, tiles_k, count, programs, slice_width, STAGES,
                        BLOCK_M, BLOCK_N, BLOCK_K, A_ROWS, GROUP_M, A_DEPTH_FIRST, B_DEPTH_FIRST, SWIGLU, OVERLAPS,
                        WIDE, LEAVES, PAIRED,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip
