"""Weight sync as a transaction over several engines: a state machine without clocks, sockets or threads of its own.

    STAGE to all -> every digest is the published one -> decided -> COMMIT to all -> ended
                 -> one refuses, differs or is silent  ->           ROLLBACK to all -> ended

Before the decision nothing of the new version is served anywhere; after it, every engine that goes on serves the new
version: one that cannot be brought there before the deadline is lost, gets no requests, and comes back through
:meth:`Coordinator.catch_up`. Whoever drives the machine delivers :attr:`Coordinator.outbox`, hands answers in, and
calls :meth:`Coordinator.tick`; no message has to arrive for the sync to end by its deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from rlkernel.contract.identity import TensorEntry, manifest_digest
from vime.errors import Interrupted, InvariantViolation
from vime.sync.messages import (
    Commit,
    Committed,
    Message,
    NothingStaged,
    Refused,
    Rollback,
    RolledBack,
    Stage,
    Staged,
    first_difference,
)


@dataclass(frozen=True)
class Deadlines:
    """In seconds. ``stage``: until every engine has staged; ``end``: from then (committed, or rolled back); ``repeat``:
    between two messages to an engine that has not answered."""

    stage: float = 600.0
    end: float = 120.0
    repeat: float = 15.0


@dataclass(frozen=True)
class Publication:
    """Weights on offer: version, digest of the manifest, the transport's handle of the bytes, and a way to make the
    manifest, which is asked for where an engine's digest differs."""

    version: int
    digest: str
    handle: Mapping[str, Any]
    manifest: Callable[[], Sequence[TensorEntry]]


class Journal(Protocol):
    """Is told what happened, before anything that follows from it is sent."""

    def staged(self, engine: str, digest: str) -> None:
        """The engine reported a digest of its own."""

    def verified(self, engine: str) -> None:
        """That digest is the published one."""

    def decided(self, version: int, digest: str) -> None:
        """Every engine has verified: the version will be committed. Has to be durable when this returns."""

    def committed(self, engine: str, digest: str) -> None:
        """The engine serves the version."""

    def rolled_back(self, engine: str, reason: str) -> None:
        """The engine forgot what it had staged, and serves on what it served."""

    def lost(self, engine: str, reason: str) -> None:
        """The engine gets no requests until it has caught up."""

    def rejoined(self, engine: str, digest: str) -> None:
        """The engine has caught up."""


class Step(Enum):
    """How far an engine is."""

    STAGE = "stage"
    VERIFIED = "verified"
    COMMIT = "commit"
    COMMITTED = "committed"
    ROLLBACK = "roll back"
    ROLLED_BACK = "rolled back"
    LOST = "lost"


_ENDS = (Step.COMMITTED, Step.ROLLED_BACK, Step.LOST)
_INTERRUPTED, _VIOLATED = Interrupted.__name__, InvariantViolation.__name__
_WAITING = (Step.STAGE, Step.COMMIT, Step.ROLLBACK)  # for an answer


@dataclass
class _Peer:
    step: Step = Step.STAGE
    due: float = 0.0
    reported: bool = False
    reason: str = "has not answered"
    error: str = ""


@dataclass
class _Sync:
    publication: Publication
    attempt: int
    peers: dict[str, _Peer]
    deadline: float
    decided: bool
    joining: bool
    reason: str = ""
    error: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a sync ended. ``reason``: why it was rolled back, or which engines were lost; empty if all is well.

    ``error`` is the class of that reason: the engines' own, InvariantViolation where digests differ, and Interrupted
    for engines that were lost or too late.
    """

    version: int
    digest: str
    committed: tuple[str, ...]
    lost: tuple[str, ...]
    rolled_back: bool
    reason: str
    error: str


def _named(version: tuple[int, str] | None) -> str:
    return "nothing" if version is None else f"version {version[0]} with digest {version[1]}"


class Coordinator:
    """Brings engines from version to version.

    Args:
        engines: all engines.
        first_attempt: above every attempt that an engine can have seen (of a coordinator before this one).
        committed: version and digest that a coordinator before this one has decided last.
    """

    def __init__(
        self,
        engines: Sequence[str],
        journal: Journal,
        deadlines: Deadlines | None = None,
        *,
        first_attempt: int = 0,
        committed: tuple[int, str] | None = None,
    ) -> None:
        if len(set(engines)) != len(engines) or not engines:
            raise InvariantViolation(f"engines of a sync need names of their own, at least one: {list(engines)}")
        self.outbox: list[tuple[str, Message]] = []
        self._journal, self._deadlines = journal, deadlines or Deadlines()
        self._attempt = first_attempt - 1
        self._committed = committed
        self._live = dict.fromkeys(engines, True)
        self._sync: _Sync | None = None
        self._outcome: Outcome | None = None

    @property
    def live(self) -> tuple[str, ...]:
        """Engines that may get requests; during a sync at what they serve."""
        return tuple(engine for engine, live in self._live.items() if live)

    @property
    def busy(self) -> bool:
        """Whether a sync has not ended."""
        return self._sync is not None

    @property
    def outcome(self) -> Outcome:
        """Of the last sync. Raises InvariantViolation before one has ended, or while one has not."""
        if self._sync is not None or self._outcome is None:
            raise InvariantViolation("no sync has ended")
        return self._outcome

    def publish(self, now: float, publication: Publication) -> None:
        """Begin to bring every live engine to a version; all of them as long as there is no version to catch up to.

        Raises InvariantViolation while another sync has not ended, and if every engine is lost.
        """
        if self._committed is None:
            self._live = dict.fromkeys(self._live, True)
        if not self.live:
            raise InvariantViolation(f"version {publication.version} cannot be published: every engine is lost")
        self._begin(now, publication, self.live, joining=False)

    def catch_up(self, now: float, engines: Sequence[str], publication: Publication) -> None:
        """Begin to bring engines that were lost, or started anew, to the committed version.

        A coordinator that takes another's place, which had decided, brings all engines there in this way.

        Raises InvariantViolation while a sync has not ended, and for a version that was not the last one committed.
        """
        served = (publication.version, publication.digest)
        if self._committed not in (None, served):
            raise InvariantViolation(
                f"engines are to catch up to {_named(served)}, committed is {_named(self._committed)}"
            )
        self._committed = served
        for engine in engines:
            if self._live.setdefault(engine, False):
                self._live[engine] = False
                self._journal.lost(engine, "is brought to the committed version")
        self._begin(now, publication, engines, joining=True)

    def lose(self, now: float, engine: str, reason: str) -> None:
        """Whoever drives the machine knows that an engine is gone: nothing waits for it any longer."""
        sync = self._sync
        if sync is None or engine not in sync.peers:
            if self._live.get(engine):
                self._live[engine] = False
                self._journal.lost(engine, reason)
            return
        if sync.peers[engine].step is not Step.LOST:
            self._drop(engine, reason)
        if not sync.decided and not sync.reason:
            self._roll_back(now, _INTERRUPTED, f"engine {engine} was lost: {reason}")
        self._end_if_all_have()

    def receive(self, now: float, engine: str, message: Message) -> None:
        """Take an engine's answer; one to another sync is forgotten.

        Raises InvariantViolation if an engine serves other bytes under the version's name; it is lost then.
        """
        sync = self._sync
        if sync is None or engine not in sync.peers or message.attempt != sync.attempt:
            return
        peer = sync.peers[engine]
        if peer.step in _ENDS:
            return
        try:
            if isinstance(message, Staged):
                self._on_staged(now, engine, message)
            elif isinstance(message, Committed):
                self._on_committed(now, engine, message)
            elif isinstance(message, RolledBack) and peer.step is Step.ROLLBACK:
                self._on_rolled_back(engine, message)
            elif isinstance(message, NothingStaged) and peer.step is Step.COMMIT:
                peer.step = Step.STAGE  # the bytes are there to be fetched again
                self._ask(now, engine)
            elif isinstance(message, Refused):
                self._on_refused(now, engine, message)
        finally:
            self._end_if_all_have()

    def tick(self, now: float) -> None:
        """Repeat what was not answered; end what is over its deadline."""
        sync = self._sync
        if sync is None:
            return
        if now >= sync.deadline:
            self._over(now)
        for engine, peer in sync.peers.items() if self._sync is not None else ():
            if now >= peer.due and peer.step in _WAITING:
                self._ask(now, engine)
        self._end_if_all_have()

    @property
    def next_tick(self) -> float | None:
        """When :meth:`tick` has something to do; None without a sync."""
        if self._sync is None:
            return None
        return min([self._sync.deadline, *(p.due for p in self._sync.peers.values() if p.step in _WAITING)])

    # inside

    def _begin(self, now: float, publication: Publication, engines: Sequence[str], *, joining: bool) -> None:
        if self._sync is not None:
            raise InvariantViolation(
                f"version {publication.version} is to be synchronised while version {self._sync.publication.version} is"
            )
        self._attempt += 1
        self._outcome = None
        deadline = now + self._deadlines.stage + (self._deadlines.end if joining else 0.0)
        peers = {engine: _Peer() for engine in engines}
        self._sync = _Sync(publication, self._attempt, peers, deadline, decided=joining, joining=joining)
        for engine in engines:
            self._ask(now, engine)
        self._end_if_all_have()  # where there is nobody to wait for

    def _ask(self, now: float, engine: str) -> None:
        """Send an engine what its step needs."""
        sync = self._running()
        peer, version = sync.peers[engine], sync.publication.version
        message: Message
        if peer.step is Step.STAGE:
            message = Stage(version, sync.attempt, sync.publication.handle)
        elif peer.step is Step.COMMIT:
            message = Commit(version, sync.attempt, sync.publication.digest)
        else:
            message = Rollback(version, sync.attempt)
        peer.due = now + self._deadlines.repeat
        self.outbox.append((engine, message))

    def _running(self) -> _Sync:
        assert self._sync is not None
        return self._sync

    def _on_staged(self, now: float, engine: str, message: Staged) -> None:
        sync, peer = self._running(), self._running().peers[engine]
        if peer.step is not Step.STAGE:
            return
        peer.reported = True
        self._journal.staged(engine, message.digest)
        difference = self._difference(message)
        if difference:
            return self._fail(now, engine, _VIOLATED, difference)
        self._journal.verified(engine)
        peer.step = Step.VERIFIED
        if sync.decided:
            self._commit(now, engine)
        elif all(other.step is Step.VERIFIED for other in sync.peers.values()):
            self._journal.decided(sync.publication.version, sync.publication.digest)
            self._committed = (sync.publication.version, sync.publication.digest)
            sync.decided, sync.deadline = True, now + self._deadlines.end
            for other in sync.peers:
                self._commit(now, other)
        return None

    def _difference(self, message: Staged) -> str:
        """Why what an engine staged is not what was published; empty if it is."""
        publication = self._running().publication
        if message.digest == publication.digest and message.version == publication.version:
            found = manifest_digest(message.manifest)
            return "" if found == message.digest else f"its manifest has digest {found}, it says {message.digest}"
        difference = first_difference(publication.manifest(), message.manifest)
        return (
            f"staged version {message.version} with digest {message.digest}, published was version "
            f"{publication.version} with digest {publication.digest}" + (f": {difference}" if difference else "")
        )

    def _commit(self, now: float, engine: str) -> None:
        self._running().peers[engine].step = Step.COMMIT
        self._ask(now, engine)

    def _on_committed(self, now: float, engine: str, message: Committed) -> None:
        sync, peer = self._running(), self._running().peers[engine]
        if (message.version, message.digest) != (sync.publication.version, sync.publication.digest):
            reason = (
                f"serves version {message.version} with digest {message.digest}, published was version "
                f"{sync.publication.version} with digest {sync.publication.digest}"
            )
            self._drop(engine, reason)
            if not sync.decided and not sync.reason:
                self._roll_back(now, _VIOLATED, f"engine {engine} {reason}")
            raise InvariantViolation(f"engine {engine} {reason}")
        if peer.step in (Step.STAGE, Step.VERIFIED) and not sync.decided:
            return self._fail(
                now, engine, _VIOLATED, f"serves version {message.version} already, before it was decided"
            )
        if peer.step is Step.ROLLBACK:
            return self._drop(engine, f"serves version {message.version}, which was rolled back")
        peer.step = Step.COMMITTED
        self._journal.committed(engine, message.digest)
        return None

    def _on_rolled_back(self, engine: str, message: RolledBack) -> None:
        sync, peer = self._running(), self._running().peers[engine]
        served = None if message.served_version is None else (message.served_version, message.served_digest)
        if served != self._committed:
            says, wanted = _named(served), _named(self._committed)
            self._drop(engine, f"serves {says} after a rollback, committed is {wanted}")
            return
        peer.step = Step.ROLLED_BACK
        if peer.reported:
            self._journal.rolled_back(engine, sync.reason)

    def _on_refused(self, now: float, engine: str, message: Refused) -> None:
        sync, peer = self._running(), self._running().peers[engine]
        peer.reason = message.reason
        if message.call == "stage" and peer.step is Step.STAGE:
            if not sync.decided:
                self._fail(now, engine, message.error, message.reason)
        elif message.call == "commit" and peer.step is Step.COMMIT:
            self._fail(now, engine, message.error, message.reason)

    def _fail(self, now: float, engine: str, error: str, reason: str) -> None:
        """What an engine did before the decision is the end of the attempt; after it, of what it has staged."""
        sync, peer = self._running(), self._running().peers[engine]
        peer.reason = reason
        if not sync.decided:
            self._roll_back(now, error, f"engine {engine} {reason}")
            return
        self._drop(engine, reason, error)

    def _roll_back(self, now: float, error: str, reason: str) -> None:
        sync = self._running()
        sync.error = error
        sync.reason, sync.deadline = reason, now + self._deadlines.end
        for engine, peer in sync.peers.items():
            if peer.step is not Step.LOST:
                peer.step = Step.ROLLBACK
                self._ask(now, engine)

    def _over(self, now: float) -> None:
        """The deadline has come."""
        sync = self._running()
        late = [engine for engine, peer in sync.peers.items() if peer.step not in (*_ENDS, Step.VERIFIED)]
        if not sync.decided and not sync.reason:
            said = "; ".join(f"engine {engine} {sync.peers[engine].reason}" for engine in late)
            self._roll_back(now, _INTERRUPTED, f"not staged everywhere after {self._deadlines.stage:g} s: {said}")
            return
        for engine in late:
            self._drop(engine, f"did not {sync.peers[engine].step.value} in time: {sync.peers[engine].reason}")

    def _drop(self, engine: str, reason: str, error: str = _INTERRUPTED) -> None:
        peer = self._running().peers[engine]
        peer.step, peer.reason, peer.error = Step.LOST, reason, error
        if self._live[engine]:
            self._live[engine] = False
            self._journal.lost(engine, reason)

    def _end_if_all_have(self) -> None:
        sync = self._sync
        if sync is None or any(peer.step not in _ENDS for peer in sync.peers.values()):
            return
        self._sync = None
        committed = tuple(engine for engine, peer in sync.peers.items() if peer.step is Step.COMMITTED)
        lost = {engine: peer.reason for engine, peer in sync.peers.items() if peer.step is Step.LOST}
        reason = sync.reason or "; ".join(f"engine {engine}: {why}" for engine, why in lost.items())
        error = sync.error or next((sync.peers[engine].error for engine in lost), "")
        publication = sync.publication
        self._outcome = Outcome(
            publication.version, publication.digest, committed, tuple(lost), not sync.decided, reason, error
        )
        for engine in committed if sync.joining else ():
            self._live[engine] = True
            self._journal.rejoined(engine, publication.digest)
