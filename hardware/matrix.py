"""What the models of all matrix units share: exact fma, decoding, exponents, a chain of steps. All on torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

NAN_BITS = 0x7FFFFFFF
_SMALLEST_EXPONENT = {torch.bfloat16: -126, torch.float16: -14}
_PRODUCTS_AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 27}  # bounds the memory of a step, nothing else


class Decoded(NamedTuple):
    """Values as float64 and their exponents as int32, of one shape."""

    value: torch.Tensor
    exponent: torch.Tensor

    def at(self, index: object) -> Decoded:
        """The same index of both parts."""
        return Decoded(self.value[index], self.exponent[index])  # type: ignore[index]


Step = Callable[[Decoded, Decoded, torch.Tensor], torch.Tensor]


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float64, for integers from -1022 to 1023."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def exponent_of(x: torch.Tensor, smallest: int = -126) -> torch.Tensor:
    """floor(log2 |x|) of float32 values as int32, at least ``smallest`` (zeros and subnormals included)."""
    return ((x.view(torch.int32) >> 23) & 0xFF).clamp(min=smallest + 127) - 127


def fused_multiply_add(product: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """``fma.rn.f32`` of float64 operands that are exact: a product of two float32, and a float32 -> float32.

    The sum is rounded to odd in float64 (TwoSum gives its error); 53 bits are enough (53 >= 24 + 2) that the conversion
    to float32, subnormals included, then equals one rounding of the exact value.
    """
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact = (error != 0) & torch.isfinite(total)
    away = inexact & ((error < 0) != (total < 0))  # the exact value is nearer to zero than total
    odd = (total.view(torch.int64) - away.to(torch.int64)) | inexact.to(torch.int64)
    return odd.view(torch.float64).to(torch.float32)


def decode(x: torch.Tensor, dtype: torch.dtype) -> Decoded:
    """Operands of a unit: tensors of ``dtype`` (bfloat16 or float16), or float32 tensors that hold values of it.

    Raises:
        ValueError: another dtype, or a float32 value that ``dtype`` does not represent.
    """
    if x.dtype not in (torch.float32, dtype):
        raise ValueError(f"an operand has dtype {x.dtype}; the unit takes {dtype}, or float32 that holds such values")
    wide = x.float()
    if x.dtype == torch.float32:
        off_grid = (wide.to(dtype).float() != wide) & ~torch.isnan(wide)
        if bool(off_grid.any()):
            count, example = int(off_grid.sum()), float(wide[off_grid][0])
            raise ValueError(f"{count} of {wide.numel()} operands are no {dtype} values, for instance {example!r}")
    return Decoded(wide.double(), exponent_of(wide, _SMALLEST_EXPONENT[dtype]))


def require_step(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, length: int) -> None:
    """Raises ValueError where operands of one step lack ``length`` elements, or the accumulator is not float32."""
    if a.shape[-1] != length or b.shape[-1] != length:
        raise ValueError(f"a step takes {length} products; the operands have {a.shape[-1]} and {b.shape[-1]} elements")
    if c.dtype != torch.float32:
        raise ValueError(f"the accumulator has dtype {c.dtype}; it is float32")


def _padded(x: Decoded, length: int) -> Decoded:
    missing = -x.value.shape[-1] % length
    if not missing:
        return x
    return Decoded(*(torch.nn.functional.pad(part, (0, missing)) for part in x))


def chain(a: Decoded, b: Decoded, c: torch.Tensor, length: int, step: Step) -> torch.Tensor:
    """Continue the accumulators ``c`` over the last axis of ``a`` and ``b``, ascending, ``length`` products a step.

    Args:
        a, b: ``[..., K]``, broadcast against each other to ``[*c.shape, K]``; padded with zeros to whole steps.
        c: float32 ``[...]``.

    Returns:
        float32 ``[...]``.
    """
    a, b = _padded(a, length), _padded(b, length)
    depth, rows = a.value.shape[-1], c.shape[0]
    share = max(1, c[0].numel() * length) if rows else 1
    block = max(1, _PRODUCTS_AT_ONCE.get(c.device.type, 1 << 21) // share)
    parts = []
    for first in range(0, rows, block):
        rows_of = slice(first, first + block)
        left = a.at(rows_of) if a.value.shape[0] > 1 else a
        right = b.at(rows_of) if b.value.shape[0] > 1 else b
        total = c[rows_of]
        for k in range(0, depth, length):
            of_step = (..., slice(k, k + length))
            total = step(left.at(of_step), right.at(of_step), total)
        parts.append(total)
    return torch.cat(parts) if parts else c


def matmul(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, dtype: torch.dtype, length: int, step: Step
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T`` as one ascending chain of steps from ``c`` (+0 without it) -> float32 ``[M, N]``.

    Raises:
        ValueError: shapes that do not fit, another dtype, or values that ``dtype`` does not represent.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"operands [M, K] and [N, K] are expected, not {list(a.shape)} and {list(b.shape)}")
    shape = (a.shape[0], b.shape[0])
    total = torch.zeros(shape, dtype=torch.float32, device=a.device) if c is None else c
    if total.shape != shape or total.dtype != torch.float32:
        raise ValueError(f"the accumulator is float32 {list(shape)}, not {total.dtype} {list(total.shape)}")
    left, right = decode(a, dtype).at((slice(None), None)), decode(b, dtype).at(None)
    return chain(left, right, total, length, step)
