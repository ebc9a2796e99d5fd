"""Publishes weight versions: digest, event, the sync of every engine, identities at every commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from time import perf_counter

import torch

from rlkernel.contract.identity import TensorEntry
from rlkernel.ops.weights import plain_manifest
from vime.errors import ERRORS, InvariantViolation
from vime.rollout.interface import CommittedVersion
from vime.runtime.assembly import Sides
from vime.runtime.checks import ClaimChecks
from vime.sync.coordinator import Coordinator, Publication
from vime.sync.drive import drive
from vime.timeline.event import Event
from vime.timeline.events import SyncCommitted, SyncRolledBack, SyncStaged, SyncVerified, VersionPublished
from vime.timeline.manager import Timeline


class _Journal:
    """Notes in the timeline what a sync does; of a catching-up, which publishes nothing, only the claims are told.

    A decision and the loss of an engine make no event: the engines of a run end with it, and those of the resumed one
    are brought to the committed version before they take a request.
    """

    def __init__(self, timeline: Timeline, claims: ClaimChecks) -> None:
        self._timeline, self._claims = timeline, claims

    def begin(self, publication: Publication, size: int, *, publishing: bool) -> None:
        """What is told from now on is of this publication of ``size`` bytes."""
        self._publication, self._size, self._publishing = publication, size, publishing
        self._started = perf_counter()

    def staged(self, engine: str, digest: str) -> None:
        self._note(SyncStaged, engine, digest=digest)

    def verified(self, engine: str) -> None:
        self._note(SyncVerified, engine, digest=self._publication.digest)

    def decided(self, version: int, digest: str) -> None:
        """Nothing to note."""

    def committed(self, engine: str, digest: str) -> None:
        self._note(SyncCommitted, engine, digest=digest)
        self._claims.committed(self._publication.version)

    def rolled_back(self, engine: str, reason: str) -> None:
        self._note(SyncRolledBack, engine, reason=reason)

    def lost(self, engine: str, reason: str) -> None:
        """The run ends with the reason."""

    def rejoined(self, engine: str, digest: str) -> None:
        """Its commit was noted."""

    def _note(self, kind: Callable[..., Event], engine: str, **what: str) -> None:
        if self._publishing:
            seen = {"seconds": perf_counter() - self._started, "bytes": self._size}
            self._timeline.append(kind(engine=engine, version=self._publication.version, observed=seen, **what))


class Publisher:
    """The current version and digest of a run."""

    def __init__(self, sides: Sides, timeline: Timeline, claims: ClaimChecks) -> None:
        self._sides, self._timeline, self._claims = sides, timeline, claims
        latest = timeline.state.latest_version
        self.version = -1 if latest is None else latest.version
        self.digest = "" if latest is None else latest.digest
        self._journal = _Journal(timeline, claims)
        committed = None if latest is None else (latest.version, latest.digest)
        self._engine = sides.engine.engine_id
        self._coordinator = Coordinator([self._engine], self._journal, committed=committed)

    def publish(self) -> CommittedVersion:
        """Publish the trainer's weights as the next version and commit it on the engine.

        Raises InvariantViolation if an engine's bytes or identity differ (it then serves the old version), or if it
        kept what the commit invalidates; Interrupted if it is lost or has no room for the weights.
        """
        version, parent = self.version + 1, self.version if self.version >= 0 else None
        digest = self._sides.trainer.manifest_digest()
        self._synchronise(version, digest, parent, publishing=True)
        self.version, self.digest = version, digest
        return CommittedVersion(version, digest)

    def check_served(self) -> None:
        """Raise InvariantViolation unless the engine, asked now, serves the bytes that were committed."""
        engine = self._sides.engine
        served = engine.committed()
        if served is None or (served.version, served.digest) != (self.version, self.digest):
            found = "nothing" if served is None else f"version {served.version} with digest {served.digest}"
            raise InvariantViolation(
                f"engine {engine.engine_id} serves {found}; committed was version {self.version} with digest "
                f"{self.digest}: its weights are not, or no longer, those that were published"
            )

    def catch_up(self) -> None:
        """Bring a new engine process to the committed version of a resumed run; nothing new is published.

        Raises InvariantViolation if the trainer's restored weights are not those that were published.
        """
        digest = self._sides.trainer.manifest_digest()
        if digest != self.digest:
            raise InvariantViolation(
                f"the restored weights have digest {digest}; version {self.version} was published with {self.digest}"
            )
        self._synchronise(self.version, digest, None, publishing=False)

    def _manifest(self, tensors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
        """Of what was published, to say in what an engine differs."""
        here = {name: tensor.cpu() for name, tensor in tensors.items()}
        return plain_manifest(here, self._sides.contract.dtype, self._sides.workers)

    def _synchronise(self, version: int, digest: str, parent: int | None, *, publishing: bool) -> None:
        sides, coordinator = self._sides, self._coordinator
        sides.check_identities()
        before = self._claims.before_commit()
        tensors = sides.trainer.weights()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if publishing:
            event = VersionPublished(version=version, digest=digest, parent=parent, observed={"bytes": size})
            self._timeline.append(event)
        handle = sides.transport.send(tensors)
        try:
            publication = Publication(version, digest, handle, lambda: self._manifest(tensors))
            self._journal.begin(publication, size, publishing=publishing)
            now = time.monotonic()
            if publishing:
                coordinator.publish(now, publication)
            else:
                coordinator.catch_up(now, [self._engine], publication)
            outcome = drive(coordinator, {self._engine: sides.engine.channel()})
        finally:
            sides.transport.release(handle)
        if outcome.reason:
            raise ERRORS.get(outcome.error, InvariantViolation)(outcome.reason)
        self._claims.after_commit(version, before)
