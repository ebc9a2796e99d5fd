"""Starts the attention kernels on torch tensors of a GPU. Tiles, warps and stages are arguments: they change no bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from rlkernel.contract.profiles import EX2_SM90, FMA, MFMA_GFX942, MMA_SM90
from rlkernel.errors import ContractError
from rlkernel.kernels.triton import attention as forward_kernels
from rlkernel.kernels.triton import attention_backward as backward_kernels
from rlkernel.kernels.triton import attention_decode as decode_kernels
from rlkernel.kernels.triton.attention_points import AttentionPoints, BackwardPoints
from rlkernel.kernels.triton.launch import compiler_options

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionTile:
    """Tuning of an attention kernel. Nothing here is part of the contract.

    Attributes:
        rows: query rows of a tile.
        columns: keys of a tile, in the backward only (the forward's key block is the contract's).
        programs: programs of the forward that share the tiles among them; 0: as many as fill the device.
    """

    rows: int = 128
    columns: int = 64
    num_warps: int = 8
    num_stages: int = 2
    programs: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ContractError(f"{name} of an attention tile is {value}; powers of two from 16 are compiled")


def default_tile(points: AttentionPoints | BackwardPoints, kind: str, rows: int, depth: int) -> AttentionTile:
    """The tile of a kernel (``forward``, ``decode``, ``dq``, ``dkv``) for ``rows`` query rows a sequence."""
    if points.mac == FMA:
        return AttentionTile(16, 16, 4, 1)  # small: every fma of a tile is an instruction of its own
    if points.mac == MFMA_GFX942:
        return AttentionTile(16 if kind == "decode" else 64, 32, 4, 1)
    stages = 1 if depth > 128 else 2
    if kind == "decode":
        return AttentionTile(16, 64, 4, stages)
    if kind == "forward":
        fitting = max(16, 1 << max(0, rows - 1).bit_length())
        return AttentionTile(min(64, fitting), 64, 4, 1)
    return AttentionTile(64, 64, 4, stages) if kind == "dq" else AttentionTile(32, 64, 4, stages)


def _options() -> dict[str, Any]:
    return compiler_options("hip" if torch.version.hip else "cuda")


def require_tensor(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    fits = x.ndim == len(shape) and all(want is None or got == want for got, want in zip(x.shape, shape, strict=False))
    if not fits or x.dtype != dtype or not x.is_contiguous():
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ContractError(
            f"{name} is {x.dtype} {list(x.shape)} with strides {x.stride()}: {dtype} [{wanted}], C-contiguous"
        )


def require_heads(points: AttentionPoints | BackwardPoints, q_heads: int, kv_heads: int, depth: int) -> int:
    block = max(16, triton.next_power_of_2(depth))
    if q_heads % kv_heads or depth % 16 or depth > MAX_HEAD_DIM:
        raise ContractError(
            f"{q_heads} query heads, {kv_heads} KV heads, head_dim {depth}: query heads are a multiple of the KV heads "
            f"and head_dim a multiple of 16 up to {MAX_HEAD_DIM}"
        )
    if points.mac == MFMA_GFX942 and block != depth:
        raise ContractError(
            f"head_dim {depth} would be padded to {block}: on gfx942 a step of zeros turns an accumulator of -0 into +0"
        )
    return int(block)


def specialised(points: AttentionPoints | BackwardPoints, x: torch.Tensor) -> bool:
    """Whether the warp-specialised kernels take these points and this head_dim on this device."""
    if (points.mac, points.weights_exp2, points.dtype) != (MMA_SM90, EX2_SM90, "bfloat16"):
        return False
    if isinstance(points, AttentionPoints) and (points.key_block, points.lanes, points.split % 128) != (128, 8, 0):
        return False
    if x.shape[2] not in (64, 128) or not x.is_cuda or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(x.device) == (9, 0)


def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor | None,
    table: torch.Tensor | None,
    max_rows: int,
    max_keys: int,
    points: AttentionPoints,
    tile: AttentionTile | None,
    out: torch.Tensor | None,
    lse2: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, q_heads, depth = q.shape
    kv_heads = k.shape[-2]
    block_d = require_heads(points, q_heads, kv_heads, depth)
    tile = tile or default_tile(points, "forward", max_rows, depth)
    out = torch.empty_like(q) if out is None else out
    lse2 = torch.empty((rows, q_heads), dtype=torch.float32, device=q.device) if lse2 is None else lse2
    require_tensor("out", out, q.dtype, tuple(q.shape))
    require_tensor("lse2", lse2, torch.float32, (rows, q_heads))
    sequences = len(starts) - 1
    tiles = triton.cdiv(max_rows, tile.rows)
    if not rows or not sequences or not tiles:
        return out, lse2
    splits = triton.cdiv(max_keys, points.split)
    programs = tiles * sequences * q_heads
    if splits > 1:
        programs = min(programs, tile.programs or 2 * multiprocessors(q.device))
    stash = torch.empty(programs * (splits - 1) * tile.rows * (block_d + 2), dtype=torch.float32, device=q.device)
    stash_rows = stash[programs * (splits - 1) * tile.rows * block_d :]
    forward_kernels.attention_forward[(programs,)](
        q, k, v, out, lse2, starts, positions, table, 0 if table is None else table.shape[1], stash, stash_rows,
        sequences, tiles, splits - 1, points.scale2,
        QH=q_heads, KVH=kv_heads, D=depth, BLOCK_D=block_d, PAGE=0 if table is None else k.shape[1],
        SEVERAL=splits > 1, MAC=points.mac, KIND=points.weights_exp2, NARROW=points.dtype == "bfloat16",
        BLOCK_M=tile.rows, KEYS=points.key_block, LANES=points.lanes, SPLIT=points.split,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **_options(),
    )  # fmt: skip
    return out, lse2


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    max_length: int,
    points: AttentionPoints,
    *,
    tile: AttentionTile | None = None,
    out: torch.Tensor | None = None,
    lse2: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of whole packed sequences.

    Args:
        q: [N, QH, D], ``k``, ``v``: [N, KVH, D], of the dtype of ``points``, C-contiguous.
        starts: int32 [S + 1], rising from 0 to N.
        max_length: the longest sequence has no more tokens.
        tile: tuning of the plain kernel; without it the warp-specialised one runs where it can (sm_90, head_dim 64 or
            128). Bits are the same.
        out, lse2: written if given.

    Returns:
        (out [N, QH, D], lse2 float32 [N, QH], the base-2 log-sum-exp of the scaled scores).

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    dtype = _DTYPES[points.dtype]
    require_tensor("q", q, dtype, (None, None, None))
    for name, x in (("k", k), ("v", v)):
        require_tensor(name, x, dtype, (len(q), k.shape[1], q.shape[2]))
    require_tensor("starts", starts, torch.int32, (None,))
    if tile is None and len(q) and len(starts) > 1 and max_length > 0 and specialised(points, q):
        from rlkernel.kernels.triton.launch_attention_hopper import varlen_hopper  # Gluon, on NVIDIA only

        require_heads(points, q.shape[1], k.shape[1], q.shape[2])
        out = torch.empty_like(q) if out is None else out
        lse2 = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse2 is None else lse2
        require_tensor("out", out, dtype, tuple(q.shape))
        require_tensor("lse2", lse2, torch.float32, tuple(q.shape[:2]))
        varlen_hopper(q, k, v, starts, max_length, points, out, lse2)
        return out, lse2
    return _forward(q, k, v, starts, None, None, max_length, max_length, points, tile, out, lse2)


def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    positions: torch.Tensor,
    max_rows: int,
    max_keys: int,
    points: AttentionPoints,
    *,
    tile: AttentionTile | None = None,
    out: torch.Tensor | None = None,
    lse2: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of consecutive query rows over the paged keys of their sequences (prefill, whole or in chunks).

    Args:
        q: [N, QH, D], the rows of all sequences one after the other.
        k_cache, v_cache: [P, page, KVH, D], page a multiple of 8; the rows' own keys are already there. Slots past a
            sequence's last row, and pages in no table, may hold anything.
        table: int32 [S, B]; key j of sequence s lies in page ``table[s, j // page]``.
        starts: int32 [S + 1], offsets of each sequence's rows in q; ``positions``: int32 [N], consecutive in a
            sequence.
        max_rows, max_keys: bounds of the rows of a sequence, and of its keys (last position + 1).
        out, lse2: written if given.

    Returns and raises as :func:`attention_varlen`.
    """
    dtype = _DTYPES[points.dtype]
    require_tensor("q", q, dtype, (None, None, None))
    require_cache(k_cache, v_cache, dtype, q.shape[2])
    require_tensor("table", table, torch.int32, (len(starts) - 1, None))
    require_tensor("starts", starts, torch.int32, (None,))
    require_tensor("positions", positions, torch.int32, (len(q),))
    if max_keys > table.shape[1] * k_cache.shape[1]:
        raise ContractError(f"{max_keys} keys do not fit {table.shape[1]} pages of {k_cache.shape[1]}")
    return _forward(q, k_cache, v_cache, starts, positions, table, max_rows, max_keys, points, tile, out, lse2)


def require_cache(k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype, depth: int) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_tensor(name, x, dtype, (len(k_cache), k_cache.shape[1], k_cache.shape[2], depth))
    if k_cache.shape[1] % 8:
        raise ContractError(f"pages of {k_cache.shape[1]} tokens: the kernels take multiples of 8")


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    max_splits: int,
    points: AttentionPoints,
    *,
    tile: AttentionTile | None = None,
    out: torch.Tensor | None = None,
    lse2: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query row a sequence over its paged keys. Grid and buffers depend on shapes only (CUDA graphs).

    Args:
        q: [S, QH, D]; caches and ``table`` as in :func:`attention_paged`; ``positions``: int32 [S], negative for a
            sequence that takes no part (its output is 0, its lse2 -inf).
        max_splits: positions are below ``max_splits * points.split``.

    Returns and raises as :func:`attention_varlen`.
    """
    dtype = _DTYPES[points.dtype]
    require_tensor("q", q, dtype, (None, None, None))
    require_cache(k_cache, v_cache, dtype, q.shape[2])
    require_tensor("table", table, torch.int32, (len(q), None))
    require_tensor("positions", positions, torch.int32, (len(q),))
    sequences, q_heads, depth = q.shape
    page, kv_heads = k_cache.shape[1:3]
    block_d = require_heads(points, q_heads, kv_heads, depth)
    if max_splits < 1:
        raise ContractError(f"max_splits is {max_splits}; at least one split is decoded")
    tile = tile or default_tile(points, "decode", 1, depth)
    group = q_heads // kv_heads
    tile_rows = max(tile.rows, triton.next_power_of_2(group))
    out = torch.empty_like(q) if out is None else out
    lse2 = torch.empty((sequences, q_heads), dtype=torch.float32, device=q.device) if lse2 is None else lse2
    require_tensor("out", out, q.dtype, tuple(q.shape))
    require_tensor("lse2", lse2, torch.float32, (sequences, q_heads))
    if not sequences:
        return out, lse2
    part = torch.empty((sequences, max_splits, q_heads, depth), dtype=torch.float32, device=q.device)
    part_m, part_l = torch.empty_like(part[..., 0]), torch.empty_like(part[..., 0])
    decode_kernels.decode_split[(kv_heads, max_splits, sequences)](
        q, k_cache, v_cache, part, part_m, part_l, positions, table, table.shape[1], max_splits,
        points.scale2,
        QH=q_heads, KVH=kv_heads, D=depth, BLOCK_D=block_d, PAGE=page, MAC=points.mac, KIND=points.weights_exp2,
        NARROW=points.dtype == "bfloat16", ROWS=tile_rows, KEYS=points.key_block, LANES=points.lanes,
        SPLIT=points.split, num_warps=tile.num_warps, num_stages=tile.num_stages, **_options(),
    )  # fmt: skip
    heads = min(8, triton.next_power_of_2(q_heads))
    decode_kernels.decode_merge[(triton.cdiv(q_heads, heads) * sequences,)](
        part, part_m, part_l, out, lse2, positions, max_splits,
        QH=q_heads, D=depth, BLOCK_D=block_d, HEADS=heads, SPLIT=points.split, num_warps=4, **_options(),
    )  # fmt: skip
    return out, lse2


def append_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write row n of k and v [N, KVH, D] into slot ``slots[n]`` (int64 [N]; page * page size + place) of the caches.

    A negative slot is left out. Raises ContractError for shapes, dtypes or layouts that do not fit.
    """
    require_tensor("k", k, k_cache.dtype, (None, *k_cache.shape[2:]))
    require_tensor("v", v, k_cache.dtype, tuple(k.shape))
    require_tensor("k_cache", k_cache, k_cache.dtype, (None, None, None, None))
    require_tensor("v_cache", v_cache, k_cache.dtype, tuple(k_cache.shape))
    require_tensor("slots", slots, torch.int64, (len(k),))
    if len(k):
        width = k.shape[1] * k.shape[2]
        decode_kernels.append_rows[(len(k),)](
            k, v, k_cache, v_cache, slots,
            WIDTH=width, BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=4, **_options(),
        )  # fmt: skip


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse2: torch.Tensor,
    starts: torch.Tensor,
    max_length: int,
    points: BackwardPoints,
    *,
    dq_tile: AttentionTile | None = None,
    dkv_tile: AttentionTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`attention_varlen`: dout, q, out [N, QH, D], k, v [N, KVH, D], lse2 float32 [N, QH].

    ``dq_tile``, ``dkv_tile``: tuning of the plain kernels; without them the warp-specialised ones run where they can
    (sm_90, head_dim 64 or 128). Bits are the same.

    Returns:
        (dq [N, QH, D], dk [N, KVH, D], dv [N, KVH, D]) in the dtype of ``points``.

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    dtype = _DTYPES[points.dtype]
    require_tensor("q", q, dtype, (None, None, None))
    for name, x in (("dout", dout), ("out", out)):
        require_tensor(name, x, dtype, tuple(q.shape))
    for name, x in (("k", k), ("v", v)):
        require_tensor(name, x, dtype, (len(q), k.shape[1], q.shape[2]))
    require_tensor("lse2", lse2, torch.float32, tuple(q.shape[:2]))
    require_tensor("starts", starts, torch.int32, (None,))
    rows, q_heads, depth = q.shape
    kv_heads, sequences = k.shape[1], len(starts) - 1
    block_d = require_heads(points, q_heads, kv_heads, depth)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not rows or not max_length or not sequences:
        return dq, dk, dv
    if dq_tile is None and dkv_tile is None and specialised(points, q):
        from rlkernel.kernels.triton.launch_attention_hopper import backward_hopper  # Gluon, on NVIDIA only

        backward_hopper(dout, q, k, v, out, lse2, starts, max_length, points, dq, dk, dv)
        return dq, dk, dv
    delta = torch.empty((rows, q_heads), dtype=torch.float32, device=q.device)
    backward_kernels.row_dots[(triton.cdiv(rows * q_heads, 128),)](
        dout, out, delta, rows * q_heads, D=depth, ROWS=128, num_warps=4, **_options()
    )
    fixed: dict[str, Any] = {
        "QH": q_heads, "KVH": kv_heads, "D": depth, "BLOCK_D": block_d, "MAC": points.mac,
        "KIND": points.weights_exp2, "NARROW": points.dtype == "bfloat16",
    }  # fmt: skip
    tile = dkv_tile or default_tile(points, "dkv", max_length, depth)
    backward_kernels.key_gradients[(sequences * kv_heads, triton.cdiv(max_length, tile.columns))](
        dout, q, k, v, lse2, delta, dk, dv, starts, points.scale, points.scale2,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **fixed, **_options(),
    )  # fmt: skip
    tile = dq_tile or default_tile(points, "dq", max_length, depth)
    backward_kernels.query_gradient[(sequences * q_heads, triton.cdiv(max_length, tile.rows))](
        dout, q, k, v, lse2, delta, dq, starts, sequences, points.scale, points.scale2,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **fixed, **_options(),
    )  # fmt: skip
    return dq, dk, dv
