"""Publishes weight versions: digest, event, transaction over the engine, identities at every commit."""

from __future__ import annotations

from vime.errors import InvariantViolation
from vime.rollout.interface import CommittedVersion
from vime.runtime.assembly import Sides
from vime.runtime.checks import ClaimChecks
from vime.sync.transaction import SyncRecord, synchronise
from vime.timeline.events import SyncCommitted, SyncRolledBack, SyncStaged, SyncVerified, VersionPublished
from vime.timeline.manager import Timeline


class Publisher:
    """The current version and digest of a run."""

    def __init__(self, sides: Sides, timeline: Timeline, claims: ClaimChecks) -> None:
        self._sides, self._timeline, self._claims = sides, timeline, claims
        latest = timeline.state.latest_version
        self.version = -1 if latest is None else latest.version
        self.digest = "" if latest is None else latest.digest

    def publish(self) -> CommittedVersion:
        """Publish the trainer's weights as the next version and commit it on the engine.

        Raises InvariantViolation if an engine's bytes or identity differ (it then serves the old version), or if it
        kept what the commit invalidates.
        """
        version, parent = self.version + 1, self.version if self.version >= 0 else None
        digest = self._sides.trainer.manifest_digest()
        self._sides.check_identities()
        before = self._claims.before_commit()
        tensors = self._sides.trainer.weights()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._timeline.append(VersionPublished(version=version, digest=digest, parent=parent, observed={"bytes": size}))

        def note(record: SyncRecord) -> None:
            seen = {"seconds": record.seconds, "bytes": size}
            engine = record.engine_id
            if record.kind == "rolled_back":
                self._timeline.append(
                    SyncRolledBack(engine=engine, version=version, reason=record.reason, observed=seen)
                )
                return
            event = {"staged": SyncStaged, "verified": SyncVerified, "committed": SyncCommitted}[record.kind]
            self._timeline.append(event(engine=engine, version=version, digest=record.digest, observed=seen))
            self._note(record)

        synchronise(version, digest, tensors, [self._sides.engine], self._sides.transport, note)
        self._claims.after_commit(version, before)
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
        self._sides.check_identities()
        before = self._claims.before_commit()
        tensors = self._sides.trainer.weights()
        synchronise(self.version, digest, tensors, [self._sides.engine], self._sides.transport, self._note)
        self._claims.after_commit(self.version, before)

    def _note(self, record: SyncRecord) -> None:
        if record.kind == "committed":
            self._claims.committed(record.version)
