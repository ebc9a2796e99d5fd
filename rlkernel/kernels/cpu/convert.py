"""Exact conversion between bfloat16 and float32 storage, and the argument checks of the row kernels.

Only integer operations touch the values. The casts of other libraries are not used: they may flush subnormals and give
NaN another pattern.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlkernel.errors import ContractError

Float32 = npt.NDArray[np.float32]
_CHUNK = 1 << 18  # elements converted at a time: temporaries stay in cache


def widen(bits: npt.NDArray[np.uint16]) -> Float32:
    """The float32 of the same value for every bfloat16 bit pattern (uint16, any shape); NaN payloads are kept."""
    if bits.dtype != np.uint16:
        raise ContractError(f"bfloat16 values are given as their uint16 bits, not as {bits.dtype}")
    wide = np.empty(bits.shape, dtype=np.uint32)
    np.left_shift(bits, np.uint32(16), out=wide, dtype=np.uint32)
    return wide.view(np.float32)


def narrow(values: Float32) -> npt.NDArray[np.uint16]:
    """bfloat16 bits (uint16) of float32 values of any shape, rounded to nearest even.

    A value that is on the bfloat16 grid already keeps its upper bits exactly, whatever they are: ``narrow(widen(b))``
    is b for all 65,536 patterns. Any other NaN keeps its upper bits and becomes quiet, as ``cast.bf16`` does.
    """
    if values.dtype != np.float32:
        raise ContractError(f"only float32 values are narrowed to bfloat16, not {values.dtype}")
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    result = np.empty(flat.size, dtype=np.uint16)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        upper = part >> np.uint32(16)
        rounded = (part + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
        inexact_nan = ((part & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)) & ((part & np.uint32(0xFFFF)) != 0)
        exact = (part & np.uint32(0xFFFF)) == 0
        rounded = np.where(exact, upper, np.where(inexact_nan, upper | np.uint32(0x40), rounded))
        result[start : start + _CHUNK] = rounded
    return result.reshape(values.shape)


def as_float32(tensor: torch.Tensor) -> Float32:
    """A CPU tensor's values as a C-contiguous float32 array.

    A contiguous float32 tensor is not copied: both share memory. A bfloat16 tensor is widened exactly.

    Raises:
        ContractError: the tensor is neither float32 nor bfloat16, or is not on the CPU.
    """
    if tensor.device.type != "cpu":
        raise ContractError(f"a tensor on {tensor.device} reached a CPU kernel; move it to the CPU first")
    plain = tensor.detach().contiguous()
    if plain.dtype == torch.float32:
        return plain.numpy()
    if plain.dtype == torch.bfloat16:
        return widen(plain.view(torch.int16).numpy().view(np.uint16))
    raise ContractError(f"a tensor of {tensor.dtype} is not a value of the contract; float32 and bfloat16 are")


def from_float32(array: Float32, dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor of ``dtype`` (torch.float32: shares memory if C-contiguous; torch.bfloat16: :func:`narrow`).

    Raises:
        ContractError: the array is not float32, or ``dtype`` is another one.
    """
    if array.dtype != np.float32:
        raise ContractError(f"an array of {array.dtype} cannot become {dtype}; float32 can")
    if dtype == torch.float32:
        return torch.from_numpy(np.ascontiguousarray(array))
    if dtype == torch.bfloat16:
        return torch.from_numpy(narrow(array).view(np.int16)).view(torch.bfloat16)
    raise ContractError(f"{dtype} is not a dtype of the contract; torch.float32 and torch.bfloat16 are")


def require(what: str, array: Any, dtype: Any, *shape: int | None) -> None:
    """Refuse an argument that a kernel was not compiled for; None in ``shape`` admits any length.

    Another dtype or memory layout would not fail in Numba: it would compile a second kernel with other arithmetic.

    Raises:
        ContractError: ``array`` is not a C-contiguous NumPy array of ``dtype`` and ``shape``.
    """
    wanted = f"{np.dtype(dtype)}{_shape_text(shape)}"
    if not isinstance(array, np.ndarray):
        raise ContractError(f"{what} is a {type(array).__name__}; a NumPy array {wanted} is required")
    fits = array.ndim == len(shape) and all(
        want is None or want == have for want, have in zip(shape, array.shape, strict=True)
    )
    if array.dtype != np.dtype(dtype) or not fits:
        raise ContractError(f"{what} is {array.dtype}{_shape_text(array.shape)}; {wanted} is required")
    if not array.flags.c_contiguous:
        raise ContractError(f"{what} is not C-contiguous (strides {array.strides}); pass np.ascontiguousarray of it")


def _shape_text(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"


def require_range(what: str, values: npt.NDArray[Any], low: int, high: int) -> None:
    """Refuse integers outside ``low <= value < high``: a kernel would read or write outside its arrays.

    Raises:
        ContractError: names the first value that is outside, and its index.
    """
    if values.size == 0:
        return
    if int(values.min()) < low or int(values.max()) >= high:
        index = int(np.argmax((values < low) | (values >= high)))
        raise ContractError(
            f"{what}[{index}] is {int(values.reshape(-1)[index])}; it must be at least {low} and below {high}"
        )
