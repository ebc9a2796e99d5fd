"""Files beside the log whose bytes the log announces: the pipeline, the contract, the evidence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from vime.errors import InvariantViolation
from vime.store.files import file_sha256
from vime.store.names import ANNOUNCED_NAMES, PIPELINE_NAME
from vime.timeline.event import Event
from vime.timeline.events import FileAnnounced


def sha256(content: bytes) -> str:
    """SHA-256 (hex)."""
    return hashlib.sha256(content).hexdigest()


def announced_files(events: Iterable[Event]) -> dict[str, list[str]]:
    """Name -> every digest that was announced, in order."""
    found: dict[str, list[str]] = {}
    for event in events:
        if isinstance(event, FileAnnounced):
            found.setdefault(event.file, []).append(event.sha256)
    return found


def check_announced(path: Path, digests: list[str]) -> None:
    """Raise InvariantViolation unless a file that is there has one of the digests."""
    found = file_sha256(path)
    if found in digests:
        return
    due = f"announced was {digests[-1]}" if digests else "nothing in the log announced it"
    raise InvariantViolation(
        f"{path} has the SHA-256 {found}; {due}. It is not what this run wrote: put that back, or remove the file"
    )


def file_problems(run: Path, events: Iterable[Event], *, finished: bool) -> Iterator[str]:
    """What is wrong with the announced files, a sentence each.

    Of a run that is not finished, which may be in use, a file may be one that was announced before, or not there yet.
    """
    announced = announced_files(events)
    for name in ANNOUNCED_NAMES:
        digests, path = announced.get(name, []), run / name
        if not path.is_file():
            # an unfinished run's may be announced and not written yet; its pipeline was there before the log
            if digests and (finished or name == PIPELINE_NAME):
                yield f"{path} is gone; the log announced it with the SHA-256 {digests[-1]}"
            continue
        if not digests and not finished:
            continue  # announced right after the start
        try:
            check_announced(path, digests[-1:] if finished else digests)
        except InvariantViolation as error:
            yield str(error)
