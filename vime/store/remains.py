"""What a run directory holds beside its log, and what of it no crash can have left.

Every record that decides what may be stored next is on disk before anything is stored: RunStarted before all else,
BatchAssigned before the arrays of its step, StepTrained before the checkpoint. So an orphan without its record says
that the log was cut, and it is kept: nothing that took a run its time is deleted for a log that is not its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vime.store.files import disk_errors, fsync_folder
from vime.store.names import ARRAYS_NAME, CHECKPOINTS_NAME, CONTRACT_NAME, SET_ASIDE_NAME, step_folder, step_of
from vime.store.provenance import PROVENANCE_NAME
from vime.store.steps import STEPS_NAME
from vime.timeline.events import BatchAssigned, StepTrained
from vime.timeline.log import LogContent


@dataclass(frozen=True)
class StoredSteps:
    """Steps that have a folder, announced or not. ``others``: files that are written only once a run has started."""

    arrays: frozenset[int]
    checkpoints: frozenset[int]
    others: tuple[str, ...]

    def sentence(self) -> str:
        """What is stored, in words; empty where nothing is."""
        parts = [_named("the arrays", self.arrays), _named("the checkpoint", self.checkpoints), *self.others]
        return ", ".join(part for part in parts if part)


def stored_steps(run: Path) -> StoredSteps:
    """What lies in a run directory now."""
    others = [name for name in (CONTRACT_NAME,) if (run / name).is_file()]
    others += [name for name in (STEPS_NAME, PROVENANCE_NAME) if _size(run / name)]
    return StoredSteps(_steps(run / ARRAYS_NAME), _steps(run / CHECKPOINTS_NAME), tuple(others))


def unexplained(stored: StoredSteps, content: LogContent) -> StoredSteps:
    """What is stored of steps that the log has not come to. ``stored`` was read before the log."""
    events = [record.event for record in content.records]
    assigned = {event.step for event in events if isinstance(event, BatchAssigned)}
    trained = {event.step for event in events if isinstance(event, StepTrained)}
    return StoredSteps(stored.arrays - assigned, stored.checkpoints - trained, () if events else stored.others)


def left_without_log(run: Path, stored: StoredSteps, content: LogContent) -> str | None:
    """A sentence where the log holds no event, although the run has written something; None else."""
    if content.records or not stored.sentence():
        return None
    return (
        f"the event log of {run} holds no event, but {stored.sentence()} are there: a run logs its start before it "
        "writes anything, so the log was emptied or replaced. Nothing was changed; put the log back, or start a run "
        "of its own with 'vime run'"
    )


def set_aside(run: Path, odd: StoredSteps) -> tuple[str, ...]:
    """Move what no crash can have left out of the way, into ``set-aside``; one sentence for what was moved."""
    names = [f"{ARRAYS_NAME}/{step_folder(step)}" for step in sorted(odd.arrays)]
    names += [f"{CHECKPOINTS_NAME}/{step_folder(step)}" for step in sorted(odd.checkpoints)]
    if not names:
        return ()
    number = 1
    while (target := run / SET_ASIDE_NAME / str(number)).exists():
        number += 1
    with disk_errors(str(target)):
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(run / name, target / name)
        for folder in (run / ARRAYS_NAME, run / CHECKPOINTS_NAME, target):
            fsync_folder(folder)
    return (
        f"{odd.sentence()} are stored, but the log ends before these steps: events at its end are gone, and not by a "
        f"crash of the run. They are in {target} now, and are made again",
    )


def _steps(folder: Path) -> frozenset[int]:
    if not folder.is_dir():
        return frozenset()
    found = (step_of(entry.name) for entry in folder.iterdir())
    return frozenset(step for step in found if step is not None)


def _named(what: str, steps: frozenset[int]) -> str:
    return f"{what} of step{'s' if len(steps) > 1 else ''} {', '.join(map(str, sorted(steps)))}" if steps else ""


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0
