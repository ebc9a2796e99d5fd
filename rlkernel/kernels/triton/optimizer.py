"""Gradient norm, clipping factor and AdamW in Triton. Definitions: docs/numerics.md.

Nothing waits for the host: the norm stays on the device, and AdamW reads the clipping factor from there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.triton.primitives import negative
from rlkernel.kernels.triton.reductions import lane_step, tree


@triton.jit
def square_leaves(g, sums, count, LEAF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """``sums[i] = lane_sum(g * g)`` over the i-th LEAF elements of g, float32 [count]: whole leaves only."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < count // LEAF
    lane = tl.arange(0, LANES)
    acc = tl.zeros((ROWS, LANES), tl.float32)
    for first in tl.static_range(0, LEAF, LANES):
        value = tl.load(g + row[:, None] * LEAF + first + lane[None, :], mask=present[:, None], other=0.0)
        acc = tl.fma(value, value, acc)
    tl.store(sums + row, tree(acc, ROWS, LANES), mask=present)


@triton.jit
def square_rest(g, sums, first, N, LANES: tl.constexpr):
    """The last, short leaf: ``sums[0] = lane_sum`` over g[first : first + N], LANES = min(256, power of two >= N)."""
    lane = tl.arange(0, LANES)
    acc = tl.zeros((1, LANES), tl.float32)
    for start in range(0, N, LANES):
        inside = (start + lane < N)[None, :]
        value = tl.load(g + first + start + lane[None, :], mask=inside, other=0.0)
        acc = lane_step(acc, value, value, inside)
    tl.store(sums + tl.arange(0, 1), tree(acc, 1, LANES))


@triton.jit
def tree_level(values, out, count, WIDTH: tl.constexpr):
    """``out[i] = tree`` over values[i * WIDTH : (i + 1) * WIDTH], those beyond count are +0."""
    block = tl.program_id(0).to(tl.int64)
    i = block * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = tl.load(values + i, mask=i < count, other=0.0)
    tl.store(out + block + tl.arange(0, 1), tree(value, 1, WIDTH))


@triton.jit
def norm_and_clip(totals, norm, clip, count, max_norm):
    """``norm = sqrt(total)``, total the sum of totals ascending from +0; ``clip = norm > max ? max / norm : 1``."""
    one = tl.arange(0, 1)
    total = tl.zeros((1,), tl.float32)
    for i in range(count):
        total = total + tl.load(totals + i + one)
    value = tl.sqrt_rn(total)
    limit = tl.full((1,), max_norm, tl.float32)
    tl.store(norm + one, value)
    tl.store(clip + one, tl.where(value > limit, tl.div_rn(limit, value), tl.full((1,), 1.0, tl.float32)))


@triton.jit
def adamw(
    master, m, v, grad, weight, scalars, clip, count, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of a tensor: float32 master, m, v [count] in place, ``weight`` = cast(master).

    Args:
        scalars: float32 [9]: lr, beta1, beta2, 1 - beta1, 1 - beta2, correction1, correction2, eps, weight decay.
        clip: float32 [1].
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    lr, beta1, beta2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    keep1, keep2 = tl.load(scalars + 3), tl.load(scalars + 4)
    correct1, correct2 = tl.load(scalars + 5), tl.load(scalars + 6)
    eps, decay = tl.load(scalars + 7), tl.load(scalars + 8)
    g = tl.load(grad + i, mask=inside, other=0.0) * tl.load(clip)
    part1 = g * keep1
    m_new = tl.fma(tl.full((BLOCK,), beta1, tl.float32), tl.load(m + i, mask=inside, other=0.0), part1)
    square = g * g
    part2 = square * keep2
    v_new = tl.fma(tl.full((BLOCK,), beta2, tl.float32), tl.load(v + i, mask=inside, other=0.0), part2)
    scaled = v_new * correct2
    divisor = tl.sqrt_rn(scaled)
    divisor = divisor + eps
    mean = m_new * correct1
    step = tl.div_rn(mean, divisor)
    old = tl.load(master + i, mask=inside, other=0.0)
    decayed = tl.fma(tl.full((BLOCK,), decay, tl.float32), old, step)
    move = decayed * negative(lr)  # old - lr * decayed, the sign of the product taken from lr
    new = old + move
    tl.store(m + i, m_new, mask=inside)
    tl.store(v + i, v_new, mask=inside)
    tl.store(master + i, new, mask=inside)
    tl.store(weight + i, new.to(weight.dtype.element_ty), mask=inside)
