"""Merge of the head's leaves in Triton: shards, their tree, and the statistics of a row. Definition: docs/numerics.md.

The merge of a shard is a chain over a thousand leaves and more. Everything that does not depend on the leaf before
(weight, moment moved to the shard's maximum) is therefore made in parallel first, and kept in place of the leaf's
maximum and moment.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract import constants
from rlkernel.kernels.triton.logprob_leaf import key_value, order_key
from rlkernel.kernels.triton.primitives import constant, exp2_full, log2_full

_LOG2E = tl.constexpr(constants.LOG2E)
_LN2 = tl.constexpr(constants.LN2)
_INF = tl.constexpr(float("inf"))
_LOWEST_KEY = tl.constexpr(-0x7F800001)  # order_key of -inf
_SKIPPED = tl.constexpr(-0x80000000)  # pattern of -0, which no weight has
TAIL = tl.constexpr(16)
"""Leaves that are loaded together at the end of a chain."""


@triton.jit
def _moved(s, shift, u, weight):
    """``fma(s, shift, u)``; u where the weight is +0, because the shift may be -inf there."""
    return tl.where(weight == 0.0, u, tl.fma(s, shift, u))


@triton.jit
def _weigh(maxima, sums, moments, row, present, R, first, last, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Maximum of leaves [first, last) of each row, float32 [ROWS], -inf of none.

    In place of a leaf's maximum its weight is left, -0 where the leaf is skipped; in place of its moment the moved one.
    """
    key = tl.full((BLOCK, ROWS), _LOWEST_KEY, tl.int32)
    for start in range(first, last, BLOCK):
        leaf = start + tl.arange(0, BLOCK)
        inside = (leaf < last)[:, None] & present[None, :]
        m = tl.load(maxima + leaf.to(tl.int64)[:, None] * R + row[None, :], mask=inside, other=-_INF)
        key = tl.maximum(key, order_key(m))
    top = key_value(tl.max(key, 0))
    for start in range(first, last, BLOCK):
        leaf = start + tl.arange(0, BLOCK)
        inside = (leaf < last)[:, None] & present[None, :]
        at = leaf.to(tl.int64)[:, None] * R + row[None, :]
        m = tl.load(maxima + at, mask=inside, other=-_INF)
        s = tl.load(sums + at, mask=inside, other=0.0)
        u = tl.load(moments + at, mask=inside, other=0.0)
        shift = m - top[None, :]
        weight = exp2_full(shift * _LOG2E)
        tl.store(moments + at, _moved(s, shift, u, weight), mask=inside)
        # by its pattern: the compiler has no -0 in tl.full
        pattern = tl.where(m == -_INF, _SKIPPED, weight.to(tl.int32, bitcast=True))
        tl.store(maxima + at, pattern.to(tl.float32, bitcast=True), mask=inside)
    return top


@triton.jit
def _largest(maxima, row, present, R, leaves, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    key = tl.full((BLOCK, ROWS), _LOWEST_KEY, tl.int32)
    for start in range(0, leaves, BLOCK):
        leaf = start + tl.arange(0, BLOCK)
        inside = (leaf < leaves)[:, None] & present[None, :]
        m = tl.load(maxima + leaf.to(tl.int64)[:, None] * R + row[None, :], mask=inside, other=-_INF)
        key = tl.maximum(key, order_key(m))
    return key_value(tl.max(key, 0))


@triton.jit
def _link(maxima, sums, moments, at, inside, total, moment):
    """One leaf's step of the chains S and U."""
    weight = tl.load(maxima + at, mask=inside, other=0.0)
    s = tl.load(sums + at, mask=inside, other=0.0)
    u = tl.load(moments + at, mask=inside, other=0.0)
    live = inside & (weight.to(tl.int32, bitcast=True) != _SKIPPED)
    return tl.where(live, tl.fma(s, weight, total), total), tl.where(live, tl.fma(u, weight, moment), moment)


@triton.jit
def _shards(
    maxima,
    sums,
    moments,
    row,
    present,
    top,
    R,
    leaves,
    size,
    shard: tl.constexpr,
    COUNT: tl.constexpr,
    WEIGHED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Tree over COUNT shards from ``shard`` on: S and U, float32 [ROWS]. WEIGHED: ``_weigh`` was called, giving top."""
    if COUNT > 1:
        HALF: tl.constexpr = COUNT // 2
        s, u = _shards(
            maxima, sums, moments, row, present, top, R, leaves, size, shard, HALF, False, ROWS, BLOCK, UNROLL
        )
        t, v = _shards(
            maxima, sums, moments, row, present, top, R, leaves, size, shard + HALF, HALF, False, ROWS, BLOCK, UNROLL
        )
        return s + t, u + v
    else:
        first = shard * size
        last = tl.minimum(first + size, leaves)
        m_shard = top if WEIGHED else _weigh(maxima, sums, moments, row, present, R, first, last, ROWS, BLOCK)
        tl.debug_barrier()  # other threads of the program wrote what the chain reads
        total = tl.zeros((ROWS,), tl.float32)
        moment = tl.zeros((ROWS,), tl.float32)
        whole = first + tl.maximum(last - first, 0) // UNROLL * UNROLL
        for start in range(first, whole, UNROLL):
            at = row.to(tl.int64) + tl.cast(start, tl.int64) * R
            for step in tl.static_range(UNROLL):
                total, moment = _link(maxima, sums, moments, at + step * R, present, total, moment)
        for start in range(whole, last, TAIL):
            for step in tl.static_range(TAIL):
                at = row.to(tl.int64) + tl.cast(start + step, tl.int64) * R
                there = present & ((row * 0 + (start + step)) < last)  # not a scalar: Triton's interpreter
                total, moment = _link(maxima, sums, moments, at, there, total, moment)
        shift = m_shard - top
        weight = exp2_full(shift * _LOG2E)
        live = m_shard != -_INF
        nothing = constant(total, 0.0)
        s = tl.where(live, total * weight, nothing)
        return s, tl.where(live, _moved(total, shift, moment, weight) * weight, nothing)


@triton.jit
def _layout(row, R, leaves, BY_ROW: tl.constexpr):
    """Where a row's partial results begin, and how far apart its leaves lie."""
    if BY_ROW:
        return row.to(tl.int64) * leaves, 1
    else:
        return row, R


@triton.jit
def merge_leaves(
    maxima,
    sums,
    moments,
    lanes,
    chosen,
    out,
    digest,
    R,
    leaves,
    size,
    SHARDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    BY_ROW: tl.constexpr = False,
):
    """``out[:, row] = max, log_sum, logprob, entropy`` (float32 [4, R]) and ``digest[row]`` (int64 [R, 2]).

    Args:
        maxima, sums, moments: float32 [leaves, R], overwritten; ``lanes``: int64 [2, leaves, R]; ``chosen``: float32
            [R], the targets' logits.
        BY_ROW: they are [R, leaves] and [R, 2, leaves] instead, for few rows.
        size: leaves of a shard; the last shards may have fewer, or none. SHARDS: a power of two.
        ROWS: rows of a program; BLOCK, UNROLL: leaves that are loaded together.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < R
    place, apart = _layout(row, R, leaves, BY_ROW)
    if SHARDS == 1:
        top = _weigh(maxima, sums, moments, place, present, apart, 0, leaves, ROWS, BLOCK)
    else:
        top = _largest(maxima, place, present, apart, leaves, ROWS, BLOCK)
    total, moment = _shards(
        maxima, sums, moments, place, present, top, apart, leaves, size, 0, SHARDS, SHARDS == 1, ROWS, BLOCK, UNROLL
    )
    log_sum = log2_full(total) * _LN2
    target = tl.load(chosen + row, mask=present, other=0.0)
    tl.store(out + row, top, mask=present)
    tl.store(out + R + row, log_sum, mask=present)
    tl.store(out + 2 * R + row, (target - top) - log_sum, mask=present)
    tl.store(out + 3 * R + row, log_sum - tl.div_rn(moment, total), mask=present)

    first = tl.zeros((BLOCK, ROWS), tl.int64)
    second = tl.zeros((BLOCK, ROWS), tl.int64)
    if BY_ROW:
        place = 2 * place
    for start in range(0, leaves, BLOCK):
        leaf = start + tl.arange(0, BLOCK)
        inside = (leaf < leaves)[:, None] & present[None, :]
        at = leaf.to(tl.int64)[:, None] * apart + place[None, :]
        first += tl.load(lanes + at, mask=inside, other=0)
        at = (leaf + leaves).to(tl.int64)[:, None] * apart + place[None, :]
        second += tl.load(lanes + at, mask=inside, other=0)
    tl.store(digest + 2 * row, tl.sum(first, 0), mask=present)
    tl.store(digest + 2 * row + 1, tl.sum(second, 0), mask=present)
