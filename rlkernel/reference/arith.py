"""Correctly rounded binary32 arithmetic on torch tensors, the same bits on every device. Definitions: docs/numerics.md.

Every function is elementwise over broadcast operands and returns float32. Operands are float32 or bfloat16 tensors
(widened exactly) of one device, or Python numbers that float32 represents exactly. Only operations that IEEE-754
defines are used, one torch call each, so that nothing can be contracted.

Two habits of torch are avoided on purpose: on a GPU, division by a Python number or a CPU scalar multiplies by its
reciprocal (operands are tensors of the device here); on a CPU, ``sqrt`` may come from a vector library whose last bit
is not promised (here it is taken in float64, where an error of one unit cannot change the rounded result).
"""

from __future__ import annotations

import struct

import torch

from hardware.matrix import fused_multiply_add
from rlkernel.errors import ContractError, NumericsError

Operand = torch.Tensor | float
CANONICAL_NAN = 0x7FC00000
CANONICAL_NAN_BF16 = 0x7FC0
_SIGN = -0x80000000


def _device(operands: tuple[Operand, ...]) -> torch.device:
    devices = {x.device for x in operands if isinstance(x, torch.Tensor)}
    if len(devices) != 1:
        names = sorted(str(device) for device in devices)
        raise ContractError(f"operands lie on {', '.join(names) or 'no device'}; tensors of one device are expected")
    return devices.pop()


def constant(value: float, device: torch.device | str) -> torch.Tensor:
    """The number as a float32 scalar of the device. Raises ContractError where float32 would round it."""
    number = float(value)
    try:
        exact = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        exact = None
    if exact != number and number == number:
        raise ContractError(f"{value!r} is not a float32: round it on purpose before it enters an operation")
    return torch.tensor(number, dtype=torch.float32, device=device)


def float32(*operands: Operand) -> list[torch.Tensor]:
    """The operands as float32 tensors of their device.

    Raises:
        ContractError: a tensor of another dtype, tensors of different devices, or a number that float32 would round.
    """
    device = _device(operands)
    result = []
    for x in operands:
        if not isinstance(x, torch.Tensor):
            result.append(constant(x, device))
        elif x.dtype in (torch.float32, torch.bfloat16):
            result.append(x.float())
        else:
            raise ContractError(
                f"an operand has dtype {x.dtype}; the arithmetic is that of float32 (or bfloat16) values"
            )
    return result


def fma32(a: Operand, b: Operand, c: Operand) -> torch.Tensor:
    """``fma.rn.f32``: ``a * b + c`` with one rounding; computed as :func:`hardware.matrix.fused_multiply_add` says."""
    x, y, z = float32(a, b, c)
    return fused_multiply_add(x.double() * y.double(), z.double())


def add(a: Operand, b: Operand) -> torch.Tensor:
    """``add.rn.f32``."""
    x, y = float32(a, b)
    return x + y


def sub(a: Operand, b: Operand) -> torch.Tensor:
    """``add.rn.f32`` of ``a`` and ``-b``."""
    x, y = float32(a, b)
    return x - y


def mul(a: Operand, b: Operand) -> torch.Tensor:
    """``mul.rn.f32``."""
    x, y = float32(a, b)
    return x * y


def div(a: Operand, b: Operand) -> torch.Tensor:
    """``div.rn.f32``.

    Taken in float64 and rounded: a quotient of two 24-bit significands lies on a border of float32's rounding, or at
    least 2^-50 of itself away from it, so that rounding to 53 bits before changes nothing.
    """
    x, y = float32(a, b)
    return (x.double() / y.double()).to(torch.float32)


def sqrt(a: Operand) -> torch.Tensor:
    """``sqrt.rn.f32``, taken in float64 for the reason given at :func:`div`; an error of one unit there is harmless."""
    (x,) = float32(a)
    return torch.sqrt(x.double()).to(torch.float32)


def maximum(a: Operand, b: Operand) -> torch.Tensor:
    """``max.f32``: NaN if either is NaN; +0 is larger than -0."""
    x, y = torch.broadcast_tensors(*float32(a, b))
    larger = torch.where(x > y, x, y)
    # equal values differ at most in the sign of zero: the AND of the bits is +0 unless both are -0
    both = (x.view(torch.int32) & y.view(torch.int32)).view(torch.float32)
    larger = torch.where(x == y, both, larger)
    larger = torch.where(torch.isnan(x), x, larger)
    return torch.where(torch.isnan(y), y, larger)


def largest(values: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``max.f32`` over an axis, any order (it is associative): NaN if any is, -inf for no values."""
    (x,) = float32(values)
    shape = list(x.shape)
    del shape[dim % x.ndim]
    if x.shape[dim] == 0:
        return torch.full(shape, -torch.inf, dtype=torch.float32, device=x.device)
    pattern = x.view(torch.int32)
    key = torch.where(pattern < 0, pattern ^ 0x7FFFFFFF, pattern).amax(dim)  # orders like the values, -0 below +0
    top = torch.where(key < 0, key ^ 0x7FFFFFFF, key).view(torch.float32)
    return torch.where(torch.isnan(x).any(dim), torch.nan, top)


def negative(a: Operand) -> torch.Tensor:
    """``a`` with the other sign, zeros included."""
    (x,) = float32(a)
    return (x.view(torch.int32) ^ _SIGN).view(torch.float32)


def cast_bf16(a: Operand) -> torch.Tensor:
    """``cast.bf16.rn``: the nearest bfloat16 (ties to even), held in float32. NaN keeps its upper bits, made quiet."""
    (x,) = float32(a)
    pattern = x.view(torch.int32)
    rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) & -0x10000
    quiet = (pattern | 0x00400000) & -0x10000
    return torch.where(torch.isnan(x), quiet, rounded).view(torch.float32)


def cast(a: Operand, dtype: str) -> torch.Tensor:
    """Round to the dtype of a contract, ``float32`` (identity) or ``bfloat16``; held in float32."""
    if dtype == "bfloat16":
        return cast_bf16(a)
    if dtype == "float32":
        return float32(a)[0]
    raise ContractError(f"a rounding to {dtype!r} is not defined; defined are float32 and bfloat16")


def canonical_bits(x: torch.Tensor) -> torch.Tensor:
    """Bits for a comparison between targets, every NaN as one pattern: int32, from float32 or bfloat16 tensors.

    float32 gives its 32 bits (NaN: 0x7FC00000), bfloat16 its 16 bits, zero-extended (NaN: 0x7FC0).
    """
    if x.dtype == torch.float32:
        return torch.where(torch.isnan(x), CANONICAL_NAN, x.view(torch.int32))
    if x.dtype == torch.bfloat16:
        pattern = x.view(torch.int16).to(torch.int32) & 0xFFFF
        return torch.where(torch.isnan(x), CANONICAL_NAN_BF16, pattern)
    raise ContractError(f"bits of {x.dtype} are not compared here; float32 and bfloat16 are")


def require_ieee(device: torch.device | str) -> None:
    """Probe that the device keeps subnormals in conversion and arithmetic.

    Raises:
        NumericsError: they are flushed, for instance because of ``torch.set_flush_denormal(True)``.
    """
    tiny = torch.full((64,), 3, dtype=torch.int32, device=device).view(torch.float32)
    least = torch.full((64,), 0x00800000, dtype=torch.int32, device=device).view(torch.float32)
    half = torch.full((64,), 0.5, dtype=torch.float32, device=device)
    results = {
        "a sum of subnormals": (tiny + tiny, 6),
        "a product below 2^-126": (least * half, 0x00400000),
        "a conversion from float64": ((least.double() * half.double()).to(torch.float32), 0x00400000),
        "a conversion to float64": ((tiny.double() * 2.0).to(torch.float32), 6),
    }
    for what, (result, pattern) in results.items():
        if not bool((result.view(torch.int32) == pattern).all()):
            raise NumericsError(f"{device}: {what} is flushed to zero; the contract's arithmetic keeps subnormals")
