"""What the engine needs of a model, and the KV pages that it lends to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlkernel.contract.identity import TensorEntry
from rlkernel.kernels.cpu.memory import aligned_zeros
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import TokenBatch

NULL_PAGE = 0


class TokenStatistics(Protocol):
    """One entry a sampled row (R): log-probability and entropy float32 [R], distribution digest uint64 [R, 2]."""

    logprob: NDArray[np.float32]
    entropy: NDArray[np.float32]
    digest: NDArray[np.uint64]


class EngineModel(Protocol):
    """A model bound to one set of weights.

    In each layer the keys and values of the whole batch are appended before any of its tokens attends: sequences of
    one batch may share blocks that the same batch fills.
    """

    def hidden(self, batch: TokenBatch, state: BatchState, case: str) -> Any:
        """Hidden states [N, H] of a batch, an array that can be indexed by int64 rows."""

    def sample(
        self, hidden_rows: Any, keys: SamplingKeys, temperature: float, case: str
    ) -> tuple[NDArray[np.int64], TokenStatistics]:
        """Draw one token a row."""


class ServedWeights(Protocol):
    """Weights in the form that a model computes with."""

    def manifest(self) -> list[TensorEntry]:
        """Name, shape, dtype and digest of every logical tensor, recomputed from those bytes."""

    def manifest_digest(self) -> str:
        """SHA-256 of the manifest, recomputed from those bytes."""


@dataclass(frozen=True)
class KVShape:
    """Dimensions of the KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def bytes_per_block(self, block_size: int) -> int:
        """Keys and values of one block over all layers, float32."""
        return 2 * 4 * self.num_layers * self.num_kv_heads * self.head_dim * block_size


class PagedKV:
    """Key and value pages of every layer, float32: k [P, KVH, D, page], v [P, KVH, page, D].

    Page 0 is the null page: block tables are padded with it and it holds NaN, so that a kernel that reads past a
    sequence's blocks cannot go unnoticed. Memory is touched when a page is first written.
    """

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int) -> None:
        pages, heads, dim = num_blocks + 1, shape.num_kv_heads, shape.head_dim
        self.page_size = block_size
        self._layers = [
            (
                aligned_zeros((pages, heads, dim, block_size)),
                aligned_zeros((pages, heads, block_size, dim)),
            )
            for _ in range(shape.num_layers)
        ]
        for keys, values in self._layers:
            keys[NULL_PAGE] = np.nan
            values[NULL_PAGE] = np.nan

    def pages(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Key and value pages of a layer."""
        return self._layers[layer]


class KVPages(Protocol):
    """Pages that a model reads and writes, in the layout of its kernels."""

    page_size: int

    def pages(self, layer: int) -> tuple[Any, Any]:
        """Key and value pages of a layer."""


@dataclass(frozen=True)
class BatchState:
    """The KV state of one batch: block tables int32 [S, B] (padded with the null page) and slots int64 [N]."""

    kv: KVPages
    block_table: NDArray[np.int32]
    slots: NDArray[np.int64]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.kv.page_size

    def pages(self, layer: int) -> tuple[Any, Any]:
        """Key and value pages of a layer."""
        return self.kv.pages(layer)
