"""A problem: everything that one execution of a region takes, so that candidate and interpreter get the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.build import Contract
from rlkernel.kernels.cpu.convert import from_float32
from rlkernel.models.config import ModelConfig
from rlkernel.models.definition import Region, define_model
from rlkernel.ops.host import TokenBatch
from rlkernel.ops.weights import DTYPES

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Pages:
    """Paged keys and values before a pass (a host's KV state). Everything but the keys of the sequences is NaN."""

    page_size: int
    block_table: NDArray[np.int32]
    slots: NDArray[np.int64]
    k_pages: Array
    v_pages: Array

    def pages(self, layer: int) -> tuple[Array, Array]:
        """(k pages, v pages); there is one layer."""
        return self.k_pages, self.v_pages

    def copy(self) -> Pages:
        """Pages of their own for another execution: a pass appends to them."""
        return replace(self, k_pages=self.k_pages.copy(), v_pages=self.v_pages.copy())


@dataclass(frozen=True)
class HeadInputs:
    """What the linear log-probability takes beside its rows; ``coefficient`` for the backward."""

    targets: NDArray[np.int64]
    temperature: float
    coefficient: Array | None = None


@dataclass(frozen=True)
class Problem:
    """One set of inputs of a region.

    Attributes:
        shape_class, name: what is special about its shape, and the shape itself.
        hazards: the class of values of each row (of each KV head for attention); one entry: of all.
        inputs: arrays of the region's ports.
        tensors: the region's weights by logical name.
        grads: gradients of the outputs; not empty in a backward problem.
        start: what the gradient chains continue, by logical name (+0 where absent).
        alone: rows (sequences, for attention) that are executed once more without their neighbours.
        views: execute once more with inputs that are not contiguous.
        pages, head: what attention and the head take beside their inputs.
        read: rows of a forward that are compared, where the interpreter takes too long for all; None: all.
        bulk: many outputs, for deviations that few of them show; not executed again to explain one.
    """

    shape_class: str
    name: str
    hazards: tuple[str, ...]
    region: Region
    config: ModelConfig
    batch: TokenBatch
    inputs: tuple[Any, ...]
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    grads: tuple[Array, ...] = ()
    start: Mapping[str, Array] = field(default_factory=dict)
    pages: Pages | None = None
    head: HeadInputs | None = None
    alone: tuple[int, ...] = ()
    views: bool = False
    read: tuple[int, ...] | None = None
    bulk: bool = False

    @property
    def cost(self) -> int:
        """Work of the interpreter where it is not the number of outputs (0): keys that it walks, in attention."""
        if self.region.kind != "attention":
            return 0
        starts = self.batch.starts
        if self.read is not None:
            return 20 * self.config.num_heads * sum(int(self.batch.positions[row]) + 1 for row in self.read)
        last = [int(self.batch.positions[b - 1]) + 1 for a, b in pairwise(starts) if b > a]
        return 20 * self.config.num_heads * sum(last)

    def hazard(self, index: tuple[int, ...]) -> str:
        """The class of values at an index of an output (``mixed`` where rows are reduced over)."""
        if len(set(self.hazards)) == 1:
            return self.hazards[0]
        axis = 1 if self.region.kind == "attention" else 0
        if self.grads and self.region.kind != "attention" and len(index) > axis and index[axis] >= len(self.hazards):
            return "mixed"
        if len(index) <= axis:
            return "mixed"
        heads = self.config.num_heads // self.config.num_kv_heads if self.region.kind == "attention" else 1
        place = index[axis]
        if axis == 1 and place >= len(self.hazards):
            place //= heads
        return self.hazards[place] if place < len(self.hazards) else "mixed"

    def take(self, rows: list[int]) -> Problem:
        """The same rows (sequences of an attention problem) without the others."""
        starts = self.batch.starts
        if self.region.kind == "attention":
            index = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in rows])
            lengths = [int(starts[s + 1] - starts[s]) for s in rows]
        else:
            index, lengths = np.array(rows, np.int64), [len(rows)]
        begin = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        batch = TokenBatch(self.batch.tokens[index], self.batch.positions[index], begin)
        pages, head = self.pages, self.head
        if pages is not None:
            pages = replace(pages, block_table=pages.block_table[rows], slots=pages.slots[index])
        if head is not None:
            coefficient = None if head.coefficient is None else head.coefficient[index]
            head = replace(head, targets=head.targets[index], coefficient=coefficient)
        return replace(
            self,
            batch=batch,
            inputs=tuple(np.ascontiguousarray(x[index]) for x in self.inputs),
            grads=tuple(np.ascontiguousarray(g[index]) for g in self.grads),
            pages=pages,
            head=head,
            alone=(),
        )

    def rows_of(self, rows: list[int]) -> NDArray[np.int64]:
        """Rows of the whole problem's outputs that :meth:`take` gives, in its order."""
        if self.region.kind != "attention":
            return np.array(rows, np.int64)
        starts = self.batch.starts
        return np.concatenate([np.arange(starts[s], starts[s + 1], dtype=np.int64) for s in rows])


def probe_config(contract: Contract, **dimensions: int) -> ModelConfig:
    """The contract's model with one layer and other dimensions: its constants stay, so that its entries stay."""
    tp = contract.topology.tp
    small = {
        "vocab_size": 130,
        "hidden_size": 8,
        "intermediate_size": 8 * tp,
        "num_heads": tp,
        "num_kv_heads": tp,
        "max_position": 600,
        "num_layers": 1,
        "bos_token_id": None,
        "eos_token_ids": (),
    }
    return replace(contract.config, **{**small, **dimensions})  # type: ignore[arg-type]


def matrix(x: Array) -> Array:
    """[N, ...] as [N, width]; also where N is 0."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def find_region(config: ModelConfig, kind: str) -> Region:
    """The first region of a kind."""
    return next(region for region in define_model(config).regions if region.kind == kind)


def weights_of(config: ModelConfig, dtype: str, given: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """All logical tensors of the probe's model: those given, +0 elsewhere."""
    kind = DTYPES[dtype]
    result = {name: torch.zeros(shape, dtype=kind) for name, shape in config.weight_shapes().items()}
    result.update({name: from_float32(value, kind) for name, value in given.items()})
    return result


def flat_batch(rows: int, tokens: NDArray[np.int64] | None = None, positions: Any = None) -> TokenBatch:
    """A batch of unrelated rows, as one sequence."""
    ids = np.zeros(rows, np.int64) if tokens is None else tokens
    places = np.arange(rows, dtype=np.int32) if positions is None else np.asarray(positions, np.int32)
    return TokenBatch(ids, places, np.array([0, rows], np.int32))


def sequence_batch(lengths: list[int], first: list[int] | None = None) -> TokenBatch:
    """Sequences of consecutive positions, each from ``first`` (0)."""
    first = [0] * len(lengths) if first is None else first
    positions = [np.arange(p, p + n, dtype=np.int32) for p, n in zip(first, lengths, strict=True)]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return TokenBatch(np.zeros(int(starts[-1]), np.int64), np.concatenate(positions), starts)
