"""Kernels that apply one scalar primitive to an array: for tests over every input, and for the audit."""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.triton.primitives import exp2_full, exp2_p3, log2_full, maximum, round_bf16


@triton.jit
def exp2_full_kernel(x, out, count, BLOCK: tl.constexpr):
    """``out = exp2.full(x)``, float32 [count]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, exp2_full(tl.load(x + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit
def exp2_p3_kernel(x, out, count, BLOCK: tl.constexpr):
    """``out = exp2.p3(x)``, float32 [count]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, exp2_p3(tl.load(x + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit
def log2_full_kernel(x, out, count, BLOCK: tl.constexpr):
    """``out = log2.full(x)``, float32 [count]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, log2_full(tl.load(x + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit
def round_bf16_kernel(x, out, count, BLOCK: tl.constexpr):
    """``out = cast.bf16(x)``, held in float32 [count]: integer operations, NaN keeps its upper bits."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, round_bf16(tl.load(x + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit
def cast_kernel(x, out, count, BLOCK: tl.constexpr):
    """``out = cast(x)`` to the dtype of out by the target's own conversion, as kernels do it."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < count, other=0.0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < count)


@triton.jit
def maximum_kernel(a, b, out, count, BLOCK: tl.constexpr):
    """``out = max(a, b)``, float32 [count]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(a + i, mask=i < count, other=0.0)
    right = tl.load(b + i, mask=i < count, other=0.0)
    tl.store(out + i, maximum(left, right), mask=i < count)


@triton.jit
def divide_kernel(a, b, out, count, BLOCK: tl.constexpr):
    """``out = div(a, b)``, float32 [count]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(a + i, mask=i < count, other=0.0)
    right = tl.load(b + i, mask=i < count, other=1.0)
    tl.store(out + i, tl.div_rn(left, right), mask=i < count)


@triton.jit
def square_root_kernel(x, out, count, BLOCK: tl.constexpr):
    """``out = sqrt(x)``, float32 [count]."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.sqrt_rn(tl.load(x + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit
def hardware_exp2_kernel(x, out, count, BLOCK: tl.constexpr):
    """``out = 2^x`` by the instruction of sm_90 that is the primitive ``ex2.approx.ftz.f32`` of ``hopper``."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < count, other=0.0)
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + i, power, mask=i < count)
