"""Run directories as they were at some moment, with the log cut and without what no barrier covers."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from tests.runtime.crash.scene import Scene, in_child, kill_self, was_killed
from vime.store.run_directory import RunView
from vime.timeline.event import Event
from vime.timeline.log import LogWriter, Record
from vime.timeline.manager import LOG_NAME

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
        os.truncate(target / LOG_NAME, length)
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

    LogWriter.append = noted_append  # type: ignore[method-assign, assignment]
    LogWriter.sync = noted_sync  # type: ignore[method-assign, assignment]
