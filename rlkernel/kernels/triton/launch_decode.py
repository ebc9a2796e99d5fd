"""Starts the decode attention of sm_90; everything else goes to :mod:`rlkernel.kernels.triton.launch_attention`."""

from __future__ import annotations

import torch
import triton

from rlkernel.kernels.triton import attention_decode as plain_kernels
from rlkernel.kernels.triton.attention_points import AttentionPoints
from rlkernel.kernels.triton.launch import compiler_options
from rlkernel.kernels.triton.launch_attention import (
    attention_decode,
    multiprocessors,
    require_cache,
    require_heads,
    require_tensor,
    specialised,
)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    max_splits: int,
    points: AttentionPoints,
    *,
    overlaps: bool = False,
) -> torch.Tensor:
    """``launch_attention.attention_decode`` without lse2: [S, QH, D].

    Args:
        overlaps: on sm_90: start while the kernel before runs, and wait for it before anything is read.

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    sequences, q_heads, depth = q.shape
    page, kv_heads = k_cache.shape[1:3]
    if not sequences or not specialised(points, q) or q_heads > 16 * kv_heads:
        return attention_decode(q, k_cache, v_cache, table, positions, max_splits, points)[0]
    require_tensor("q", q, torch.bfloat16, (None, None, None))
    require_cache(k_cache, v_cache, q.dtype, depth)
    require_tensor("table", table, torch.int32, (sequences, None))
    require_tensor("positions", positions, torch.int32, (sequences,))
    block_d = require_heads(points, q_heads, kv_heads, depth)
    from rlkernel.kernels.triton.decode_hopper import decode_split_hopper  # Gluon: on sm_90 alone

    out, single = torch.empty_like(q), max_splits == 1
    part = part_m = part_l = torch.empty(1, dtype=torch.float32, device=q.device)
    if not single:
        part = torch.empty((sequences, max_splits, q_heads, depth), dtype=torch.float32, device=q.device)
        part_m, part_l = torch.empty_like(part[..., 0]), torch.empty_like(part[..., 0])
    decode_split_hopper[(kv_heads, max_splits, sequences)](
        q, k_cache, v_cache, part, part_m, part_l, out, positions, table, table.shape[1], max_splits, points.scale2,
        QH=q_heads, KVH=kv_heads, D=depth, PAGE=page, SPLIT=points.split, SINGLE=single,
        V_SLOTS=2 if kv_heads * sequences <= multiprocessors(q.device) else 1, OVERLAPS=overlaps, num_warps=4,
        launch_pdl=overlaps, **compiler_options("cuda"),
    )  # fmt: skip
    if not single:
        lse2 = torch.empty((sequences, q_heads), dtype=torch.float32, device=q.device)
        heads = min(8, triton.next_power_of_2(q_heads))
        plain_kernels.decode_merge[(triton.cdiv(q_heads, heads) * sequences,)](
            part, part_m, part_l, out, lse2, positions, max_splits,
            QH=q_heads, D=depth, BLOCK_D=block_d, HEADS=heads, SPLIT=points.split, num_warps=4,
            **compiler_options("cuda"),
        )  # fmt: skip
    return out
