"""The event log: one line an event, chained by hashes, synced at barriers; reading tells damage of both kinds apart.

A line is ``{"seq", "prev", "type", "logical", "deployment", "observed", "checksum"}`` and a newline. ``prev`` is the
SHA-256 of the previous line, ``checksum`` the first 16 hex digits of the SHA-256 of all that precedes it in the line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime.errors import InputError, Interrupted, InvariantViolation
from vime.store.files import disk_error, disk_errors, fsync_folder
from vime.timeline.event import Event, decode_event, encode_observed, to_json
from vime.timeline.events import EVENT_TYPES

GENESIS = "0" * 64
_BEGINNING = b'{"seq":'
_CHECKSUM = b',"checksum":"'
_SUFFIX = len(_CHECKSUM) + 16 + len(b'"}')
_TYPES = {kind.type: kind for kind in EVENT_TYPES}


@dataclass(frozen=True)
class Head:
    """A place in the log: ``seq`` is that of the last line before it (-1: none), ``hash`` the SHA-256 of that line."""

    seq: int
    hash: str


@dataclass(frozen=True)
class Record:
    """One line of the log. ``hash`` is the line's own SHA-256, ``end`` the offset of the byte after its newline."""

    seq: int
    prev: str
    hash: str
    end: int
    event: Event

    @property
    def before(self) -> Head:
        """The head of the log when this line was written."""
        return Head(self.seq - 1, self.prev)


@dataclass(frozen=True)
class DamagedTail:
    """Bytes after the last valid record: an append that a crash cut short. ``line`` counts from 1."""

    line: int
    offset: int
    length: int
    content: str

    def sentence(self) -> str:
        """What is damaged, and where."""
        return (
            f"line {self.line} of the log (byte {self.offset}) is incomplete or garbled: "
            f"{self.length} bytes, beginning with {self.content!r}"
        )


@dataclass(frozen=True)
class LogContent:
    """A log as read: all valid records, and what follows them if that is not a record."""

    records: tuple[Record, ...]
    tail: DamagedTail | None

    @property
    def end(self) -> int:
        """Offset of the first byte after the last valid record."""
        return self.records[-1].end if self.records else 0

    @property
    def head(self) -> Head:
        """The last valid line."""
        return Head(self.records[-1].seq, self.records[-1].hash) if self.records else Head(-1, GENESIS)


def encode_line(seq: int, prev: str, event: Event) -> bytes:
    """The line of an event, newline included."""
    body = (
        f'{{"seq":{seq},"prev":"{prev}","type":"{event.type}","logical":{to_json(event.logical())},'
        f'"deployment":{to_json(event.deployment())},"observed":{to_json(encode_observed(event.observed))}'
    ).encode()
    return body + _CHECKSUM + _checksum(body) + b'"}\n'


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()


def line_hash(line: bytes) -> str:
    """SHA-256 (hex) of a line without its newline."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def _intact(line: bytes) -> bool:
    body = line[: -_SUFFIX - 1]
    return len(body) > 0 and line[len(body) :] == _CHECKSUM + _checksum(body) + b'"}\n'


def _decode(line: bytes, number: int) -> tuple[dict[str, Any], Event]:
    try:
        data = json.loads(line)
        kind = _TYPES.get(data["type"])
        if kind is None:
            raise ValueError(f"the event type {data['type']!r} is unknown; known are {sorted(_TYPES)}")
        return data, decode_event(kind, data["logical"], data["deployment"], data["observed"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantViolation(f"line {number} of the log cannot be understood: {error}") from error


def read_log(path: Path) -> LogContent:
    """Read and verify a log.

    A last line (or several) without any valid line after it is a damaged tail: everything before it counts, and the
    result says what is cut. Raises InvariantViolation, naming the line, for a deleted, altered or reordered event
    anywhere else; InputError where there is no log.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"the event log {path} cannot be read: {error.strerror}") from error
    try:
        return _parse(content)
    except InvariantViolation as error:
        raise InvariantViolation(f"{path}: {error}") from error


def read_start(path: Path) -> Event | None:
    """The first event of a log; None where there is none that could be read. Nothing behind it is looked at."""
    try:
        with path.open("rb") as lines:
            line = lines.readline()
        return _decode(line, 1)[1] if _intact(line) else None
    except (OSError, InvariantViolation):
        return None


def _parse(content: bytes) -> LogContent:
    records: list[Record] = []
    head, offset = Head(-1, GENESIS), 0
    for number, line in enumerate(_lines(content), start=1):
        if not _intact(line):
            _refuse_damage_in_the_middle(content, offset, number)
            shown = line[:80].decode("utf-8", "replace")
            return LogContent(tuple(records), DamagedTail(number, offset, len(content) - offset, shown))
        data, event = _decode(line, number)
        if data["seq"] != head.seq + 1:
            raise InvariantViolation(
                f"line {number} of the log holds event {data['seq']} ({event.type}), but event {head.seq + 1} is due: "
                "an event was deleted, repeated or moved"
            )
        if data["prev"] != head.hash:
            raise InvariantViolation(
                f"line {number} of the log (event {data['seq']}, {event.type}) follows a line with the hash "
                f"{data['prev'][:16]}..., but the line before it has {head.hash[:16]}...: line {number - 1} was altered"
            )
        offset += len(line)
        head = Head(head.seq + 1, line_hash(line))
        records.append(Record(head.seq, data["prev"], head.hash, offset, event))
    return LogContent(tuple(records), None)


def _lines(content: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(content):
        newline = content.find(b"\n", start)
        end = len(content) if newline < 0 else newline + 1
        yield content[start:end]
        start = end


def _refuse_damage_in_the_middle(content: bytes, offset: int, number: int) -> None:
    # Looks for lines by how they begin, not by newlines: a newline may be what was damaged.
    start = content.find(_BEGINNING, offset + 1)
    while start >= 0:
        end = content.find(b"\n", start)
        if end >= 0 and _intact(content[start : end + 1]):
            shown = content[offset : offset + 120].split(b"\n")[0].decode("utf-8", "replace")
            raise InvariantViolation(
                f"line {number} of the log (byte {offset}) does not match its checksum, but a later line (byte "
                f"{start}) does: the event was altered after it was written; the line begins with {shown!r}"
            )
        start = content.find(_BEGINNING, start + 1)


@dataclass(frozen=True)
class _Position:
    head: Head
    offset: int


class LogWriter:
    """The one writer of a log. ``append`` returns when the line is written, and at a barrier when it is on disk."""

    def __init__(self, path: Path, position: _Position) -> None:
        self.path = path
        self._position = position
        self._failed = False
        with disk_errors(str(path)):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    @classmethod
    def create(cls, path: Path) -> LogWriter:
        """Start an empty log. Raises InputError where one exists."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError as error:
            raise InputError(
                f"the event log {path} exists already: resume that run, or choose another folder"
            ) from error
        except OSError as error:
            raise disk_error(error, str(path)) from error
        with disk_errors(str(path)):
            os.fsync(descriptor)
            os.close(descriptor)
            fsync_folder(path.parent)
        return cls(path, _Position(Head(-1, GENESIS), 0))

    @classmethod
    def resume(cls, path: Path, content: LogContent) -> LogWriter:
        """Go on after the last valid record; a damaged tail is cut off."""
        with disk_errors(str(path)):
            if content.tail is not None:
                os.truncate(path, content.end)
            writer = cls(path, _Position(content.head, content.end))
            os.fsync(writer._descriptor)
        return writer

    @property
    def head(self) -> Head:
        """The last line written."""
        return self._position.head

    def append(self, event: Event) -> Record:
        """Write the next line.

        Raises Interrupted when the disk refuses (what was written of the line is taken back), and from then on
        whenever it could not be taken back or a sync failed: nobody knows then what is on disk.
        """
        if self._failed:
            raise Interrupted(f"the event log {self.path} failed before; resume the run to go on from what is on disk")
        head, start = self._position.head, self._position.offset
        line = encode_line(head.seq + 1, head.hash, event)
        try:
            # An append that an exception (Ctrl-C, a full disk) cut short may have left bytes after the last record.
            if os.fstat(self._descriptor).st_size != start:
                os.ftruncate(self._descriptor, start)
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            self._take_back(start)
            raise disk_error(error, f"event {head.seq + 1} ({event.type}) to {self.path}") from error
        record = Record(head.seq + 1, head.hash, line_hash(line), start + len(line), event)
        self._position = _Position(Head(record.seq, record.hash), record.end)
        if event.barrier:
            self.sync()
        return record

    def sync(self) -> None:
        """Put everything written on disk. Raises Interrupted, and the log takes no more events."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._failed = True
            raise disk_error(error, f"the event log {self.path}") from error

    def _take_back(self, offset: int) -> None:
        try:
            os.ftruncate(self._descriptor, offset)
        except OSError:
            self._failed = True

    def close(self) -> None:
        """Sync and close."""
        if self._descriptor >= 0:
            if not self._failed:
                self.sync()
            os.close(self._descriptor)
            self._descriptor = -1
