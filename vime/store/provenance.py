"""provenance.jsonl: one line a weight version and a sync, a view of the log that can be rebuilt from it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import structlog

from vime.store.files import disk_errors, write_file
from vime.timeline.events import SyncCommitted, SyncRolledBack, VersionPublished
from vime.timeline.log import Record

PROVENANCE_NAME = "provenance.jsonl"


def provenance_fields(record: Record) -> dict[str, Any] | None:
    """The line of a record: who, which bytes, which digest, how long, which engine. None for other events."""
    event = record.event
    seen = {
        "seq": record.seq,
        "at": event.observed.get("at"),
        "seconds": event.observed.get("seconds"),
        "bytes": event.observed.get("bytes"),
    }
    if isinstance(event, VersionPublished):
        facts: dict[str, Any] = {"event": "weight_version", "who": "trainer", "engine": None}
        facts |= {"version": event.version, "digest": event.digest, "parent": event.parent}
    elif isinstance(event, SyncCommitted):
        facts = {"event": "sync", "who": "trainer", "engine": event.engine, "outcome": "committed"}
        facts |= {"version": event.version, "digest": event.digest}
    elif isinstance(event, SyncRolledBack):
        facts = {"event": "sync", "who": "trainer", "engine": event.engine, "outcome": "rolled_back"}
        facts |= {"version": event.version, "digest": None, "reason": event.reason}
    else:
        return None
    return {**facts, **seen}


def provenance_lines(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """The lines of a log."""
    for record in records:
        fields = provenance_fields(record)
        if fields is not None:
            yield fields


class ProvenanceWriter:
    """Appends lines as versions are published and synced. Not synced to disk: the log is what counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, record: Record) -> None:
        """Take a record of the log as it is written."""
        fields = provenance_fields(record)
        if fields is not None:
            with disk_errors(str(self.path)), open(self.path, "a") as file:
                _write(_logger(file), fields)


def _logger(file: TextIO) -> Any:
    return structlog.wrap_logger(
        structlog.PrintLogger(file),
        processors=[structlog.processors.JSONRenderer(sort_keys=False)],
        wrapper_class=structlog.BoundLogger,
        context_class=dict,
        cache_logger_on_first_use=False,
    )


def _write(logger: Any, fields: dict[str, Any]) -> None:
    logger.info(fields["event"], **{name: value for name, value in fields.items() if name != "event"})


def rebuild_provenance(records: Iterable[Record], path: Path) -> None:
    """Write provenance.jsonl anew from the log."""
    write_file(path, provenance_text(records).encode())


def provenance_text(records: Iterable[Record]) -> str:
    """What provenance.jsonl holds of a log."""
    buffer = io.StringIO()
    logger = _logger(buffer)
    for fields in provenance_lines(records):
        _write(logger, fields)
    return buffer.getvalue()
