"""Statistics of the linear log-probability in Triton: leaves of 128 columns, then their merge.

``linear_leaves`` is a GEMM that never stores a logit: its epilogue makes the partial results of every (row, leaf).
``logits_leaves`` makes the same of logits in memory. Partial results lie as [leaf, row], so that neighbouring rows are
read and written together; :mod:`logprob_merge` merges them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract import constants
from rlkernel.kernels.triton.logprob_leaf import canonical, leaf_statistics

_LOG2E = tl.constexpr(constants.LOG2E)
_LN2 = tl.constexpr(constants.LN2)


@triton.jit
def divided(z, temperature, DIVISION: tl.constexpr):
    """``div(z, temperature)``. DIVISION: "one" (it is 1), "product" (temperature is given as 2^-k), "quotient"."""
    if DIVISION == "quotient":
        return tl.div_rn(z, tl.zeros_like(z) + temperature)
    elif DIVISION == "product":
        return z * temperature
    else:
        return z


@triton.jit
def store_leaves(
    maxima, sums, moments, lanes, m, s, u, d1, d2, leaf, row, R, leaves, real, BY_ROW: tl.constexpr = False
):  # fmt: skip
    """Partial results of (leaf, row) pairs; ``leaves``: how many a row has in the buffers. BY_ROW: see the merge."""
    if BY_ROW:
        at = row.to(tl.int64) * leaves + leaf
        first = row.to(tl.int64) * (2 * leaves) + leaf
        second = first + leaves
    else:
        at = leaf.to(tl.int64) * R + row
        first = at
        second = (leaf + leaves).to(tl.int64) * R + row
    tl.store(maxima + at, m, mask=real)
    tl.store(sums + at, s, mask=real)
    tl.store(moments + at, u, mask=real)
    tl.store(lanes + first, d1, mask=real)
    tl.store(lanes + second, d2, mask=real)


@triton.jit
def linear_leaves(
    x,
    w,
    targets,
    maxima,
    sums,
    moments,
    lanes,
    chosen,
    R,
    V,
    K,
    leaves,
    temperature,
    zero,
    nothing,
    DIVISION: tl.constexpr,
    EVEN: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Logits of a tile, one chain over K each, and what a leaf's statistics need of them.

    Args:
        x: [R, K]; ``w``: [V, K], bfloat16; ``targets``: int64 [R].
        maxima, sums, moments: float32 [leaves, R]; ``lanes``: int64 [2, leaves, R]; ``chosen``: float32 [R].
        zero: float32 +0, where chains start; ``nothing``: int32 0 (see logprob_leaf).
        EVEN: K is a multiple of BLOCK_K; else the last step is filled up with zeros.
        MASKED: V is no multiple of 128. BLOCK_N: 128 or 256.
    """
    PARTS: tl.constexpr = BLOCK_N // 128
    tiles_m = tl.cdiv(R, BLOCK_M)
    tiles_n = tl.cdiv(leaves, PARTS)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    group_size = min(tiles_m - group * GROUP_M, GROUP_M)
    place = tl.program_id(0) % (GROUP_M * tiles_n)
    tile_m = group * GROUP_M + place % group_size
    tile_n = place // group_size

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    # A thread of the matrix unit's accumulator holds two neighbouring columns of every eight. Column n of the tile is
    # therefore this vocabulary id: a thread gets 32 consecutive ones.
    inner = n % 128
    ids = tile_n * BLOCK_N + n // 128 * 128 + (inner % 8 // 2) * 32 + (inner // 8) * 2 + inner % 2
    k = tl.arange(0, BLOCK_K)
    x_rows = x + tl.minimum(rows, R - 1).to(tl.int64)[:, None] * K
    w_rows = w + tl.minimum(ids, V - 1).to(tl.int64)[None, :] * K
    acc = tl.full((BLOCK_M, BLOCK_N), zero, tl.float32)
    for start in range(0, K, BLOCK_K):
        index = start + k
        if EVEN:
            a = tl.load(x_rows + index[None, :])
            b = tl.load(w_rows + index[:, None])
        else:
            a = tl.load(x_rows + index[None, :], mask=(index < K)[None, :], other=0.0)
            b = tl.load(w_rows + index[:, None], mask=(index < K)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")

    ROWS: tl.constexpr = BLOCK_M * PARTS
    z = tl.permute(tl.reshape(acc, (ROWS, 16, 4, 2)), (0, 2, 1, 3))
    z = canonical(divided(tl.reshape(z, (ROWS, 4, 32)), temperature, DIVISION))
    lane = tl.arange(0, ROWS)
    row = tile_m * BLOCK_M + lane // PARTS
    leaf = tile_n * PARTS + lane % PARTS
    real = (row < R) & (leaf < leaves)
    first = leaf.to(tl.int64) * 128
    target = tl.load(targets + row, mask=real, other=-1)
    offset = tl.where(target < V, target - first, -1).to(tl.int32)
    hit = (offset >= 0) & (offset < 128)
    if tl.max(hit.to(tl.int32), 0) != 0:  # few tiles hold a target
        column = tl.arange(0, 4)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
        # a sum of patterns, only one of them not 0: as floats a -0 would be lost
        bits = tl.where(column == offset[:, None, None], z.to(tl.int32, bitcast=True), 0)
        tl.store(chosen + row, tl.sum(tl.sum(bits, 2), 1).to(tl.float32, bitcast=True), mask=hit)

    m, s, u, d1, d2 = leaf_statistics(z, first, V, nothing, ROWS, 4, 32, PIECE, MASKED)
    store_leaves(maxima, sums, moments, lanes, m, s, u, d1, d2, leaf, row, R, leaves, real)


@triton.jit
def load_leaves(
    z, row, block, R, columns, stride, temperature, DIVISION: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr
):
    """Divided logits of ROWS rows and 4 * WARPS leaves -> float32 [ROWS * 4 * WARPS, 8, 16], canonical NaN.

    Four times four neighbouring columns fall to a thread in the layout of a coalesced load; they are taken from memory
    so that these are 16 consecutive ones.
    """
    COLUMNS: tl.constexpr = 512 * WARPS
    n = tl.arange(0, COLUMNS)
    column = block * COLUMNS + (n % (128 * WARPS) // 4) * 16 + (n // (128 * WARPS)) * 4 + n % 4
    column = tl.max_contiguous(tl.multiple_of(column, 4), 4)
    inside = (row < R)[:, None] & (column < columns)[None, :]
    values = tl.load(z + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
    values = canonical(divided(values, temperature, DIVISION))
    values = tl.permute(tl.reshape(values, (ROWS, 4, 32 * WARPS, 4)), (0, 2, 1, 3))
    return tl.reshape(values, (ROWS * 4 * WARPS, 8, 16))


@triton.jit
def logits_leaves(
    z,
    targets,
    maxima,
    sums,
    moments,
    lanes,
    chosen,
    R,
    columns,
    stride,
    first_leaf,
    leaves,
    all_leaves,
    temperature,
    nothing,
    DIVISION: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The leaves of logits in memory: float32 [R, columns], rows ``stride`` apart, not yet divided.

    Args:
        first_leaf: leaf of the vocabulary that column 0 begins; ``leaves``: how many the columns fill.
        maxima, sums, moments: float32 [all_leaves, R]; ``lanes``: int64 [2, all_leaves, R]; ``chosen``: float32 [R].
        Grid: (blocks of 4 * WARPS leaves, blocks of ROWS rows). Everything else as ``linear_leaves``.
    """
    PARTS: tl.constexpr = 4 * WARPS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tile = load_leaves(z, row, tl.program_id(0), R, columns, stride, temperature, DIVISION, ROWS, WARPS)
    lane = tl.arange(0, ROWS * PARTS)
    row = tl.program_id(1) * ROWS + lane // PARTS
    local = tl.program_id(0) * PARTS + lane % PARTS
    real = (row < R) & (local < leaves)
    leaf = first_leaf + local
    first = leaf.to(tl.int64) * 128
    last = first_leaf * 128 + columns
    target = tl.load(targets + row, mask=real, other=-1)
    offset = tl.where(target < last, target - first, -1).to(tl.int32)
    hit = (offset >= 0) & (offset < 128)
    value = tl.load(z + row.to(tl.int64) * stride + local * 128 + offset, mask=hit, other=0.0)
    tl.store(chosen + row, canonical(divided(value, temperature, DIVISION)), mask=hit)

    m, s, u, d1, d2 = leaf_statistics(tile, first, last, nothing, ROWS * PARTS, 8, 16, PIECE, MASKED)
    store_leaves(maxima, sums, moments, lanes, m, s, u, d1, d2, leaf, row, R, all_leaves, real)
