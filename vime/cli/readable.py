"""Events and facts of a token for people: decimal values beside bits, times as ISO 8601, tokens as text."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime.timeline.log import Record

_ENCODED = re.compile(r'(?<!\\)"f64:([0-9a-f]{16})"')


def iso_time(seconds: Any) -> str:
    """Seconds since the epoch as UTC with milliseconds; a dash where there is no such time."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        return "-"
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return "-"


def event_line(record: Record, limit: int = 400) -> str:
    """An event on one line: number, time, type, logical fields; floats as decimals with their bits behind."""
    text = _ENCODED.sub(_with_decimal, record.event.describe(limit=1 << 30))
    short = text if len(text) <= limit else text[:limit] + "..."
    return f"{record.seq:>7}  {iso_time(record.event.observed.get('at')):<24}  {short}"


def _with_decimal(match: re.Match[str]) -> str:
    (value,) = struct.unpack(">d", bytes.fromhex(match[1]))
    return f"{value!r} (f64:{match[1]})"


def token_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """What made a token, one fact a line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        yield f"{name:<{width}}  {_fact(name, value)}"


def _fact(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_logprob_bits"):
        (decimal,) = struct.unpack(">f", bytes.fromhex(value))
        return f"{decimal:.9g} ({value})"
    if name == "sampled_at":
        return f"{iso_time(value)} ({value!r})"
    return repr(value) if name == "token_text" else str(value)


def token_text(run: Path, token_id: int | None) -> str | None:
    """A token as its run's tokenizer writes it; None where that cannot be loaded from here any more."""
    from rlkernel.errors import RlkernelError
    from vime.errors import VimeError
    from vime.pipeline.loading import load_pipeline
    from vime.pipeline.model import resolve_model

    if token_id is None:
        return None
    try:
        model, _ = resolve_model(load_pipeline(run / "pipeline.yaml"))
    except (VimeError, RlkernelError, OSError):
        return None
    return None if model is None else model.tokenizer.decode([token_id], skip_special=False)
