"""The gradients of attention for sm_90 in Gluon: warp-specialised, the arithmetic of ``attention_backward``.

One warp loads tiles by TMA; two groups of four warps compute, each 64 rows of the accumulators. Only the schedule
differs from ``attention_backward.py``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rlkernel.kernels.triton.attention_hopper import GROUPS, KEYS, ROWS, STAGES, clear_rows, load_tile

QUERIES = gl.constexpr(64)
"""Queries of a block in the kernel of dk and dv."""
STAGES_KEYS = gl.constexpr(3)


@gluon.jit
def _power(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _statistics_column(begin, sequence):
    """Where the columns of a sequence begin in lse and delta (``row_statistics``)."""
    return (begin + 3 * sequence + 3) // 4 * 4


@gluon.jit
def _query_tile(tiles, starts, QH: gl.constexpr):
    sequence, head = gl.program_id(0) // QH, gl.program_id(0) % QH
    first_row = (tiles - 1 - gl.program_id(1)) * (ROWS * GROUPS)
    begin = gl.load(starts + sequence)
    count = gl.load(starts + sequence + 1) - begin
    return begin, count, head, first_row, _statistics_column(begin, sequence)


@gluon.jit
def _load_keys(
    q_desc, dout_desc, k_desc, v_desc, q_smem, dout_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
    starts, tiles, QH: gl.constexpr, KVH: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    begin, count, head, first_row, _column = _query_tile(tiles, starts, QH)
    if first_row < count:
        mbarrier.expect(q_full, 2 * GROUPS * ROWS * D * 2)
        for group in gl.static_range(GROUPS):
            load_tile(q_desc, [begin + first_row + group * ROWS, head * D], q_full, q_smem.index(group))
            load_tile(dout_desc, [begin + first_row + group * ROWS, head * D], q_full, dout_smem.index(group))
        column = head // (QH // KVH) * D
        for block in range(0, first_row // KEYS + 1):
            stage = block % STAGES
            phase = (block // STAGES) & 1
            k_stage = block % STAGES
            mbarrier.wait(k_empty.index(k_stage), ((block // STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(k_stage), KEYS * D * 2)
            load_tile(k_desc, [begin + block * KEYS, column], k_full.index(k_stage), k_smem.index(k_stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), KEYS * D * 2)
            load_tile(v_desc, [begin + block * KEYS, column], v_full.index(stage), v_smem.index(stage))


@gluon.jit
def _key_step(
    block, acc, queries, gradients, k_smem, v_smem, k_full, k_empty, v_full, v_empty, lse, delta, scale2, limit,
    present,
    MASKED: gl.constexpr, D: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Key block ``block`` enters the chains of dq; ``present``: keys of the block that exist, where MASKED."""
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    zero = gl.zeros((ROWS, KEYS), gl.float32, S)
    stage = block % STAGES
    phase = (block // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(queries, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    dp = warpgroup_mma(gradients, v_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    x = s * scale2 - lse[:, None]
    if MASKED:
        column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
        x = gl.where(column[None, :] <= limit[:, None], x, float("-inf"))
    p = _power(x)
    # the values are here since long: the branch keeps ptxas from moving the exponentials behind the wait for dp
    mbarrier.wait(v_full.index(stage), phase)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    ds = p * (dp - delta[:, None])
    if MASKED:
        column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
        ds = gl.where(column[None, :] <= limit[:, None], ds, 0.0)
        if present < KEYS:
            clear_rows(k_smem.index(stage), present, KEYS, D)
            fence_async_shared()
    acc = warpgroup_mma(
        gl.convert_layout(ds.to(gl.bfloat16), P), k_smem.index(stage), acc, use_acc=block > 0, is_async=True
    )
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    return acc


@gluon.jit
def _compute_queries(
    group: gl.constexpr, q_smem, dout_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, lse2, delta, dq,
    starts, tiles, length, scale, scale2, QH: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    begin, count, head, first_row, column_0 = _query_tile(tiles, starts, QH)
    if first_row < count:
        local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        row = first_row + group * ROWS + local
        place = head * length + column_0 + row
        lse = gl.load(lse2 + place, mask=row < count, other=0.0)
        row_delta = gl.load(delta + place, mask=row < count, other=0.0)
        acc = gl.zeros((ROWS, D), gl.float32, ACC)
        queries = q_smem.index(group)
        gradients = dout_smem.index(group)
        limit = group * ROWS + local  # last visible key of the last block
        blocks = first_row // KEYS + 1
        mbarrier.wait(q_full, 0)
        for block in range(0, blocks - 1):
            acc = _key_step(
                block, acc, queries, gradients, k_smem, v_smem, k_full, k_empty, v_full, v_empty, lse, row_delta,
                scale2, limit, KEYS, False, D, S, ACC,
            )  # fmt: skip
        acc = _key_step(
            blocks - 1, acc, queries, gradients, k_smem, v_smem, k_full, k_empty, v_full, v_empty, lse, row_delta,
            scale2, limit, count - first_row, True, D, S, ACC,
        )  # fmt: skip
        d = gl.arange(0, D, layout=gl.SliceLayout(0, ACC))
        row = first_row + group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
        target = dq + ((begin + row).to(gl.int64) * QH + head)[:, None] * D + d[None, :]
        gl.store(target, (acc * scale).to(gl.bfloat16), mask=(row < count)[:, None])


@gluon.jit(do_not_specialize=["tiles", "length"])
def query_gradient_hopper(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    lse2,
    delta,
    dq,
    starts,
    tiles,
    length,
    scale,
    scale2,
    QH: gl.constexpr,
    KVH: gl.constexpr,
    D: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """``dq`` [N, QH, D] of whole packed sequences, bf16, head_dim 64 or 128.

    Args:
        q_desc, dout_desc: TMA descriptors of [N, QH * D] in tiles [64, D]; ``k_desc``, ``v_desc``: of [N, KVH * D] in
            tiles [128, D].
        lse2, delta: float32 [QH, length] of ``row_statistics``.
        tiles: tiles of 128 rows of the longest sequence. The grid is (sequences * QH, tiles).
    """
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, ROWS, D], q_desc.layout)
    dout_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute_queries,
                (
                    gl.constexpr(0), q_smem, dout_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, lse2,
                    delta, dq, starts, tiles, length, scale, scale2, QH, D,
                ),
            ),
            (
                _compute_queries,
                (
                    gl.constexpr(1), q_smem, dout_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, lse2,
                    delta, dq, starts, tiles, length, scale, scale2, QH, D,
                ),
            ),
            (
                _load_keys,
                (
                    q_desc, dout_desc, k_desc, v_desc, q_smem, dout_smem, k_smem, v_smem, q_full, k_full, k_empty,
                    v_full, v_empty, starts, tiles, QH, KVH, D,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def _key_tile(starts, KVH: gl.constexpr):
    sequence, kv_head = gl.program_id(0) // KVH, gl.program_id(0) % KVH
    first_key = gl.program_id(1) * KEYS
    begin = gl.load(starts + sequence)
    count = gl.load(starts + sequence + 1) - begin
    return begin, count, kv_head, first_key, _statistics_column(begin, sequence)


@gluon.jit
def _load_queries(
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem,
    kv_full, q_full, q_empty, dout_full, dout_empty, starts, QH: gl.constexpr, KVH: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    begin, count, kv_head, first_key, column_0 = _key_tile(starts, KVH)
    if first_key < count:
        mbarrier.expect(kv_full, 2 * GROUPS * ROWS * D * 2)
        for group in gl.static_range(GROUPS):
            load_tile(k_desc, [begin + first_key + group * ROWS, kv_head * D], kv_full, k_smem.index(group))
            load_tile(v_desc, [begin + first_key + group * ROWS, kv_head * D], kv_full, v_smem.index(group))
        step = 0
        for member in range(0, QH // KVH):
            head = kv_head * (QH // KVH) + member
            for first in range(first_key, count, QUERIES):
                stage = step % STAGES_KEYS
                phase = (step // STAGES_KEYS) & 1
                mbarrier.wait(q_empty.index(stage), phase ^ 1)
                mbarrier.expect(q_full.index(stage), QUERIES * (D * 2 + 4))
                load_tile(q_desc, [begin + first, head * D], q_full.index(stage), q_smem.index(stage))
                load_tile(lse_desc, [head, column_0 + first], q_full.index(stage), lse_smem.index(stage))
                mbarrier.wait(dout_empty.index(stage), phase ^ 1)
                mbarrier.expect(dout_full.index(stage), QUERIES * (D * 2 + 4))
                load_tile(dout_desc, [begin + first, head * D], dout_full.index(stage), dout_smem.index(stage))
                load_tile(delta_desc, [head, column_0 + first], dout_full.index(stage), delta_smem.index(stage))
                step += 1


@gluon.jit
def _query_step(
    step, first, dk, dv, keys, values, q_smem, dout_smem, lse_smem, delta_smem, q_full, q_empty, dout_full, dout_empty,
    scale2, key, count, MASKED: gl.constexpr, LAST: gl.constexpr, D: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Queries ``first .. first + QUERIES`` of one head enter the chains of dk and dv; LAST: not all may exist."""
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    columns: gl.constexpr = gl.SliceLayout(0, S)
    zero = gl.zeros((ROWS, QUERIES), gl.float32, S)
    stage = step % STAGES_KEYS
    phase = (step // STAGES_KEYS) & 1
    mbarrier.wait(q_full.index(stage), phase)
    s = warpgroup_mma(keys, q_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(dout_full.index(stage), phase)
    dp = warpgroup_mma(values, dout_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = lse_smem.index(stage).reshape((QUERIES,)).load(columns)
    s = warpgroup_mma_wait(1, deps=(s,))
    x = s * scale2 - lse[None, :]
    if MASKED:
        i = first + gl.arange(0, QUERIES, layout=columns)
        x = gl.where((key[:, None] <= i[None, :]) & (i < count)[None, :], x, float("-inf"))
    p = _power(x)
    # the gradients are here since long: the branch keeps ptxas from moving the exponentials behind the wait for dp
    mbarrier.wait(dout_full.index(stage), phase)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    if LAST:  # noqa: SIM102 (known when the kernel is compiled, the other is not)
        if first + QUERIES > count:
            clear_rows(q_smem.index(stage), count - first, QUERIES, D)
            clear_rows(dout_smem.index(stage), count - first, QUERIES, D)
            fence_async_shared()
    dv = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), P), dout_smem.index(stage), dv, is_async=True)
    row_delta = delta_smem.index(stage).reshape((QUERIES,)).load(columns)
    ds = p * (dp - row_delta[None, :])
    if MASKED:
        i = first + gl.arange(0, QUERIES, layout=columns)
        ds = gl.where((key[:, None] <= i[None, :]) & (i < count)[None, :], ds, 0.0)
    dk = warpgroup_mma(gl.convert_layout(ds.to(gl.bfloat16), P), q_smem.index(stage), dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dv,))
    mbarrier.arrive(dout_empty.index(stage), count=1)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _compute_keys(
    group: gl.constexpr, q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem, kv_full, q_full, q_empty, dout_full,
    dout_empty, dk, dv, starts, scale, scale2, QH: gl.constexpr, KVH: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    begin, count, kv_head, first_key, _column = _key_tile(starts, KVH)
    if first_key < count:
        key = first_key + group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        dk_acc = gl.zeros((ROWS, D), gl.float32, ACC)
        dv_acc = gl.zeros((ROWS, D), gl.float32, ACC)
        keys = k_smem.index(group)
        values = v_smem.index(group)
        mbarrier.wait(kv_full, 0)
        step = 0
        middle = gl.minimum(first_key + KEYS, count // QUERIES * QUERIES)
        high = gl.maximum(middle, count // QUERIES * QUERIES)
        for _member in range(0, QH // KVH):
            for first in range(first_key, middle, QUERIES):
                dk_acc, dv_acc = _query_step(
                    step, first, dk_acc, dv_acc, keys, values, q_smem, dout_smem, lse_smem, delta_smem, q_full, q_empty,
                    dout_full, dout_empty, scale2, key, count, True, False, D, S, ACC,
                )  # fmt: skip
                step += 1
            for first in range(middle, high, QUERIES):
                dk_acc, dv_acc = _query_step(
                    step, first, dk_acc, dv_acc, keys, values, q_smem, dout_smem, lse_smem, delta_smem, q_full, q_empty,
                    dout_full, dout_empty, scale2, key, count, False, False, D, S, ACC,
                )  # fmt: skip
                step += 1
            if high < count:
                dk_acc, dv_acc = _query_step(
                    step, high, dk_acc, dv_acc, keys, values, q_smem, dout_smem, lse_smem, delta_smem, q_full, q_empty,
                    dout_full, dout_empty, scale2, key, count, True, True, D, S, ACC,
                )  # fmt: skip
                step += 1
        d = gl.arange(0, D, layout=gl.SliceLayout(0, ACC))
        row = first_key + group * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
        place = ((begin + row).to(gl.int64) * KVH + kv_head)[:, None] * D + d[None, :]
        gl.store(dk + place, (dk_acc * scale).to(gl.bfloat16), mask=(row < count)[:, None])
        gl.store(dv + place, dv_acc.to(gl.bfloat16), mask=(row < count)[:, None])


@gluon.jit
def key_gradients_hopper(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    lse_desc,
    delta_desc,
    dk,
    dv,
    starts,
    scale,
    scale2,
    QH: gl.constexpr,
    KVH: gl.constexpr,
    D: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """``dk`` and ``dv`` [N, KVH, D] of whole packed sequences, bf16, head_dim 64 or 128.

    Args:
        q_desc, dout_desc: TMA descriptors of [N, QH * D] in tiles [64, D]; ``k_desc``, ``v_desc``: of [N, KVH * D] in
            tiles [64, D]; ``lse_desc``, ``delta_desc``: of float32 [QH, length]
            of ``row_statistics`` in tiles [1, 64].
        starts: int32 [sequences + 1]. The grid is (sequences * KVH, tiles of 128 keys of the longest sequence).
    """
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES_KEYS, QUERIES, D], q_desc.layout)
    dout_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES_KEYS, QUERIES, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, ROWS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, ROWS, D], v_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES_KEYS, 1, QUERIES], lse_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES_KEYS, 1, QUERIES], lse_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES_KEYS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES_KEYS, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES_KEYS, 1], mbarrier.MBarrierLayout())
    dout_empty = gl.allocate_shared_memory(gl.int64, [STAGES_KEYS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for stage in gl.static_range(STAGES_KEYS):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(dout_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=GROUPS)
        mbarrier.init(dout_empty.index(stage), count=GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute_keys,
                (
                    gl.constexpr(0), q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem, kv_full, q_full, q_empty,
                    dout_full, dout_empty, dk, dv, starts, scale, scale2, QH, KVH, D,
                ),
            ),
            (
                _compute_keys,
                (
                    gl.constexpr(1), q_smem, dout_smem, k_smem, v_smem, lse_smem, delta_smem, kv_full, q_full, q_empty,
                    dout_full, dout_empty, dk, dv, starts, scale, scale2, QH, KVH, D,
                ),
            ),
            (
                _load_queries,
                (
                    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, q_smem, dout_smem, k_smem, v_smem,
                    lse_smem, delta_smem, kv_full, q_full, q_empty, dout_full, dout_empty, starts, QH, KVH, D,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
