"""Starts statistics and sampling of logits in memory, the path of decode: no host sync, safe in CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton

from rlkernel.contract.entries import VOCABULARY_LEAF
from rlkernel.errors import ContractError
from rlkernel.kernels.triton import sampling as kernels
from rlkernel.kernels.triton import sampling_truncated as truncated_kernels
from rlkernel.kernels.triton.launch import _options
from rlkernel.kernels.triton.launch_logprob import (
    DeviceRowStatistics,
    LeafTile,
    MergeTile,
    Partials,
    division,
    logits_leaves,
    merge,
    require_shards,
    require_targets,
)

Tensor = torch.Tensor
_BLOCK = 1024
_SAMPLED = LeafTile(rows=1, warps=2, piece=16)
"""By the compiled code: smaller pieces make scores twice, and more rows need more registers than 128."""


@dataclass(frozen=True)
class DeviceSamplingKeys:
    """Counters of the generator and the sampler's options on the device, one entry a row.

    ``seeds`` int64 [R] (bits of the uint64 seed); ``prompt_index``, ``position`` (below 2^32), ``k`` (below 2^24),
    ``namespace`` (below 256) int64 [R]; ``greedy`` bool [R]; ``top_k`` int64 [R], 0 is off; ``top_p`` float64 [R] in
    (0, 1], 1 is off. Ranges are the caller's: the device is not asked.
    """

    seeds: Tensor
    prompt_index: Tensor
    k: Tensor
    namespace: Tensor
    position: Tensor
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor

    def counters(self) -> tuple[Tensor, ...]:
        return self.seeds, self.prompt_index, self.k, self.namespace, self.position


def _require(z: Tensor, keys: DeviceSamplingKeys | None) -> None:
    if z.dtype != torch.float32 or z.ndim != 2 or not z.is_contiguous() or z.shape[1] == 0:
        raise ContractError(f"logits are C-contiguous float32 [R, V] with V >= 1, not {z.dtype} {list(z.shape)}")
    for item in fields(keys) if keys is not None else ():
        value = getattr(keys, item.name)
        dtype = {"greedy": torch.bool, "top_p": torch.float64}.get(item.name, torch.int64)
        if value.dtype != dtype or value.shape != (len(z),) or not value.is_contiguous():
            raise ContractError(f"{item.name} of the keys is {value.dtype} {list(value.shape)}, not {dtype} [{len(z)}]")


def row_statistics(
    z: Tensor,
    temperature: float,
    targets: Tensor,
    shards: int,
    *,
    leaf_tile: LeafTile | None = None,
    merge_tile: MergeTile | None = None,
) -> DeviceRowStatistics:
    """Statistics of logits in memory, which stay as they are.

    Args:
        z: float32 [R, V], real vocabulary, before the division by the temperature.
        targets: int64 [R], each below V (not looked at).
        shards: T of the definition; a power of two.

    Raises:
        ContractError: operands, a temperature or shards that do not fit.
    """
    _require(z, None)
    require_targets(targets, len(z))
    require_shards(shards)
    partials = Partials(len(z), triton.cdiv(z.shape[1], VOCABULARY_LEAF), z.device)
    if len(z):
        logits_leaves(z, targets, temperature, partials, 0, leaf_tile or LeafTile())
    return merge(partials, z.shape[1], shards, merge_tile or MergeTile.of(len(z)))


def sample(
    z: Tensor,
    temperature: float,
    keys: DeviceSamplingKeys,
    shards: int,
    *,
    truncation: bool,
    leaf_tile: LeafTile | None = None,
    merge_tile: MergeTile | None = None,
) -> tuple[Tensor, DeviceRowStatistics]:
    """Draw one token a row, and the row's statistics with the drawn token as target; logits are read once.

    Args:
        z: float32 [R, V], real vocabulary, before the division by the temperature; not changed.
        keys: of the R rows.
        shards: T of the definition; a power of two.
        truncation: whether a row of this batch may have top-k or top-p. It adds a sort of all rows. Without it such a
            row gives token -1: the host knows the options and chooses before a graph is captured.

    Returns:
        int64 [R] vocabulary ids, and DeviceRowStatistics. NaN never wins; a row with nothing above -inf gives id 0.
        (The log-probability of a row of token -1 is that of no token in particular.)

    Raises:
        ContractError: operands, a temperature or shards that do not fit.
    """
    _require(z, keys)
    require_shards(shards)
    rows, columns = z.shape
    tile = leaf_tile or _SAMPLED
    partials = Partials(rows, triton.cdiv(columns, VOCABULARY_LEAF), z.device, by_row=True)
    tokens = torch.empty(rows, dtype=torch.int64, device=z.device)
    if rows:
        how, factor = division(temperature)
        blocks = triton.cdiv(partials.leaves, 4 * tile.warps)
        best = torch.empty((blocks, rows), dtype=torch.int64, device=z.device)
        kernels.sampled_leaves[(blocks, triton.cdiv(rows, tile.rows))](
            z,
            *keys.counters(),
            keys.greedy.view(torch.uint8),
            *partials.sums,
            partials.lanes,
            best,
            rows,
            columns,
            z.stride(0),
            partials.leaves,
            factor,
            0,
            DIVISION=how,
            MASKED=columns % VOCABULARY_LEAF != 0,
            ROWS=tile.rows,
            WARPS=tile.warps,
            PIECE=tile.piece,
            num_warps=tile.warps,
            **_options(),
        )
        if truncation:
            best = _truncate(z, factor, how, keys, best)
        kernels.choose_tokens[(rows,)](
            z,
            best,
            keys.greedy.view(torch.uint8),
            keys.top_k,
            keys.top_p,
            tokens,
            partials.chosen,
            rows,
            columns,
            z.stride(0),
            len(best),
            factor,
            DIVISION=how,
            REFUSE=not truncation,
            BLOCK=128,
            num_warps=1,
            **_options(),
        )
    return tokens, merge(partials, columns, shards, merge_tile or MergeTile.of(rows, by_row=True))


def _truncate(z: Tensor, factor: float, how: str, keys: DeviceSamplingKeys, best: Tensor) -> Tensor:
    """The best candidates [blocks, R], in truncated rows those of what top-k and top-p leave."""
    rows, columns = z.shape
    blocks = triton.cdiv(columns, _BLOCK)
    sorting = torch.empty_like(z)
    options = _options()
    truncated_kernels.sorting_keys[(rows, blocks)](
        z, sorting, columns, z.stride(0), factor, DIVISION=how, BLOCK=_BLOCK, num_warps=4, **options
    )
    ordered, ids = torch.sort(sorting, dim=1, descending=True, stable=True)
    weights = torch.empty((columns, rows), dtype=torch.float32, device=z.device)
    truncated_kernels.sorted_weights[(triton.cdiv(columns, 64), triton.cdiv(rows, 16))](
        ordered, weights, rows, columns, ROWS=16, BLOCK=64, num_warps=4, **options
    )
    kept = torch.empty(rows, dtype=torch.int64, device=z.device)
    truncated_kernels.kept_candidates[(triton.cdiv(rows, 32),)](
        weights, keys.top_k, keys.top_p, kept, rows, columns, ROWS=32, UNROLL=32, num_warps=1, **options
    )
    after = torch.empty((blocks, rows), dtype=torch.int64, device=z.device)
    truncated_kernels.best_of_sorted[(blocks, rows)](
        ordered, ids, kept, *keys.counters(), after, rows, columns, BLOCK=_BLOCK, num_warps=4, **options
    )
    both = torch.empty((max(blocks, len(best)), rows), dtype=torch.int64, device=z.device)
    truncated_kernels.join_candidates[(rows,)](
        best,
        after,
        keys.top_k,
        keys.top_p,
        keys.greedy.view(torch.uint8),
        both,
        rows,
        columns,
        len(best),
        blocks,
        len(both),
        BLOCK=128,
        num_warps=1,
        **options,
    )
    return both
