"""Embedding in Triton: rows of a table, and the gradient that adds them back, each id's tokens in order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embedding(table, ids, out, N, BLOCK: tl.constexpr):
    """``out[t] = table[ids[t]]``, bits unchanged. The grid is (T, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    value = tl.load(table + row * N + column, mask=column < N, other=0)
    tl.store(out + token * N + column, value, mask=column < N)


@triton.jit
def embedding_gradient(dh, order, ids, first, grad, runs, N, BLOCK: tl.constexpr):
    """``grad[id] = add(grad[id], dh[t])`` over the tokens t of one id ascending; float32, continued in place.

    Args:
        dh: [T, N]; ``order``: int64 [T], tokens sorted by id, equal ids ascending; ``ids``: int64 [runs], each id once.
        first: int64 [runs + 1], where the run of each id begins in order.

    The grid is (runs, blocks of columns).
    """
    run = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    row = tl.load(ids + run)
    acc = tl.load(grad + row * N + column, mask=inside, other=0.0)
    for place in range(tl.load(first + run), tl.load(first + run + 1)):
        token = tl.load(order + place)
        acc = acc + tl.load(dh + token * N + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad + row * N + column, acc, mask=inside)
