"""Plain data of the evidence as HTML: short things in a line, long ones in a table that opens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_SHORT = 72
"""Characters of a line that needs no table."""


def fact(value: Any) -> str:
    """A fact of any form."""
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _sequence(value)
    return _scalar(value)


def words(name: object) -> str:
    """A name of the data as words."""
    return escape(str(name).replace("_", " "))


def _scalar(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    text = str(value)
    if _DIGEST.match(text):
        return f'<code title="{text}">{text[:16]}</code>'
    return escape(text)


def _plain(value: Any) -> str | None:
    """What fits into a line, as text; None for anything deeper."""
    if isinstance(value, Mapping):
        items = [f"{words(name)} {_scalar(inner)}" for name, inner in value.items() if not _deep(inner)]
        return ", ".join(items) if len(items) == len(value) else None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return None if any(_deep(item) for item in value) else ", ".join(map(_scalar, value)) or "none"
    return _scalar(value)


def _deep(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str))


def _mapping(value: Mapping[str, Any]) -> str:
    if not value:
        return "none"
    line = _plain(value)
    if line is not None and len(re.sub(r"<[^>]*>", "", line)) <= _SHORT:
        return line
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{_plain(inner) if _plain(inner) is not None else fact(inner)}</td></tr>"
        for name, inner in value.items()
    )
    return _folded(len(value), rows)


def _sequence(value: Sequence[Any]) -> str:
    line = _plain(value)
    if line is not None and len(re.sub(r"<[^>]*>", "", line)) <= _SHORT:
        return line
    return _folded(len(value), "".join(f"<tr><td>{fact(item)}</td></tr>" for item in value))


def _folded(count: int, rows: str) -> str:
    what = "1 entry" if count == 1 else f"{count:,} entries"
    return f'<details><summary>{what}</summary><table class="left"><tbody>{rows}</tbody></table></details>'
