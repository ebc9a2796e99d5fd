"""A data set of your own: JSON Lines, one row a line, with ``text`` or ``messages`` and whatever the reward needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from vime.errors import InputError
from vime.tasks.prompts import prompt_content
from vime.types import GeneratedSample, Namespace, Prompt

_SHOWN = 10


@dataclass(frozen=True)
class JsonRows(Sequence[Mapping[str, Any]]):
    """The rows of one file, and the line that each stands on (counted from 1)."""

    path: Path
    found: tuple[Mapping[str, Any], ...]
    lines: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.found)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> JsonRows: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | JsonRows:
        if isinstance(index, slice):
            return JsonRows(self.path, self.found[index], self.lines[index])
        return self.found[index]

    def place(self, number: int) -> str:
        """File and line of a row."""
        return f"{self.path}:{self.lines[number]}"


def rows(namespace: Namespace, *, train: str, eval: str | None = None) -> Sequence[Mapping[str, Any]]:
    """Read the file of a namespace (paths are relative to the current directory).

    Raises:
        InputError: a file is missing or unreadable, or lines are no rows; all are named (of many the first ten).
    """
    name = eval if namespace == "eval" else train
    if name is None:
        return []
    if not isinstance(name, str):
        raise InputError(f"{'eval' if namespace == 'eval' else 'train'} = {name!r}: the name of a file is needed")
    try:
        path = Path(name).resolve()
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"there is no data file {path}") from None
    except (OSError, ValueError) as error:  # a ValueError for text that is not UTF-8, and for a NUL in the name
        raise InputError(f"data file {name[:200]!r} cannot be read: {error}") from error
    found: list[Mapping[str, Any]] = []
    lines: list[int] = []
    wrong: list[str] = []
    # not splitlines(): that also cuts at U+2028 and others, which a JSON string may hold
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            wrong.append(f"{path}:{number}: not JSON ({error.msg} at column {error.colno})")
            continue
        except (ValueError, RecursionError) as error:
            wrong.append(f"{path}:{number}: not JSON that can be read ({error})")
            continue
        if not isinstance(row, dict):
            wrong.append(f"{path}:{number}: a row is an object with 'text' or 'messages', not {line[:40]!r}")
            continue
        found.append(row)
        lines.append(number)
    if wrong:
        wrong += [
            f"{path}:{number}: {said}" for row, number in zip(found, lines, strict=True) if (said := _misfit(row))
        ]
        more = f"; and {len(wrong) - _SHOWN} more lines" if len(wrong) > _SHOWN else ""
        raise InputError("; ".join(wrong[:_SHOWN]) + more)
    return JsonRows(path, tuple(found), tuple(lines))


def _misfit(row: Mapping[str, Any]) -> str:
    """What is wrong with the form of a row; empty if nothing is."""
    try:
        prompt_content(row)
    except InputError as error:
        return str(error)
    return ""


def exact_match(prompt: Prompt, sample: GeneratedSample, text: str, *, field: str = "answer") -> float:
    """1 if the response without surrounding white space equals a field of the row, else 0."""
    if field not in prompt.row:
        has = ", ".join(map(str, prompt.row))
        raise InputError(f"the row of the prompt {prompt.text[:60]!r} has no field {field!r}; it has {has}")
    return 1.0 if text.strip() == str(prompt.row[field]).strip() else 0.0
