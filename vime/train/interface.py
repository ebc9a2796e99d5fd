"""What every trainer provides, embedded or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.identity import Identities
from vime.types import GeneratedSample, SampleId


@dataclass(frozen=True)
class TrainSample:
    """One whole sequence of a step's batch, in sample order. T = number of response tokens.

    ``loss_mask`` [T] selects the tokens that are trained on; ``advantage`` is float64, one a sample;
    ``old_logprobs`` and ``reference_logprobs`` [T] are float32 (the reference only with a KL term).
    """

    sample_id: SampleId
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    loss_mask: NDArray[np.bool_]
    advantage: float = 0.0
    old_logprobs: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, sample: GeneratedSample, advantage: float = 0.0) -> TrainSample:
        """A sample as an engine made it, all its response tokens trained on."""
        mask = np.ones(len(sample.token_ids), np.bool_)
        return cls(sample.sample_id, sample.prompt_token_ids, sample.token_ids, mask, advantage)


@dataclass(frozen=True)
class ScoredSample:
    """The trainer's own evaluation of a sample's response tokens (arrays of length T; digests [T, 2])."""

    sample_id: SampleId
    logprobs: NDArray[np.float32]
    digests: NDArray[np.uint64]
    entropies: NDArray[np.float32]


@dataclass(frozen=True)
class ScoreResult:
    """Scores in the order of the request, with the evidence that a forward of the trainer's own made them.

    ``forward_tokens`` is how many tokens went through the trainer's layers in ``case`` for this result, read
    off the evidence counters (not off the request); ``manifest_digest`` is that of the weights used.
    """

    samples: tuple[ScoredSample, ...]
    case: str
    forward_tokens: int
    manifest_digest: str


@dataclass(frozen=True)
class TrainResult:
    """What a training step did. Losses and diagnostics are means over the step's trained tokens.

    ``facts`` is plain data; ``trained_tokens`` in it, how many tokens all updates were computed of, is due.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    clip_fraction: float
    ratio_min: float
    ratio_max: float
    updates: int
    first_forward: ScoreResult | None = None  # the training forward before the first update, in sample order
    gradient_digest: str = ""  # manifest digest of the last update's gradients
    facts: Mapping[str, Any] = field(default_factory=dict)


class Trainer(Protocol):
    """A trainer. Its weights are the truth that is published."""

    def identities(self) -> Identities: ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Logical tensors under their Hugging Face names, in the contract's dtype."""

    def manifest_digest(self) -> str:
        """Digest recomputed from the trainer's weights as they are now."""

    def score(self, samples: Sequence[TrainSample], model: Literal["policy", "reference"] = "policy") -> ScoreResult:
        """Evaluate the response tokens without gradients (case ``trainer_score``)."""

    def train(self, step: int, samples: Sequence[TrainSample]) -> TrainResult:
        """All updates of one step."""

    def save(self, folder: Path) -> dict[str, str]:
        """Write everything that the next step depends on; returns file name -> SHA-256."""

    def load(self, folder: Path) -> None:
        """Inverse of :meth:`save`. Raises InputError naming a missing, truncated or unfitting file."""

    def evidence(self) -> dict[str, Any]: ...

    def close(self) -> None: ...
