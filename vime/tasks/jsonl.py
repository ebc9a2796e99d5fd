"""A data set of your own: JSON Lines, one row a line, with ``text`` or ``messages`` and whatever the reward needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vime.errors import InputError
from vime.types import GeneratedSample, Namespace, Prompt


def rows(namespace: Namespace, *, train: str, eval: str | None = None) -> Sequence[Mapping[str, Any]]:
    """Read the file of a namespace (paths are relative to the current directory).

    Raises:
        InputError: a file is missing or unreadable, or a line is no row; file and line are named.
    """
    name = eval if namespace == "eval" else train
    if name is None:
        return []
    path = Path(name).resolve()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no data file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data file {path} cannot be read: {error}") from error
    found: list[Mapping[str, Any]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: a row is an object with 'text' or 'messages', not {line[:40]!r}")
        found.append(row)
    return found


def exact_match(prompt: Prompt, sample: GeneratedSample, text: str, *, field: str = "answer") -> float:
    """1 if the response without surrounding white space equals a field of the row, else 0."""
    if field not in prompt.row:
        raise InputError(f"prompt {prompt.prompt_index} has no field {field!r}; its row has {', '.join(prompt.row)}")
    return 1.0 if text.strip() == str(prompt.row[field]).strip() else 0.0
