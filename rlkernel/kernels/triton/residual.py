"""Sums of two arrays in Triton: stream and branch, or two gradients that meet."""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.triton.primitives import widen


@triton.jit
def residual_add(a, b, out, count, BLOCK: tl.constexpr):
    """``out = cast(add(a, b))``, all [count]; out may be a or b."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    left = widen(tl.load(a + i, mask=i < count, other=0.0))
    right = widen(tl.load(b + i, mask=i < count, other=0.0))
    tl.store(out + i, (left + right).to(out.dtype.element_ty), mask=i < count)
