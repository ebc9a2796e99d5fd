"""The engine's part of a weight sync: every message may come twice, late, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from rlkernel.contract.identity import TensorEntry
from rlkernel.errors import RlkernelError
from vime.errors import Interrupted, InvariantViolation, VimeError
from vime.rollout.interface import CommittedVersion
from vime.sync.messages import Commit, Committed, Message, NothingStaged, Refused, Rollback, RolledBack, Stage, Staged
from vime.sync.transport import Handle


class WeightHolder(Protocol):
    """What of an engine a sync moves; see :class:`vime.rollout.interface.RolloutEngine`."""

    def stage_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> str: ...

    def staged_manifest(self) -> Sequence[TensorEntry]:
        """What the digest of the staged bytes was computed from."""

    def commit_weights(self, version: int, digest: str) -> CommittedVersion: ...

    def rollback_weights(self) -> None: ...

    def committed(self) -> CommittedVersion | None: ...


class Receiver(Protocol):
    """The receiving end of a transport."""

    def receive(self, handle: Handle) -> dict[str, torch.Tensor]: ...

    def close_received(self) -> None: ...


class Participant:
    """Answers the messages of a sync for one engine.

    At most one version is staged. A repeated message gets its answer again; one of an older attempt than was seen
    gets none, for whoever sent it has given that attempt up.
    """

    def __init__(self, engine: WeightHolder, transport: Receiver) -> None:
        self._engine, self._transport = engine, transport
        self._attempt = -1
        self._staged: Staged | None = None
        self._rolled_back = False

    def answer(self, message: Message) -> Message | None:
        """What is to be said to a message; None where there is nothing to say.

        Whatever an engine or a transport raises is a refusal. Raises InvariantViolation for what only engines send.
        """
        if not isinstance(message, Stage | Commit | Rollback):
            raise InvariantViolation(f"an engine was sent {message.kind!r}, which only engines send")
        try:
            return self._answer(message)
        except Exception as error:
            return _refusal(message, error)

    def _answer(self, message: Stage | Commit | Rollback) -> Message | None:
        if message.attempt < self._attempt:
            return None
        if message.attempt > self._attempt:
            self._forget()
            self._attempt, self._rolled_back = message.attempt, False
        if isinstance(message, Stage):
            return self._stage(message)
        if isinstance(message, Commit):
            return self._commit(message)
        self._forget()
        self._rolled_back = True
        return self._serves_on(message)

    def _forget(self) -> None:
        """Nothing is staged from now on."""
        if self._staged is not None:
            self._staged = None
            self._engine.rollback_weights()

    def _serves_on(self, message: Message) -> RolledBack:
        served = self._engine.committed()
        if served is None:
            return RolledBack(message.version, message.attempt, None, "")
        return RolledBack(message.version, message.attempt, served.version, served.digest)

    def _stage(self, message: Stage) -> Message | None:
        if self._rolled_back:
            return self._serves_on(message)
        if self._staged is not None:
            return self._staged
        served = self._engine.committed()
        if served is not None and served.version == message.version:
            return Committed(message.version, message.attempt, served.digest)
        try:
            digest = self._receive(message)
            staged = Staged(message.version, message.attempt, digest, tuple(self._engine.staged_manifest()))
        except Exception as error:
            self._engine.rollback_weights()
            return _refusal(message, error)
        self._staged = staged
        return staged

    def _receive(self, message: Stage) -> str:
        tensors: Any = self._transport.receive(message.handle)  # type: ignore[arg-type]
        try:
            return self._engine.stage_weights(message.version, tensors)
        finally:
            del tensors
            self._transport.close_received()

    def _commit(self, message: Commit) -> Message:
        served = self._engine.committed()
        if served is not None and (served.version, served.digest) == (message.version, message.digest):
            return Committed(message.version, message.attempt, served.digest)
        if self._staged is None:
            return NothingStaged(message.version, message.attempt)
        try:
            self._engine.commit_weights(message.version, message.digest)
        except Exception as error:
            self._forget()
            return _refusal(message, error)
        self._staged = None
        served = self._engine.committed()
        if served is None:
            raise InvariantViolation("nothing is served after a commit")
        return Committed(served.version, message.attempt, served.digest)


def _refusal(message: Message, error: Exception) -> Refused:
    """A lack of memory or room is one to resume after; what is no error of vime is named."""
    torch_has_none = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    if isinstance(error, (OSError, MemoryError)) or torch_has_none:
        reason = f"has no room for version {message.version}: {str(error) or type(error).__name__}"
        return Refused(message.version, message.attempt, message.kind, Interrupted.__name__, reason)
    known = isinstance(error, VimeError | RlkernelError)
    name = type(error).__name__ if isinstance(error, VimeError) else InvariantViolation.__name__
    said = str(error) if known else f"{type(error).__name__}: {error}"
    return Refused(message.version, message.attempt, message.kind, name, f"refuses version {message.version}: {said}")
