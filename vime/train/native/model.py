"""What the trainer needs of a model: evaluation, training forward and backward over whole sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.models.definition import ModelDefinition
from rlkernel.ops.gradients import Gradients
from rlkernel.ops.host import TokenBatch
from rlkernel.verify.evidence import Evidence
from vime.train.batching import FlatSequences, flatten
from vime.train.interface import ScoredSample, TrainSample


class Statistics(Protocol):
    """One entry a response token (R): log-probability and entropy float32 [R], distribution digest uint64 [R, 2]."""

    @property
    def logprob(self) -> NDArray[np.float32]: ...
    @property
    def entropy(self) -> NDArray[np.float32]: ...
    @property
    def digest(self) -> NDArray[np.uint64]: ...


class TrainingTape(Protocol):
    """What a training forward kept for its backward."""

    @property
    def statistics(self) -> Statistics: ...


class ModelWeights(Protocol):
    """Weights in the form that a model computes with."""

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take other values for all tensors."""

    def manifest_digest(self) -> str:
        """SHA-256 of the manifest, recomputed from the bytes that the kernels read."""


class TrainableModel(Protocol):
    """A model bound to one set of weights (:class:`rlkernel.ops.runner.ModelRunner` is one)."""

    @property
    def definition(self) -> ModelDefinition: ...
    @property
    def evidence(self) -> Evidence: ...
    @property
    def weights(self) -> ModelWeights: ...

    def hidden(self, batch: TokenBatch, state: None, case: str) -> Any:
        """Hidden states [N, H] of whole sequences."""

    def logprobs(self, hidden_rows: Any, targets: NDArray[np.int64], temperature: float, case: str) -> Statistics:
        """Statistics of rows [R, H] for target ids [R]."""

    def forward(
        self,
        batch: TokenBatch,
        rows: NDArray[np.int64],
        targets: NDArray[np.int64],
        temperature: float,
        *,
        checkpointing: bool = False,
    ) -> TrainingTape:
        """Training forward; raises NumericsError later if a recomputation differs."""

    def backward(self, tape: Any, coefficient: NDArray[np.float32], gradients: Gradients) -> None:
        """Continue the gradient chains; ``coefficient`` [R] = d loss / d logprob."""


def token_batch(flat: FlatSequences) -> TokenBatch:
    """The rows of whole sequences as a model takes them."""
    return TokenBatch(flat.tokens, flat.positions, flat.starts)


def scored(samples: Sequence[TrainSample], flat: FlatSequences, statistics: Statistics) -> list[ScoredSample]:
    """Cut the statistics of R rows into one :class:`ScoredSample` a sequence; arrays are copies."""
    return [
        ScoredSample(sample.sample_id, logprobs.copy(), digests.copy(), entropies.copy())
        for sample, logprobs, digests, entropies in zip(
            samples,
            flat.responses(statistics.logprob),
            flat.responses(statistics.digest),
            flat.responses(statistics.entropy),
            strict=True,
        )
    ]


def evaluate(
    model: TrainableModel, samples: Sequence[TrainSample], temperature: float, case: str
) -> list[ScoredSample]:
    """Forward whole sequences without gradients."""
    flat = flatten(samples)
    hidden = model.hidden(token_batch(flat), None, case)
    return scored(samples, flat, model.logprobs(hidden[flat.rows], flat.targets, temperature, case))


@dataclass
class ForwardCount:
    """Tokens that went through every region of the body, read off the evidence; filled when the count ends."""

    tokens: int = 0


@contextmanager
def count_forward(model: TrainableModel, case: str) -> Iterator[ForwardCount]:
    """Count the tokens that go through *all* layers of a model in ``case``: the smallest count of any region kind."""
    kinds = Counter(region.kind for region in model.definition.body)
    before = {kind: model.evidence.tokens[(kind, case)] for kind in kinds}
    count = ForwardCount()
    yield count
    count.tokens = min((model.evidence.tokens[(k, case)] - before[k]) // kinds[k] for k in kinds)


@dataclass(frozen=True)
class GradientShape:
    """How one update's gradients are laid out: logical shapes, the tied table, and the leaves of the dp claim."""

    shapes: Mapping[str, tuple[int, ...]]
    tied_embedding: str | None
    leaves: int = field(default=1)

    @classmethod
    def of(cls, definition: ModelDefinition, dp: int) -> GradientShape:
        """The layout for a model and the claimed data-parallel degree."""
        tied = definition.regions[0].weights[0] if definition.config.tied_embeddings else None
        return cls(definition.config.weight_shapes(), tied, dp)

    def zeros(self) -> Gradients:
        """Buffers of +0."""
        return Gradients(self.shapes, tied_embedding=self.tied_embedding, leaves=self.leaves)
