"""Comparison of a re-executed run with what its log says happened after the checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from vime.errors import InvariantViolation
from vime.timeline.event import Event, Scope
from vime.timeline.log import Head, Record
from vime.timeline.order import Key, first_difference, free_key


class Outcome(Enum):
    """What to do with a re-executed event that is not in the log."""

    NEW = "the log ends before it: write it"
    PASSED = "scheduling that the first execution did without: fold it, do not write it"


@dataclass
class _Segment:
    free: dict[Key, deque[Record]] = field(default_factory=dict)
    end: Record | None = None

    def left_over(self) -> Record | None:
        """A logged free event that counts and was not made again."""
        records = [queue[0] for queue in self.free.values() if queue and queue[0].event.scope is Scope.RUN]
        return min(records, key=lambda record: record.seq, default=None)


class Replay:
    """The logged events that are still to be made again. Order inside a segment is free, as in the run digest."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._segments: deque[_Segment] = deque([_Segment()])
        for record in records:
            if record.event.scope is Scope.BOOKKEEPING:
                continue
            segment = self._segments[-1]
            if record.event.free:
                segment.free.setdefault(free_key(record.event), deque()).append(record)
            else:
                segment.end = record
                self._segments.append(_Segment())

    @property
    def active(self) -> bool:
        """Whether the log holds events that have not been made again."""
        return len(self._segments) > 1 or self._segments[0].left_over() is not None

    @property
    def closed(self) -> bool:
        """Whether an ordered event is logged ahead, so that nothing new can happen before it."""
        return len(self._segments) > 1

    @property
    def head(self) -> Head | None:
        """The head of the log when the next ordered event was written; None when there is none ahead."""
        end = self._segments[0].end
        return None if end is None else end.before

    def peek_free(self, key: Key) -> Event | None:
        """The logged free event of this key in the current segment."""
        queue = self._segments[0].free.get(key)
        return queue[0].event if queue else None

    def peek_ordered(self) -> Event | None:
        """The next logged ordered event."""
        end = self._segments[0].end
        return None if end is None else end.event

    def take(self, event: Event) -> Record | Outcome:
        """The logged record of a re-executed event, or what to do without one.

        Raises InvariantViolation, naming the first differing field, when the re-execution went another way.
        """
        segment = self._segments[0]
        if event.scope is Scope.BOOKKEEPING:
            return Outcome.NEW
        if event.free:
            queue = segment.free.get(free_key(event))
            if queue:
                _require_equal(queue[0], event)
                return queue.popleft()
            if segment.end is None:
                return Outcome.NEW
            if event.scope is Scope.SCHEDULING:
                return Outcome.PASSED
            raise InvariantViolation(
                f"the resumed run made {event.describe()}, which the log does not hold before event "
                f"{segment.end.seq} ({segment.end.event.type}): the re-execution went another way"
            )
        left_over = segment.left_over()
        if left_over is not None:
            raise InvariantViolation(
                f"the resumed run came to {event.describe()} without making event {left_over.seq} again, which the log "
                f"holds before it: {left_over.event.describe()}"
            )
        if segment.end is None:
            return Outcome.NEW
        _require_equal(segment.end, event)
        self._segments.popleft()
        return segment.end


def _require_equal(record: Record, event: Event) -> None:
    logged = record.event
    if type(logged) is not type(event):
        raise InvariantViolation(
            f"the resumed run made {event.describe()}, but event {record.seq} is {logged.describe()}"
        )
    if difference := first_difference(logged.logical(), event.logical()):
        path, old, new = difference
        raise InvariantViolation(
            f"the resumed run differs from its log at event {record.seq} ({logged.type}, {_subject(logged)}): field "
            f"{path} was {old!r} and is now {new!r}"
        )


def _subject(event: Event) -> str:
    for name in ("sample_id", "step", "version", "key", "prompt_index", "subject"):
        if hasattr(event, name):
            return f"{name.replace('_', ' ')} {getattr(event, name)}"
    return "the run"
