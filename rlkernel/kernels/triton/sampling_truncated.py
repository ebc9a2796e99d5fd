"""Top-k and top-p in Triton: what of a row's sorted candidates stays, and the best of them.

The sums of top-p are float64 and sequential in the defined order, so a row is one thread's work; rows run side by side,
and weights lie as [place, row] for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract import constants
from rlkernel.kernels.triton.logprob import divided
from rlkernel.kernels.triton.primitives import exp2_full
from rlkernel.kernels.triton.sampling import NO_CANDIDATE, candidate, philox4x32, row_counters, score

_LOG2E = tl.constexpr(constants.LOG2E)


@triton.jit
def sorting_keys(z, keys, V, stride, temperature, DIVISION: tl.constexpr, BLOCK: tl.constexpr):
    """Divided logits float32 [R, V] for a stable descending sort: -0 as +0, NaN as -inf. Grid: (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = divided(tl.load(z + row * stride + v, mask=v < V, other=0.0), temperature, DIVISION) + 0.0
    tl.store(keys + row * V + v, tl.where(value == value, value, float("-inf")), mask=v < V)


@triton.jit
def sorted_weights(ordered, weights, R, V, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``weights[j, row] = exp2.full(mul(sub(z, M), LOG2E))`` of ordered [R, V]. Grid: (blocks, blocks of rows)."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < R)[:, None] & (j < V)[None, :]
    top = tl.load(ordered + row.to(tl.int64) * V, mask=row < R, other=0.0)
    value = tl.load(ordered + row.to(tl.int64)[:, None] * V + j[None, :], mask=inside, other=0.0)
    weight = exp2_full((value - top[:, None]) * _LOG2E)
    tl.store(weights + j.to(tl.int64)[:, None] * R + row[None, :], tl.trans(weight), mask=tl.trans(inside))


@triton.jit
def kept_candidates(weights, top_k, top_p, kept, R, V, ROWS: tl.constexpr, UNROLL: tl.constexpr):
    """``kept[row]``: candidates that top-k, then top-p leave, int64 [R].

    Args:
        weights: float32 [V, R], in each row's order; ``top_k``: int64 [R], 0 is off; ``top_p``: float64 [R], 1 is off.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < R
    k = tl.load(top_k + row, mask=present, other=1)
    p = tl.load(top_p + row, mask=present, other=1.0)
    columns = tl.zeros((ROWS,), tl.int64) + V
    n = tl.where((k > 0) & (k < V), k, columns)
    summed = tl.where(p < 1.0, n, 0)
    longest = tl.max(summed, 0)
    total = tl.zeros((ROWS,), tl.float64)
    for start in range(0, longest, UNROLL):
        for step in tl.static_range(UNROLL):
            j = start + step
            inside = j < summed
            weight = tl.load(weights + j.to(tl.int64) * R + row, mask=inside, other=0.0)
            total = tl.where(inside, total + weight.to(tl.float64), total)
    bound = p * total
    running = tl.zeros((ROWS,), tl.float64)
    found = tl.where(p < 1.0, columns + 1, 0)
    start = longest * 0
    while (tl.max(found, 0) > V) & (start < longest):
        for step in tl.static_range(UNROLL):
            j = start + step
            inside = j < summed
            weight = tl.load(weights + j.to(tl.int64) * R + row, mask=inside, other=0.0)
            running = tl.where(inside, running + weight.to(tl.float64), running)
            found = tl.where(inside & (found > V) & (running >= bound), j + 1, found)
        start += UNROLL
    tl.store(kept + row, tl.where((found > 0) & (found <= V), found, n), mask=present)


@triton.jit
def best_of_sorted(ordered, ids, kept, seeds, prompt_index, k, namespace, position, best, R, V, BLOCK: tl.constexpr):
    """The best candidate of each block of a row's kept ones: ``best`` int64 [blocks, R]. Grid: (blocks, rows).

    Args:
        ordered: float32 [R, V]; ``ids``: int64 [R, V], their vocabulary ids; ``kept``: int64 [R].
    """
    row = tl.program_id(1)
    n = tl.load(kept + row)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), NO_CANDIDATE, tl.int64)
    if tl.program_id(0) * BLOCK < n:
        inside = j < n
        at = row.to(tl.int64) * V + j
        value = tl.load(ordered + at, mask=inside, other=0.0)
        v = tl.load(ids + at, mask=inside, other=0)
        none = tl.zeros((BLOCK,), tl.uint32)
        k0, k1, c1, c2, c3 = row_counters(seeds, prompt_index, k, namespace, position, row, True)
        r0, r1, r2, r3 = philox4x32((v >> 2).to(tl.uint32), c1 | none, c2 | none, c3 | none, k0 | none, k1 | none)
        lane = v & 3
        bits = tl.where(lane == 0, r0, tl.where(lane == 1, r1, tl.where(lane == 2, r2, r3)))
        top = tl.where(inside, candidate(score(value, bits), v), NO_CANDIDATE)
    tl.store(best + tl.program_id(0).to(tl.int64) * R + row, tl.max(top, 0))


@triton.jit
def join_candidates(
    best, truncated, top_k, top_p, greedy, out, R, V, blocks, truncated_blocks, all_blocks, BLOCK: tl.constexpr
):
    """Candidates of each row: ``truncated`` where top-k or top-p cuts the row, else ``best``. Grid: rows.

    Args:
        best: int64 [blocks, R]; ``truncated``: int64 [truncated_blocks, R]; ``out``: int64 [all_blocks, R].
    """
    row = tl.program_id(0).to(tl.int64)
    kept = tl.load(top_k + row)
    cut = ((kept > 0) & (kept < V)) | (tl.load(top_p + row) < 1.0)
    cut = cut & (tl.load(greedy + row) == 0)
    for start in range(0, all_blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        at = block.to(tl.int64) * R + row
        whole = tl.load(best + at, mask=block < blocks, other=NO_CANDIDATE)
        part = tl.load(truncated + at, mask=block < truncated_blocks, other=NO_CANDIDATE)
        tl.store(out + at, tl.where(cut, part, whole), mask=block < all_blocks)
