"""The closed set of primitives: their exact definitions, and functions on torch tensors that give exactly those bits.

``exp2.full``, ``exp2.p3`` and ``log2.full`` are chains of correctly rounded operations whose coefficients stand in
:mod:`rlkernel.contract.constants`. Tensors may lie on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from hardware import matrix
from hardware.cuda import mma
from hardware.cuda.exp2 import ex2_approx_ftz_sm90
from hardware.rocm import mfma
from rlkernel.contract import constants, profiles
from rlkernel.contract.constants import LN2, LOG2E
from rlkernel.errors import ContractError
from rlkernel.reference import arith
from rlkernel.reference.arith import add, cast_bf16, div, float32, fma32, maximum, mul, sqrt, sub

__all__ = [
    "LN2",
    "LOG2E",
    "MULTIPLY_ACCUMULATE",
    "PRIMITIVES",
    "MultiplyAccumulate",
    "Primitive",
    "exp2_full",
    "exp2_p3",
    "log2_full",
    "sigmoid",
]


def _horner(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    """Coefficients ascending, evaluated from the highest down by fma."""
    total = arith.constant(coefficients[-1], x.device).expand(x.shape)
    for coefficient in reversed(coefficients[:-1]):
        total = fma32(x, total, coefficient)
    return total


def _exp2(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    (x,) = float32(x)
    inside = torch.clamp(x, -126.0, 128.0)
    shifted = add(inside, constants.ROUND_TO_INTEGER)
    n = shifted.view(torch.int32) - constants.ROUND_TO_INTEGER_BITS
    r = sub(inside, sub(shifted, constants.ROUND_TO_INTEGER))
    power = (_horner(r, coefficients).view(torch.int32) + n * (1 << 23)).view(torch.float32)
    power = torch.where(x < -126.0, 0.0, torch.where(x >= 128.0, torch.inf, power))
    return torch.where(torch.isnan(x), x, power)


def exp2_full(x: torch.Tensor) -> torch.Tensor:
    """``exp2.full``: 2^x within 1 ulp. 1 at 0; +0 below -126; +inf from 128; NaN stays NaN."""
    return _exp2(x, constants.EXP2_FULL)


def exp2_p3(x: torch.Tensor) -> torch.Tensor:
    """``exp2.p3``: 2^x within 1.1e-4 (relative), for attention weights that are rounded to bfloat16."""
    return _exp2(x, constants.EXP2_P3)


def log2_full(x: torch.Tensor) -> torch.Tensor:
    """``log2.full``: log2(x) within 1 ulp, subnormals included. -inf at 0; NaN below 0; +inf at +inf."""
    (x,) = float32(x)
    small = x < constants.SMALLEST_NORMAL
    pattern = torch.where(small, mul(x, constants.TWO_TO_24), x).view(torch.int32)
    exponent = (pattern - constants.SQRT_HALF_BITS) >> 23
    # the mantissa lies in [sqrt(1/2), sqrt(2)); taking 1 away is exact
    f = sub((pattern - exponent * (1 << 23)).view(torch.float32), 1.0)
    low = mul(f, fma32(f, _horner(f, constants.LOG2_FULL), constants.LOG2_LOW))
    count = (exponent - small.to(torch.int32) * 24).to(torch.float32)
    y = add(count, fma32(f, LOG2E, low))
    y = torch.where(x == 0, -torch.inf, torch.where(x == torch.inf, torch.inf, y))
    return torch.where((x < 0) | torch.isnan(x), torch.nan, y)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``div(1, add(1, exp2.full(mul(-x, LOG2E))))``; a composition, not a primitive of its own."""
    return div(1.0, add(1.0, exp2_full(mul(arith.negative(x), LOG2E))))


@dataclass(frozen=True)
class MultiplyAccumulate:
    """A primitive that chains are made of.

    Attributes:
        name: as entries of the contract name it.
        step: products that one application adds.
        inputs: dtypes of operands that it takes.
        chain: (a ``[..., K]``, b ``[..., K]``, start float32 ``[...]``) -> float32 ``[...]``: one ascending chain, K
            padded with zeros to whole steps. Operands are float32 (holding values of the dtype) or bfloat16 tensors.
    """

    name: str
    step: int
    inputs: tuple[str, ...]
    chain: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _fma_chain(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    left, right = (x.double() for x in float32(a, b))
    total = start
    for k in range(a.shape[-1]):
        total = matrix.fused_multiply_add(left[..., k] * right[..., k], total.double())
    return total


def _unit_chain(name: str, step: int, fused_step: matrix.Step) -> MultiplyAccumulate:
    def chain(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        try:
            left, right = matrix.decode(a, torch.bfloat16), matrix.decode(b, torch.bfloat16)
        except ValueError as error:
            raise ContractError(f"{name}: {error}") from error
        return matrix.chain(left, right, start, step, fused_step)

    return MultiplyAccumulate(name, step, ("bfloat16",), chain)


MULTIPLY_ACCUMULATE: Mapping[str, MultiplyAccumulate] = MappingProxyType(
    {
        primitive.name: primitive
        for primitive in (
            MultiplyAccumulate(profiles.FMA, 1, ("float32", "bfloat16"), _fma_chain),
            _unit_chain(profiles.MMA_SM90, mma.K_STEP, mma.fused_step),
            _unit_chain(profiles.MFMA_GFX942, mfma.K_STEP, mfma.fused_step),
        )
    }
)
"""The primitives that chains are made of, by name."""


@dataclass(frozen=True)
class Primitive:
    """A primitive by its name in entries: the exact definition in words, and a function on torch tensors."""

    name: str
    definition: str
    function: Callable[..., torch.Tensor]


PRIMITIVES: Mapping[str, Primitive] = MappingProxyType(
    {
        primitive.name: primitive
        for primitive in (
            Primitive("copy", "the value's bits, unchanged", lambda x: x),
            Primitive(profiles.FMA, "a * b + c, rounded once to nearest even; subnormals kept", fma32),
            Primitive(profiles.ADD, "a + b, rounded to nearest even; sub is add with b's sign changed", add),
            Primitive(profiles.MUL, "a * b, rounded to nearest even", mul),
            Primitive(profiles.DIV, "a / b, rounded to nearest even", div),
            Primitive(profiles.SQRT, "the square root, rounded to nearest even", sqrt),
            Primitive(profiles.MAX, "the larger; NaN if either is NaN; +0 above -0", maximum),
            Primitive("cast.bf16", "nearest bfloat16, ties to even; NaN keeps its upper bits, made quiet", cast_bf16),
            Primitive(
                profiles.EXP2,
                f"2^x: degree 6, coefficients {constants.EXP2_FULL} by fma (lowest power first)",
                exp2_full,
            ),
            Primitive(
                profiles.EXP2_P3,
                f"2^x: degree 3, coefficients {constants.EXP2_P3} by fma (lowest power first)",
                exp2_p3,
            ),
            Primitive(
                profiles.LOG2,
                f"log2 x: coefficients {constants.LOG2_FULL} by fma, low part {constants.LOG2_LOW!r}",
                log2_full,
            ),
            Primitive(profiles.MMA_SM90, "16 products onto c: rules in hardware/cuda/mma.py", mma.dot_k16_bf16),
            Primitive(profiles.MFMA_GFX942, "8 products onto c: rules in hardware/rocm/mfma.py", mfma.dot_k8_bf16),
            Primitive(profiles.EX2_SM90, "2^x, x <= 0: table in hardware/cuda/exp2.py", ex2_approx_ftz_sm90),
        )
    }
)
"""Every primitive that an entry of the contract may name."""
