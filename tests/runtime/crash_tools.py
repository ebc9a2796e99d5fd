"""Runs that are killed, robbed of unsynced files, and resumed; and what has to be equal afterwards.

A run is killed in a forked child: it counts what it does to files, and at a chosen number writes half of what it was
to write, if it was to write, and kills itself with SIGKILL. With ``power_loss`` everything that was not synced is taken
away afterwards: contents of files as well as names in folders.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import re
import shutil
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

import vime.train.native.state as trainer_state
from vime.errors import VimeError
from vime.pipeline.loading import load_pipeline
from vime.pipeline.prepare import prepare
from vime.runtime.observer import Observer, RunOutcome
from vime.runtime.run_loop import run
from vime.store.run_directory import RunView
from vime.store.steps import read_steps
from vime.store.verify import verify_run
from vime.timeline.diff import diff_runs
from vime.timeline.event import Event
from vime.timeline.events import OBSERVED_IN_REPORTS, Decision, RewardGiven
from vime.timeline.log import LogWriter, Record
from vime.timeline.manager import LOG_NAME

PIPELINE = """
name: crash
seed: 5
run_directory: {run_directory}
threads: 1
placement: {placement}
model:
  preset: tiny-qwen3
  overrides: {{num_layers: 1, hidden_size: 32, intermediate_size: 32, num_heads: 2, num_kv_heads: 1}}
data:
  source: complement_digits
  parameters: {{digits: 2, held_out: 4}}
stages:
  rollout:
    prompts_per_step: 2
    samples_per_prompt: 3
    sampling: {{temperature: 1.0, max_new_tokens: 3}}
    max_num_seqs: 4
  reward: {{function: {reward}, on_error: {on_error}}}
  filter: {{function: {keep}, incomplete_group: keep}}
  train:
    optimizer: {{learning_rate: 3e-3, schedule: linear}}
  sync: {{transport: {transport}}}
  evaluate: {{every: 1, prompts: 1, samples_per_prompt: 2, greedy: false}}
checkpoint: {{every: {every}, keep: {keep_checkpoints}}}
steps: {steps}
"""
USER_FUNCTIONS = "tests.runtime.crash_functions"


@dataclass(frozen=True)
class Scene:
    """A kind of run; runs of one scene have the same digest wherever and however they run."""

    steps: int = 3
    every: int = 2
    keep_checkpoints: int = 2
    user: bool = False
    on_error: str = "stop"
    placement: str = "colocated"
    transport: str = "memory"

    def pipeline(self, path: Path) -> str:
        """The YAML of a run in ``path``."""
        return PIPELINE.format(
            run_directory=path,
            placement=self.placement,
            transport=self.transport,
            reward=f"{USER_FUNCTIONS}.reward" if self.user else "complement_digits",
            keep=f"{USER_FUNCTIONS}.keep" if self.user else "null",
            on_error=self.on_error,
            every=self.every,
            keep_checkpoints=self.keep_checkpoints,
            steps=self.steps,
        )

    def file(self, path: Path) -> Path:
        """Write the pipeline of a run in ``path`` beside that folder; returns the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.parent.parent / f"{path.parent.name}.yaml"
        file.write_text(self.pipeline(path))
        return file

    def start(self, path: Path, observer: Observer | None = None) -> RunOutcome:
        """A new run in ``path``."""
        return run(prepare(load_pipeline(self.file(path))), observer=observer)

    def finish(self, path: Path, observer: Observer | None = None) -> RunOutcome:
        """Resume what is in ``path``; where the first process did not get as far as a log, start anew."""
        if not (path / LOG_NAME).is_file():
            return self.start(path, observer)
        override = [f"run_directory={path}"]
        prepared = prepare(load_pipeline(path / "pipeline.yaml", override), new_run=False)
        return run(prepared, resume=True, observer=observer)


# ------------------------------------------------------------------------------------------ what must be equal


def other_digests(whole: RunOutcome, other: RunOutcome) -> list[str]:
    """Digests of the run and of its final weights that differ."""
    found = []
    if other.extra["run_digest"] != whole.extra["run_digest"]:
        found.append(f"run digest {other.extra['run_digest']}, not {whole.extra['run_digest']}")
    if other.manifest_digest != whole.manifest_digest:
        found.append(f"weights {other.manifest_digest}, not {whole.manifest_digest}")
    return found


def differences(whole: RunOutcome, other: RunOutcome) -> list[str]:
    """In what a run that was interrupted differs from one that was not; empty: in nothing.

    Compares digests, every event and array, and the reports; verifies the log, all arrays, checkpoints and views.
    Raises InvariantViolation for a run that is damaged.
    """
    found = other_digests(whole, other)
    difference = diff_runs(whole.run_directory, other.run_directory)
    if difference is not None:
        found.append(difference.sentence())
    verified = verify_run(other.run_directory)
    found += verified.problems
    if not verified.finished:
        found.append("the run is not finished")
    if (reports := _reports(other)) != _reports(whole):
        found.append(f"the step reports differ: {reports}")
    for name in ("contract.json", "evidence.json", "report.html"):
        if not (other.run_directory / name).is_file():
            found.append(f"{name} is missing")
    return found


def _reports(outcome: RunOutcome) -> list[list[dict[str, Any]]]:
    both = [dict(report) for report in outcome.reports], read_steps(outcome.run_directory / "steps.jsonl")
    return [[{k: v for k, v in r.items() if k not in OBSERVED_IN_REPORTS} for r in reports] for reports in both]


def logged_calls(path: Path) -> int:
    """How many rewards and filter answers the log of a run holds (0 without a log)."""
    if not (path / LOG_NAME).is_file():
        return 0
    events = [record.event for record in RunView.open(path).records]
    wanted = [e for e in events if isinstance(e, RewardGiven) or (isinstance(e, Decision) and e.kind == "filter")]
    decided = {e.key for e in events if isinstance(e, Decision) and e.kind == "reward"}
    if not decided:
        return len(wanted)
    return len(decided) + sum(isinstance(e, Decision) for e in wanted)


# ------------------------------------------------------------------------------------------------- children


def in_child(work: Callable[[], Any], said: Path) -> int:
    """Do ``work`` in a forked child; returns its exit status as os.wait gives it. ``said`` gets its errors."""
    said.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        code = 70
        try:
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = sys.stderr = open(descriptor, "w", closefd=False)  # noqa: SIM115
            result = work()
            code = result if isinstance(result, int) else 0
        except VimeError as error:
            print(error)
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1]


def was_killed(status: int) -> bool:
    """Whether a child died of SIGKILL."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def kill_self() -> None:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def operations(scene: Scene, work: Path) -> list[str]:
    """All operations on files of an uninterrupted run, in order: ``what path``."""
    work.mkdir()
    listed = work.parent / f"{work.name}.operations"

    def count() -> None:
        counting = FileOperations(work)
        counting.install()
        scene.start(work / "run")
        listed.write_text("\n".join(counting.counted))

    said = work.parent / f"{work.name}.said"
    assert in_child(count, said) == 0, said.read_text()
    return listed.read_text().splitlines()


def kill_at(scene: Scene, work: Path, at: int, place: str = "", *, power_loss: bool = False) -> str:
    """Start or resume the run ``work/run`` in a child that dies at its ``at``-th operation on a file (of a ``place``).

    Returns what it died of; empty when it came to its end first.
    """
    work.mkdir(exist_ok=True)

    def die() -> None:
        FileOperations(work, at, place, power_loss=power_loss).install()
        scene.finish(work / "run")

    said = work.parent / f"{work.name}.said"
    status = in_child(die, said)
    assert was_killed(status) or status == 0, said.read_text()
    if was_killed(status) and power_loss:
        disk = Disk(work)
        disk.load(certain_file(work))
        disk.lose_the_rest()
    return said.read_text().strip().splitlines()[-1] if was_killed(status) else ""


@dataclass
class StageKiller:
    """An observer that kills the process when it is told something for the ``count``-th time; else it only notes."""

    what: str = ""
    count: int = 1
    told: list[str] = field(default_factory=list)

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what == self.what and self.told.count(what) == self.count:
            print(f"killed at {what}", flush=True)
            kill_self()

    def started(self, run_directory: Path, first_step: int, steps: int) -> None:
        self._tell("started")

    def step_started(self, step: int) -> None:
        self._tell(f"step {step}")

    def stage(self, name: str) -> None:
        self._tell(f"stage {name}")

    def progress(self, done: int, total: int) -> None:
        self._tell(f"sample {done} of {total}")

    def step_finished(self, report: Any) -> None:
        self._tell("step finished")

    def evaluated(self, evaluation: Any) -> None:
        self._tell("evaluated")

    def finished(self, outcome: RunOutcome) -> None:
        self._tell("finished")

    def stop_requested(self) -> bool:
        return False


# ------------------------------------------------------------------------------------------ what a disk keeps


class Disk:
    """What of a folder is on disk for certain: contents that were synced, and names whose folder was synced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[int, tuple[int, int]] = {}
        self._names: dict[int, dict[str, int]] = {}
        for folder, _, files in os.walk(root):
            self.synced(folder)
            for name in files:
                self.synced(os.path.join(folder, name))

    def synced(self, place: int | str) -> None:
        """A file or folder was synced."""
        facts = os.stat(place)
        if stat.S_ISDIR(facts.st_mode):
            with os.scandir(place) as entries:
                self._names[facts.st_ino] = {entry.name: entry.inode() for entry in entries}
        else:
            self._files[facts.st_ino] = (facts.st_size, facts.st_mtime_ns)

    def made_folder(self, path: str) -> None:
        """A folder is new (its number may have been that of a deleted one)."""
        self._names.pop(os.stat(path).st_ino, None)

    def save(self, file: Path) -> None:
        """Write down what is certain."""
        file.write_text(json.dumps([list(self._files.items()), list(self._names.items())]))

    def load(self, file: Path) -> None:
        """Know what another process wrote down."""
        files, names = json.loads(file.read_text())
        self._files = {number: (size, changed) for number, (size, changed) in files}
        self._names = dict(names)

    def lose_the_rest(self) -> list[str]:
        """Take away everything else, as a power failure may; returns what went."""
        lost: list[str] = []
        self._visit(str(self._root), lost)
        return lost

    def _visit(self, folder: str, lost: list[str]) -> None:
        kept = self._names.get(os.stat(folder).st_ino, {})
        for entry in list(os.scandir(folder)):
            if kept.get(entry.name) != entry.inode():
                lost.append(entry.path)
                shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else _unlink(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                self._visit(entry.path, lost)
            else:
                self._lose_content(entry.path, lost)

    def _lose_content(self, path: str, lost: list[str]) -> None:
        facts = os.stat(path)
        size, changed = self._files.get(facts.st_ino, (0, -1))
        if (facts.st_size, facts.st_mtime_ns) != (size, changed):
            lost.append(path)
            if path.endswith(LOG_NAME):
                # only ever appended to: some part of what was appended may have come to the disk
                _truncate(path, size + (facts.st_size - size) * (facts.st_mtime_ns % 7) // 7)
            else:
                _truncate(path, min(size, facts.st_size))


_unlink, _truncate = os.unlink, os.truncate


# --------------------------------------------------------------------------------------- operations on files


def certain_file(root: Path) -> Path:
    """Where a dying process writes down what of ``root`` is certain."""
    return root.parent / f"{root.name}.certain"


class FileOperations:
    """Counts what this process does to files below ``root``, and at number ``at`` dies, or has its disk ``full``.

    With a ``place`` (a regular expression) only what it describes counts towards ``at``.
    Patches the process that it is installed in for good: to be used in a child. Nothing is really synced: what a
    sync guarantees is kept in :class:`Disk`.
    """

    def __init__(
        self, root: Path, at: int = 0, place: str = "", *, power_loss: bool = False, full: bool = False
    ) -> None:
        self.root = str(root.absolute())
        self.at = self.left = at
        self.place = re.compile(place)
        self.full = full
        self.counted: list[str] = []
        self._disk = Disk(root) if power_loss else None
        self._lock = threading.RLock()

    def _inside(self, place: Any, dir_fd: int | None = None) -> str | None:
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(place))
        elif isinstance(place, int):
            path = os.readlink(f"/proc/self/fd/{place}")
        else:
            path = os.path.abspath(os.fspath(place))
        return path if path.startswith(self.root + "/") or path == self.root else None

    def _point(self, what: str, path: str, half: Callable[[], Any] | None = None) -> None:
        with self._lock:
            self.counted.append(f"{what} {os.path.relpath(path, self.root)}")
            where = self.counted[-1]
            if self.left > 0 and self.place.search(where):
                self.left -= 1
            elif not self.full:
                return
            if self.left or not self.at:
                return
            if self.full:
                self._refuse(what)
                return
            self.at = 0  # what follows is the death itself
            if half is not None:
                half()
            if self._disk is not None:
                self._disk.save(certain_file(Path(self.root)))
            print(f"killed at {where}", flush=True)
            kill_self()

    def _refuse(self, what: str) -> None:
        if what not in ("write", "open", "mkdir", "save"):
            return  # a full disk still renames and deletes
        if what == "save":
            raise SafetensorError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error {errno.ENOSPC})")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def install(self) -> None:
        """From now on count."""
        for name in ("replace", "rename", "link", "mkdir", "unlink", "remove", "rmdir", "truncate"):
            setattr(os, name, self._of_path(name, getattr(os, name)))
        self._patch_descriptors()
        builtins.open = io.open = self._opener(io.open)  # type: ignore[assignment]
        trainer_state.save_file = self._saver(trainer_state.save_file)

    def _of_path(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **keywords: Any) -> Any:
            inside = self._inside(path, keywords.get("dir_fd"))
            if inside is not None:
                self._point(name, inside)
            result = original(path, *arguments, **keywords)
            if inside is not None and name == "mkdir" and self._disk is not None:
                with self._lock:
                    self._disk.made_folder(inside)
            return result

        return call

    def _patch_descriptors(self) -> None:
        write, fsync, ftruncate = os.write, os.fsync, os.ftruncate

        def counted_write(descriptor: int, data: bytes) -> int:
            if inside := self._inside(descriptor):
                self._point("write", inside, lambda: write(descriptor, data[: len(data) // 2]))
            return write(descriptor, data)

        def counted_fsync(descriptor: int) -> None:
            if not (inside := self._inside(descriptor)):
                return fsync(descriptor)
            self._point("fsync", inside)
            if self._disk is not None:
                with self._lock:
                    self._disk.synced(descriptor)
            return None

        def counted_ftruncate(descriptor: int, length: int) -> None:
            if inside := self._inside(descriptor):
                self._point("ftruncate", inside)
            ftruncate(descriptor, length)

        os.write, os.fsync, os.ftruncate = counted_write, counted_fsync, counted_ftruncate  # type: ignore[assignment]

    def _opener(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            inside = None if isinstance(file, int) or not set(mode) & set("wax+") else self._inside(file)
            if inside is None:
                return original(file, mode, *arguments, **keywords)
            self._point("open", inside)
            return _CountedFile(original(file, mode, *arguments, **keywords), inside, self._point)

        return opened

    def _saver(self, original: Callable[..., None]) -> Callable[..., None]:
        def save(tensors: Any, path: Path, *arguments: Any) -> None:
            def half() -> None:
                original(tensors, path, *arguments)
                _truncate(path, os.stat(path).st_size // 2)

            self._point("save", str(path), half)
            original(tensors, path, *arguments)

        return save


class _CountedFile:
    """A file opened to be written."""

    def __init__(self, file: Any, path: str, point: Callable[..., None]) -> None:
        self._file, self._path, self._point = file, path, point

    def write(self, data: Any) -> Any:
        """Count, then write."""

        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._point("write", self._path, half)
        return self._file.write(data)

    def __enter__(self) -> _CountedFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# ---------------------------------------------------------------------------------------------- cutting the log

Listing = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Moment:
    """A run directory as it was right after an event was logged, and which files were there at every barrier.

    ``barriers``: length of the log after its sync, and the files of then with size and time of change.
    """

    path: Path
    barriers: tuple[tuple[int, Listing], ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """The log."""
        return RunView.open(self.path).records

    def cut(self, target: Path, length: int, lose_unsynced: bool = True) -> None:
        """Copy to ``target`` with the log cut to ``length`` bytes, and, if asked for, without every file that was
        written after the last barrier before the cut."""
        shutil.copytree(self.path, target, copy_function=_link_or_copy)
        _truncate(target / LOG_NAME, length)
        if not lose_unsynced:
            return
        known = [listing for end, listing in self.barriers if end <= length][-1]
        for name, facts in listing(target).items():
            if name != LOG_NAME and known.get(name) != facts:
                (target / name).unlink()


def listing(folder: Path) -> Listing:
    """Files below a folder: relative path -> size and time of change."""
    found: Listing = {}
    for path in folder.rglob("*"):
        facts = path.stat()
        if stat.S_ISREG(facts.st_mode):
            found[str(path.relative_to(folder))] = (facts.st_size, facts.st_mtime_ns)
    return found


def _link_or_copy(source: str, target: str) -> None:
    """Files that are only ever replaced may share their content; the others are copied."""
    if source.endswith((".jsonl", ".lock")):
        shutil.copy2(source, target)
    else:
        os.link(source, target)


def stop_after(scene: Scene, path: Path, event_type: str, count: int) -> Moment:
    """Run in a child that dies right after the ``count``-th event of a type is logged (0: it lives on to the end)."""
    notes = path.parent / f"{path.name}.barriers"

    def work() -> None:
        _note_barriers(path, notes, event_type, count)
        scene.start(path)

    status = in_child(work, path.parent / f"{path.name}.said")
    assert was_killed(status) if count else status == 0, (path.parent / f"{path.name}.said").read_text()
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    barriers = tuple((end, {name: tuple(facts) for name, facts in files.items()}) for end, files in lines)
    return Moment(path, barriers)


def _note_barriers(path: Path, notes: Path, event_type: str, count: int) -> None:
    append, sync, seen = LogWriter.append, LogWriter.sync, [0]

    def note() -> None:
        with open(notes, "a") as file:
            file.write(json.dumps([(path / LOG_NAME).stat().st_size, listing(path)]) + "\n")

    def noted_append(writer: LogWriter, event: Event) -> Record:
        if writer.head.seq == -1:
            note()
        record = append(writer, event)
        seen[0] += event.type == event_type
        if count and seen[0] == count:
            kill_self()
        return record

    def noted_sync(writer: LogWriter) -> None:
        sync(writer)
        if writer.head.seq >= 0:
            note()

    LogWriter.append, LogWriter.sync = noted_append, noted_sync  # type: ignore[method-assign]
