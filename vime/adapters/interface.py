"""What a trainer or an engine of another framework provides. docs/adapters.md says it in words, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from rlkernel.contract.identity import Identities, TensorEntry
from vime.rollout.interface import CommittedVersion
from vime.train.interface import ScoredSample, ScoreResult, TrainResult, TrainSample
from vime.types import GeneratedSample, RolloutRequest

TRAINER_FACTS = ("degrees",)
"""Facts in a trainer's evidence that the claims are checked by."""

ENGINE_FACTS = (
    "degrees",
    "blocks_cached",
    "blocks_invalidated",
    "cached_versions",
    "kv_versions",
    "in_flight_updates",
)
"""Facts in an engine's evidence that the claims are checked by."""


class TrainerAdapter(Protocol):
    """A trainer (:class:`vime.train.interface.Trainer`). Its weights are the truth that is published."""

    def identities(self) -> Identities:
        """All three digests; they never change while the trainer lives."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Every logical tensor, whole, under its Hugging Face name, in the contract's dtype, on the CPU, as a copy."""

    def manifest_digest(self) -> str:
        """Digest of the weights, recomputed now from the bytes that the trainer computes with."""

    def score(self, samples: Sequence[TrainSample], model: Literal["policy", "reference"] = "policy") -> ScoreResult:
        """Response tokens evaluated by a forward of its own, in the order asked, arrays of its own memory.

        Raises InputError for a sample that cannot be evaluated, and without a reference model.
        """

    def train(self, step: int, samples: Sequence[TrainSample]) -> TrainResult:
        """All updates of a step; steps are consecutive from 0.

        Raises InputError for another step or an impossible sample; nothing is changed then.
        """

    def save(self, folder: Path) -> dict[str, str]:
        """Write everything that the next step depends on; file name -> SHA-256 (hex), durable when it returns."""

    def load(self, folder: Path) -> None:
        """Inverse of :meth:`save`. Raises InputError naming a missing or damaged file; nothing is changed then."""

    def evidence(self) -> dict[str, Any]:
        """``Evidence.as_json()`` of what ran, with the facts :data:`TRAINER_FACTS`."""

    def close(self) -> None:
        """Give back what outlives the object."""


class EngineAdapter(Protocol):
    """A rollout engine (:class:`vime.rollout.interface.RolloutEngine`) that can also evaluate a given sequence."""

    @property
    def engine_id(self) -> str:
        """Name that is written beside every sample."""

    def identities(self) -> Identities:
        """All three digests; they never change while the engine lives."""

    def stage_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> str:
        """Take a copy beside the served weights; the digest recomputed from the staged bytes.

        Raises InvariantViolation if other weights are staged, or ``version`` does not follow the served one.
        """

    def staged_manifest(self) -> Sequence[TensorEntry]:
        """Name, shape, dtype and digest of every staged tensor. Raises InvariantViolation if none are staged."""

    def commit_weights(self, version: int, digest: str) -> CommittedVersion:
        """Serve the staged weights and forget every cache that belongs to the old ones.

        Raises InvariantViolation unless version and digest are the staged ones; the old version serves on.
        """

    def rollback_weights(self) -> None:
        """Forget staged weights; the old version serves on."""

    def committed(self) -> CommittedVersion | None:
        """What is served, the digest recomputed now from the bytes that are served; None before the first commit."""

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[GeneratedSample]:
        """Generate every request once, each token with the version that made it.

        Raises InputError for a request that cannot be generated, before anything is, and InvariantViolation without
        committed weights.
        """

    def score(self, sample: TrainSample, temperature: float) -> ScoredSample:
        """Evaluate a given sequence with the served weights, by a forward of its own."""

    def evidence(self) -> dict[str, Any]:
        """``Evidence.as_json()`` of what ran, with the facts :data:`ENGINE_FACTS`."""

    def close(self) -> None:
        """Give everything back; later calls raise InvariantViolation."""
