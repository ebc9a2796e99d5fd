"""Verification of a whole run directory: the log and its invariants, arrays, checkpoints, views."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vime.errors import InputError, InvariantViolation
from vime.store.announced import announced_files, file_problems
from vime.store.checkpoints import CheckpointStore, kept_checkpoints
from vime.store.names import ARRAYS_NAME, CHECKPOINTS_NAME, step_of
from vime.store.provenance import PROVENANCE_NAME, provenance_text
from vime.store.remains import left_without_log, stored_steps, unexplained
from vime.store.run_view import RunView
from vime.store.steps import STEPS_NAME, steps_text
from vime.timeline.events import CheckpointWritten, RunFinished
from vime.timeline.invariants import check_all
from vime.timeline.order import run_digest


@dataclass(frozen=True)
class Verification:
    """What was verified, and what was wrong: one sentence a problem. ``run_digest`` is None without a valid log.

    report.html is a view for people and is not verified: nothing reads it.
    """

    events: int
    steps: int
    arrays: int
    checkpoints: int
    finished: bool
    run_digest: str | None
    problems: tuple[str, ...]
    files: tuple[str, ...] = ()  # those whose bytes are what the log announced

    @property
    def ok(self) -> bool:
        """Nothing was wrong."""
        return not self.problems


def verify_run(run: Path) -> Verification:
    """Verify everything in a run directory. Raises InputError where there is no run; problems are collected.

    An unfinished run may be in use: of its unannounced files only those are named that no crash can leave, its views
    are not looked at, and a tail that is still being written reads as damaged.
    """
    run = Path(run)
    stored = stored_steps(run)  # before the log: what is written in between is in the log
    try:
        view = RunView.open(run)
    except InvariantViolation as error:
        return Verification(0, 0, 0, 0, False, None, (str(error),))
    problems: list[str] = []
    if view.content.tail is not None:
        problems.append(view.content.tail.sentence())
    events = [record.event for record in view.records]
    try:
        check_all(events)
    except InvariantViolation as error:
        problems.append(str(error))
    finished = any(isinstance(event, RunFinished) for event in events)
    odd = unexplained(stored, view.content).sentence()
    if left := left_without_log(run, stored, view.content):
        problems.append(left)
    elif odd and not finished:
        problems.append(f"{odd} are stored, but the log ends before these steps: events at its end are gone")
    problems.extend(file_problems(run, events, finished=finished))
    files = tuple(name for name in announced_files(events) if (run / name).is_file())
    announced = view.announced_arrays()
    arrays = 0
    for step, event in announced.items():
        try:
            arrays += len(view.arrays.read(step, event.stored, event.metadata))
        except InvariantViolation as error:
            problems.append(str(error))
    checkpoints = _checkpoints(view, problems)
    if odd_root := view.arrays.root_problem():
        problems.append(odd_root)
    problems.extend(_odd_names(view.path / ARRAYS_NAME, ("zarr.json",)))
    problems.extend(_odd_names(view.path / CHECKPOINTS_NAME))
    if finished:
        for step in sorted(stored.arrays - set(announced)):
            problems.append(f"step {step}: arrays are stored that no event announced")
        named = [event for event in events if isinstance(event, CheckpointWritten)]
        kept = {event.step for event in kept_checkpoints(named)}
        for step in sorted(stored.checkpoints - kept):
            known = any(event.step == step for event in named)
            why = "was deleted when later ones were written" if known else "no event announced"
            problems.append(f"step {step}: a checkpoint is stored that {why}")
        problems.extend(_views(view))
    return Verification(
        len(events), len(announced), arrays, checkpoints, finished, run_digest(events), tuple(problems), files
    )


def _odd_names(folder: Path, due: tuple[str, ...] = ()) -> Iterator[str]:
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if step_of(entry.name) is None and entry.name not in due:
            yield f"{entry.name} in {folder} is no step's: nothing of this run wrote it"


def _checkpoints(view: RunView, problems: list[str]) -> int:
    announced = [(r, r.event) for r in view.records if isinstance(r.event, CheckpointWritten)]
    if not announced:
        return 0
    keep = len(kept_checkpoints([event for _, event in announced]))
    store = CheckpointStore(view.path / CHECKPOINTS_NAME, view.path, keep)
    verified = 0
    for record, event in announced[-keep:]:
        try:
            store.verify(event.step, event.files, record.before)
            verified += 1
        except (InputError, InvariantViolation) as error:
            problems.append(str(error))
    return verified


def _views(view: RunView) -> Iterator[str]:
    for name, due in ((STEPS_NAME, steps_text(view.records)), (PROVENANCE_NAME, provenance_text(view.records))):
        try:
            found = (view.path / name).read_bytes()
        except OSError as error:
            yield f"{name} cannot be read ({error}); it can be rebuilt from the event log"
            continue
        if found == due.encode():
            continue
        stored, logged = found.split(b"\n"), due.encode().split(b"\n")
        if len(stored) != len(logged):
            yield f"{name} has {len(stored) - 1} lines, the event log makes {len(logged) - 1}"
        for number, (mine, wanted) in enumerate(zip(stored, logged, strict=False), start=1):
            if mine != wanted:
                yield f"line {number} of {name} is not what the event log says; it can be rebuilt from the log"
                break
