"""Starts the head's warp-specialised kernel of sm_90. Tiles, stages and programs are arguments: they change no bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlkernel.contract.entries import VOCABULARY_LEAF
from rlkernel.errors import ContractError
from rlkernel.kernels.triton.launch import compiler_options
from rlkernel.kernels.triton.logprob_gradient_hopper import linear_gradient_hopper
from rlkernel.kernels.triton.logprob_hopper import linear_leaves_hopper

if TYPE_CHECKING:
    from rlkernel.kernels.triton.launch_logprob import Partials

_ALIGNMENT = 16  # bytes, of the address and the rows of what the TMA reads


@dataclass(frozen=True)
class HopperHeadTile:
    """Tuning. Nothing here is part of the contract. ``registers``: of a thread that makes statistics."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    stages: int = 5
    registers: int = 128
    num_warps: int = 8


def hopper_leaves(
    x: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    division: tuple[str, float],
    partials: Partials,
    tile: HopperHeadTile | None = None,
) -> None:
    """Partial results of bfloat16 x [R, H] and w [V, H], made on sm_90 while the matrix unit works on the next tile.

    Args:
        division: how the temperature divides, and the factor (``launch_logprob.division``).
        partials: of R rows and the vocabulary's leaves, filled.

    Raises:
        ContractError: operands whose address or rows the TMA does not take, or another dtype.
    """
    tile = tile or HopperHeadTile()
    (rows, depth), vocabulary = x.shape, len(w)
    programs, operands = _operands(x, w, tile)
    how, factor = division
    linear_leaves_hopper[(programs,)](
        *operands,
        targets,
        *partials.arguments(),
        rows,
        vocabulary,
        depth,
        partials.leaves,
        programs,
        factor,
        0,
        DIVISION=how,
        MASKED=vocabulary % VOCABULARY_LEAF != 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        STAGES=tile.stages,
        REGISTERS=tile.registers,
        num_warps=tile.num_warps,
        **compiler_options("cuda"),
    )


def _operands(
    x: torch.Tensor, w: torch.Tensor, tile: HopperHeadTile
) -> tuple[int, tuple[TensorDescriptor, TensorDescriptor]]:
    """Programs, and x [M, K] and w [N, K] as the TMA reads them."""
    depth = x.shape[1]
    for name, operand in (("x", x), ("w", w)):
        if operand.dtype != torch.bfloat16 or operand.data_ptr() % _ALIGNMENT or depth * 2 % _ALIGNMENT:
            raise ContractError(
                f"{name} of the head is {operand.dtype} with rows of {depth} elements; gemm='hopper' takes bfloat16 "
                f"whose address and rows are aligned to {_ALIGNMENT} bytes"
            )
    if tile.block_n not in (128, 256):
        raise ContractError(f"block_n of the head is {tile.block_n}; a tile holds one or two leaves: 128 or 256")
    tiles = triton.cdiv(len(x), tile.block_m) * triton.cdiv(len(w), tile.block_n)
    programs = min(torch.cuda.get_device_properties(x.device).multi_processor_count, tiles)
    layout = gl.NVMMASharedLayout.get_default_for([tile.block_m, tile.block_k], gl.bfloat16)
    return (
        programs,
        (
            TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k], layout),
            TensorDescriptor.from_tensor(w, [tile.block_n, tile.block_k], layout),
        ),
    )


def hopper_gradient(
    x: torch.Tensor,
    w: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    dz: torch.Tensor,
    first: int,
    division: tuple[str, float],
    divisor: float,
    tile: HopperHeadTile | None = None,
) -> None:
    """Gradient dz [R, C] of the logits of C columns of the vocabulary, from ``first`` on, from x [R, H] and w [C, H].

    Args:
        rows: maximum, log-sum, target and coefficient of each row.
        division, divisor: how the temperature divides logits, and the temperature.

    Raises:
        ContractError: operands that the TMA does not take.
    """
    tile = tile or HopperHeadTile()
    programs, operands = _operands(x, w, tile)
    how, factor = division
    linear_gradient_hopper[(programs,)](
        *operands,
        *rows,
        dz,
        len(x),
        len(w),
        x.shape[1],
        first,
        programs,
        factor,
        divisor,
        DIVISION=how,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        STAGES=tile.stages,
        REGISTERS=tile.registers,
        num_warps=tile.num_warps,
        **compiler_options("cuda"),
    )
