"""SwiGLU, forward and backward, in Triton. Definitions: docs/numerics.md.

Gate and up are columns of one fused matrix [T, 2 * I] in the order of its leaves: L times [gate slice, up slice]
(L = 1: gate then up). That is the order in which the gradient of the fused projection is reduced, so nothing is moved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract import constants
from rlkernel.kernels.triton.primitives import constant, exp2_full, negative

_LOG2E = tl.constexpr(constants.LOG2E)


@triton.jit
def sigmoid(x):
    """``div(1, add(1, exp2.full(mul(-x, LOG2E))))``."""
    one = constant(x, 1.0)
    power = exp2_full(negative(x) * _LOG2E)
    divisor = one + power
    return tl.div_rn(one, divisor)


@triton.jit
def _places(row, leaf, WIDTH, SLICE, BLOCK: tl.constexpr):
    """Columns of one slice: places of [T, WIDTH] and of the gate in [T, 2 * WIDTH], and which are inside."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    plain = row * WIDTH + leaf * SLICE + column
    return plain, row * (2 * WIDTH) + leaf * (2 * SLICE) + column, column < SLICE


@triton.jit
def swiglu(fused, out, WIDTH, SLICE, BLOCK: tl.constexpr):
    """``out = cast((g * sigmoid(g)) * u)``.

    Args:
        fused: [T, 2 * WIDTH] (see the module); ``out``: [T, WIDTH]; SLICE: WIDTH / leaves.

    The grid is (T, blocks of a slice, leaves).
    """
    plain, place, inside = _places(tl.program_id(0).to(tl.int64), tl.program_id(2), WIDTH, SLICE, BLOCK)
    g = tl.load(fused + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(fused + place + SLICE, mask=inside, other=0.0).to(tl.float32)
    silu = g * sigmoid(g)
    value = silu * u
    tl.store(out + plain, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(dy, fused, dfused, WIDTH, SLICE, BLOCK: tl.constexpr):
    """``du = cast(dy * (g*sg))``, ``dg = cast((dy * u) * (sg * fma(g, 1 - sg, 1)))``; dfused as fused."""
    plain, place, inside = _places(tl.program_id(0).to(tl.int64), tl.program_id(2), WIDTH, SLICE, BLOCK)
    ds = tl.load(dy + plain, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(fused + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(fused + place + SLICE, mask=inside, other=0.0).to(tl.float32)
    one = constant(g, 1.0)
    sg = sigmoid(g)
    silu = g * sg
    du = ds * silu
    rest = one - sg
    inner = tl.fma(g, rest, one)
    slope = sg * inner
    both = ds * u
    dg = both * slope
    tl.store(dfused + place, dg.to(dfused.dtype.element_ty), mask=inside)
    tl.store(dfused + place + SLICE, du.to(dfused.dtype.element_ty), mask=inside)
