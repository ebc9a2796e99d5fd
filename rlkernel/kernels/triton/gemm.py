"""GEMM ``c = a @ b^T`` in Triton: one chain over K, or G leaves of K merged in a balanced tree.

a is [M, K], b is [N, K] (a weight as models store it), both C-contiguous, c is [M, N]. A chain starts at +0 and
ascends in k; its step is the matrix instruction's (k16 on sm_90, two k8 groups on gfx942, one fma in ``portable``).
c is rounded once, at the end. Tiles, warps and stages change no bit.

``zero`` is a float32 argument that must be +0: the start of every chain. It is an argument because the compiler folds
``x + dot(a, b, 0)`` into ``dot(a, b, x)`` where it can see the 0, and a leaf of one tile would silently join the chain
of the leaf before it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _leaf(
    a_rows,
    b_rows,
    row_inside,
    column_inside,
    first,
    size,
    zero,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One chain from ``zero`` over k in [first, first + size) -> float32 [BLOCK_M, BLOCK_N]."""
    k = tl.arange(0, BLOCK_K)
    last = first + size
    acc = tl.full((BLOCK_M, BLOCK_N), zero, tl.float32)
    for start in range(first, last, BLOCK_K):
        index = start + k
        if EVEN:
            x = tl.load(a_rows + index[None, :], mask=row_inside[:, None], other=0.0)
            y = tl.load(b_rows + index[:, None], mask=column_inside[None, :], other=0.0)
        else:
            inside = index < last
            x = tl.load(a_rows + index[None, :], mask=row_inside[:, None] & inside[None, :], other=0.0)
            y = tl.load(b_rows + index[:, None], mask=column_inside[None, :] & inside[:, None], other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
            if not EVEN:
                # beyond the end a is -0 and b +0: fma(-0, +0, acc) is acc, whatever acc is. The sign is set by an
                # integer operation, because the compiler folds a selection into the load and drops the sign there
                sign = tl.where(index < last, 0, -0x80000000).to(tl.int32)
                x = (x.to(tl.int32, bitcast=True) | sign[None, :]).to(tl.float32, bitcast=True)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def _pair(
    a_rows,
    b_rows,
    row_inside,
    column_inside,
    first,
    size,
    zero,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    left = _leaf(a_rows, b_rows, row_inside, column_inside, first, size, zero, WIDEN, EVEN, BM, BN, BK)
    right = _leaf(a_rows, b_rows, row_inside, column_inside, first + size, size, zero, WIDEN, EVEN, BM, BN, BK)
    return left + right


@triton.jit
def _four(
    a_rows,
    b_rows,
    row_inside,
    column_inside,
    first,
    size,
    zero,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    left = _pair(a_rows, b_rows, row_inside, column_inside, first, size, zero, WIDEN, EVEN, BM, BN, BK)
    right = _pair(a_rows, b_rows, row_inside, column_inside, first + 2 * size, size, zero, WIDEN, EVEN, BM, BN, BK)
    return left + right


@triton.jit
def gemm(
    a,
    b,
    c,
    M,
    N,
    K,
    zero,
    LEAVES: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """``c = cast(tree over LEAVES of chain(a, b))``.

    Args:
        a: [M, K]; ``b``: [N, K], one dtype, float32 or bfloat16; ``c``: [M, N], its dtype is that of the cast.
        zero: float32 +0 (see the module).
        LEAVES: 1, 2, 4 or 8 equal contiguous parts of K, each a chain of its own.
        WIDEN: operands to float32 before the multiplication (``portable``): the chain is then one of fma.
        EVEN: K / LEAVES is a multiple of BLOCK_K.
        GROUP_M: tiles of M that neighbouring programs share a tile of N with.
    """
    tl.static_assert(LEAVES == 1 or LEAVES == 2 or LEAVES == 4 or LEAVES == 8, "LEAVES is 1, 2, 4 or 8")
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    group_size = min(tiles_m - group * GROUP_M, GROUP_M)
    place = tl.program_id(0) % (GROUP_M * tiles_n)
    rows = (group * GROUP_M + place % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (place // group_size) * BLOCK_N + tl.arange(0, BLOCK_N)
    ri, ci = rows < M, columns < N
    ar = a + rows.to(tl.int64)[:, None] * K
    br = b + columns.to(tl.int64)[None, :] * K
    size = K // LEAVES
    # the tree is unrolled, left subtree first: at most log2(LEAVES) sums wait for their right neighbour
    if LEAVES == 1:
        total = _leaf(ar, br, ri, ci, 0, size, zero, WIDEN, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
    elif LEAVES == 2:
        total = _pair(ar, br, ri, ci, 0, size, zero, WIDEN, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
    elif LEAVES == 4:
        total = _four(ar, br, ri, ci, 0, size, zero, WIDEN, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        total = _four(ar, br, ri, ci, 0, size, zero, WIDEN, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
        right = _four(ar, br, ri, ci, 4 * size, size, zero, WIDEN, EVEN, BLOCK_M, BLOCK_N, BLOCK_K)
        total = total + right
    place_c = c + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(place_c, total.to(c.dtype.element_ty), mask=ri[:, None] & ci[None, :])
