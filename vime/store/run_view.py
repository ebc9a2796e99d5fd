"""A run directory as a reader sees it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vime.errors import InputError
from vime.store.arrays import ArrayStore
from vime.store.names import ARRAYS_NAME, STAGING_NAME
from vime.timeline.event import Event
from vime.timeline.events import ArraysRestored, ArraysWritten
from vime.timeline.log import LogContent, Record, read_log
from vime.timeline.manager import LOG_NAME


def announced_arrays(events: Iterable[Event]) -> dict[int, ArraysWritten]:
    """Announcements by step, with the arrays of wall times as they were written last."""
    found: dict[int, ArraysWritten] = {}
    for event in events:
        if isinstance(event, ArraysWritten):
            found[event.step] = event
        elif isinstance(event, ArraysRestored) and event.step in found:
            found[event.step] = restored(found[event.step], event)
    return found


def restored(announced: ArraysWritten, event: ArraysRestored) -> ArraysWritten:
    """An announcement with the arrays of wall times that were written later."""
    now = {key: event.observed[key] for key in ("arrays", "metadata") if key in event.observed}
    return replace(announced, observed={**announced.observed, "arrays": {}, **now})


@dataclass(frozen=True)
class RunView:
    """A run directory as a reader sees it: the valid part of its log, and its arrays. Locks and changes nothing."""

    path: Path
    content: LogContent
    arrays: ArrayStore

    @classmethod
    def open(cls, path: Path) -> RunView:
        """Raises InputError where there is no run, InvariantViolation for a log that was tampered with."""
        path = Path(path).absolute()
        if not (path / LOG_NAME).is_file():
            raise InputError(f"{path} holds no run: {LOG_NAME} is missing")
        return cls(path, read_log(path / LOG_NAME), ArrayStore(path / ARRAYS_NAME, path / STAGING_NAME))

    @property
    def records(self) -> tuple[Record, ...]:
        """All valid records."""
        return self.content.records

    def announced_arrays(self) -> dict[int, ArraysWritten]:
        """Steps whose arrays were announced; see :func:`announced_arrays`."""
        return announced_arrays(record.event for record in self.records)

    def step_arrays(self, step: int) -> dict[str, NDArray[Any]]:
        """A step's arrays, verified against the log. Raises InputError for a step without arrays."""
        announced = self.announced_arrays()
        if step not in announced:
            raise InputError(f"step {step} of {self.path} has no arrays; steps with arrays: {sorted(announced)}")
        return self.arrays.read(step, announced[step].stored, announced[step].metadata)
