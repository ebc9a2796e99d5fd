"""One weight publication as a transaction: stage on every engine, verify, commit on all or roll back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from vime.errors import InvariantViolation, VimeError
from vime.rollout.interface import CommittedVersion, RolloutEngine
from vime.sync.transport import Handle, Transport


class SyncTarget(Protocol):
    """An engine as the transaction sees it."""

    @property
    def engine_id(self) -> str: ...

    def stage(self, version: int, handle: Handle) -> str: ...

    def commit_weights(self, version: int, digest: str) -> CommittedVersion: ...

    def rollback_weights(self) -> None: ...


class LocalTarget:
    """An engine of this process: opens the handle itself."""

    def __init__(self, engine: RolloutEngine, transport: Transport) -> None:
        self._engine, self._transport = engine, transport

    @property
    def engine_id(self) -> str:
        return self._engine.engine_id

    def stage(self, version: int, handle: Handle) -> str:
        tensors = self._transport.receive(handle)
        try:
            return self._engine.stage_weights(version, tensors)
        finally:
            del tensors
            self._transport.close_received()

    def commit_weights(self, version: int, digest: str) -> CommittedVersion:
        return self._engine.commit_weights(version, digest)

    def rollback_weights(self) -> None:
        self._engine.rollback_weights()


@dataclass(frozen=True)
class SyncRecord:
    """What happened on one engine; ``kind`` is staged, verified, committed or rolled_back."""

    kind: str
    engine_id: str
    version: int
    digest: str
    seconds: float
    reason: str = ""


def synchronise(
    version: int,
    digest: str,
    tensors: Mapping[str, torch.Tensor],
    targets: Sequence[SyncTarget],
    transport: Transport,
    record: Callable[[SyncRecord], Any],
) -> None:
    """Bring every engine to ``version``, whose published manifest digest is ``digest``.

    Each engine recomputes the digest from its staged bytes. Only when all are equal is any committed; otherwise all
    roll back and serve what they served. An engine that has committed stays at the new version, whatever fails then.

    Raises:
        InvariantViolation: an engine's staged or committed bytes have another digest.
    """
    started = perf_counter()

    def note(kind: str, engine_id: str, seen: str, reason: str = "") -> None:
        record(SyncRecord(kind, engine_id, version, seen, perf_counter() - started, reason))

    handle = transport.send(tensors)
    staged: list[SyncTarget] = []
    reported: set[str] = set()  # an engine that refused what arrived has staged nothing
    committed_on: set[str] = set()  # what is served is no longer taken back, also where it cannot be noted
    try:
        for target in targets:
            staged.append(target)
            seen = target.stage(version, handle)
            note("staged", target.engine_id, seen)
            reported.add(target.engine_id)
            if seen != digest:
                raise InvariantViolation(
                    f"engine {target.engine_id} staged version {version} with digest {seen}; "
                    f"the trainer published {digest}"
                )
            note("verified", target.engine_id, seen)
        for target in targets:
            committed = target.commit_weights(version, digest)
            if (committed.version, committed.digest) != (version, digest):
                raise InvariantViolation(
                    f"engine {target.engine_id} serves version {committed.version} ({committed.digest}) after the "
                    f"commit of version {version} ({digest})"
                )
            committed_on.add(target.engine_id)
            note("committed", target.engine_id, committed.digest)
    except VimeError as error:
        for target in staged:
            if target.engine_id in committed_on:
                continue
            target.rollback_weights()
            if target.engine_id in reported:
                note("rolled_back", target.engine_id, digest, str(error))
        raise
    finally:
        transport.release(handle)
