"""A run's directory: layout, lock, and the order of writes that makes every crash resumable.

Files come first and are durable before the event that announces them; views (steps.jsonl, provenance.jsonl) follow
the log. What no event announces is removed and made again on resume.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

from vime.errors import InputError, InvariantViolation
from vime.store.announced import announced_files, check_announced, sha256
from vime.store.arrays import ArrayStore, WrittenArrays, describe_array
from vime.store.checkpoints import Checkpoint, CheckpointStore, kept_checkpoints
from vime.store.files import disk_errors, fsync_folder, fsync_tree, write_file
from vime.store.lock import RunLock, holder_of
from vime.store.names import (
    ARRAYS_NAME,
    CHECKPOINTS_NAME,
    CONTRACT_NAME,
    EVIDENCE_NAME,
    PIPELINE_NAME,
    REPORT_NAME,
    STAGING_NAME,
)
from vime.store.provenance import PROVENANCE_NAME, ProvenanceWriter, rebuild_provenance
from vime.store.remains import left_without_log, set_aside, stored_steps, unexplained
from vime.store.run_view import RunView, announced_arrays, restored
from vime.store.steps import STEPS_NAME, StepsWriter, rebuild_steps
from vime.timeline.event import Event
from vime.timeline.events import ArraysRestored, ArraysWritten, CheckpointWritten, FileAnnounced
from vime.timeline.log import LogContent, Record, read_log
from vime.timeline.manager import LOG_NAME, Resumption, Timeline

_BUILDING = ".new-"
__all__ = ["CONTRACT_NAME", "EVIDENCE_NAME", "RunDirectory", "RunView"]


class RunDirectory:
    """A run directory in use by this process, and the timeline in it.

    ``found`` says in sentences what was not as a run leaves it when it was opened.
    """

    def __init__(
        self,
        path: Path,
        lock: RunLock,
        timeline: Timeline,
        arrays: ArrayStore,
        checkpoints: CheckpointStore,
        events: Sequence[Event],
        found: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.found = tuple(found)
        self._announced = announced_arrays(events)
        self._files = announced_files(events)
        self.timeline = timeline
        self.arrays = arrays
        self.checkpoints = checkpoints
        self._lock = lock
        timeline.subscribe(ProvenanceWriter(path / PROVENANCE_NAME))
        timeline.subscribe(StepsWriter(path / STEPS_NAME))

    @classmethod
    def create(cls, path: Path, pipeline: str, keep_checkpoints: int = 2) -> RunDirectory:
        """Start a run in a new folder; ``pipeline`` is the resolved pipeline's YAML.

        The folder appears as a whole or not at all. Raises InputError where it exists and is not empty.
        """
        path = path.absolute()
        _refuse_existing(path)
        building = path.with_name(f".{path.name}{_BUILDING}{os.getpid()}")
        missing = [folder for folder in path.parents if not folder.exists()]
        _remove_abandoned(path)
        with disk_errors(f"the new run directory {path}"):
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
        lock = RunLock(building)
        with disk_errors(f"the new run directory {path}"):
            (building / CHECKPOINTS_NAME).mkdir()
            (building / STAGING_NAME).mkdir()
            (building / PIPELINE_NAME).write_text(pipeline)
        ArrayStore.create(building / ARRAYS_NAME, building / STAGING_NAME)
        Timeline.create(building).close()
        with disk_errors(f"the new run directory {path}"):
            fsync_tree(building)
            try:
                os.rename(building, path)
            except OSError as error:
                lock.close()
                shutil.rmtree(building, ignore_errors=True)
                _refuse_existing(path)
                raise error
            # The names of folders that were made on the way are no safer than the run in them.
            for folder in (path.parent, *(folder.parent for folder in missing)):
                fsync_folder(folder)
        # An empty log has nothing to replay: opening it is starting it.
        return cls._opened(path, lock, keep_checkpoints, read_log(path / LOG_NAME))

    @classmethod
    def open_for_resume(cls, path: Path, keep_checkpoints: int = 2) -> RunDirectory:
        """Take up an interrupted run: cut a damaged tail, go back to the last usable checkpoint, remove what was not
        announced, rebuild the views, and replay.

        What was found is in ``resumption``. Raises InputError where there is no run, or another process uses it;
        InvariantViolation for a log that was tampered with, or that is empty beside what a run has written (nothing is
        changed then).
        """
        path = path.absolute()
        if not (path / LOG_NAME).is_file():
            raise InputError(f"{path} holds no run ({LOG_NAME} is missing): start one with 'vime run'")
        lock = RunLock(path)
        try:
            stored, content = stored_steps(path), read_log(path / LOG_NAME)
            if left := left_without_log(path, stored, content):
                raise InvariantViolation(left)
            with disk_errors(str(path)):
                shutil.rmtree(path / STAGING_NAME, ignore_errors=True)
                (path / STAGING_NAME).mkdir()
                (path / CHECKPOINTS_NAME).mkdir(exist_ok=True)
            if ArrayStore(path / ARRAYS_NAME, path / STAGING_NAME).root_problem():
                (path / ARRAYS_NAME / "zarr.json").unlink(missing_ok=True)
                ArrayStore.create(path / ARRAYS_NAME, path / STAGING_NAME)
            return cls._opened(path, lock, keep_checkpoints, content)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def _opened(cls, path: Path, lock: RunLock, keep: int, content: LogContent) -> RunDirectory:
        arrays = ArrayStore(path / ARRAYS_NAME, path / STAGING_NAME)
        checkpoints = CheckpointStore(path / CHECKPOINTS_NAME, path / STAGING_NAME, keep)

        def problem(record: Record, event: CheckpointWritten) -> str | None:
            try:
                checkpoints.verify(event.step, event.files, record.before)
            except InputError as error:
                return str(error)
            return None

        timeline = Timeline.open_for_resume(path, problem, content=content)
        events = [record.event for record in content.records]
        announced = announced_arrays(events)
        found = [*set_aside(path, unexplained(stored_steps(path), content))]
        assert timeline.resumption is not None
        try:
            found += _lost_arrays(arrays, announced, timeline.resumption)
        except InvariantViolation:
            timeline.close()
            raise
        arrays.remove_orphans(announced)
        # a crash can bring one back that was deleted when later ones were written; it stays if the run goes on from it
        written = [event for event in events if isinstance(event, CheckpointWritten)]
        kept = {event.step for event in kept_checkpoints(written)}
        checkpoints.remove_orphans({*kept, timeline.resumption.checkpoint_step})
        rebuild_steps(content.records, path / STEPS_NAME)
        rebuild_provenance(content.records, path / PROVENANCE_NAME)
        return cls(path, lock, timeline, arrays, checkpoints, events, found)

    @property
    def resumption(self) -> Resumption:
        """From where the run goes on. A new run goes on from nothing, with nothing to replay."""
        found = self.timeline.resumption
        assert found is not None
        return found

    @property
    def pipeline(self) -> str:
        """The resolved pipeline's YAML."""
        try:
            return (self.path / PIPELINE_NAME).read_text()
        except OSError as error:
            raise InputError(f"{self.path / PIPELINE_NAME} cannot be read: {error.strerror}") from error

    def resume_checkpoint(self) -> Checkpoint | None:
        """The checkpoint to load before the run goes on, verified; None at the start of a run."""
        step = self.resumption.checkpoint_step
        if step is None:
            return None
        return self.checkpoints.verify(step, self.timeline.state.checkpoints[step].files)

    def write_arrays(
        self, step: int, arrays: Mapping[str, NDArray[Any]], observed: Collection[str] = ()
    ) -> ArraysWritten:
        """Store a step's arrays, then announce them.

        A replay compares them with what the log announced before it touches a file. It keeps a folder that is the
        announced one; one that is gone or damaged is written again, with other wall times, which the log is told.
        """
        if self.timeline.logged_arrays(step) is None:
            written = self.arrays.write(step, arrays, observed)
            event = ArraysWritten(step=step, arrays=written.arrays, observed=_observed(written))
            self._announced[step] = self.timeline.append(event)
            return self._announced[step]
        facts = {name: describe_array(array) for name, array in arrays.items() if name not in observed}
        event = self.timeline.append(ArraysWritten(step=step, arrays=facts))
        try:
            self.arrays.read(step, self._announced[step].stored, self._announced[step].metadata)
        except InvariantViolation:
            again = self.arrays.write(step, arrays, observed)
            told = self.timeline.append(ArraysRestored(step=step, observed=_observed(again)))
            self._announced[step] = restored(event, told)
        return self._announced[step]

    def step_arrays(self, step: int) -> dict[str, NDArray[Any]]:
        """A step's arrays, verified. Raises InputError for a step without arrays."""
        known = self.timeline.state.steps.get(step)
        if known is None or known.arrays is None:
            raise InputError(f"step {step} has no arrays; the timeline has {sorted(self.timeline.state.steps)}")
        return self.arrays.read(step, self._announced[step].stored, self._announced[step].metadata)

    def write_checkpoint(self, step: int, write: Callable[[Path], Mapping[str, str]]) -> CheckpointWritten:
        """Let ``write(folder)`` store everything that the next step depends on, announce it, delete the oldest.

        Appends nothing between reading the log's head and announcing, so that both stand side by side in the log.
        """
        checkpoint = self.checkpoints.write(step, self.timeline.head, write)
        seen = {"bytes": sum(checkpoint.sizes.values()), "keep": self.checkpoints.keep}
        event = self.timeline.append(CheckpointWritten(step=step, files=checkpoint.files, observed=seen))
        self.checkpoints.prune()
        return event

    def announce_pipeline(self) -> None:
        """Log which pipeline.yaml this process goes by; settings that decide no bit may have been edited."""
        try:
            content = (self.path / PIPELINE_NAME).read_bytes()
        except OSError as error:
            raise InputError(f"{self.path / PIPELINE_NAME} cannot be read: {error.strerror}") from error
        self._announce(PIPELINE_NAME, content)

    def write_contract(self, data: Mapping[str, Any]) -> None:
        """contract.json: identities, entries, claims, certificates. Announced, so only in a run that has started."""
        self._write_announced(CONTRACT_NAME, data)

    def write_evidence(self, data: Mapping[str, Any]) -> None:
        """evidence.json: which implementation ran how often in which case, and what was refused. Announced as well."""
        self._write_announced(EVIDENCE_NAME, data)

    def read_announced(self, name: str) -> dict[str, Any] | None:
        """An announced JSON file; None where it is gone. Raises InvariantViolation where it is another one."""
        path = self.path / name
        if not path.is_file():
            return None
        check_announced(path, self._files.get(name, [])[-1:])
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def _write_announced(self, name: str, data: Mapping[str, Any]) -> None:
        content = (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()
        self._announce(name, content)
        write_file(self.path / name, content)

    def _announce(self, name: str, content: bytes) -> None:
        known, digest = self._files.setdefault(name, []), sha256(content)
        if known[-1:] != [digest]:
            self.timeline.append(FileAnnounced(file=name, sha256=digest))
            known.append(digest)

    def write_report(self, html: str) -> None:
        """report.html. A reason may hold what is no text (half of a surrogate pair)."""
        write_file(self.path / REPORT_NAME, html.encode("utf-8", "backslashreplace"))

    def discard_unbegun(self) -> bool:
        """Remove the folder of a run whose log has no event yet; says whether it was removed. Close it all the same."""
        if self.timeline.head.seq >= 0:
            return False
        gone = self.path.with_name(f".{self.path.name}{_BUILDING}{os.getpid()}")
        with disk_errors(str(self.path)):
            os.rename(self.path, gone)  # at once: nobody finds half of it
            shutil.rmtree(gone, ignore_errors=True)
        return True

    def close(self) -> None:
        """Sync the log, and let others use the directory."""
        try:
            self.timeline.close()
        finally:
            self._lock.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _observed(written: WrittenArrays) -> dict[str, Any]:
    return {"arrays": written.observed, "metadata": written.metadata}


def _lost_arrays(arrays: ArrayStore, announced: Mapping[int, ArraysWritten], resumption: Resumption) -> Iterator[str]:
    """What is gone of the arrays of steps that are not made again.

    Raises InvariantViolation for a folder that is that of another step or run.
    """
    for step, event in announced.items():
        checkpoint = resumption.checkpoint_step
        again = not resumption.finished and (checkpoint is None or step > checkpoint)
        if odd := arrays.foreign(step, event.stored, renewed=event.observed.get("arrays", {}) if again else ()):
            raise InvariantViolation(
                f"{odd}. Nothing was computed; put this run's own folder back, or remove it: the run can go on without"
            )
        if not again and (gone := arrays.missing(step, event.stored)):
            yield f"{gone}; the run goes on without them"


def _remove_abandoned(path: Path) -> None:
    """Remove what a process that died while it created this run left behind."""
    for left in path.parent.glob(f".{path.name}{_BUILDING}*"):
        try:
            lock = RunLock(left)
        except InputError:
            continue  # another process is creating it right now; the rename decides who wins
        shutil.rmtree(left, ignore_errors=True)
        lock.close()


def _refuse_existing(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise InputError(f"the run directory {path} is a file; name a folder that does not exist")
    if (path / LOG_NAME).exists():
        if holder := holder_of(path):
            raise InputError(
                f"{path} holds a run that is alive ({holder} works on it): wait until it ends, or name another "
                "run_directory"
            )
        raise InputError(
            f"{path} holds a run already: continue it with: vime resume {shlex.quote(str(path))}, or name another "
            "run_directory ('vime run --fresh' moves it aside)"
        )
    if path.exists() and any(path.iterdir()):
        raise InputError(f"the run directory {path} is not empty; name a folder that does not exist")
