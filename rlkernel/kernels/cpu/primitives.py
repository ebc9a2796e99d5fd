"""The scalar primitives of the contract, compiled by Numba. Definitions: docs/numerics.md.

All values are float32. Every literal is wrapped in ``float32``: Numba would otherwise compute the
expression in float64, which gives other bits. The constants are those of ``rlkernel.contract.constants``.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import float32 as f32
from numba import int32 as i32
from numba import types, uint32, uint64
from numba.extending import intrinsic

from rlkernel.contract import constants
from rlkernel.kernels.cpu.jit import device_function, kernel


@intrinsic
def _fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """fma.rn.f32 (or f64, if all three are float64): ``a * b + c`` with one rounding."""
    if a not in (types.float32, types.float64) or b != a or c != a:
        return None

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, b, c), codegen


fma: Any = _fma  # an intrinsic's Python signature has a typing context that callers do not pass


def _bitcast(source: Any, target: Any, llvm_target: Any) -> Any:
    @intrinsic
    def cast(typing_context: Any, value: Any) -> Any:
        if value != source:
            return None

        def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], llvm_target)

        return target(source), codegen

    return cast


float_bits = _bitcast(types.float32, types.uint32, ir.IntType(32))
bits_float = _bitcast(types.uint32, types.float32, ir.FloatType())
bits_float_signed = _bitcast(types.int32, types.float32, ir.FloatType())
float_bits_signed = _bitcast(types.float32, types.int32, ir.IntType(32))

LOG2E = np.float32(constants.LOG2E)
LN2 = np.float32(constants.LN2)
_ROUND = np.float32(constants.ROUND_TO_INTEGER)
_ROUND_BITS = np.int32(constants.ROUND_TO_INTEGER_BITS)
_INF = np.float32(np.inf)

_, _E1, _E2, _E3, _E4, _E5, _E6 = (np.float32(value) for value in constants.EXP2_FULL)
_, _P1, _P2, _P3 = (np.float32(value) for value in constants.EXP2_P3)

_L_LOW = np.float32(constants.LOG2_LOW)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9 = (np.float32(value) for value in constants.LOG2_FULL)


@device_function
def exp2_full(x):
    """``exp2.full``: 2^x within 1 ulp. 1 at 0; +0 below -126; +inf from 128; NaN stays NaN."""
    inside = min(max(x, f32(-126.0)), f32(128.0))
    shifted = inside + _ROUND
    n = i32(float_bits_signed(shifted) - _ROUND_BITS)
    r = inside - (shifted - _ROUND)
    q = fma(r, _E6, _E5)
    q = fma(r, q, _E4)
    q = fma(r, q, _E3)
    q = fma(r, q, _E2)
    q = fma(r, q, _E1)
    p = fma(r, q, f32(1.0))
    y = bits_float_signed(i32(float_bits_signed(p) + i32(n << i32(23))))
    y = f32(0.0) if x < f32(-126.0) else y
    y = _INF if x >= f32(128.0) else y
    return y if x == x else x


@device_function
def exp2_p3(x):
    """``exp2.p3``: 2^x within 1.1e-4 (relative), for attention weights that are rounded to bfloat16."""
    inside = min(max(x, f32(-126.0)), f32(128.0))
    shifted = inside + _ROUND
    n = i32(float_bits_signed(shifted) - _ROUND_BITS)
    r = inside - (shifted - _ROUND)
    q = fma(r, _P3, _P2)
    q = fma(r, q, _P1)
    p = fma(r, q, f32(1.0))
    y = bits_float_signed(i32(float_bits_signed(p) + i32(n << i32(23))))
    y = f32(0.0) if x < f32(-126.0) else y
    y = _INF if x >= f32(128.0) else y
    return y if x == x else x


@device_function
def log2_full(x):
    """``log2.full``: log2(x) within 1 ulp, subnormals included. -inf at 0; NaN below 0; +inf at +inf."""
    scaled = x * f32(16777216.0) if x < f32(1.1754943508222875e-38) else x
    bias = i32(-24) if x < f32(1.1754943508222875e-38) else i32(0)
    bits = float_bits_signed(scaled)
    # m in [sqrt(1/2), sqrt(2)): subtract the bits of sqrt(1/2), the exponent is what is left above 23 bits
    e = i32(i32(bits - i32(0x3F3504F3)) >> i32(23))
    m = bits_float_signed(i32(bits - i32(e << i32(23))))
    f = m - f32(1.0)
    q = fma(f, _L9, _L8)
    q = fma(f, q, _L7)
    q = fma(f, q, _L6)
    q = fma(f, q, _L5)
    q = fma(f, q, _L4)
    q = fma(f, q, _L3)
    q = fma(f, q, _L2)
    q = fma(f, q, _L1)
    q = fma(f, q, _L0)
    low = f * fma(f, q, _L_LOW)
    y = f32(i32(e + bias)) + fma(f, LOG2E, low)
    y = -_INF if x == f32(0.0) else y
    y = f32(np.nan) if x < f32(0.0) else y
    y = _INF if x == _INF else y
    return y if x == x else x


@device_function
def maximum(a, b):
    """``max``: NaN if either is NaN; +0 is larger than -0."""
    larger = a if a > b else b
    # equal values differ at most in the sign of zero: the AND of the bits is +0 unless both are -0
    larger = bits_float(uint32(float_bits(a) & float_bits(b))) if a == b else larger
    larger = a if a != a else larger
    return b if b != b else larger


@device_function
def round_bf16(x):
    """``cast.bf16``: nearest even bfloat16, held in float32. NaN keeps its upper bits and becomes quiet."""
    bits = float_bits(x)
    rounded = uint32((bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) & uint32(0xFFFF0000))
    quiet = uint32((bits | uint32(0x00400000)) & uint32(0xFFFF0000))
    return bits_float(rounded if x == x else quiet)


@device_function
def cast(x, bf16):
    """Round to the activation dtype: bfloat16 if ``bf16``, else unchanged."""
    return round_bf16(x) if bf16 else x


@device_function
def sigmoid(x):
    """1 / (1 + exp2(-x * log2(e)))."""
    return f32(1.0) / (f32(1.0) + exp2_full(-x * LOG2E))


@device_function
def mix_first(value):
    """First lane's 64-bit finaliser of the tensor digest (constants of SplitMix64's mix13)."""
    value = (value ^ (value >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> uint64(27))) * uint64(0x94D049BB133111EB)
    return value ^ (value >> uint64(31))


@device_function
def mix_second(value):
    """Second lane's 64-bit finaliser of the tensor digest (constants of MurmurHash3)."""
    value = (value ^ (value >> uint64(33))) * uint64(0xFF51AFD7ED558CCD)
    value = (value ^ (value >> uint64(33))) * uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> uint64(33))


INDEX_FIRST = np.uint64(0x9E3779B97F4A7C15)
INDEX_SECOND = np.uint64(0xD1B54A32D192ED03)


@device_function
def digest_first(index, bits):
    """First lane of one element: index and bits are uint64."""
    return mix_first((index + uint64(1)) * INDEX_FIRST + bits)


@device_function
def digest_second(index, bits):
    """Second lane of one element: index and bits are uint64."""
    return mix_second((index + uint64(1)) * INDEX_SECOND + bits)


@device_function
def canonical_bits(x):
    """Bits of x for comparators and activation digests: every NaN becomes 0x7FC00000."""
    return uint64(float_bits(x)) if x == x else uint64(0x7FC00000)


@kernel
def _subnormal_probe(tiny):
    # 2^-149 * 1 flushes if the thread's control register says so; the loop keeps the value opaque
    total = f32(0.0)
    for i in range(tiny.size):
        total = total + tiny[i] * f32(1.0)
    return total


def subnormals_survive() -> bool:
    """Whether the calling thread keeps subnormals in arithmetic (inputs and results)."""
    tiny = np.full(4, 1, dtype=np.uint32).view(np.float32)
    half = np.full(1, 0x00800000, dtype=np.uint32).view(np.float32)
    kept_input = int(np.float32(_subnormal_probe(tiny)).view(np.uint32)) == 4
    kept_result = int(np.float32(_halve(half)).view(np.uint32)) == 0x00400000
    return kept_input and kept_result


def rounds_to_nearest_even() -> bool:
    """Whether the calling thread rounds as IEEE 754 does by default; another mode changes almost every sum.

    1 + 2^-24 and 1 + 3 * 2^-24 are ties, 1 + 2^-23 - 2^-25 lies above one; with both signs no other mode gives all six.
    """
    added = np.array([2.0**-24, 3 * 2.0**-24, 2.0**-23 - 2.0**-25], np.float32)
    expected = [0x3F800000, 0x3F800002, 0x3F800001]
    found = np.empty(6, np.float32)
    _sums_with_one(added, found)
    return found.view(np.uint32).tolist() == expected + [bits | 0x80000000 for bits in expected]


@kernel
def _sums_with_one(added, out):
    for i in range(added.size):
        out[i] = f32(1.0) + added[i]
        out[added.size + i] = f32(-1.0) - added[i]


@kernel
def _halve(values):
    return values[0] * f32(0.5)
