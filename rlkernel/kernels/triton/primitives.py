"""The scalar primitives of the contract as Triton device functions. Definitions: docs/numerics.md.

Values are float32. Only operations with one meaning on every target appear: add, sub, mul, fma, integer operations,
comparisons and selections. Kernels must be compiled with ``enable_fp_fusion=False`` (see ``launch.OPTIONS``): a
multiplication and an addition written apart stay apart, a fused one is written ``tl.fma``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract import constants

_LOG2E = tl.constexpr(constants.LOG2E)
_ROUND = tl.constexpr(constants.ROUND_TO_INTEGER)
_ROUND_BITS = tl.constexpr(constants.ROUND_TO_INTEGER_BITS)
_E1, _E2, _E3, _E4, _E5, _E6 = (tl.constexpr(value) for value in constants.EXP2_FULL[1:])
_P1, _P2, _P3 = (tl.constexpr(value) for value in constants.EXP2_P3[1:])
_L_LOW = tl.constexpr(constants.LOG2_LOW)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9 = (tl.constexpr(value) for value in constants.LOG2_FULL)
_SQRT_HALF_BITS = tl.constexpr(constants.SQRT_HALF_BITS)
_SMALLEST_NORMAL = tl.constexpr(constants.SMALLEST_NORMAL)
_TWO_TO_24 = tl.constexpr(constants.TWO_TO_24)
_INF = tl.constexpr(float("inf"))


@triton.jit
def constant(x, value: tl.constexpr):
    """A tensor of ``value`` with the shape of x, float32."""
    return tl.full(x.shape, value, tl.float32)


@triton.jit
def widen(x):
    """x as float32. bfloat16 by its bits: a compiler that sees the conversion may add two of them in bfloat16."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def negative(x):
    """x with the other sign, zeros included. Triton 3.6 compiles ``-x`` to ``0 - x``, which keeps the sign of +0."""
    return (x.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def _inside(x):
    low = tl.where(x < -126.0, constant(x, -126.0), x)
    return tl.where(low > 128.0, constant(x, 128.0), low)


@triton.jit
def _scale_exp2(x, p, shifted):
    # p * 2^n by adding n to the exponent's bits, then the ends of the range
    n = shifted.to(tl.int32, bitcast=True) - _ROUND_BITS
    y = (p.to(tl.int32, bitcast=True) + (n << 23)).to(tl.float32, bitcast=True)
    y = tl.where(x < -126.0, constant(x, 0.0), y)
    y = tl.where(x >= 128.0, constant(x, _INF), y)
    return tl.where(x == x, y, x)


@triton.jit
def exp2_full(x):
    """``exp2.full``: 2^x within 1 ulp. 1 at 0; +0 below -126; +inf from 128; NaN stays NaN."""
    inside = _inside(x)
    shifted = inside + _ROUND
    r = inside - (shifted - _ROUND)
    q = tl.fma(r, constant(x, _E6), constant(x, _E5))
    q = tl.fma(r, q, constant(x, _E4))
    q = tl.fma(r, q, constant(x, _E3))
    q = tl.fma(r, q, constant(x, _E2))
    q = tl.fma(r, q, constant(x, _E1))
    p = tl.fma(r, q, constant(x, 1.0))
    return _scale_exp2(x, p, shifted)


@triton.jit
def exp2_p3(x):
    """``exp2.p3``: 2^x within 1.1e-4 (relative), for attention weights that are rounded to bfloat16."""
    inside = _inside(x)
    shifted = inside + _ROUND
    r = inside - (shifted - _ROUND)
    q = tl.fma(r, constant(x, _P3), constant(x, _P2))
    q = tl.fma(r, q, constant(x, _P1))
    p = tl.fma(r, q, constant(x, 1.0))
    return _scale_exp2(x, p, shifted)


@triton.jit
def log2_full(x):
    """``log2.full``: log2(x) within 1 ulp, subnormals included. -inf at 0; NaN below 0; +inf at +inf."""
    small = x < _SMALLEST_NORMAL
    scaled = tl.where(small, x * _TWO_TO_24, x)
    bits = scaled.to(tl.int32, bitcast=True)
    e = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0
    q = tl.fma(f, constant(x, _L9), constant(x, _L8))
    q = tl.fma(f, q, constant(x, _L7))
    q = tl.fma(f, q, constant(x, _L6))
    q = tl.fma(f, q, constant(x, _L5))
    q = tl.fma(f, q, constant(x, _L4))
    q = tl.fma(f, q, constant(x, _L3))
    q = tl.fma(f, q, constant(x, _L2))
    q = tl.fma(f, q, constant(x, _L1))
    q = tl.fma(f, q, constant(x, _L0))
    low = f * tl.fma(f, q, constant(x, _L_LOW))
    exponent = (e + tl.where(small, -24, 0)).to(tl.float32)
    y = exponent + tl.fma(f, constant(x, _LOG2E), low)
    y = tl.where(x == 0.0, constant(x, -_INF), y)
    y = tl.where(x < 0.0, constant(x, float("nan")), y)
    y = tl.where(x == _INF, constant(x, _INF), y)
    return tl.where(x == x, y, x)


@triton.jit
def maximum(a, b):
    """``max``: NaN if either is NaN; +0 is larger than -0."""
    larger = tl.where(a > b, a, b)
    # equal values differ at most in the sign of zero: the AND of the bits is +0 unless both are -0
    both = (a.to(tl.int32, bitcast=True) & b.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    larger = tl.where(a == b, both, larger)
    larger = tl.where(a == a, larger, a)
    return tl.where(b == b, larger, b)


@triton.jit
def round_bf16(x):
    """``cast.bf16``: nearest even bfloat16, held in float32. NaN keeps its upper bits and becomes quiet."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    quiet = (bits | 0x00400000) & 0xFFFF0000
    return tl.where(x == x, rounded, quiet).to(tl.float32, bitcast=True)
