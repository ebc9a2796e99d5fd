"""``tree`` and ``lane_sum`` as Triton device functions, and the row reduction kernel. Definitions: docs/numerics.md.

``tl.sum`` over an axis adds in an order that depends on the layout of its operand, so the tree over the lanes is
written out, one level at a time: neighbours lie along an axis of two, which has one order only.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plus(left, right):
    """``add``, for a reduction over two neighbours."""
    return left + right


@triton.jit
def tree(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum of each row of ``values`` [ROWS, WIDTH] by neighbours -> [ROWS]. WIDTH is a power of two."""
    LEVELS: tl.constexpr = WIDTH.bit_length() - 1
    for level in tl.static_range(LEVELS):
        # an axis of two has one sum: the layout decides only which thread takes it (a register, a shuffle)
        values = tl.reduce(tl.reshape(values, (ROWS, WIDTH >> (level + 1), 2)), 2, plus)
    return tl.reshape(values, (ROWS,))


@triton.jit
def lane_step(acc, u, v, inside):
    """The lanes' next products; a lane beyond the row takes no part: fma(0, 0, acc) would turn -0 into +0."""
    return tl.where(inside, tl.fma(u, v, acc), acc)


@triton.jit
def lane_dot(a, b, rows, present, N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """``lane_sum(a * b)`` over rows of N elements -> float32 [ROWS].

    Args:
        a: pointer to [*, N] rows, C-contiguous; ``b`` likewise.
        rows: int64 [ROWS], row indices; ``present``: bool [ROWS], rows that exist.
        LANES: min(256, smallest power of two >= N).
    """
    lane = tl.arange(0, LANES)
    start = rows[:, None] * N + lane[None, :]
    acc = tl.zeros((ROWS, LANES), tl.float32)
    WHOLE: tl.constexpr = N // LANES * LANES
    for first in range(0, WHOLE, LANES):
        u = tl.load(a + start + first, mask=present[:, None], other=0.0).to(tl.float32)
        v = tl.load(b + start + first, mask=present[:, None], other=0.0).to(tl.float32)
        acc = tl.fma(u, v, acc)
    if WHOLE < N:
        inside = present[:, None] & (lane + WHOLE < N)[None, :]
        u = tl.load(a + start + WHOLE, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(b + start + WHOLE, mask=inside, other=0.0).to(tl.float32)
        acc = lane_step(acc, u, v, inside)
    return tree(acc, ROWS, LANES)


@triton.jit
def row_reduction(a, b, out, row_count, N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """``out[i] = lane_sum(a[i] * b[i])``: a, b [row_count, N] float32 or bfloat16, out float32 [row_count]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = rows < row_count
    total = lane_dot(a, b, rows, present, N, ROWS, LANES)
    tl.store(out + rows, total, mask=present)
