"""The policy loss and its derivative, one token an element, in Triton. Definition: docs/numerics.md, Loss."""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract import constants
from rlkernel.kernels.triton.primitives import constant, exp2_full, negative

_LOG2E = tl.constexpr(constants.LOG2E)


@triton.jit
def token_loss(
    new, old, reference, advantage, weight, trained, loss, coefficient, ratio, divergence, clipped,
    count, low, high, beta, CLIPS: tl.constexpr, KL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss, d loss / d log-probability, ratio, KL term and whether the token was clipped.

    Args:
        new, old, reference, advantage, weight: float32 [count]; ``trained``: int8 [count].
        loss, coefficient, ratio, divergence: float32 [count]; ``clipped``: int8 [count].
        low, high, beta: float32. CLIPS: ``ppo_clip``, else ``reinforce``. KL: 0 without a term, 1 to 3 for k1 to k3.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    n = tl.load(new + i, mask=inside, other=0.0)
    a = tl.load(advantage + i, mask=inside, other=0.0)
    counts = tl.load(trained + i, mask=inside, other=0) != 0
    zero, one = constant(n, 0.0), constant(n, 1.0)
    r = exp2_full((n - tl.load(old + i, mask=inside, other=0.0)) * _LOG2E)
    if CLIPS:
        above = (a > 0.0) & (r > high)
        below = (a < 0.0) & (r < low)
        slope = negative(r * a)
        policy = tl.where(above, negative(a * high), slope)
        policy = tl.where(below, negative(a * low), policy)
        cut = above | below
        slope = tl.where(cut, zero, slope)
    else:
        policy = negative(n * a)
        slope = negative(a)
        cut = tl.zeros((BLOCK,), tl.int1)
    kl = zero
    if KL > 0:
        q = tl.load(reference + i, mask=inside, other=0.0)
        x = q - n
        if KL == 1:
            kl, dkl = n - q, one
        elif KL == 2:
            square = x * x
            kl, dkl = square * 0.5, n - q
        else:
            e = exp2_full(x * _LOG2E)
            less = e - one
            kl, dkl = less - x, one - e
        weighted = kl * beta
        weighted_slope = dkl * beta
        policy = policy + weighted
        slope = slope + weighted_slope
    g = slope * tl.load(weight + i, mask=inside, other=0.0)
    tl.store(loss + i, tl.where(counts, policy, zero), mask=inside)
    tl.store(coefficient + i, tl.where(counts, g, zero), mask=inside)
    tl.store(ratio + i, tl.where(counts, r, one), mask=inside)
    tl.store(divergence + i, tl.where(counts, kl, zero), mask=inside)
    tl.store(clipped + i, (cut & counts).to(tl.int8), mask=inside)
