"""Conversion of weights between floating-point types: exact widening, or one rounding by integer operations."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.errors import ModelError

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
TORCH_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_dtype(dtype: str) -> Dtype:
    """Return ``dtype``. Raises ModelError unless it is one of the contract's two."""
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of the contract's: {', '.join(DTYPES)}")
    return dtype


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Nearest even bfloat16 of float32 values, as bits. NaN keeps its sign and upper payload and becomes quiet.

    The same function as the primitive ``cast.bf16``, for arrays on the host.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits | np.uint32(0x00400000)) >> np.uint32(16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def _float16_to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Exact widening by integers: no instruction whose flushing of subnormals a thread could have changed."""
    half = tensor.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    sign, exponent, fraction = (half & 0x8000) << 16, (half >> 10) & 0x1F, half & 0x3FF
    normal = ((exponent + 112) << 23) | (fraction << 13)
    special = 0x7F800000 | (fraction << 13)
    # a subnormal is fraction * 2^-24: the float32 of the integer fraction, its exponent lowered by 24
    subnormal = np.where(fraction > 0, fraction.astype(np.float32).view(np.uint32) - np.uint32(24 << 23), 0)
    bits = np.where(exponent == 31, special, np.where(exponent == 0, subnormal, normal)) | sign
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def convert(tensor: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """The tensor in the contract's dtype: itself, widened exactly, or rounded once to nearest even.

    Accepts float32, bfloat16 and float16; raises ModelError for any other type.
    """
    if tensor.dtype == TORCH_DTYPES[dtype]:
        return tensor
    if tensor.dtype == torch.bfloat16:
        bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << np.uint32(16)
        return torch.from_numpy(bits.view(np.float32))
    if tensor.dtype == torch.float16:
        wide = _float16_to_float32(tensor)
    elif tensor.dtype == torch.float32:
        wide = tensor
    else:
        raise ModelError(f"weights of type {tensor.dtype} cannot be converted; float32, bfloat16 and float16 can")
    if dtype == "float32":
        return wide
    narrow = bfloat16_bits(wide.contiguous().numpy())
    return torch.from_numpy(narrow.view(np.int16)).view(torch.bfloat16)
