"""Weights of an engine: staged beside the served ones, then committed or rolled back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlkernel.contract.identity import TensorEntry, manifest_digest
from rlkernel.errors import ModelError
from vime.errors import InvariantViolation
from vime.rollout.interface import CommittedVersion
from vime.rollout.native.model import ServedWeights

WeightsFactory = Callable[[Mapping[str, torch.Tensor]], ServedWeights]


@dataclass(frozen=True)
class LabelledWeights:
    """A version number bound to weights, and the digest and manifest of their bytes when they were staged."""

    version: int
    digest: str
    weights: ServedWeights
    manifest: Sequence[TensorEntry]


class WeightSlots:
    """The served and the staged weights of one engine."""

    def __init__(self, engine_id: str, factory: WeightsFactory) -> None:
        self._engine_id = engine_id
        self._factory = factory
        self._served: LabelledWeights | None = None
        self._staged: LabelledWeights | None = None

    @property
    def served(self) -> LabelledWeights:
        """What is served. Raises InvariantViolation before the first commit."""
        if self._served is None:
            raise InvariantViolation(f"engine {self._engine_id} has no committed weights: stage and commit a version")
        return self._served

    @property
    def served_version(self) -> int | None:
        """Version that is served, or None before the first commit."""
        return None if self._served is None else self._served.version

    def stage(self, version: int, tensors: Mapping[str, torch.Tensor]) -> str:
        """Build weights beside the served ones; returns the digest recomputed from the staged bytes.

        Raises InvariantViolation for a version that cannot follow, and for missing, extra or unfitting tensors.
        """
        if version < 0:
            raise InvariantViolation(f"engine {self._engine_id}: version {version} is staged; versions start at 0")
        if self._staged is not None:
            raise InvariantViolation(
                f"engine {self._engine_id}: version {version} is staged while version {self._staged.version} still is: "
                "commit it or roll it back first"
            )
        if self._served is not None and version <= self._served.version:
            raise InvariantViolation(
                f"engine {self._engine_id}: version {version} is staged, but {self._served.version} is served; "
                "only a later version can follow"
            )
        try:
            weights = self._factory(tensors)
        except ModelError as error:
            raise InvariantViolation(
                f"engine {self._engine_id}: what arrived of version {version} is refused: {error}"
            ) from error
        manifest = weights.manifest()
        digest = manifest_digest(manifest)
        self._staged = LabelledWeights(version, digest, weights, manifest)
        return digest

    def staged_manifest(self) -> Sequence[TensorEntry]:
        """Name, shape, dtype and digest of every tensor as it was staged. Raises InvariantViolation without any."""
        if self._staged is None:
            raise InvariantViolation(f"engine {self._engine_id}: nothing is staged")
        return self._staged.manifest

    def check_commit(self, version: int, digest: str) -> LabelledWeights:
        """The staged weights, if they are what is to be committed; their digest is recomputed.

        Raises InvariantViolation otherwise; nothing changes.
        """
        staged = self._staged
        if staged is None:
            raise InvariantViolation(f"engine {self._engine_id}: version {version} is to be committed, none is staged")
        if version != staged.version:
            raise InvariantViolation(
                f"engine {self._engine_id}: version {version} is to be committed, version {staged.version} is staged"
            )
        now = staged.weights.manifest_digest()
        if not digest or digest != now:
            raise InvariantViolation(
                f"engine {self._engine_id}: version {version} is to be committed with digest {digest or 'missing'}, "
                f"the staged bytes have {now}"
            )
        return staged

    def commit(self, staged: LabelledWeights) -> None:
        """Serve what :meth:`check_commit` returned."""
        self._served, self._staged = staged, None

    def rollback(self) -> None:
        """Forget staged weights."""
        self._staged = None

    def committed(self) -> CommittedVersion | None:
        """The served version with the digest of the bytes as they are now."""
        if self._served is None:
            return None
        return CommittedVersion(self._served.version, self._served.weights.manifest_digest())
