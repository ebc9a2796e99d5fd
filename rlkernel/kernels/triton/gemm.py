"""GEMM ``c = a @ b^T`` in Triton: one chain over K, or G leaves of K merged in a balanced tree.

a is [M, K] and b [N, K] (a weight as models store it), or stored depth first: a [K, M], b [K, N]. All are C-contiguous,
c is [M, N]. A chain starts at +0, or continues a float32 matrix, and ascends in k; its step is the matrix instruction's
(k16 on sm_90, two k8 groups on gfx942, one fma in ``portable``). c is rounded once, at the end. Tiles, warps and stages
change no bit.

``zero`` is a float32 argument that must be +0: the start of every chain. It is an argument because the compiler folds
``x + dot(a, b, 0)`` into ``dot(a, b, x)`` where it can see the 0, and a leaf of one tile would silently join the chain
of the leaf before it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _chain(
    a_rows, b_rows, row_inside, column_inside, first, size, acc, a_step, b_step,
    WIDEN: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Continue ``acc`` [BLOCK_M, BLOCK_N] over k in [first, first + size). ``a_step``, ``b_step``: strides of k."""
    k = tl.arange(0, BLOCK_K)
    last = first + size
    for start in range(first, last, BLOCK_K):
        index = (start + k).to(tl.int64)
        if EVEN:
            x = tl.load(a_rows + index[None, :] * a_step, mask=row_inside[:, None], other=0.0)
            y = tl.load(b_rows + index[:, None] * b_step, mask=column_inside[None, :], other=0.0)
        else:
            inside = index < last
            x = tl.load(a_rows + index[None, :] * a_step, mask=row_inside[:, None] & inside[None, :], other=0.0)
            y = tl.load(b_rows + index[:, None] * b_step, mask=column_inside[None, :] & inside[:, None], other=0.0)
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
    a_rows, b_rows, row_inside, column_inside, first, size, start, a_step, b_step,
    WIDEN: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    left = _chain(
        a_rows, b_rows, row_inside, column_inside, first, size, start, a_step, b_step, WIDEN, EVEN, BLOCK_K
    )  # fmt: skip
    right = _chain(
        a_rows, b_rows, row_inside, column_inside, first + size, size, start, a_step, b_step, WIDEN, EVEN, BLOCK_K
    )  # fmt: skip
    return left + right


@triton.jit
def _four(
    a_rows, b_rows, row_inside, column_inside, first, size, start, a_step, b_step,
    WIDEN: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    left = _pair(
        a_rows, b_rows, row_inside, column_inside, first, size, start, a_step, b_step, WIDEN, EVEN, BLOCK_K
    )  # fmt: skip
    right = _pair(
        a_rows, b_rows, row_inside, column_inside, first + 2 * size, size, start, a_step, b_step, WIDEN, EVEN, BLOCK_K
    )  # fmt: skip
    return left + right


@triton.jit
def gemm(
    a, b, c, bias, grad, M, N, K, zero,
    LEAVES: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, CONTINUES: tl.constexpr,
    A_DEPTH_FIRST: tl.constexpr, B_DEPTH_FIRST: tl.constexpr, WIDEN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """``c = cast(tree over LEAVES of chain(a, b) [+ bias])``, or one chain from grad.

    Args:
        a: [M, K], or [K, M] with A_DEPTH_FIRST; ``b``: [N, K], or [K, N] with B_DEPTH_FIRST, one dtype, float32 or
            bfloat16; ``c``: [M, N], its dtype is that of the cast.
        bias: [N], read with HAS_BIAS; ``grad``: float32 [M, N], read with CONTINUES (one leaf); c may be grad.
        zero: float32 +0 (see the module).
        LEAVES: 1, 2, 4 or 8 equal contiguous parts of K, each a chain of its own.
        SPLIT: the second axis of the grid is the leaf, and c is float32 [LEAVES, M, N]: the leaves, not merged.
        WIDEN: operands to float32 before the multiplication (``portable``): the chain is then one of fma.
        EVEN: K / LEAVES is a multiple of BLOCK_K.
        GROUP_M: tiles of M that neighbouring programs share a tile of N with.
    """
    tl.static_assert(LEAVES == 1 or LEAVES == 2 or LEAVES == 4 or LEAVES == 8, "LEAVES is 1, 2, 4 or 8")
    tl.static_assert(LEAVES == 1 or not CONTINUES, "only one chain is continued")
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    group_size = min(tiles_m - group * GROUP_M, GROUP_M)
    place = tl.program_id(0) % (GROUP_M * tiles_n)
    rows = (group * GROUP_M + place % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (place // group_size) * BLOCK_N + tl.arange(0, BLOCK_N)
    ri, ci = rows < M, columns < N
    inside = ri[:, None] & ci[None, :]
    if A_DEPTH_FIRST:
        ar = a + rows[:, None]
        a_step = M
    else:
        ar = a + rows.to(tl.int64)[:, None] * K
        a_step = 1
    if B_DEPTH_FIRST:
        br = b + columns[None, :]
        b_step = N
    else:
        br = b + columns.to(tl.int64)[None, :] * K
        b_step = 1
    place_c = rows.to(tl.int64)[:, None] * N + columns[None, :]
    if CONTINUES:
        start = tl.load(grad + place_c, mask=inside, other=0.0)
    else:
        start = tl.full((BLOCK_M, BLOCK_N), zero, tl.float32)
    size = K // LEAVES
    # the tree is unrolled, left subtree first: at most log2(LEAVES) sums wait for their right neighbour
    if SPLIT:
        leaf = tl.program_id(1)
        total = _chain(ar, br, ri, ci, leaf * size, size, start, a_step, b_step, WIDEN, EVEN, BLOCK_K)
        place_c += leaf.to(tl.int64) * M * N
    elif LEAVES == 1:
        total = _chain(ar, br, ri, ci, 0, size, start, a_step, b_step, WIDEN, EVEN, BLOCK_K)
    elif LEAVES == 2:
        total = _pair(ar, br, ri, ci, 0, size, start, a_step, b_step, WIDEN, EVEN, BLOCK_K)
    elif LEAVES == 4:
        total = _four(ar, br, ri, ci, 0, size, start, a_step, b_step, WIDEN, EVEN, BLOCK_K)
    else:
        total = _four(ar, br, ri, ci, 0, size, start, a_step, b_step, WIDEN, EVEN, BLOCK_K)
        right = _four(ar, br, ri, ci, 4 * size, size, start, a_step, b_step, WIDEN, EVEN, BLOCK_K)
        total = total + right
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=ci, other=0.0).to(tl.float32)
        total = total + shift[None, :]
    tl.store(c + place_c, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def merge_leaves(
    parts, bias, c, count, N, LEAVES: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """``c = cast(tree over LEAVES of parts [+ bias])``: parts float32 [LEAVES, count], count = M * N."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    total = _subtree(parts + i, inside, count, 0, LEAVES)
    if HAS_BIAS:
        total = total + tl.load(bias + i % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(c + i, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _subtree(places, inside, count, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    if WIDTH == 1:
        total = tl.load(places + tl.cast(count, tl.int64) * FIRST, mask=inside, other=0.0)
    else:
        HALF: tl.constexpr = WIDTH // 2
        left = _subtree(places, inside, count, FIRST, HALF)
        right = _subtree(places, inside, count, FIRST + HALF, HALF)
        total = left + right
    return total
