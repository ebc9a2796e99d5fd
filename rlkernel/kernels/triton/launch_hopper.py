"""Starts the warp-specialised GEMM of sm_90. Tiles, stages and programs are arguments: they change no bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlkernel.errors import ContractError
from rlkernel.kernels.triton.gemm_hopper import gemm_hopper as kernel
from rlkernel.kernels.triton.launch import LEAVES, compiler_options, product_output, product_shape, require_product
from rlkernel.kernels.triton.tiles import SHARED_BYTES, HopperTile

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
_ALIGNMENT = 16  # bytes, of the address and the rows of what the TMA reads and writes
_SMALLEST = HopperTile(64, 64, 16, 8, 4, 1, 4)


def unfit(
    a: torch.Tensor, b: torch.Tensor, columns: int, out_size: int, leaves: int, depth: int, tile: HopperTile
) -> str:
    """Why the kernel does not take these operands, in words; empty where it does.

    ``columns``, ``out_size``: of the result, which must begin at a multiple of 16 bytes; ``depth``: K.
    """
    for name, x in (("a", a), ("b", b)):
        if x.dtype != torch.bfloat16:
            return f"operand {name} is {x.dtype}, the matrix unit takes bfloat16"
        if x.data_ptr() % _ALIGNMENT or x.shape[1] * x.element_size() % _ALIGNMENT:
            return f"operand {name}, or its rows of {x.shape[1]} elements, is not aligned to {_ALIGNMENT} bytes"
    if columns * out_size % _ALIGNMENT:
        return f"rows of {columns} columns of the result are not aligned to {_ALIGNMENT} bytes"
    if tile.shared_bytes(leaves, out_size) > SHARED_BYTES:
        return f"{tile} takes {tile.shared_bytes(leaves, out_size)} bytes of shared memory of {SHARED_BYTES}"
    if leaves > 1 and depth % (leaves * tile.block_k):
        return f"leaves of {depth // leaves} in k are no multiple of block_k {tile.block_k}"
    return ""


def fitting(
    a: torch.Tensor, b: torch.Tensor, columns: int, out_size: int, leaves: int, depth: int, tile: HopperTile
) -> HopperTile | None:
    """The tile, or a smaller one that the kernel takes these operands with; None where it takes none."""
    if not unfit(a, b, columns, out_size, leaves, depth, tile):
        return tile
    smaller = (replace(tile, parts=2), replace(tile, block_k=32), replace(tile, block_k=16), _SMALLEST)
    return next((t for t in smaller if not unfit(a, b, columns, out_size, leaves, depth, t)), None)


@cache  # some hundred products a pass, of a handful of tiles
def _layout(block: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _TYPES[dtype])


def _descriptor(x: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, list(block), _layout(block, x.dtype))


def gemm_hopper(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    a_depth_first: bool = False,
    b_depth_first: bool = False,
    leaves: int = 1,
    bias: torch.Tensor | None = None,
    grad: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: HopperTile | None = None,
    out: torch.Tensor | None = None,
    swiglu_leaves: int = 0,
    overlaps: bool = False,
) -> torch.Tensor:
    """:func:`rlkernel.kernels.triton.launch.gemm` for bfloat16 on sm_90, with ``mac='matrix'``.

    Args:
        swiglu_leaves: not 0: rows of b are so many times [gate slice, up slice], and the result [M, N / 2] is the
            SwiGLU of the two, each rounded to the dtype of a before.
        overlaps: start while the kernel before runs, and read b before it has ended: it must not write b.

    Raises:
        ContractError: operands that the kernel does not take (:func:`unfit` says why).
    """
    tile = tile or HopperTile()
    m, n, k = product_shape(a, b, a_depth_first, b_depth_first)
    require_product(a, b, "matrix", bias, n)
    if grad is not None and (leaves > 1 or bias is not None or out is not None):
        raise ContractError("a gradient is one continued chain: leaves, bias and out do not go with it")
    dtype, columns, slice_width = torch.float32 if grad is not None else out_dtype, n, 0
    if swiglu_leaves:
        columns, slice_width = n // 2, n // (2 * swiglu_leaves)
        _require_swiglu(a, n, swiglu_leaves, tile, a_depth_first or b_depth_first or leaves > 1, bias, grad, out_dtype)
    c = product_output(a, (m, columns), grad if grad is not None else out, dtype)
    problem = unfit(a, b, columns, c.element_size(), leaves, k, tile)
    if tile.wide > 1 and (tile.wide != 3 or tile.parts > 1 or leaves > 1 or bias is not None or grad is not None):
        problem = f"{tile} is for a forward of one chain without a bias"
    if tile.paired and (leaves < 2 or tile.parts > 1 or tile.wide > 1):
        problem = f"{tile} is for several leaves, stored whole"
    if tile.wide > 1 and (a_depth_first or b_depth_first):
        problem = f"{tile} is for a forward"
    if not problem and c.data_ptr() % _ALIGNMENT:
        problem = f"the result is not aligned to {_ALIGNMENT} bytes"
    if problem or leaves not in LEAVES or not k or not c.numel():
        raise ContractError(
            f"gemm_hopper of {list(a.shape)} and {list(b.shape)}, {leaves} leaves: {problem or 'no work'}"
        )
    programs = min(
        tile.resident * torch.cuda.get_device_properties(a.device).multi_processor_count,
        triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.wide * tile.block_n),
    )
    # boxes that lie beyond the matrix for the most part load slowly: few rows are loaded by a smaller box
    rows = tile.block_m if a_depth_first else min(tile.block_m, max(16, triton.next_power_of_2(m)))
    workspace = c
    four_shared = (
        leaves == 8 and not tile.paired and tile.shared_bytes(8, c.element_size(), four_shared=True) <= SHARED_BYTES
    )
    if leaves == 8 and not four_shared and not tile.paired:
        workspace = torch.empty((programs, tile.block_m, tile.block_n), dtype=torch.float32, device=a.device)
    part = tile.block_n // 2 if swiglu_leaves else tile.block_n
    kernel[(programs,)](
        _descriptor(a, (tile.block_k, tile.block_m) if a_depth_first else (rows, tile.block_k)),
        _descriptor(b, (tile.block_k, tile.block_n) if b_depth_first else (part, tile.block_k)),
        _descriptor(c, (tile.block_m, part // tile.parts)),
        c if bias is None else bias, c, workspace, m, n, k, programs, slice_width,
        LEAVES=leaves, HAS_BIAS=bias is not None, CONTINUES=grad is not None,
        A_DEPTH_FIRST=a_depth_first, B_DEPTH_FIRST=b_depth_first,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, A_ROWS=rows, GROUP_M=tile.group_m,
        STAGES=tile.stages, PARTS=tile.parts, SWIGLU=swiglu_leaves > 0, OVERLAPS=overlaps, FOUR_SHARED=four_shared,
        WIDE=tile.wide, PAIRED=tile.paired, num_warps=tile.num_warps, launch_pdl=overlaps,
        **_registers(tile, overlaps), **compiler_options("cuda"),
    )  # fmt: skip
    return c


def _registers(tile: HopperTile, overlaps: bool) -> dict[str, int]:
    """Registers of a thread where the multiprocessor's 65,536 are shared: with other programs, or the next kernel.

    The threads are those of the warps that multiply, and of four for loading.
    """
    shares = 2 if overlaps and tile.num_warps == 4 else tile.resident
    return {} if shares == 1 else {"maxnreg": 65536 // (shares * 32 * (tile.num_warps + 4)) // 8 * 8}


def _require_swiglu(
    a: torch.Tensor, n: int, leaves: int, tile: HopperTile, other_layout: bool,
    bias: torch.Tensor | None, grad: torch.Tensor | None, out_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Raise ContractError unless a product of n columns can be stored as a SwiGLU."""
    if other_layout or bias is not None or grad is not None or out_dtype not in (None, a.dtype) or tile.parts > 1:
        raise ContractError("a SwiGLU is stored of a forward of one chain, without a bias, in the dtype of a")
    if n % (2 * leaves) or n // (2 * leaves) % (tile.block_n // 2):
        raise ContractError(
            f"{n} columns in {leaves} leaves of gate and up: each is a multiple of {tile.block_n // 2} columns"
        )
