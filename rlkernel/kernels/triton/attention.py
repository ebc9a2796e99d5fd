"""Causal attention in Triton, forward, over whole packed sequences or pages. Definition: docs/numerics.md.

A program takes tiles of BLOCK_M query rows of one head. Key blocks are counted from the sequence's first token. The
merge of the splits needs the largest of their maxima, which is known only at the end: the partial results of all splits
but the last wait in a buffer of the program's own (``stash``), which is small enough to stay in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.triton.attention_block import (
    FMA,
    column,
    depth_operand,
    larger,
    online_weights,
    operand,
    scores,
)
from rlkernel.kernels.triton.primitives import exp2_full, log2_full


@triton.jit
def key_rows(j, inside, base, table, PAGE: tl.constexpr):
    """Row of the cache (or of the packed keys, PAGE = 0) that holds key j of the sequence -> int64."""
    if PAGE == 0:  # noqa: SIM108
        rows = base + j
    else:
        rows = tl.load(table + j // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + j % PAGE
    return rows


@triton.jit
def accumulate(
    p, acc, v, v_rows, v_step, positions, first, keys, d, D: tl.constexpr, MASKED: tl.constexpr, MAC: tl.constexpr,
    table, base, PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Continue the chains ``acc`` [ROWS, BLOCK_D] over the block's keys with weights p [ROWS, KEYS].

    A matrix unit takes a masked key as a product of zeros. A chain of fma leaves it out, which keeps the sign of a zero
    and costs one key at a time in the blocks on the diagonal.
    """
    if MAC == FMA and MASKED:
        for j in range(0, min(KEYS, keys - first)):
            row = key_rows(first + j, True, base, table, PAGE)
            values = tl.load(v + row * v_step + d, mask=d < D, other=0.0).to(tl.float32)
            weight = column(p.to(tl.float32), j, ROWS, KEYS)
            continued = tl.fma(
                tl.broadcast_to(weight[:, None], acc.shape), tl.broadcast_to(values[None, :], acc.shape), acc
            )
            acc = tl.where((first + j <= positions)[:, None], continued, acc)
    else:
        j = first + tl.arange(0, KEYS)
        if MASKED:
            values = tl.load(
                v + v_rows[:, None] * v_step + d[None, :], mask=(j < keys)[:, None] & (d < D)[None, :], other=0.0
            )
        else:
            values = tl.load(v + v_rows[:, None] * v_step + d[None, :], mask=(d < D)[None, :], other=0.0)
        values = operand(values, MAC)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision="ieee")
    return acc


@triton.jit
def one_block(
    q, k, v, m, sums, acc, first, keys, positions, d, step, base, table, scale2, MASKED: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, MAC: tl.constexpr, KIND: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Keys ``first .. first + KEYS`` (below ``keys``) enter the state m, sums [ROWS], acc [ROWS, BLOCK_D]."""
    j = first + tl.arange(0, KEYS)
    inside = j < keys
    rows = key_rows(j, inside, base, table, PAGE)
    places = rows[:, None] * step + d[None, :]
    if MASKED:
        k_block = tl.load(k + places, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    else:
        k_block = tl.load(k + places, mask=(d < D)[None, :], other=0.0)
    s = scores(q, operand(k_block, MAC), scale2)
    visible = j[None, :] <= positions[:, None]
    p, m, alpha, sums = online_weights(s, visible, m, sums, MASKED, KIND, NARROW, ROWS, KEYS, LANES)
    acc = accumulate(
        p, acc * alpha[:, None], v, rows, step, positions, first, keys, d, D, MASKED, MAC, table, base, PAGE, ROWS, KEYS
    )
    return m, sums, acc


@triton.jit(do_not_specialize=["table_step", "sequences", "tiles", "stash_splits"])
def attention_forward(
    q,
    k,
    v,
    out,
    lse2,
    starts,
    positions,
    table,
    table_step,
    stash,
    stash_rows,
    sequences,
    tiles,
    stash_splits,
    scale2,
    QH: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    SEVERAL: tl.constexpr,
    MAC: tl.constexpr,
    KIND: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attention of query rows over the keys of their sequences.

    Args:
        q, out: [N, QH, D]; ``lse2``: float32 [N, QH].
        k, v: [N, KVH, D], or with PAGE > 0 caches [pages, PAGE, KVH, D].
        starts: int32 [sequences + 1], rows of each sequence in q.
        positions: int32 [N], consecutive in a sequence; read with PAGE > 0 only (else rows count from 0).
        table: int32 [sequences, table_step], pages of each sequence.
        stash: float32 [programs, stash_splits, BLOCK_M, BLOCK_D]; ``stash_rows``: float32 [programs, stash_splits, 2,
            BLOCK_M]; both used with SEVERAL only: a sequence may have more than one split.
        tiles: tiles of the longest sequence.
        scale2: float32, positive.
        MAC, KIND: primitives of the contract: multiply-accumulate, exponential of the weights.
        NARROW: weights are rounded to bfloat16.
        KEYS, LANES, SPLIT: key block, lanes of the row sum, keys of a split.
    """
    d = tl.arange(0, BLOCK_D)
    local = tl.arange(0, BLOCK_M)
    step: tl.constexpr = KVH * D
    my_stash = stash + tl.program_id(0).to(tl.int64) * stash_splits * (BLOCK_M * BLOCK_D)
    my_rows = stash_rows + tl.program_id(0).to(tl.int64) * stash_splits * (2 * BLOCK_M)
    places = local[:, None] * BLOCK_D + d[None, :]
    per_tile = sequences * QH
    for item in range(tl.program_id(0), tiles * per_tile, tl.num_programs(0)):
        # the longest tiles first; heads of a group side by side
        first_row = (tiles - 1 - item // per_tile) * BLOCK_M
        sequence, head = item % per_tile // QH, item % QH
        begin = tl.load(starts + sequence)
        count = tl.load(starts + sequence + 1) - begin
        if first_row < count:
            origin = 0
            base = begin.to(tl.int64)
            my_table = table
            if PAGE > 0:
                origin = tl.load(positions + begin)
                my_table = table + sequence.to(tl.int64) * table_step
            keys = origin + count  # of the sequence
            reached = min(origin + first_row + BLOCK_M, keys)  # by the tile
            full = (origin + first_row + 1) // KEYS * KEYS  # keys of blocks that every row sees whole
            position = origin + first_row + local
            rows = begin.to(tl.int64) + first_row + local
            present = first_row + local < count
            head_k, head_v = k + (head // (QH // KVH)) * D, v + (head // (QH // KVH)) * D
            q_tile = tl.load(
                q + (rows * QH + head)[:, None] * D + d[None, :], mask=present[:, None] & (d < D)[None, :], other=0.0
            )
            q_tile = depth_operand(q_tile, d, D, BLOCK_D, MAC)
            largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            m = largest
            sums = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            splits = 1
            if SEVERAL:
                splits = tl.cdiv(reached, SPLIT)
            for split in range(0, splits):
                m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                sums = tl.zeros((BLOCK_M,), tl.float32)
                acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                low = split * SPLIT
                high = min(low + SPLIT, reached)
                middle = min(max(full, low), high)
                for first in range(low, middle, KEYS):
                    m, sums, acc = one_block(
                        q_tile, head_k, head_v, m, sums, acc, first, keys, position, d, step, base, my_table, scale2,
                        False, D, PAGE, MAC, KIND, NARROW, BLOCK_M, KEYS, LANES,
                    )  # fmt: skip
                for first in range(middle, high, KEYS):
                    m, sums, acc = one_block(
                        q_tile, head_k, head_v, m, sums, acc, first, keys, position, d, step, base, my_table, scale2,
                        True, D, PAGE, MAC, KIND, NARROW, BLOCK_M, KEYS, LANES,
                    )  # fmt: skip
                largest = tl.where(low <= position, larger(largest, m, KIND), largest)
                if SEVERAL:  # noqa: SIM102 (known when the kernel is compiled, the other is not)
                    if split + 1 < splits:
                        tl.store(my_stash + split * (BLOCK_M * BLOCK_D) + places, acc)
                        tl.store(my_rows + split * (2 * BLOCK_M) + local, m)
                        tl.store(my_rows + split * (2 * BLOCK_M) + BLOCK_M + local, sums)
            total = tl.zeros((BLOCK_M,), tl.float32)
            result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            if SEVERAL:
                tl.debug_barrier()  # threads may read what others of the program stored
                for split in range(0, splits - 1):
                    part_m = tl.load(my_rows + split * (2 * BLOCK_M) + local)
                    part_l = tl.load(my_rows + split * (2 * BLOCK_M) + BLOCK_M + local)
                    part = tl.load(my_stash + split * (BLOCK_M * BLOCK_D) + places)
                    w = exp2_full(part_m - largest)
                    seen = split * SPLIT <= position
                    total = tl.where(seen, tl.fma(part_l, w, total), total)
                    wide = tl.broadcast_to(w[:, None], (BLOCK_M, BLOCK_D))
                    result = tl.where(seen[:, None], tl.fma(part, wide, result), result)
                tl.debug_barrier()
            w = exp2_full(m - largest)
            seen = (splits - 1) * SPLIT <= position
            total = tl.where(seen, tl.fma(sums, w, total), total)
            wide = tl.broadcast_to(w[:, None], (BLOCK_M, BLOCK_D))
            result = tl.where(seen[:, None], tl.fma(acc, wide, result), result)
            result = tl.div_rn(result, tl.broadcast_to(total[:, None], (BLOCK_M, BLOCK_D)))
            tl.store(
                out + (rows * QH + head)[:, None] * D + d[None, :],
                result.to(out.dtype.element_ty),
                mask=present[:, None] & (d < D)[None, :],
            )
            tl.store(lse2 + rows * QH + head, largest + log2_full(total), mask=present)
