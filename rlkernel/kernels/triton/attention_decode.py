"""Causal attention in Triton for decoding: one program per (sequence, KV head, split of keys), then a merge.

Nothing depends on the values of positions but which keys are read: the grid covers the largest number of splits, and a
split beyond the sequence does nothing, so that a CUDA graph can be replayed as sequences grow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.triton.attention import one_block
from rlkernel.kernels.triton.attention_block import depth_operand
from rlkernel.kernels.triton.primitives import exp2_full, log2_full, maximum


@triton.jit(do_not_specialize=["table_step", "splits"])
def decode_split(
    q,
    k,
    v,
    part,
    part_m,
    part_l,
    positions,
    table,
    table_step,
    splits,
    scale2,
    QH: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    MAC: tl.constexpr,
    KIND: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LANES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Partial softmax of one query row a sequence over one split of its keys.

    Args:
        q: [S, QH, D]; ``k``, ``v``: caches [pages, PAGE, KVH, D]; ``table``: int32 [S, table_step].
        positions: int32 [S]; a sequence sees keys 0 .. its position, none where it is negative.
        part: float32 [S, splits, QH, D]; ``part_m``, ``part_l``: float32 [S, splits, QH]. Splits beyond a sequence are
            left as they are.
        ROWS: rows of the tile, at least QH / KVH.
    """
    GROUP: tl.constexpr = QH // KVH
    kv_head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = tl.load(positions + sequence)
    low = split * SPLIT
    if low <= position:
        keys = position + 1
        high = min(low + SPLIT, keys)
        middle = max(keys // KEYS * KEYS, low)
        d = tl.arange(0, BLOCK_D)
        member = tl.arange(0, ROWS)
        head = kv_head * GROUP + member
        present = member < GROUP
        row_positions = tl.full((ROWS,), 0, tl.int32) + position
        inside = present[:, None] & (d < D)[None, :]
        q_tile = tl.load(q + (sequence * QH + head)[:, None] * D + d[None, :], mask=inside, other=0.0)
        q_tile = depth_operand(q_tile, d, D, BLOCK_D, MAC)
        my_table = table + sequence * table_step
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        sums = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
        base = sequence  # not used with pages
        for first in range(low, min(middle, high), KEYS):
            m, sums, acc = one_block(
                q_tile, k + kv_head * D, v + kv_head * D, m, sums, acc, first, keys, row_positions, d, KVH * D, base,
                my_table, scale2, False, D, PAGE, MAC, KIND, NARROW, ROWS, KEYS, LANES,
            )  # fmt: skip
        if middle < high:
            m, sums, acc = one_block(
                q_tile, k + kv_head * D, v + kv_head * D, m, sums, acc, middle, keys, row_positions, d, KVH * D, base,
                my_table, scale2, True, D, PAGE, MAC, KIND, NARROW, ROWS, KEYS, LANES,
            )  # fmt: skip
        places = (sequence * splits + split) * QH + head
        tl.store(part + places[:, None] * D + d[None, :], acc, mask=inside)
        tl.store(part_m + places, m, mask=present)
        tl.store(part_l + places, sums, mask=present)


@triton.jit(do_not_specialize=["splits"])
def decode_merge(
    part,
    part_m,
    part_l,
    out,
    lse2,
    positions,
    splits,
    QH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Merge the splits that :func:`decode_split` wrote: ascending, each rescaled by the largest maximum.

    Args:
        out: [S, QH, D]; ``lse2``: float32 [S, QH]; HEADS: of one program. A sequence that sees no key gets zeros and
            lse2 = -inf. The grid has one dimension: sequences, then parts of HEADS heads.
    """
    PARTS: tl.constexpr = (QH + HEADS - 1) // HEADS
    sequence = (tl.program_id(0) // PARTS).to(tl.int64)
    position = tl.load(positions + sequence)
    head = tl.program_id(0) % PARTS * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK_D)
    present = head < QH
    inside = present[:, None] & (d < D)[None, :]
    used = tl.cdiv(position + 1, SPLIT)
    first = sequence * splits * QH + head
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    for split in range(0, used):
        largest = maximum(largest, tl.load(part_m + first + split * QH, mask=present, other=0.0))
    total = tl.zeros((HEADS,), tl.float32)
    result = tl.zeros((HEADS, BLOCK_D), tl.float32)
    for split in range(0, used):
        places = first + split * QH
        w = exp2_full(tl.load(part_m + places, mask=present, other=0.0) - largest)
        total = tl.fma(tl.load(part_l + places, mask=present, other=0.0), w, total)
        value = tl.load(part + places[:, None] * D + d[None, :], mask=inside, other=0.0)
        result = tl.fma(value, tl.broadcast_to(w[:, None], (HEADS, BLOCK_D)), result)
    wide = tl.broadcast_to(total[:, None], (HEADS, BLOCK_D))
    value = tl.where(used > 0, tl.div_rn(result, wide), result)
    tl.store(out + (sequence * QH + head)[:, None] * D + d[None, :], value.to(out.dtype.element_ty), mask=inside)
    tl.store(lse2 + sequence * QH + head, largest + log2_full(total), mask=present)


@triton.jit
def append_rows(k, v, k_cache, v_cache, slots, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy row n of k and v [N, WIDTH] into row ``slots[n]`` of the caches [pages * page, WIDTH]; none where < 0."""
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + n)
    if slot >= 0:
        for first in tl.static_range(0, WIDTH, BLOCK):
            i = first + tl.arange(0, BLOCK)
            tl.store(k_cache + slot * WIDTH + i, tl.load(k + n * WIDTH + i, mask=i < WIDTH), mask=i < WIDTH)
            tl.store(v_cache + slot * WIDTH + i, tl.load(v + n * WIDTH + i, mask=i < WIDTH), mask=i < WIDTH)
