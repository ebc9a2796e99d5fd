"""Starts the digest kernels on torch tensors of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton

from rlkernel.errors import ContractError
from rlkernel.kernels.triton import digest as kernels
from rlkernel.kernels.triton.launch import _options

GROUPS, STEPS, WARPS = 256, 8, 4
"""Of a program: groups of 16 bytes in a step, steps, warps."""
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_CANONICAL = {torch.bfloat16: 16, torch.float32: 32}


def tensor_digest(tensor: torch.Tensor, index_offset: int = 0, *, canonical: bool = False) -> torch.Tensor:
    """Both lanes of a tensor's bits, on its device.

    Args:
        tensor: any shape, C-contiguous, elements of 1, 2, 4 or 8 bytes; bits are zero-extended, the index is row-major.
        index_offset: index of the first element, so that the lanes of consecutive parts add up (mod 2^64).
        canonical: map every NaN to one pattern first, as digests of activations do (float32 and bfloat16).

    Returns:
        int64 [2]; read as unsigned it is what ``rlkernel.kernels.cpu.digest.tensor_digest`` returns.

    Raises:
        ContractError: elements of another size, a layout that is not C-contiguous, or a dtype without a canonical NaN.
    """
    size = tensor.element_size()
    if size not in _BITS or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise ContractError(f"a tensor digest takes elements of 1, 2, 4 or 8 bytes; {tensor.dtype} is none of them")
    if not tensor.is_contiguous():
        raise ContractError(f"a tensor digest takes a C-contiguous tensor; its strides are {tensor.stride()}")
    if canonical and tensor.dtype not in _CANONICAL:
        raise ContractError(f"{tensor.dtype} has no canonical NaN here; float32 and bfloat16 have")
    count, columns = tensor.numel(), 16 // size
    programs = triton.cdiv(count, GROUPS * columns * STEPS)
    lanes = torch.empty((programs, 2), dtype=torch.int64, device=tensor.device)
    if programs:
        kernels.tensor_digest[(programs,)](
            tensor.view(-1).view(_BITS[size]),
            lanes,
            count,
            index_offset,
            CANONICAL=canonical,
            BITS=8 * size,
            GROUPS=GROUPS,
            COLUMNS=columns,
            STEPS=STEPS,
            num_warps=WARPS,
            **_options(),
        )
    return lanes.sum(0)


@dataclass(frozen=True)
class Part:
    """Memory of a tensor. ``rows``: its rows in the order of its index, int64, of a matrix that holds others as well;
    without them it is all of ``tensor``, in order. ``tensor`` is C-contiguous and keeps its memory."""

    tensor: torch.Tensor
    rows: np.ndarray | None = None


class TensorDigests:
    """Digests of many tensors of one dtype and device by one kernel, as often as wanted.

    Raises ContractError for a dtype of neither 2 nor 4 bytes, or a layout that is not C-contiguous.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)  # keeps the memory that the addresses are of
        size = parts[0].tensor.element_size()
        self._bits, self._columns = 8 * size, 16 // size
        most, tables = GROUPS * self._columns * STEPS, []
        for part in parts:
            tensor = part.tensor
            if tensor.element_size() != size or size not in (2, 4) or not tensor.is_contiguous():
                raise ContractError(
                    f"digests of many tensors take C-contiguous elements of 2 or of 4 bytes, all of one size; found "
                    f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
                )
            width = tensor.numel() if part.rows is None else tensor.shape[1]
            begins = np.arange(0, width, most)  # pieces of a row
            rows = np.zeros(1, np.int64) if part.rows is None else part.rows
            places = rows[:, None] * width + begins
            offsets = np.arange(len(rows))[:, None] * width + begins
            counts = np.broadcast_to(np.minimum(width - begins, most), places.shape)
            tables.append((tensor.data_ptr() + size * places.ravel(), counts.ravel(), offsets.ravel()))
        addresses, counts, offsets = (np.concatenate(columns) for columns in zip(*tables, strict=True))
        self._aligned = not (addresses % 16).any() and not (counts % self._columns).any()
        device = parts[0].tensor.device
        self._arguments = [
            torch.from_numpy(np.ascontiguousarray(values)).to(device)
            for values in (addresses.astype(np.int64), counts.astype(np.int32), offsets.astype(np.int64))
        ]
        ends = np.cumsum([len(table[0]) for table in tables])
        self._ends = torch.from_numpy(ends).to(device)

    def __call__(self) -> torch.Tensor:
        """int64 [parts, 2], on the device: each row is what :func:`tensor_digest` returns for that tensor now."""
        count, device = len(self._arguments[0]), self._ends.device
        lanes = torch.zeros((count + 1, 2), dtype=torch.int64, device=device)
        if count:
            kernels.pieces_digest[(count,)](
                *self._arguments,
                lanes[1:],
                ALIGNED=self._aligned,
                BITS=self._bits,
                GROUPS=GROUPS,
                COLUMNS=self._columns,
                num_warps=WARPS,
                **_options(),
            )
        until = lanes.cumsum(0)[self._ends]  # mod 2^64, so that differences are exact
        return torch.diff(until, dim=0, prepend=until.new_zeros((1, 2)))


def rows_digest(z: torch.Tensor) -> torch.Tensor:
    """Distribution digests of rows of logits: float32 [R, V], C-contiguous -> int64 [R, 2]; every NaN is one pattern.

    Raises:
        ContractError: another dtype, rank or layout.
    """
    if z.dtype != torch.float32 or z.ndim != 2 or not z.is_contiguous():
        raise ContractError(f"row digests take a C-contiguous float32 matrix, not {z.dtype} {list(z.shape)}")
    rows, columns = z.shape
    programs = triton.cdiv(columns, GROUPS * 4 * STEPS)
    lanes = torch.empty((rows, programs, 2), dtype=torch.int64, device=z.device)
    if lanes.numel():
        kernels.rows_digest[(rows, programs)](
            z.view(torch.uint32), lanes, columns, GROUPS=GROUPS, COLUMNS=4, STEPS=STEPS, num_warps=WARPS, **_options()
        )
    return lanes.sum(1)
