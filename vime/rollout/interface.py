"""What every rollout engine provides, embedded or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rlkernel.contract.identity import Identities, TensorEntry
from vime.types import GeneratedSample, RolloutRequest


@dataclass(frozen=True)
class CommittedVersion:
    """The weights that an engine serves: a number bound to the digest of the bytes."""

    version: int
    digest: str


class RolloutEngine(Protocol):
    """A rollout engine.

    Weights arrive by stage -> (compare digests) -> commit, or roll back. A commit invalidates every cache that
    belongs to the old version. Generation never starts without a committed version.
    """

    @property
    def engine_id(self) -> str: ...

    def identities(self) -> Identities: ...

    def stage_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> str:
        """Take a copy beside the served weights; return the manifest digest recomputed from the staged bytes."""

    def staged_manifest(self) -> Sequence[TensorEntry]:
        """What that digest was computed from. Raises InvariantViolation if nothing is staged."""

    def commit_weights(self, version: int, digest: str) -> CommittedVersion:
        """Serve the staged weights. Raises InvariantViolation unless version and digest are the staged ones."""

    def rollback_weights(self) -> None:
        """Forget staged weights; the old version serves on."""

    def committed(self) -> CommittedVersion | None:
        """What is served now, the digest recomputed from the bytes being served."""

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[GeneratedSample]:
        """Generate all requests by continuous batching; yield each sample when it finishes."""

    def evidence(self) -> dict[str, Any]: ...

    def close(self) -> None: ...
