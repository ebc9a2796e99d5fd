"""The arithmetic of the matrix cores of gfx942 (MI300X): MFMA with bf16 or fp16 operands, and with fp32 operands.

**bf16, fp16**: groups of 8 products along k, ascending; ``v_mfma_f32_16x16x16`` is two groups, rounded to float32
between them. Write a value as ``s * 2^e`` with 1 <= |s| < 2; subnormals and a zero accumulator keep the smallest
exponent; zero products have none; a product has e = e_a + e_b and is not renormalised, and one that reaches 2^128 is
infinite. Then:

1. e_dot is the largest exponent over the products; each is truncated toward zero to a multiple of 2^(e_dot - 24); they
   are summed exactly;
2. E = max(e_dot, e_c); the sum is rounded down (floor) to a multiple of 2^(E - 32), c to one of 2^(E - 24);
3. they are added exactly; with e the exponent of the result (at least -126), it is rounded down to a multiple of
   2^(e - 31), and then to the nearest float32, ties to even. Nothing is flushed. NaN is 0x7FFFFFFF.

The floors make it asymmetric in sign. The model was published by MMA-Sim (arXiv 2511.10909). This is an implementation
of our own, compared with its (benchmarks/mma_oracle.py); no MI300X was at hand: it is a prediction of the device.

**fp32**: a chain of fused multiply-adds along k, ascending.

Tensors may lie on any device; the bits are the same.
"""

from __future__ import annotations

import torch

from hardware import matrix
from hardware.matrix import NAN_BITS, Decoded, decode, exponent_of, power_of_two, require_step

K_STEP = 8
_NO_EXPONENT = -900  # below every exponent, and a power of two of float64
_PRODUCT_BITS = 24
_SUM_BITS = 32
_ACCUMULATOR_BITS = 24
_RESULT_BITS = 31


def _exponent64(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 |x|) of float64 values as int64, at least -126."""
    return ((x.view(torch.int64) >> 52) & 0x7FF).clamp(min=1023 - 126) - 1023


def _floor_to(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """float64 rounded down to a multiple of 2^exponent."""
    return torch.floor(x * power_of_two(-exponent)) * power_of_two(exponent)


def fused_step(a: Decoded, b: Decoded, c: torch.Tensor) -> torch.Tensor:
    """One group: decoded ``a``, ``b`` ``[..., 8]`` (broadcast), float32 ``c`` ``[...]`` -> float32 ``[...]``."""
    product = a.value * b.value
    product = torch.where(product.abs() >= 2.0**128, product * torch.inf, product)
    exponent = torch.where(product == 0, _NO_EXPONENT, a.exponent + b.exponent)
    of_dot = exponent.amax(-1)
    unit = of_dot - _PRODUCT_BITS
    dot = torch.trunc(product * power_of_two(-unit).unsqueeze(-1)).sum(-1) * power_of_two(unit)
    top = torch.maximum(of_dot, exponent_of(c))
    total = _floor_to(dot, top - _SUM_BITS) + _floor_to(c.double(), top - _ACCUMULATOR_BITS)
    total = _floor_to(total, _exponent64(total) - _RESULT_BITS)
    nearest = total.to(torch.float32)
    return torch.where(torch.isnan(nearest), NAN_BITS, nearest.view(torch.int32)).view(torch.float32)


def dot_k8_bf16(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``c + sum of a * b`` as one group of 8 computes it.

    Args:
        a, b: ``[..., 8]``, bfloat16, or float32 that holds bfloat16 values; broadcast against each other.
        c: float32 ``[...]``.

    Returns:
        float32 ``[...]``.

    Raises:
        ValueError: another length or dtype, or values off the bfloat16 grid.
    """
    require_step(a, b, c, K_STEP)
    return fused_step(decode(a, torch.bfloat16), decode(b, torch.bfloat16), c)


def dot_k8_fp16(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """As :func:`dot_k8_bf16`, for float16 operands."""
    require_step(a, b, c, K_STEP)
    return fused_step(decode(a, torch.float16), decode(b, torch.float16), c)


def chain_bf16(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, step: int = K_STEP) -> torch.Tensor:
    """``a @ b.T`` as one ascending chain of groups of 8; K is padded with zeros to whole groups.

    Args:
        a: ``[M, K]``; ``b``: ``[N, K]``; bfloat16, or float32 that holds bfloat16 values.
        c: float32 ``[M, N]`` that the chain continues; +0 without it.
        step: products of one group; the unit has 8 and no other number.

    Returns:
        float32 ``[M, N]``.

    Raises:
        ValueError: another step, shapes that do not fit, another dtype, or values off the bfloat16 grid.
    """
    if step != K_STEP:
        raise ValueError(f"a step of {step} products: bf16 on gfx942 takes {K_STEP}")
    return matrix.matmul(a, b, c, torch.bfloat16, K_STEP, fused_step)


def chain_f32_rows(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The fp32 MFMA's chain of fused multiply-adds along the last axis: float32 ``[..., K]``, ``c`` ``[...]``."""
    left, right, total = a.double(), b.double(), c
    for k in range(a.shape[-1]):
        total = matrix.fused_multiply_add(left[..., k] * right[..., k], total.double())
    return total


def chain_f32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b.T`` on the fp32 MFMA: one ascending chain of fused multiply-adds, which is the portable chain.

    Args:
        a: float32 ``[M, K]``; ``b``: float32 ``[N, K]``.
        c: float32 ``[M, N]`` that the chain continues; +0 without it.

    Returns:
        float32 ``[M, N]``.
    """
    total = torch.zeros((a.shape[0], b.shape[0]), dtype=torch.float32, device=a.device) if c is None else c
    return chain_f32_rows(a[:, None, :], b[None, :, :], total)
