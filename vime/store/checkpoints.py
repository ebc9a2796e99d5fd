"""Checkpoints: whole folders with a manifest, announced by an event, verified before they are loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import InputError, InvariantViolation
from vime.store.files import disk_errors, file_sha256, parse_json, publish_folder, retire_folder
from vime.store.names import step_folder, step_of
from vime.timeline.events import CheckpointWritten
from vime.timeline.log import Head

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. ``files``: name -> SHA-256; ``head`` is the log's head when it was written."""

    step: int
    folder: Path
    files: dict[str, str]
    sizes: dict[str, int]
    head: Head


class CheckpointStore:
    """``checkpoints/``, of which the last ``keep`` stay."""

    def __init__(self, root: Path, staging: Path, keep: int = 2) -> None:
        if keep < 1:
            raise InputError(f"checkpoints: keep is {keep}; at least 1 has to stay")
        self.root = root
        self.staging = staging
        self.keep = keep

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.root / step_folder(step)

    def write(self, step: int, head: Head, write: Callable[[Path], Mapping[str, str]]) -> Checkpoint:
        """Let ``write(folder)`` fill a folder and return file name -> SHA-256; durable on return, in place as a whole.

        Raises InputError when what is on disk is not what ``write`` declared; Interrupted when the disk refuses.
        """
        staged = self.staging / f"checkpoint-{step:06d}"
        with disk_errors(f"the checkpoint of step {step} to {self.root}"):
            try:
                shutil.rmtree(staged, ignore_errors=True)
                staged.mkdir()
                files = dict(sorted(write(staged).items()))
                sizes = _check_declared(staged, files)
                (staged / MANIFEST).write_text(_manifest_text(step, head, files, sizes))
                publish_folder(staged, self.folder(step))
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
        return Checkpoint(step, self.folder(step), files, sizes, head)

    def verify(self, step: int, announced: Mapping[str, str], head: Head | None = None) -> Checkpoint:
        """The checkpoint, if every file is what was announced.

        Raises InputError naming the first file that is missing, truncated or changed, with what was expected, and
        InvariantViolation for files that nothing announced beside intact ones: damage does not add files, and whoever
        loads the folder may read them.
        """
        folder = self.folder(step)
        where = f"the checkpoint of step {step} ({folder})"
        try:
            text = (folder / MANIFEST).read_text()
            manifest = parse_json(text)
            found_head = Head(manifest["head"]["seq"], manifest["head"]["hash"])
            sizes = {name: int(entry["bytes"]) for name, entry in manifest["files"].items()}
            sums = {name: str(entry["sha256"]) for name, entry in manifest["files"].items()}
            step_found = manifest["step"]
        except OSError as error:
            raise InputError(f"{where}: {MANIFEST} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise InputError(f"{where}: {MANIFEST} is damaged ({error})") from error
        if step_found != step:
            raise InputError(f"{where}: {MANIFEST} is that of step {step_found}")
        if head is not None and found_head != head:
            raise InputError(
                f"{where} belongs to another log: it was written after event {found_head.seq} "
                f"({found_head.hash[:16]}...), this log has event {head.seq} ({head.hash[:16]}...) there"
            )
        if sums != dict(announced):
            odd = sorted(name for name in {*sums, *announced} if sums.get(name) != announced.get(name))
            raise InputError(f"{where}: {MANIFEST} and the event log disagree about {', '.join(odd)}")
        if text != _manifest_text(step, found_head, sums, sizes):
            raise InputError(f"{where}: {MANIFEST} is not as it was written")
        names = sorted(announced)
        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(
                lambda name: _check_file(folder / name, f"{where}: file {name}", sizes[name], announced[name]), names
            ):
                pass  # raises what the first of them found
        if additional := sorted(set(_files(folder)) - {MANIFEST, *announced}):
            raise InvariantViolation(
                f"{where} holds {', '.join(additional)}, which nothing announced. Remove what is not the run's own"
            )
        return Checkpoint(step, folder, sums, sizes, found_head)

    def steps(self) -> list[int]:
        """Steps that have a checkpoint folder, ascending."""
        found = (step_of(entry.name) for entry in self.root.iterdir())
        return sorted(step for step in found if step is not None)

    def prune(self) -> list[int]:
        """Delete all but the last ``keep``. To be called after the newest was announced; returns the deleted steps."""
        return self._retire(self.steps()[: -self.keep])

    def remove_orphans(self, kept: Collection[int | None]) -> list[int]:
        """Delete all other checkpoints; returns their steps."""
        return self._retire([step for step in self.steps() if step not in kept])

    def _retire(self, steps: list[int]) -> list[int]:
        for step in steps:
            with disk_errors(f"{self.root} (removing the checkpoint of step {step})"):
                retire_folder(self.folder(step), self.staging)
        return steps


def kept_checkpoints(announced: Sequence[CheckpointWritten]) -> Sequence[CheckpointWritten]:
    """Those that stay: the last ones, as many as the last announcement says."""
    return announced[-int(announced[-1].observed.get("keep", 1)) :] if announced else ()


def _manifest_text(step: int, head: Head, files: Mapping[str, str], sizes: Mapping[str, int]) -> str:
    manifest = {
        "step": step,
        "head": {"seq": head.seq, "hash": head.hash},
        "files": {name: {"sha256": files[name], "bytes": sizes[name]} for name in files},
    }
    return json.dumps(manifest, indent=1, sort_keys=True) + "\n"


def _files(folder: Path) -> dict[str, Path]:
    """Everything below a folder that is no folder itself, by relative name."""
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if not path.is_dir()}


def _check_declared(folder: Path, files: Mapping[str, str]) -> dict[str, int]:
    found = _files(folder)
    if not files:
        raise InputError("a checkpoint without files restores nothing")
    if set(found) != set(files):
        raise InputError(f"a checkpoint was declared with the files {sorted(files)}, but holds {sorted(found)}")
    sizes = {}
    with ThreadPoolExecutor(4) as pool:  # hashing releases the GIL, and the files of a large model are many gigabytes
        for (name, path), actual in zip(found.items(), pool.map(file_sha256, found.values()), strict=True):
            if actual != files[name]:
                raise InputError(f"checkpoint file {name} was declared with SHA-256 {files[name]}, but has {actual}")
            sizes[name] = path.stat().st_size
    return sizes


def _check_file(path: Path, what: str, size: int, sha256: str) -> None:
    try:
        found: Any = path.stat().st_size
        if found != size:
            raise InputError(f"{what} has {found} bytes, expected {size}")
        found = file_sha256(path)
    except OSError as error:
        raise InputError(
            f"{what} cannot be read ({error.strerror}); expected {size} bytes, SHA-256 {sha256}"
        ) from error
    if found != sha256:
        raise InputError(f"{what} has SHA-256 {found}, expected {sha256}")
