"""Starts the chains over rows on CUDA. Blocks and stages change no bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from rlkernel.errors import ContractError
from rlkernel.kernels.triton.chains_hopper import column_chain as kernel
from rlkernel.kernels.triton.launch import compiler_options

_BYTES = 16


@dataclass(frozen=True)
class Rows:
    """Where row (token, head) lies: ((token * groups + head // per) * slots + first + head % per) * stride."""

    stride: int
    groups: int = 1
    per: int = 1
    slots: int = 1
    first: int = 0


@dataclass(frozen=True)
class ChainTuning:
    """Columns of a program, rows copied at a time, and blocks of rows in shared memory."""

    columns: int = 32
    block: int = 32
    stages: int = 8


def copies(width: int, *operands: torch.Tensor) -> bool:
    """Whether rows of ``width`` elements of these tensors can be copied 16 bytes at a time, on CUDA."""
    aligned = all(x.data_ptr() % _BYTES == 0 and width * x.element_size() % _BYTES == 0 for x in operands)
    return aligned and not torch.version.hip


def column_chain(
    dy: torch.Tensor,
    total: torch.Tensor,
    *,
    x: torch.Tensor | None = None,
    inv_rms: torch.Tensor | None = None,
    rows: Rows | None = None,
    tuning: ChainTuning | None = None,
) -> None:
    """``total = fma(dy[t], x[t] * inv_rms[t], total)`` over rows t ascending, or ``add(total, dy[t])`` without x.

    Args:
        dy: [R, N]; ``total``: float32 [N], in place; ``x``: rows at ``rows``, ``inv_rms``: float32 [R].

    Raises:
        ContractError: rows that :func:`copies` refuses.
    """
    tuning, width, vector = tuning or ChainTuning(), total.shape[0], _BYTES // dy.element_size()
    rows = rows or Rows(width)
    if not copies(width, dy, dy if x is None else x):
        raise ContractError(f"rows of {width} elements of {dy.dtype} cannot be copied {_BYTES} bytes at a time")
    if not dy.numel():
        return
    kernel[(triton.cdiv(width, tuning.columns),)](
        dy, dy if x is None else x, total if inv_rms is None else inv_rms, total,
        dy.numel() // width, width // vector, rows.stride // vector,
        GROUPS=rows.groups, PER=rows.per, SLOTS=rows.slots, FIRST=rows.first,
        BLOCK=tuning.block, COLUMNS=tuning.columns, STAGES=tuning.stages, NORM=x is not None,
        VECTOR=vector, num_warps=1, **compiler_options("cuda"),
    )  # fmt: skip
