"""Starts the warp-specialised attention kernels of sm_90."""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rlkernel.kernels.triton import attention_hopper as kernels
from rlkernel.kernels.triton import attention_hopper_backward as backward_kernels
from rlkernel.kernels.triton.attention_backward import row_statistics
from rlkernel.kernels.triton.attention_points import AttentionPoints, BackwardPoints
from rlkernel.kernels.triton.launch import compiler_options

TILE = 128


def _tiles(x: torch.Tensor, height: int, width: int) -> TensorDescriptor:
    """TMA descriptor of a tensor as [first axis, the rest] in tiles [height, width] of bf16."""
    layout = gl.NVMMASharedLayout.get_default_for([height, width], gl.bfloat16)
    return TensorDescriptor.from_tensor(x.view(x.shape[0], -1), [height, width], layout)


def varlen_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    max_length: int,
    points: AttentionPoints,
    out: torch.Tensor,
    lse2: torch.Tensor,
    pingpong: bool = False,
    stages: int = 0,
) -> None:
    """``attention_varlen`` of the hopper profile, head_dim 64 or 128, into ``out`` and ``lse2``; operands are checked.

    ``pingpong``: groups of warps take turns at the matrix unit, which gained nothing on an H200; ``stages``: blocks of
    keys, and of values, in shared memory (0: as many as fit with head_dim 128). Neither changes a bit.
    """
    _, q_heads, depth = q.shape
    kv_heads, sequences = k.shape[1], len(starts) - 1
    tiles = triton.cdiv(max_length, TILE)
    items = tiles * sequences * q_heads
    programs = min(items, torch.cuda.get_device_properties(q.device).multi_processor_count)
    splits = max(1, triton.cdiv(max_length, points.split) - 1)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    stash = torch.empty(programs * splits * TILE * depth, dtype=torch.float32, device=q.device)
    stash_rows = torch.empty(programs * splits * TILE * 2, dtype=torch.float32, device=q.device)
    kernels.attention_forward_hopper[(programs,)](
        _tiles(q, 64, depth), _tiles(k, 128, depth), _tiles(v, 128, depth), out, lse2, stash, stash_rows, starts,
        counter, sequences, tiles, splits, points.scale2,
        QH=q_heads, KVH=kv_heads, D=depth, SPLIT_BLOCKS=points.split // points.key_block, PINGPONG=pingpong,
        STAGES=stages or (3 if depth == 128 else 2), REGISTERS=240, num_warps=4, **compiler_options("cuda"),
    )  # fmt: skip


def backward_hopper(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse2: torch.Tensor,
    starts: torch.Tensor,
    max_length: int,
    points: BackwardPoints,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """``attention_backward`` of the hopper profile, head_dim 64 or 128, into dq, dk and dv; operands are checked.

    TMA reads the row statistics, so a sequence's begin at columns that are multiples of 4 (``row_statistics``).
    """
    rows, q_heads, depth = q.shape
    kv_heads, sequences = k.shape[1], len(starts) - 1
    tiles = triton.cdiv(max_length, TILE)
    length = (rows + 3 * sequences + 3) // 4 * 4  # columns of row_statistics
    lse, delta = (torch.empty((q_heads, length), dtype=torch.float32, device=q.device) for _ in range(2))
    options = compiler_options("cuda")
    row_statistics[(triton.cdiv(max_length, 128), q_heads, sequences)](
        dout, out, lse2, lse, delta, starts, length, QH=q_heads, D=depth, ROWS=128, num_warps=4, **options
    )
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    shared = {"QH": q_heads, "KVH": kv_heads, "D": depth, "REGISTERS": 240, "num_warps": 4, **options}
    backward_kernels.key_gradients_hopper[(sequences * kv_heads, tiles)](
        _tiles(q, 64, depth), _tiles(dout, 64, depth), _tiles(k, 64, depth), _tiles(v, 64, depth),
        TensorDescriptor.from_tensor(lse, [1, 64], flat), TensorDescriptor.from_tensor(delta, [1, 64], flat),
        dk, dv, starts, points.scale, points.scale2, **shared,
    )  # fmt: skip
    backward_kernels.query_gradient_hopper[(sequences * q_heads, tiles)](
        _tiles(q, 64, depth), _tiles(dout, 64, depth), _tiles(k, 128, depth), _tiles(v, 128, depth),
        lse, delta, dq, starts, tiles, length, points.scale, points.scale2, **shared,
    )  # fmt: skip
