"""What a disk keeps for certain, and processes that die, or find the disk full, at a chosen operation on a file.

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
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

import vime.train.native.state as trainer_state
from tests.runtime.crash.scene import Scene, in_child, kill_self, was_killed
from vime.timeline.manager import LOG_NAME


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
