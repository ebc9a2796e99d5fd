"""The step-timeline manager: the one way by which events happen."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vime.errors import InvariantViolation
from vime.timeline.event import Event, Scope, decode_value, encode_value
from vime.timeline.events import (
    ArraysWritten,
    CheckpointWritten,
    ContractFixed,
    Decision,
    RewardGiven,
    RunResumed,
    RunStarted,
)
from vime.timeline.invariants import check, check_all
from vime.timeline.log import DamagedTail, Head, LogContent, LogWriter, Record, read_log
from vime.timeline.order import RunDigest, free_key
from vime.timeline.replay import Outcome, Replay
from vime.timeline.state import State, advance, fold
from vime.types import SampleId

LOG_NAME = "timeline.jsonl"
E = TypeVar("E", bound=Event)
Subscriber = Callable[[Record], None]
CheckpointCheck = Callable[[Record, CheckpointWritten], str | None]
"""Says what is wrong with an announced checkpoint; None: it can be loaded."""


@dataclass(frozen=True)
class Resumption:
    """What was found when a run was opened to be resumed.

    ``checkpoint_step`` is None where the run is executed again from its start; ``rejected`` names each checkpoint
    that was announced, but cannot be loaded, and why; ``to_replay`` events are made again and compared; a
    ``finished`` run has nothing left to do. ``start`` and ``contract`` are what the run began with, as logged.
    """

    checkpoint_step: int | None
    tail: DamagedTail | None
    rejected: tuple[str, ...]
    to_replay: int
    finished: bool
    start: RunStarted | None = None
    contract: ContractFixed | None = None


class Timeline:
    """Appends events: checked against the invariants, logged, folded into the state.

    After a resume the events that the log holds beyond the checkpoint are *replayed*: the run loop makes them again,
    each is compared with the logged one (``observed`` and deployment fields aside) and not written twice. Decisions
    and rewards are taken from the log and their functions not called. When the logged events are used up, the run
    goes on.
    """

    def __init__(
        self,
        writer: LogWriter,
        state: State,
        replay: Replay,
        digest: RunDigest,
        resumption: Resumption | None,
        clock: Callable[[], float],
    ) -> None:
        self._writer = writer
        self._state = state
        self._replay = replay
        self._digest = digest
        self._clock = clock
        self._subscribers: list[Subscriber] = []
        self._repeated = False
        self.resumption = resumption

    @classmethod
    def create(cls, folder: Path, clock: Callable[[], float] = time.time) -> Timeline:
        """Start the log of a new run in ``folder``. Raises InputError where it holds one."""
        return cls(LogWriter.create(folder / LOG_NAME), State(), Replay(), RunDigest(), None, clock)

    @classmethod
    def open_for_resume(
        cls,
        folder: Path,
        checkpoint_problem: CheckpointCheck = lambda record, event: None,
        clock: Callable[[], float] = time.time,
        content: LogContent | None = None,
    ) -> Timeline:
        """Go back to the last usable checkpoint, or to the start, and replay from there.

        ``content`` is the log's, for a caller who has read it since the run was locked.

        Raises InputError without a log and InvariantViolation for a log that is damaged in the middle or breaks
        an invariant. A damaged tail is cut off.
        """
        content = content if content is not None else read_log(folder / LOG_NAME)
        whole = check_all(record.event for record in content.records)
        finished = whole.finished is not None
        rejected: list[str] = []
        count = len(content.records)
        checkpoint: CheckpointWritten | None = None
        if not finished:
            count, checkpoint = _resume_point(content, checkpoint_problem, rejected)
        done, ahead = content.records[:count], content.records[count:]
        state = whole if finished else fold(record.event for record in done)
        digest = RunDigest()
        for record in done:
            digest.add(record.event)
        to_replay = sum(record.event.scope is not Scope.BOOKKEEPING for record in ahead)
        step = checkpoint.step if checkpoint is not None else None
        events = [record.event for record in content.records]
        start = next((event for event in events if isinstance(event, RunStarted)), None)
        contract = next((event for event in events if isinstance(event, ContractFixed)), None)
        resumption = Resumption(step, content.tail, tuple(rejected), to_replay, finished, start, contract)
        writer = LogWriter.resume(folder / LOG_NAME, content)
        timeline = cls(writer, state, Replay(ahead), digest, resumption, clock)
        if content.records and not finished:
            timeline._note_resumption(resumption)
        return timeline

    def _note_resumption(self, resumption: Resumption) -> None:
        seen: dict[str, Any] = {"to_replay": resumption.to_replay}
        if resumption.rejected:
            seen["rejected_checkpoints"] = list(resumption.rejected)
        if resumption.tail is not None:
            seen["cut"] = resumption.tail.sentence()
        # Not folded: in the log it stands after the events that are replayed first.
        self._writer.append(self._observed(RunResumed(checkpoint_step=resumption.checkpoint_step, observed=seen)))

    @property
    def state(self) -> State:
        """A live, read-only view of the run after the last event."""
        return self._state

    @property
    def replaying(self) -> bool:
        """Whether logged events are still being made again."""
        return self._replay.active

    @property
    def repeated(self) -> bool:
        """Whether the last event was in the log already: it was made again, and is what was logged."""
        return self._repeated

    @property
    def head(self) -> Head:
        """The log's head, as a checkpoint that is written now has to record it (in a replay: as it was then)."""
        return self._replay.head or self._writer.head

    def run_digest(self) -> str:
        """SHA-256 over what the run has computed so far; see ``vime.timeline.order``."""
        return self._digest.hexdigest()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call ``subscriber`` with every record that is written from now on (replayed ones were written before)."""
        self._subscribers.append(subscriber)

    def append(self, event: E) -> E:
        """Let an event happen; returns it as it is logged (in a replay with the first execution's observations).

        Raises InvariantViolation for a broken invariant or a replay that differs (nothing is written then), and
        Interrupted when the disk refuses.
        """
        found = self._replay.take(event)
        self._repeated = isinstance(found, Record)
        if isinstance(found, Record):
            logged = found.event
            assert type(logged) is type(event)
            check(self._state, logged, found.seq)
            self._fold(logged)
            return logged
        check(self._state, event, self._writer.head.seq + 1)
        if found is Outcome.PASSED:
            advance(self._state, event)
            return event
        event = self._observed(event)
        record = self._writer.append(event)
        self._fold(event)
        for subscriber in self._subscribers:
            subscriber(record)
        return event

    def _fold(self, event: Event) -> None:
        advance(self._state, event)
        self._digest.add(event)

    def _observed(self, event: E) -> E:
        seen: dict[str, Any] = {"at": self._clock()}
        if isinstance(event, RunStarted | RunResumed):
            seen |= {"host": socket.gethostname(), "pid": os.getpid()}
        return replace(event, observed={**seen, **event.observed})

    def decide(self, kind: str, key: str, function: Callable[[], Any]) -> Any:
        """A value that depends on a clock, on arrival or on a user's function: logged, never computed twice.

        ``key`` names one decision of the whole run (put the step or sample into it). The value is plain data;
        sequences come back as tuples.
        """
        draft = Decision(kind=kind, key=key, value=None)
        logged = self._logged_free(draft)
        if logged is None:
            self._refuse_new(f"the decision {kind} of {key}")
            logged = replace(draft, value=decode_value(encode_value(function())))
        return self.append(logged).value

    def give_reward(
        self, sample_id: SampleId, source: str, function: Callable[[], tuple[float, Mapping[str, float]]]
    ) -> RewardGiven:
        """Reward a sample with what ``function`` returns (reward, components), in a replay with what it returned."""
        draft = RewardGiven(sample_id=sample_id, source=source, reward=0.0)
        logged = self._logged_free(draft)
        if logged is None:
            self._refuse_new(f"a reward of sample {sample_id}")
            reward, components = function()
            logged = replace(draft, reward=reward, components=components)
        return self.append(logged)

    def logged_reward(self, sample_id: SampleId) -> RewardGiven | None:
        """The logged reward of a sample that a replay is about to give: its function must not be called again."""
        return self._logged_free(RewardGiven(sample_id=sample_id, source="", reward=0.0))

    def logged_arrays(self, step: int) -> ArraysWritten | None:
        """The logged announcement that comes next in a replay, if it is that of this step's arrays."""
        event = self._replay.peek_ordered()
        return event if isinstance(event, ArraysWritten) and event.step == step else None

    def _logged_free(self, draft: E) -> E | None:
        event = self._replay.peek_free(free_key(draft))
        return None if event is None else event  # type: ignore[return-value]

    def _refuse_new(self, what: str) -> None:
        if self._replay.closed:
            raise InvariantViolation(
                f"the resumed run asks for {what}, but the log holds none there: it cannot be made up now"
            )

    def close(self) -> None:
        """Sync and close the log."""
        self._writer.close()


def _resume_point(
    content: LogContent, problem: CheckpointCheck, rejected: list[str]
) -> tuple[int, CheckpointWritten | None]:
    for record in reversed(content.records):
        if isinstance(record.event, CheckpointWritten):
            found = problem(record, record.event)
            if found is None:
                return record.seq + 1, record.event
            rejected.append(found)
    return 0, None
