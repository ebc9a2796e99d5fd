"""A run directory as a reader sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vime.errors import InputError
from vime.store.arrays import ArrayStore
from vime.store.names import ARRAYS_NAME, STAGING_NAME
from vime.timeline.events import ArraysWritten
from vime.timeline.log import LogContent, Record, read_log
from vime.timeline.manager import LOG_NAME


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
        """Steps whose arrays were announced."""
        return {r.event.step: r.event for r in self.records if isinstance(r.event, ArraysWritten)}

    def step_arrays(self, step: int) -> dict[str, NDArray[Any]]:
        """A step's arrays, verified against the log. Raises InputError for a step without arrays."""
        announced = self.announced_arrays()
        if step not in announced:
            raise InputError(f"step {step} of {self.path} has no arrays; steps with arrays: {sorted(announced)}")
        return self.arrays.read(step, announced[step].arrays)
