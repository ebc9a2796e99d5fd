"""The order in which events count, and the digest of a run.

Events that may come in any order (samples, rewards, draws) are free inside a *segment*: what lies between two ordered
events. Two runs are equal when, segment by segment, their sorted free events and the ordered event that follows
are. Scheduling and bookkeeping take no part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from vime.timeline.event import Event, OrderKey, Scope, to_json
from vime.timeline.log import Record

Key = tuple[OrderKey, str]


def free_key(event: Event) -> Key:
    """Place of a free event in its segment; equal only for the same fact about the same subject."""
    return event.order_key(), event.type


def counts(event: Event) -> bool:
    """Whether the event is part of what the run computed."""
    return event.scope is Scope.RUN


def in_canonical_order(records: Iterable[Record]) -> Iterator[Record]:
    """Records that count, each segment's free ones sorted before the ordered one that ends it."""
    free: list[Record] = []
    for record in records:
        if not counts(record.event):
            continue
        if record.event.free:
            free.append(record)
            continue
        yield from sorted(free, key=lambda r: free_key(r.event))
        free.clear()
        yield record
    yield from sorted(free, key=lambda r: free_key(r.event))


class RunDigest:
    """SHA-256 over the logical content of a run, event by event.

    Equal for an uninterrupted and a resumed run, and for independent runs without clocks, whatever the scheduling.
    """

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()
        self._free: list[tuple[Key, bytes]] = []

    def add(self, event: Event) -> None:
        """Take the next event."""
        if not counts(event):
            return
        content = f"{event.type} {to_json(event.logical())}\n".encode()
        if event.free:
            self._free.append((free_key(event), content))
            return
        self._flush(self._hasher)
        self._free.clear()
        self._hasher.update(content)

    def _flush(self, hasher: hashlib._Hash) -> None:
        for _, content in sorted(self._free, key=lambda item: item[0]):
            hasher.update(content)

    def hexdigest(self) -> str:
        """The digest of all events so far."""
        hasher = self._hasher.copy()
        self._flush(hasher)
        return hasher.hexdigest()


def run_digest(events: Iterable[Event]) -> str:
    """The digest of a sequence of events."""
    digest = RunDigest()
    for event in events:
        digest.add(event)
    return digest.hexdigest()


def first_difference(left: object, right: object, path: str = "") -> tuple[str, object, object] | None:
    """The first place where two JSON values differ: (path, left, right), or None. A missing value is None."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in [*left, *(k for k in right if k not in left)]:
            inner = f"{path}.{key}" if path else str(key)
            if key not in left or key not in right:
                return inner, left.get(key), right.get(key)
            if found := first_difference(left[key], right[key], inner):
                return found
        return None
    if isinstance(left, list) and isinstance(right, list):
        for index, (a, b) in enumerate(zip(left, right, strict=False)):
            if found := first_difference(a, b, f"{path}[{index}]"):
                return found
        if len(left) != len(right):
            return f"{path}.length", len(left), len(right)
        return None
    return None if left == right and type(left) is type(right) else (path, left, right)
