"""Paged causal attention of the portable profile (docs/numerics.md, section Attention), forward.

One kernel serves prefill, chunked prefill, decode and training. Its unit of work is a tile: some consecutive
query rows of one sequence with all query heads that share one KV head, so that a decode step reads K and V
once for the whole group. Key blocks and splits are counted from the sequence's first token and are part of
the contract; page size, query tile and threads are not.
"""

from __future__ import annotations

import numpy as np
from numba import float32 as f32
from numba import int64

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.attention_pages import (
    F32,
    I32,
    I64,
    append_kv,
    expect,
    fetch_ahead,
    gather_keys,
    gather_values,
    page_size,
    pages_from_sequences,
)
from rlkernel.kernels.cpu.attention_tile import (
    KEY_BLOCK,
    block_maximum,
    chain_block,
    chain_lower,
    element_address,
)
from rlkernel.kernels.cpu.jit import device_function, kernel
from rlkernel.kernels.cpu.memory import aligned_empty, aligned_scratch
from rlkernel.kernels.cpu.microkernel import LANES
from rlkernel.kernels.cpu.primitives import cast, exp2_full, exp2_p3, fma, log2_full, maximum, round_bf16
from rlkernel.kernels.cpu.threads import Workers

__all__ = ["KEY_BLOCK", "SPLIT", "append_kv", "attention", "pages_from_sequences"]

SPLIT = 512  # keys of one partial softmax: contractual
_TILE_ROWS = 48  # (query row, head) pairs of one work item: tuning

_NEGATIVE_INFINITY = np.float32(-np.inf)


@device_function
def _tile_positions(group):
    """Query rows of one tile, each with ``group`` heads."""
    return max(int64(1), int64(_TILE_ROWS) // group)


@device_function
def _scale_and_mask(row, valid, scale2):
    """Scores of one row and key block from their dot products; keys from ``valid`` on are masked."""
    for j in range(KEY_BLOCK):
        row[j] = row[j] * scale2
    for j in range(valid, KEY_BLOCK):
        row[j] = _NEGATIVE_INFINITY


@device_function
def _weights(row, valid, new, bf16):
    """P of one row and key block, in place; masked keys get +0 whatever ``new`` is."""
    if bf16:
        for j in range(KEY_BLOCK):
            row[j] = round_bf16(exp2_p3(row[j] - new))
    else:
        for j in range(KEY_BLOCK):
            row[j] = exp2_full(row[j] - new)
    for j in range(valid, KEY_BLOCK):
        row[j] = f32(0.0)


@device_function
def _add_weights(weights, rows, sums):
    """``sums[r] = add(sums[r], p[r, j])`` for j ascending; masked weights are +0, which changes no sum."""
    r = 0
    while r + 4 <= rows:  # four chains side by side hide the latency of the additions
        base = r * KEY_BLOCK
        s0, s1, s2, s3 = sums[r], sums[r + 1], sums[r + 2], sums[r + 3]
        for j in range(KEY_BLOCK):
            s0 += weights[base + j]
            s1 += weights[base + KEY_BLOCK + j]
            s2 += weights[base + 2 * KEY_BLOCK + j]
            s3 += weights[base + 3 * KEY_BLOCK + j]
        sums[r], sums[r + 1], sums[r + 2], sums[r + 3] = s0, s1, s2, s3
        r += 4
    while r < rows:
        total = sums[r]
        for j in range(KEY_BLOCK):
            total += weights[r * KEY_BLOCK + j]
        sums[r] = total
        r += 1


@kernel
def _attend(first, last, bounds, tiles, q, k_pages, v_pages, block_table, scratch, splits, out, lse2, scale2, bf16):
    """Work items ``bounds[first] .. bounds[last]``; ``tiles`` rows are (sequence, first row, rows, position)."""
    kv_heads, depth, page = k_pages.shape[1], k_pages.shape[2], k_pages.shape[3]
    group = q.shape[1] // kv_heads
    padded = (depth + LANES - 1) // LANES * LANES
    direct_keys = page % KEY_BLOCK == 0
    direct_values = direct_keys and depth == padded
    most = _tile_positions(group) * group
    memory = scratch[first]
    k_block = memory[: depth * KEY_BLOCK]
    at = k_block.size
    v_block = memory[at : at + KEY_BLOCK * padded]
    at += v_block.size
    queries = memory[at : at + most * depth]
    at += queries.size
    scores = memory[at : at + most * KEY_BLOCK]
    at += scores.size
    result = memory[at : at + padded]
    at += result.size
    maxima = memory[at : at + splits * most]
    at += maxima.size
    sums = memory[at : at + splits * most]
    at += sums.size
    accumulators = memory[at : at + splits * most * padded]

    for item in range(bounds[first], bounds[last]):
        kv_head = item // tiles.shape[0]
        tile = tiles[item % tiles.shape[0]]
        table = block_table[tile[0]]
        base, count, position = int64(tile[1]), int64(tile[2]), int64(tile[3])
        rows = count * group
        for i in range(count):
            for h in range(group):
                for d in range(depth):
                    queries[(i * group + h) * depth + d] = q[base + i, kv_head * group + h, d]
        keys = position + count
        used = (keys + SPLIT - 1) // SPLIT
        for split in range(used):
            m = maxima[split * most : split * most + rows]
            l = sums[split * most : split * most + rows]  # noqa: E741 - the row sum's usual name
            acc = accumulators[split * most * padded : (split * most + rows) * padded]
            m[:] = _NEGATIVE_INFINITY
            l[:] = f32(0.0)
            acc[:] = f32(0.0)
            for start in range(split * SPLIT, min((split + 1) * SPLIT, keys), KEY_BLOCK):
                held = min(int64(KEY_BLOCK), keys - start)
                if count == 1:  # decode waits for the memory; a larger tile uses what it reads often enough
                    fetch_ahead(k_pages, v_pages, table, kv_head, start, held)
                if direct_keys:
                    origin = (int64(table[start // page]) * kv_heads + kv_head) * depth * page + start % page
                    k_address, k_stride = element_address(k_pages, origin), page
                else:
                    gather_keys(k_pages, table, kv_head, start, held, k_block)
                    k_address, k_stride = element_address(k_block, int64(0)), int64(KEY_BLOCK)
                if direct_values:
                    origin = ((int64(table[start // page]) * kv_heads + kv_head) * page + start % page) * depth
                    v_address = element_address(v_pages, origin)
                else:
                    gather_values(v_pages, table, kv_head, start, held, v_block, padded)
                    v_address = element_address(v_block, int64(0))
                # rows before `skipped` see no key of this block: it leaves them alone
                skipped = max(int64(0), start - position)
                valid_first = position + skipped - start + 1
                active = rows - skipped * group
                block_scores = scores[: active * KEY_BLOCK]
                chain_block(
                    active, held, element_address(queries, skipped * group * depth), depth, int64(1),
                    k_address, k_stride, element_address(block_scores, int64(0)), int64(KEY_BLOCK), depth, int64(1),
                )  # fmt: skip
                for r in range(active):
                    valid = min(int64(KEY_BLOCK), valid_first + r // group)
                    row = block_scores[r * KEY_BLOCK : (r + 1) * KEY_BLOCK]
                    _scale_and_mask(row, valid, scale2)
                    at_row = skipped * group + r
                    old = m[at_row]
                    new = maximum(old, block_maximum(element_address(row, int64(0))))
                    _weights(row, valid, new, bf16)
                    m[at_row] = new
                    if new != old:  # equal maxima: alpha is exactly 1, and -inf only meets untouched zeros or NaN
                        alpha = exp2_full(old - new) if old != _NEGATIVE_INFINITY else f32(0.0)
                        l[at_row] = l[at_row] * alpha
                        for d in range(padded):
                            acc[at_row * padded + d] = acc[at_row * padded + d] * alpha
                _add_weights(block_scores, active, l[skipped * group :])
                chain_lower(
                    active, group, valid_first, int64(KEY_BLOCK), padded, element_address(block_scores, int64(0)),
                    int64(KEY_BLOCK), v_address, padded, element_address(acc, skipped * group * padded), padded,
                )  # fmt: skip
        for r in range(rows):
            # a later split that holds no key of this row has m = -inf, l = +0: it takes no part
            seen = (position + r // group) // SPLIT + 1
            overall = maxima[r]
            for split in range(1, seen):
                overall = maximum(overall, maxima[split * most + r])
            total = f32(0.0)
            for d in range(padded):
                result[d] = f32(0.0)
            for split in range(seen):
                weight = exp2_full(maxima[split * most + r] - overall)
                total = fma(sums[split * most + r], weight, total)
                part = accumulators[(split * most + r) * padded : (split * most + r + 1) * padded]
                for d in range(padded):
                    result[d] = fma(part[d], weight, result[d])
            n, head = base + r // group, kv_head * group + r % group
            for d in range(depth):
                out[n, head, d] = cast(result[d] / total, bf16)
            lse2[n, head] = overall + log2_full(total)


def attention(
    q: F32,
    k_pages: F32,
    v_pages: F32,
    block_table: I32,
    starts: I32,
    positions: I32,
    scale2: float | np.float32,
    workers: Workers,
    bf16: bool,
) -> tuple[F32, F32]:
    """Causal attention of query rows over the paged keys of their sequences.

    Args:
        q: f32[N, QH, D], the rows of all sequences one after the other.
        k_pages, v_pages: f32[P, KVH, D, page] and f32[P, KVH, page, D]; the rows' own keys are already there.
            Slots past a sequence's last position, and pages in no table, may hold anything.
        block_table: int32[S, B]; key j of sequence s lies in page ``block_table[s, j // page]``.
        starts: int32[S + 1], offsets of each sequence's rows in q.
        positions: int32[N], absolute positions, consecutive within a sequence.
        scale2: head_dim^-0.5 * log2(e), rounded to float32 (``rlkernel.contract.hostscalars.attention_scales``).
        bf16: round P and the output to bfloat16 (held in float32).

    Returns:
        ``(out f32[N, QH, D], lse2 f32[N, QH])``; lse2 is the base-2 log-sum-exp of the scaled scores.

    Raises:
        ContractError: shapes, positions or table entries that do not fit together.
    """
    q = expect("q", q, np.float32)
    block_table, starts = expect("block_table", block_table, np.int32), expect("starts", starts, np.int32)
    positions = expect("positions", positions, np.int32)
    tiles, costs = _tiles(q, k_pages, v_pages, block_table, starts, positions)
    out = aligned_empty(q.shape)
    lse2 = np.empty(q.shape[:2], np.float32)
    if not len(tiles):
        return out, lse2
    kv_heads, depth = k_pages.shape[1], k_pages.shape[2]
    group = q.shape[1] // kv_heads
    splits = int((tiles[:, 3] + tiles[:, 2]).max() - 1) // SPLIT + 1
    padded = -(-depth // LANES) * LANES
    most = max(1, _TILE_ROWS // group) * group
    scratch = aligned_scratch(
        workers.count, KEY_BLOCK * (depth + padded) + most * (depth + KEY_BLOCK + splits * (2 + padded)) + padded
    )
    bounds = balanced_bounds(np.tile(costs, kv_heads), workers.count)
    workers.run(
        _attend, workers.count, bounds, tiles, q, k_pages, v_pages, block_table, scratch, splits, out, lse2,
        np.float32(scale2), bf16,
    )  # fmt: skip
    return out, lse2


def balanced_bounds(costs: I64, parts: int) -> I64:
    """int64[parts + 1]: cut the items, in order, into runs of about equal cost."""
    total = np.cumsum(costs)
    targets = total[-1] * np.arange(1, parts, dtype=np.int64) // parts
    return np.concatenate(([0], np.searchsorted(total, targets, side="left") + 1, [len(costs)])).clip(0, len(costs))


def _tiles(q: F32, k_pages: F32, v_pages: F32, block_table: I32, starts: I32, positions: I32) -> tuple[I64, I64]:
    """Checks, and the work items: int64[items, 4] rows (sequence, first row, rows, position) with their costs."""
    page = page_size(k_pages, v_pages)
    rows, heads, depth = q.shape
    if depth != k_pages.shape[2] or heads % k_pages.shape[1]:
        raise ContractError(
            f"{heads} query heads of {depth} do not fit {k_pages.shape[1]} KV heads of {k_pages.shape[2]}: the head "
            "dimensions must be equal and the query heads a multiple of the KV heads"
        )
    begin, end = starts[:-1].astype(np.int64), starts[1:].astype(np.int64)
    counts = end - begin
    if len(block_table) != len(counts) or starts[0] != 0 or starts[-1] != rows or (counts < 0).any():
        raise ContractError(
            f"starts must rise from 0 to the {rows} rows, one entry more than the {len(block_table)} rows of the block "
            f"table; it has {len(starts)} entries, {int(starts[0])} .. {int(starts[-1])}"
        )
    if positions.shape != (rows,):
        raise ContractError(f"positions {positions.shape} should be ({rows},), one a query row")
    kept = np.flatnonzero(counts)
    begin, end, counts = begin[kept], end[kept], counts[kept]
    from_first = np.arange(rows) - np.repeat(begin, counts)
    if rows and (positions.min() < 0 or (positions - from_first != np.repeat(positions[begin], counts)).any()):
        raise ContractError("positions must be >= 0 and consecutive within each sequence")
    needed = positions[end - 1].astype(np.int64) // page + 1
    if rows and int(needed.max()) > block_table.shape[1]:
        raise ContractError(
            f"the block table has {block_table.shape[1]} pages a sequence, {int(needed.max())} are needed"
        )
    entries = block_table[kept]
    wrong = ((entries < 0) | (entries >= len(k_pages))) & (np.arange(block_table.shape[1]) < needed[:, None])
    if wrong.any():
        s, b = np.argwhere(wrong)[0]
        raise ContractError(
            f"block table entry [{int(kept[s])}, {int(b)}] is {int(entries[s, b])}; pages 0..{len(k_pages) - 1} exist"
        )
    step = max(1, _TILE_ROWS // (heads // k_pages.shape[1]))
    parts = -(-counts // step)
    owner = np.repeat(np.arange(len(kept)), parts)
    first = begin[owner] + (np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)) * step
    length = np.minimum(step, end[owner] - first)
    position = positions[first].astype(np.int64)
    costs = length * (position + length // 2 + KEY_BLOCK)
    return np.stack((kept[owner], first, length, position), axis=1), costs
