"""The training forward of attention for sm_90 in Gluon: warp-specialised, the arithmetic of ``attention_forward``.

One warp loads tiles by TMA; two groups of four warps compute 64 query rows each. A group starts the scores of the next
key block before it multiplies the weights of this one with the values, so that the softmax overlaps with the matrix
unit. Every sum keeps the order of the contract: nothing but the schedule differs from ``attention.py``.
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
from rlkernel.kernels.triton.gluon_parts import exp2_full, lane_total, larger

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.9 renamed it

ROWS = gl.constexpr(64)
"""Query rows of a group of warps."""
GROUPS = gl.constexpr(2)
KEYS = gl.constexpr(128)
STAGES = gl.constexpr(2)
_LOG2E = gl.constexpr(constants.LOG2E)
_L_LOW = gl.constexpr(constants.LOG2_LOW)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9 = (gl.constexpr(value) for value in constants.LOG2_FULL)
_SQRT_HALF_BITS = gl.constexpr(constants.SQRT_HALF_BITS)
_SMALLEST_NORMAL = gl.constexpr(constants.SMALLEST_NORMAL)
_TWO_TO_24 = gl.constexpr(constants.TWO_TO_24)
_DIVIDEND_LOW, _DIVIDEND_HIGH = gl.constexpr((127 - 60) << 23), gl.constexpr((127 + 60) << 23)
_DIVISOR_LOW, _DIVISOR_HIGH = gl.constexpr((127 - 30) << 23), gl.constexpr((127 + 30) << 23)
"""Bits of float32 numbers between which ``_quotients`` need not divide one by one."""


@gluon.jit
def _log2_full(x):
    # rlkernel.kernels.triton.primitives.log2_full
    small = x < _SMALLEST_NORMAL
    scaled = gl.where(small, x * _TWO_TO_24, x)
    bits = scaled.to(gl.int32, bitcast=True)
    e = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (e << 23)).to(gl.float32, bitcast=True) - 1.0
    q = gl.fma(f, gl.full_like(x, _L9), gl.full_like(x, _L8))
    q = gl.fma(f, q, gl.full_like(x, _L7))
    q = gl.fma(f, q, gl.full_like(x, _L6))
    q = gl.fma(f, q, gl.full_like(x, _L5))
    q = gl.fma(f, q, gl.full_like(x, _L4))
    q = gl.fma(f, q, gl.full_like(x, _L3))
    q = gl.fma(f, q, gl.full_like(x, _L2))
    q = gl.fma(f, q, gl.full_like(x, _L1))
    q = gl.fma(f, q, gl.full_like(x, _L0))
    low = f * gl.fma(f, q, gl.full_like(x, _L_LOW))
    exponent = (e + gl.where(small, -24, 0)).to(gl.float32)
    y = exponent + gl.fma(f, gl.full_like(x, _LOG2E), low)
    y = gl.where(x == 0.0, float("-inf"), y)
    y = gl.where(x < 0.0, float("nan"), y)
    y = gl.where(x == float("inf"), float("inf"), y)
    return gl.where(x == x, y, x)


@gluon.jit
def clear_rows(smem, present, HEIGHT: gl.constexpr, D: gl.constexpr):
    """Rows of a tile [HEIGHT, D] from ``present`` on become +0: they are another sequence's, and may hold NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    for first in gl.static_range(0, HEIGHT, 16):
        if first + 16 > present:
            part = smem.slice(first, 16)
            values = part.load(L).to(gl.int16, bitcast=True)
            part.store(gl.where((first + row < present)[:, None], values, 0).to(gl.int16).to(gl.bfloat16, bitcast=True))


@gluon.jit
def _weights(x):
    """``ex2.approx.ftz`` rounded to bf16, packed for the matrix unit -> (bf16, the same values as float32).

    Written as one piece for two values, because a conversion of single values is four times as slow.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .f32 low, high;
            ex2.approx.ftz.f32 low, $3;
            ex2.approx.ftz.f32 high, $4;
            cvt.rn.bf16x2.f32 $0, high, low;
            shl.b32 $1, $0, 16;
            and.b32 $2, $0, 0xffff0000;
        }
        """,
        "=r,=r,=r,r,r",
        [x],
        dtype=(gl.bfloat16, gl.float32),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _softmax(s, m, sums, scale2, fresh, limit, MASKED: gl.constexpr, S: gl.constexpr):
    """Products of one block -> bf16 weights, new maximum, factor, new row sum. ``fresh``: first block of a split.

    The maximum is taken before the products are scaled: a positive factor keeps their order, rounded or not.
    """
    rows: gl.constexpr = gl.SliceLayout(1, S)
    hidden = s
    if MASKED:
        column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
        hidden = gl.where(column[None, :] <= limit[:, None], s, float("-inf"))
    m = gl.where(fresh, float("-inf"), m)
    sums = gl.where(fresh, 0.0, sums)
    new = larger(m, gl.reduce(hidden, 1, larger) * scale2)
    alpha = exp2_full(m - new)
    alpha = gl.where(m == float("-inf"), gl.where(new == new, 0.0, new), alpha)
    x = s * scale2 - new[:, None]
    if MASKED:
        column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
        x = gl.where(column[None, :] <= limit[:, None], x, float("-inf"))
    p, wide = _weights(x)
    total = gl.fma(sums, alpha, gl.convert_layout(lane_total(wide, ROWS, KEYS), rows))
    return p, new, alpha, total


@gluon.jit
def _place(item, sequences, tiles, starts, QH: gl.constexpr):
    """First row and rows of an item's sequence, its head, its first row: a sequence's longest tiles first."""
    per_sequence = tiles * QH
    sequence = item // per_sequence
    begin = gl.load(starts + sequence)
    count = gl.load(starts + sequence + 1) - begin
    first_row = (tiles - 1 - item % per_sequence // QH) * (ROWS * GROUPS)
    return begin, count, item % QH, first_row


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    item_full, item_empty, starts, counter, sequences, tiles, QH: gl.constexpr, KVH: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads: takes the next item, then its queries, keys and values in the order of their use."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    items = sequences * tiles * QH
    done = 0
    k_step = 0
    v_step = 0
    item = gl.atomic_add(counter, 1)
    while item < items:
        begin, count, head, first_row = _place(item, sequences, tiles, starts, QH)
        if first_row < count:
            mbarrier.wait(item_empty, (done & 1) ^ 1)
            item_smem.store(gl.full((1,), item, gl.int32, L))
            mbarrier.arrive(item_full, count=1)
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            mbarrier.expect(q_full, GROUPS * ROWS * D * 2)
            for group in gl.static_range(GROUPS):
                load_tile(q_desc, [begin + first_row + group * ROWS, head * D], q_full, q_smem.index(group))
            done += 1
            blocks = first_row // KEYS + 1
            column = head // (QH // KVH) * D
            for block in range(0, blocks + 1):  # keys are used one block ahead of the values
                if block < blocks:
                    stage = k_step % STAGES
                    mbarrier.wait(k_empty.index(stage), ((k_step // STAGES) & 1) ^ 1)
                    mbarrier.expect(k_full.index(stage), KEYS * D * 2)
                    load_tile(k_desc, [begin + block * KEYS, column], k_full.index(stage), k_smem.index(stage))
                    k_step += 1
                if block > 0:
                    stage = v_step % STAGES
                    mbarrier.wait(v_empty.index(stage), ((v_step // STAGES) & 1) ^ 1)
                    mbarrier.expect(v_full.index(stage), KEYS * D * 2)
                    load_tile(v_desc, [begin + (block - 1) * KEYS, column], v_full.index(stage), v_smem.index(stage))
                    v_step += 1
        item = gl.atomic_add(counter, 1)
    mbarrier.wait(item_empty, (done & 1) ^ 1)
    item_smem.store(gl.full((1,), items, gl.int32, L))
    mbarrier.arrive(item_full, count=1)


@gluon.jit
def _take_item(item_smem, item_full, item_empty, done):
    """The item that the loading warp took; its slot is free again."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(item_full, done & 1)
    item = gl.max(item_smem.load(L), 0)
    mbarrier.arrive(item_empty, count=1)
    return item


@gluon.jit
def _next_block(
    block, step, p, m, sums, acc, largest, queries, k_smem, v_smem, q_empty, k_full, k_empty, v_full, v_empty, my_stash,
    my_rows, places, local, limit, scale2, turn, turns, group: gl.constexpr, MASKED: gl.constexpr, D: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr, PINGPONG: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the scores of ``block``; weights of the block before times its values; softmax of ``block`` meanwhile."""
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    zero = gl.zeros((ROWS, KEYS), gl.float32, S)
    stage = (step + 1) % STAGES
    before = step % STAGES
    if PINGPONG:
        mbarrier.wait(turn.index(group), (turns & 1) ^ (1 - group))
    s = warpgroup_mma(queries, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (step // STAGES) & 1)
    acc = warpgroup_mma(
        gl.convert_layout(p, P), v_smem.index(before), acc, use_acc=(block - 1) % SPLIT_BLOCKS != 0, is_async=True
    )
    if PINGPONG:
        mbarrier.arrive(turn.index(1 - group), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASKED:  # the last block of an item
        mbarrier.arrive(q_empty, count=1)
    fresh = block % SPLIT_BLOCKS == 0
    p, next_m, alpha, next_l = _softmax(s, m, sums, scale2, fresh, limit, MASKED, S)
    # what the next step waits for, already here: ptxas moves the softmax behind the wait for the matrix unit unless a
    # branch stands between them
    if MASKED:
        mbarrier.wait(v_full.index(stage), ((step + 1) // STAGES) & 1)
    else:
        mbarrier.wait(k_full.index((step + 2) % STAGES), ((step + 2) // STAGES) & 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(before), count=1)
    if fresh:
        split = block // SPLIT_BLOCKS - 1
        gl.store(my_stash + split * (ROWS * D) + places, acc)
        gl.store(my_rows + split * (2 * ROWS) + local, m)
        gl.store(my_rows + split * (2 * ROWS) + ROWS + local, sums)
        largest = larger(largest, m)
    else:
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
    return p, next_m, next_l, acc, largest


@gluon.jit
def _largest_of_two(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _quotients(x, total, present, ACC: gl.constexpr):
    """``div.rn(x, total)`` of x [ROWS, D] and total [ROWS]; rows that are not ``present`` may be anything.

    One reciprocal a row, rounded to nearest, then two corrections by fma: the quotient rounded to nearest (Markstein)
    where nothing leaves the range of normal numbers. Where a number may, all are divided one by one.
    """
    reciprocal = gl.div_rn(gl.full_like(total, 1.0), total)
    total_bits = total.to(gl.int32, bitcast=True)
    normal = (total_bits >= _DIVISOR_LOW) & (total_bits <= _DIVISOR_HIGH)
    bits = x.to(gl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    good = (bits == 0) | ((size >= _DIVIDEND_LOW) & (size <= _DIVIDEND_HIGH))
    bad = gl.where(present[:, None] & ((normal[:, None] & good) == 0), 1, 0)
    wide, _ = gl.broadcast(total[:, None], x)
    if gl.reduce(gl.reduce(bad, 1, _largest_of_two), 0, _largest_of_two) == 0:
        y, _ = gl.broadcast(reciprocal[:, None], x)
        minus = wide * -1.0
        quotient = x * y
        quotient = gl.fma(gl.fma(quotient, minus, x), y, quotient)
        quotient = gl.fma(gl.fma(quotient, minus, x), y, quotient)
    else:
        quotient = gl.div_rn(x, wide)
    return quotient


@gluon.jit
def _compute(
    group: gl.constexpr, q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    item_full, item_empty, turn, out, lse2, stash, stash_rows, starts, sequences, tiles, stash_splits, scale2,
    QH: gl.constexpr, D: gl.constexpr, SPLIT_BLOCKS: gl.constexpr, PINGPONG: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One group of warps: 64 rows of every item."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    rows_s: gl.constexpr = gl.SliceLayout(1, S)
    rows_o: gl.constexpr = gl.SliceLayout(1, ACC)
    local = gl.arange(0, ROWS, layout=rows_s)
    local_o = gl.arange(0, ROWS, layout=rows_o)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, ACC))
    places = local_o[:, None] * D + d[None, :]
    owner = (gl.program_id(0) * GROUPS + group).to(gl.int64) * stash_splits
    my_stash = stash + owner * (ROWS * D)
    my_rows = stash_rows + owner * (2 * ROWS)
    queries = q_smem.index(group)
    limit = group * ROWS + local  # last visible key of an item's last block
    items = sequences * tiles * QH
    done = 0
    step = 0
    turns = 0
    item = _take_item(item_smem, item_full, item_empty, done)
    while item < items:
        begin, count, head, first_row = _place(item, sequences, tiles, starts, QH)
        blocks = first_row // KEYS + 1
        mbarrier.wait(q_full, done & 1)
        done += 1
        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        zero = gl.zeros((ROWS, KEYS), gl.float32, S)
        s = warpgroup_mma(queries, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        m = gl.full((ROWS,), float("-inf"), gl.float32, rows_s)
        sums = gl.zeros((ROWS,), gl.float32, rows_s)
        acc = gl.zeros((ROWS, D), gl.float32, ACC)
        largest = m
        if blocks == 1:
            mbarrier.arrive(q_empty, count=1)
            p, m, _alpha, sums = _softmax(s, m, sums, scale2, True, limit, True, S)
            mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        else:
            p, m, _alpha, sums = _softmax(s, m, sums, scale2, True, limit, False, S)
            mbarrier.wait(k_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
            for block in range(1, blocks - 1):
                p, m, sums, acc, largest = _next_block(
                    block, step, p, m, sums, acc, largest, queries, k_smem, v_smem, q_empty, k_full, k_empty, v_full,
                    v_empty, my_stash, my_rows, places, local, limit, scale2, turn, turns, group, False, D,
                    SPLIT_BLOCKS, S, ACC, PINGPONG, STAGES,
                )  # fmt: skip
                step += 1
                turns += 1
            p, m, sums, acc, largest = _next_block(
                blocks - 1, step, p, m, sums, acc, largest, queries, k_smem, v_smem, q_empty, k_full, k_empty, v_full,
                v_empty, my_stash, my_rows, places, local, limit, scale2, turn, turns, group, True, D, SPLIT_BLOCKS, S,
                ACC, PINGPONG, STAGES,
            )  # fmt: skip
            step += 1
            turns += 1
        stage = step % STAGES
        if first_row + GROUPS * ROWS > count:
            clear_rows(v_smem.index(stage), count - first_row, KEYS, D)
            fence_async_shared()
        acc = warpgroup_mma(
            gl.convert_layout(p, P), v_smem.index(stage), acc, use_acc=(blocks - 1) % SPLIT_BLOCKS != 0, is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
        largest = larger(largest, m)
        total = gl.zeros((ROWS,), gl.float32, rows_s)
        result = gl.zeros((ROWS, D), gl.float32, ACC)
        for split in range(0, (blocks - 1) // SPLIT_BLOCKS):
            part = gl.load(my_stash + split * (ROWS * D) + places)
            part_m = gl.load(my_rows + split * (2 * ROWS) + local)
            part_l = gl.load(my_rows + split * (2 * ROWS) + ROWS + local)
            w = exp2_full(part_m - largest)
            total = gl.fma(part_l, w, total)
            wide, _ = gl.broadcast(gl.convert_layout(w, rows_o)[:, None], result)
            result = gl.fma(part, wide, result)
        w = exp2_full(m - largest)
        total = gl.fma(sums, w, total)
        wide, _ = gl.broadcast(gl.convert_layout(w, rows_o)[:, None], result)
        result = gl.fma(acc, wide, result)
        row = first_row + group * ROWS + local_o
        result = _quotients(result, gl.convert_layout(total, rows_o), row < count, ACC)
        target = out + ((begin + row).to(gl.int64) * QH + head)[:, None] * D + d[None, :]
        gl.store(target, result.to(gl.bfloat16), mask=(row < count)[:, None])
        row = first_row + group * ROWS + local
        gl.store(lse2 + (begin + row).to(gl.int64) * QH + head, largest + _log2_full(total), mask=row < count)
        item = _take_item(item_smem, item_full, item_empty, done)


@gluon.jit(do_not_specialize=["sequences", "tiles", "stash_splits"])
def attention_forward_hopper(
    q_desc,
    k_desc,
    v_desc,
    out,
    lse2,
    stash,
    stash_rows,
    starts,
    counter,
    sequences,
    tiles,
    stash_splits,
    scale2,
    QH: gl.constexpr,
    KVH: gl.constexpr,
    D: gl.constexpr,
    SPLIT_BLOCKS: gl.constexpr,
    PINGPONG: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Causal attention of whole packed sequences, bf16, head_dim 64 or 128.

    Args:
        q_desc: TMA descriptor of q as [N, QH * D] in tiles [64, D]; ``k_desc``, ``v_desc``: of k and v as [N, KVH * D]
            in tiles [128, D].
        out: [N, QH, D]; ``lse2``: float32 [N, QH].
        stash: float32 [programs, 2, stash_splits, 64, D]; ``stash_rows``: float32 [programs, 2, stash_splits, 2, 64].
        starts: int32 [sequences + 1]; ``tiles``: tiles of 128 rows of the longest sequence.
        counter: int32 [1], 0: items that were taken by a program.
        SPLIT_BLOCKS: key blocks of a split.
        PINGPONG: the groups take turns at the matrix unit; changes no bit.
    """
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, ROWS, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, D], v_desc.layout)
    item_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    item_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(item_full, count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turn.index(group), count=1)
    mbarrier.init(q_empty, count=GROUPS)
    mbarrier.init(item_empty, count=GROUPS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    gl.constexpr(0), q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, item_full, item_empty, turn, out, lse2, stash, stash_rows, starts, sequences, tiles,
                    stash_splits, scale2, QH, D, SPLIT_BLOCKS, PINGPONG, STAGES,
                ),
            ),
            (
                _compute,
                (
                    gl.constexpr(1), q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, item_full, item_empty, turn, out, lse2, stash, stash_rows, starts, sequences, tiles,
                    stash_splits, scale2, QH, D, SPLIT_BLOCKS, PINGPONG, STAGES,
                ),
            ),
            (
                _load,
                (
                    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, item_smem, q_full, q_empty, k_full, k_empty, v_full,
                    v_empty, item_full, item_empty, starts, counter, sequences, tiles, QH, KVH, D, STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
