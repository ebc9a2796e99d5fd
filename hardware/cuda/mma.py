"""The arithmetic of the tensor cores of sm_90: ``mma.m16n8k16`` and ``wgmma`` k16, bf16 or fp16 in, fp32 accumulator.

One step adds 16 products to the accumulator c. Write a value as ``s * 2^e`` with 1 <= |s| < 2; subnormals keep the
smallest exponent of their format and zero terms count as e = -133. A product has e = e_a + e_b and is not renormalised
(|s| may reach almost 4). Then:

1. e_max is the largest exponent over the 16 products and c;
2. each of the 17 terms is truncated toward zero to a multiple of 2^(e_max - 25);
3. they are summed exactly, and the sum is truncated toward zero to float32 (subnormals kept; infinite from 2^128);
4. -0 becomes +0; NaN is 0x7FFFFFFF.

The model was published by MMA-Sim (arXiv 2511.10909). This is an implementation of our own, compared with its
(benchmarks/mma_oracle.py); MMA-Sim's was compared with an H200.

float64 carries every step exactly: products have at most 48 bits, terms are integers below 2^28, sums below 2^32.
Tensors may lie on any device; the bits are the same.
"""

from __future__ import annotations

import torch

from hardware import matrix
from hardware.matrix import NAN_BITS, Decoded, decode, exponent_of, power_of_two, require_step

K_STEP = 16
_FRACTION_BITS = 25
_ZERO_EXPONENT = -133


def fused_step(a: Decoded, b: Decoded, c: torch.Tensor) -> torch.Tensor:
    """One step: decoded ``a``, ``b`` ``[..., 16]`` (broadcast), float32 ``c`` ``[...]`` -> float32 ``[...]``."""
    product = a.value * b.value
    exponent = torch.where(product == 0, _ZERO_EXPONENT, a.exponent + b.exponent)
    c_exponent = torch.where(c == 0, _ZERO_EXPONENT, exponent_of(c))
    largest = torch.maximum(exponent.amax(-1), c_exponent)
    scale = power_of_two(_FRACTION_BITS - largest)
    terms = torch.trunc(product * scale.unsqueeze(-1)).sum(-1) + torch.trunc(c.double() * scale)
    return _truncate_to_float32(terms * power_of_two(largest - _FRACTION_BITS))


def _truncate_to_float32(x: torch.Tensor) -> torch.Tensor:
    """float64 truncated toward zero to float32; infinite from 2^128; -0 as +0; NaN as 0x7FFFFFFF."""
    nearest = x.to(torch.float32)
    beyond = (nearest.double().abs() > x.abs()) & (x.abs() < 2.0**128)
    pattern = nearest.view(torch.int32) - beyond.to(torch.int32)  # one step toward zero
    result = pattern.view(torch.float32)
    pattern = torch.where(result == 0, 0, torch.where(torch.isnan(result), NAN_BITS, pattern))
    return pattern.view(torch.float32)


def dot_k16_bf16(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``c + sum of a * b`` as one k16 step computes it.

    Args:
        a, b: ``[..., 16]``, bfloat16, or float32 that holds bfloat16 values; broadcast against each other.
        c: float32 ``[...]``.

    Returns:
        float32 ``[...]``.

    Raises:
        ValueError: another length or dtype, or values off the bfloat16 grid.
    """
    require_step(a, b, c, K_STEP)
    return fused_step(decode(a, torch.bfloat16), decode(b, torch.bfloat16), c)


def dot_k16_fp16(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """As :func:`dot_k16_bf16`, for float16 operands."""
    require_step(a, b, c, K_STEP)
    return fused_step(decode(a, torch.float16), decode(b, torch.float16), c)


def chain_bf16(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, step: int = K_STEP) -> torch.Tensor:
    """``a @ b.T`` as one ascending chain of k16 steps; K is padded with zeros to whole steps.

    Args:
        a: ``[M, K]``; ``b``: ``[N, K]``; bfloat16, or float32 that holds bfloat16 values.
        c: float32 ``[M, N]`` that the chain continues; +0 without it.
        step: products of one step; the unit has 16 and no other number.

    Returns:
        float32 ``[M, N]``.

    Raises:
        ValueError: another step, shapes that do not fit, another dtype, or values off the bfloat16 grid.
    """
    if step != K_STEP:
        raise ValueError(f"a step of {step} products: bf16 on sm_90 takes {K_STEP}")
    return matrix.matmul(a, b, c, torch.bfloat16, K_STEP, fused_step)
