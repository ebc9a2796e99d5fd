"""Starts the digest kernels on torch tensors of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
        size, device = parts[0].tensor.element_size(), parts[0].tensor.device
        for part in parts:
            tensor = part.tensor
            if tensor.element_size() != size or size not in _BITS_OF_MANY or not tensor.is_contiguous():
                raise ContractError(
                    f"digests of many tensors take C-contiguous elements of 2 or of 4 bytes, all of one size; found "
                    f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
                )
        if all(part.rows is None for part in parts):
            self._pieces = _whole(tuple((p.tensor.data_ptr(), p.tensor.numel()) for p in parts), size, device)
        else:
            rows = [_NO_ROWS if part.rows is None else part.rows for part in parts]
            widths = [p.tensor.numel() if p.rows is None else p.tensor.shape[1] for p in parts]
            addresses = [part.tensor.data_ptr() for part in parts]
            self._pieces = _pieces(list(zip(addresses, widths, rows, strict=True)), size, device)

    def __call__(self) -> torch.Tensor:
        """int64 [parts, 2], on the device: each row is what :func:`tensor_digest` returns for that tensor now."""
        pieces = self._pieces
        count = len(pieces.addresses)
        # lanes lie side by side, for sums along the innermost axis are the fast ones; the first column is zero
        lanes = torch.zeros((2, count + 1), dtype=torch.int64, device=pieces.ends.device)
        if count:
            kernels.pieces_digest[(count,)](
                pieces.addresses,
                pieces.counts,
                pieces.offsets,
                lanes[:, 1:],
                count + 1,
                ALIGNED=pieces.aligned,
                BITS=8 * pieces.size,
                GROUPS=GROUPS,
                COLUMNS=16 // pieces.size,
                num_warps=WARPS,
                **_options(),
            )
        until = lanes.cumsum(1)[:, pieces.ends]  # mod 2^64, so that differences are exact
        return torch.diff(until, dim=1, prepend=until.new_zeros((2, 1))).T


_BITS_OF_MANY = (2, 4)
_NO_ROWS = np.zeros(1, np.int64)


@dataclass(frozen=True)
class _Pieces:
    """Where the elements of some tensors lie, on the device; ``ends``: the number of pieces up to each tensor's end."""

    addresses: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    ends: torch.Tensor
    aligned: bool
    size: int


@lru_cache(maxsize=8)  # the same tensors step after step; addresses alone, no memory is kept
def _whole(tensors: tuple[tuple[int, int], ...], size: int, device: torch.device) -> _Pieces:
    return _pieces([(address, count, _NO_ROWS) for address, count in tensors], size, device)


def _pieces(parts: Sequence[tuple[int, int, np.ndarray]], size: int, device: torch.device) -> _Pieces:
    """Of parts (address, elements of a row, rows)."""
    columns = 16 // size
    most, tables = GROUPS * columns * STEPS, []
    for address, width, rows in parts:
        begins = np.arange(0, width, most)  # pieces of a row
        places = rows[:, None] * width + begins
        offsets = np.arange(len(rows))[:, None] * width + begins
        counts = np.broadcast_to(np.minimum(width - begins, most), places.shape)
        tables.append((address + size * places.ravel(), counts.ravel(), offsets.ravel()))
    addresses, counts, offsets = (np.concatenate(values) for values in zip(*tables, strict=True))
    aligned = not (addresses % 16).any() and not (counts % columns).any()
    ends = np.cumsum([len(table[0]) for table in tables])
    placed = [
        torch.from_numpy(np.ascontiguousarray(values)).to(device)
        for values in (addresses.astype(np.int64), counts.astype(np.int32), offsets.astype(np.int64), ends)
    ]
    return _Pieces(placed[0], placed[1], placed[2], placed[3], aligned, size)


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
