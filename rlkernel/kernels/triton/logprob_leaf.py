"""What the head computes of one leaf of 128 logits, in registers: maximum, s, u and digest lanes.

A tile is float32 [ROWS, GROUPS, COLUMNS] with GROUPS * COLUMNS = 128 consecutive columns of the vocabulary: callers
arrange it so that a thread's registers hold the last axis. The first levels of the trees are then additions inside a
thread, and only the levels over GROUPS cross threads.

A tile is worked through in pieces of its last axis, and a piece waits for the one before it (``_after``): a hundred
logits a thread, each with two 64-bit digest states and an exponential in flight, would not fit into its registers, and
the assembler interleaves whatever is independent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract import constants
from rlkernel.kernels.triton.digest import INDEX_FIRST, INDEX_SECOND, mix_first, mix_second
from rlkernel.kernels.triton.primitives import constant

LEAF = tl.constexpr(128)
_LOG2E = tl.constexpr(constants.LOG2E)
_ROUND = tl.constexpr(constants.ROUND_TO_INTEGER)
_E1, _E2, _E3, _E4, _E5, _E6 = (tl.constexpr(value) for value in constants.EXP2_FULL[1:])
_ALL_ONES = tl.constexpr((1 << 64) - 1)
_LOWEST_KEY = tl.constexpr(-0x7F800001)  # order_key of -inf


@triton.jit
def order_key(bits):
    """int32 that orders float32 patterns as ``max`` does: -0 below +0, NaN (0x7FC00000) on top."""
    bits = bits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """The float32 that has this :func:`order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp2_of_difference(x):
    """(``exp2.full(x)``, whether it is not +0) for x <= 0; NaN gives an arbitrary number.

    The bits of the definition without its cases above 0. The sum of a leaf with a NaN may be any number: its maximum is
    NaN, which makes the weight of the leaf NaN.
    """
    shifted = x + _ROUND
    r = x - (shifted - _ROUND)
    q = tl.fma(r, constant(x, _E6), constant(x, _E5))
    q = tl.fma(r, q, constant(x, _E4))
    q = tl.fma(r, q, constant(x, _E3))
    q = tl.fma(r, q, constant(x, _E2))
    q = tl.fma(r, q, constant(x, _E1))
    p = tl.fma(r, q, constant(x, 1.0))
    # the integer of shifted stands in its low bits, and shifting by 23 drops the bits of the constant
    n = shifted.to(tl.int32, bitcast=True)
    y = (p.to(tl.int32, bitcast=True) + (n << 23)).to(tl.float32, bitcast=True)
    live = x >= -126.0
    return tl.where(live, y, constant(x, 0.0)), live


@triton.jit
def _tree_last(values, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    for level in tl.static_range(WIDTH.bit_length() - 1):
        left, right = tl.split(tl.reshape(values, (ROWS, GROUPS, WIDTH >> (level + 1), 2)))
        values = left + right
    return tl.reshape(values, (ROWS, GROUPS))


@triton.jit
def _tree_groups(values, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    for level in tl.static_range(GROUPS.bit_length() - 1):
        left, right = tl.split(tl.reshape(values, (ROWS, GROUPS >> (level + 1), 2)))
        values = left + right
    return tl.reshape(values, (ROWS,))


@triton.jit
def _piece(
    z, m, base1, base2, limit, ROWS: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr
):
    c = tl.arange(0, COLUMNS)[None, None, :]
    bits = z.to(tl.uint32, bitcast=True).to(tl.uint64)
    # the products of the index with the lane's constant are one 64-bit value a thread, and constants of its registers
    first = mix_first(base1[:, :, None] + c.to(tl.uint64) * INDEX_FIRST + bits).to(tl.int64)
    second = mix_second(base2[:, :, None] + c.to(tl.uint64) * INDEX_SECOND + bits).to(tl.int64)
    if MASKED:
        first = tl.where(c < limit[:, :, None], first, 0)
        second = tl.where(c < limit[:, :, None], second, 0)
    d1 = tl.sum(first, 2)
    d2 = tl.sum(second, 2)
    difference = z - m[:, :, None]
    e, live = exp2_of_difference(difference * _LOG2E)
    s = _tree_last(e, ROWS, GROUPS, COLUMNS)
    # the difference may be -inf where e is +0
    u = _tree_last(tl.where(live, e * difference, constant(e, 0.0)), ROWS, GROUPS, COLUMNS)
    return s, u, d1, d2


@triton.jit
def _after(m, base1, base2, s, u, d1, d2, nothing):
    """m, base1 and base2 unchanged, but only once s, u, d1 and d2 are known: ``nothing`` is an argument that is 0."""
    done = (s.to(tl.int32, bitcast=True) | u.to(tl.int32, bitcast=True) | d1.to(tl.int32) | d2.to(tl.int32)) & nothing
    m = (m.to(tl.int32, bitcast=True) | done).to(tl.float32, bitcast=True)
    wide = done.to(tl.uint64)
    return m, base1 | wide, base2 | wide


@triton.jit
def _walk(
    z,
    m,
    base1,
    base2,
    limit,
    nothing,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    MASKED: tl.constexpr,
):
    if COLUMNS > PIECE:
        HALF: tl.constexpr = COLUMNS // 2
        STEP1: tl.constexpr = (HALF * INDEX_FIRST) & _ALL_ONES
        STEP2: tl.constexpr = (HALF * INDEX_SECOND) & _ALL_ONES
        left, right = tl.split(tl.permute(tl.reshape(z, (ROWS, GROUPS, 2, HALF)), (0, 1, 3, 2)))
        s, u, d1, d2 = _walk(left, m, base1, base2, limit, nothing, ROWS, GROUPS, HALF, PIECE, MASKED)
        m, base1, base2 = _after(m, base1, base2, s, u, d1, d2, nothing)
        s2, u2, e1, e2 = _walk(
            right, m, base1 + STEP1, base2 + STEP2, limit - HALF, nothing, ROWS, GROUPS, HALF, PIECE, MASKED
        )
        return s + s2, u + u2, d1 + e1, d2 + e2
    else:
        return _piece(z, m, base1, base2, limit, ROWS, GROUPS, COLUMNS, MASKED)


@triton.jit
def canonical(z):
    """z with every NaN as 0x7FC00000."""
    return tl.where(z == z, z.to(tl.uint32, bitcast=True), 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def leaf_statistics(
    z,
    first,
    V,
    nothing,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Maximum, s, u (float32 [ROWS]) and both digest lanes (int64 [ROWS]) of one leaf a row.

    Args:
        z: float32 [ROWS, GROUPS, COLUMNS], canonical NaN, after division by the temperature.
        first: vocabulary id of each leaf's first column, int64 [ROWS].
        V: columns of the real vocabulary; those from V on take no part (only looked at if MASKED).
        nothing: an int32 argument of the kernel that is 0 (see ``_after``).
        PIECE: columns of a thread that are in flight together.
    """
    start = first[:, None] + tl.arange(0, GROUPS)[None, :] * COLUMNS
    limit = tl.minimum(V - start, COLUMNS).to(tl.int32)
    key = order_key(z)
    if MASKED:
        key = tl.where(tl.arange(0, COLUMNS)[None, None, :] < limit[:, :, None], key, _LOWEST_KEY)
        z = tl.where(tl.arange(0, COLUMNS)[None, None, :] < limit[:, :, None], z, constant(z, float("-inf")))
    m = key_value(tl.max(tl.max(key, 2), 1))
    base1 = (start + 1).to(tl.uint64) * INDEX_FIRST
    base2 = (start + 1).to(tl.uint64) * INDEX_SECOND
    top = tl.broadcast_to(m[:, None], (ROWS, GROUPS))
    s, u, d1, d2 = _walk(z, top, base1, base2, limit, nothing, ROWS, GROUPS, COLUMNS, PIECE, MASKED)
    return m, _tree_groups(s, ROWS, GROUPS), _tree_groups(u, ROWS, GROUPS), tl.sum(d1, 1), tl.sum(d2, 1)
