"""Sampling from rows of logits in Triton (Gumbel-max, Philox4x32-10). Definition: docs/numerics.md.

``sampled_leaves`` reads the logits once: it makes the leaves' statistics and, for rows that are not truncated, the best
candidate of every block of columns. A candidate is one int64: its score's order above, the complement of its id below,
so that the largest one has the largest score and, of equal ones, the lower id. ``choose_tokens`` takes the best of each
row. Rows that top-k or top-p truncates go through a stable sort by the caller, ``kept_candidates`` and
``best_of_sorted``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract import constants
from rlkernel.kernels.triton.logprob import divided, load_leaves, store_leaves
from rlkernel.kernels.triton.logprob_leaf import canonical, leaf_statistics, order_key
from rlkernel.kernels.triton.primitives import constant, log2_full, negative

_LOG2E = tl.constexpr(constants.LOG2E)
_LN2 = tl.constexpr(constants.LN2)
_STEP = tl.constexpr(2.0**-24)
_HALF_STEP = tl.constexpr(2.0**-25)
_LARGEST_W = tl.constexpr(1 - 2.0**-24)
_THIRD = tl.constexpr(0.3333333432674408)  # the nearest float32
NO_CANDIDATE = tl.constexpr(-(1 << 63))
MINUS_INFINITY = tl.constexpr((-0x7F800001) << 32)
"""Below it lie only NaN and -inf at any id but 0."""


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al., SC 2011): four uint32 words of uint32 counters and keys."""
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = second.to(tl.uint32)
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = first.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def score(z, bits):
    """``z`` plus Gumbel noise made of 32 random bits (uint32)."""
    w = tl.fma((bits >> 8).to(tl.int32).to(tl.float32), constant(z, _STEP), constant(z, _HALF_STEP))
    w = tl.where(w > _LARGEST_W, constant(z, _LARGEST_W), w)
    series = tl.fma(w, constant(z, 0.25), constant(z, _THIRD))
    series = tl.fma(w, series, constant(z, 0.5))
    series = w * tl.fma(w, series, constant(z, 1.0))
    logarithm = negative(log2_full(1.0 - w)) * _LN2
    exponential = tl.where(w < 0.015625, series, logarithm)
    return z - log2_full(exponential) * _LN2


@triton.jit
def candidate(value, ids):
    """int64 that orders (score, id) as the winner does; NaN is below everything."""
    value = value + 0.0  # -0 and +0 are equal
    key = order_key(value.to(tl.uint32, bitcast=True)).to(tl.int64)
    packed = (key << 32) | (0xFFFFFFFF - ids.to(tl.int64))
    return tl.where(value == value, packed, NO_CANDIDATE)


@triton.jit
def row_counters(seeds, prompt_index, k, namespace, position, row, present):
    """The row's Philox key and the counter's last three words, uint32 each."""
    seed = tl.load(seeds + row, mask=present, other=0)
    c1 = tl.load(position + row, mask=present, other=0).to(tl.uint32)
    c2 = tl.load(prompt_index + row, mask=present, other=0).to(tl.uint32)
    space = tl.load(namespace + row, mask=present, other=0)
    c3 = ((space << 24) | tl.load(k + row, mask=present, other=0)).to(tl.uint32)
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32), c1, c2, c3


@triton.jit
def _noisy(z, quarter, c1, c2, c3, k0, k1, ROWS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Scores of z [ROWS, GROUPS, COLUMNS]; ``quarter``: id >> 2 of each group's first column, uint32 [ROWS, GROUPS]."""
    c0 = quarter[:, :, None] + tl.arange(0, COLUMNS // 4)[None, None, :].to(tl.uint32)
    none = tl.zeros_like(c0)
    r0, r1, r2, r3 = philox4x32(
        c0,
        c1[:, None, None] | none,
        c2[:, None, None] | none,
        c3[:, None, None] | none,
        k0[:, None, None] | none,
        k1[:, None, None] | none,
    )
    bits = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (ROWS, GROUPS, COLUMNS))
    return score(z, bits)


@triton.jit
def _best(
    z,
    start,
    limit,
    greedy,
    c1,
    c2,
    c3,
    k0,
    k1,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The best candidate of each row of z [ROWS, GROUPS, COLUMNS], int64 [ROWS, GROUPS]."""
    if COLUMNS > PIECE:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = tl.split(tl.permute(tl.reshape(z, (ROWS, GROUPS, 2, HALF)), (0, 1, 3, 2)))
        first = _best(left, start, limit, greedy, c1, c2, c3, k0, k1, ROWS, GROUPS, HALF, PIECE)
        # as in logprob_leaf: the second half waits for the first (a candidate is never all ones)
        after = (first == -1).to(tl.int32)
        second = _best(right, start + HALF + after, limit - HALF, greedy, c1, c2, c3, k0, k1, ROWS, GROUPS, HALF, PIECE)
        return tl.maximum(first, second)
    else:
        c = tl.arange(0, COLUMNS)[None, None, :]
        noisy = _noisy(z, (start >> 2).to(tl.uint32), c1, c2, c3, k0, k1, ROWS, GROUPS, COLUMNS)
        value = tl.where((greedy != 0)[:, None, None], z, noisy)
        packed = candidate(value, start[:, :, None] + c)
        return tl.max(tl.where(c < limit[:, :, None], packed, NO_CANDIDATE), 2)


@triton.jit
def sampled_leaves(
    z,
    seeds,
    prompt_index,
    k,
    namespace,
    position,
    greedy,
    maxima,
    sums,
    moments,
    lanes,
    best,
    R,
    V,
    stride,
    leaves,
    temperature,
    nothing,
    DIVISION: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The leaves of logits float32 [R, V] in memory, as ``logits_leaves``, and the best candidate of every block.

    Args:
        seeds: int64 [R] (bits of uint64); ``prompt_index``, ``k``, ``namespace``, ``position``: int64 [R].
        maxima, sums, moments, lanes: by row (see :mod:`logprob_merge`).
        greedy: uint8 [R]; ``best``: int64 [blocks, R]. Grid: (blocks of 4 * WARPS leaves, blocks of ROWS rows).
    """
    PARTS: tl.constexpr = 4 * WARPS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tile = load_leaves(z, row, tl.program_id(0), R, V, stride, temperature, DIVISION, ROWS, WARPS)
    lane = tl.arange(0, ROWS * PARTS)
    row = tl.program_id(1) * ROWS + lane // PARTS
    leaf = tl.program_id(0) * PARTS + lane % PARTS
    first = leaf.to(tl.int64) * 128
    m, s, u, d1, d2 = leaf_statistics(tile, first, V, nothing, ROWS * PARTS, 8, 16, PIECE, MASKED)
    real = (row < R) & (leaf < leaves)
    store_leaves(maxima, sums, moments, lanes, m, s, u, d1, d2, leaf, row, R, leaves, real, BY_ROW=True)

    k0, k1, c1, c2, c3 = row_counters(seeds, prompt_index, k, namespace, position, row, row < R)
    flag = tl.load(greedy + row, mask=row < R, other=1)
    # the candidates wait for the statistics, which no longer need registers then
    after = d1.to(tl.int32) & nothing
    start = (leaf * 128)[:, None] + tl.arange(0, 8)[None, :] * 16 + after[:, None]
    packed = _best(tile, start, V - start, flag, c1, c2, c3, k0, k1, ROWS * PARTS, 8, 16, PIECE)
    top = tl.max(tl.reshape(tl.max(packed, 1), (ROWS, PARTS)), 1)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tl.store(best + tl.program_id(0).to(tl.int64) * R + row, top, mask=row < R)


@triton.jit
def choose_tokens(
    z,
    best,
    greedy,
    top_k,
    top_p,
    tokens,
    chosen,
    R,
    V,
    stride,
    blocks,
    temperature,
    DIVISION: tl.constexpr,
    REFUSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best candidate over all blocks of a row, and its divided logit.

    Args:
        best: int64 [blocks, R]; ``tokens``: int64 [R]; ``chosen``: float32 [R].
        REFUSE: a row that top-k or top-p truncates gives -1 (and the logit of id 0). Grid: rows.
    """
    row = tl.program_id(0).to(tl.int64)
    top = tl.full((BLOCK,), NO_CANDIDATE, tl.int64)
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(best + block.to(tl.int64) * R + row, mask=block < blocks, other=NO_CANDIDATE))
    packed = tl.max(top, 0)
    token = 0xFFFFFFFF - (packed & 0xFFFFFFFF)
    # nothing above -inf
    token = tl.where((packed >> 32) <= (MINUS_INFINITY >> 32), 0, token)
    value = tl.load(z + row * stride + token)
    tl.store(chosen + row, canonical(divided(value, temperature, DIVISION)))
    if REFUSE:
        kept = tl.load(top_k + row)
        truncated = ((kept > 0) & (kept < V)) | (tl.load(top_p + row) < 1.0)
        token = tl.where(truncated & (tl.load(greedy + row) == 0), -1, token)
    tl.store(tokens + row, token)
