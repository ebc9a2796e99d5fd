"""What is wrong with a pipeline: one sentence a problem, each with its place; all are reported together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlkernel.names import nearest_name as nearest_name
from vime.errors import InputError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. ``line`` and ``column`` count from 1 (0: the place is not a line of the file).

    ``key`` is the dotted path (``stages.train.optimizer``); ``nearest`` the valid name closest to a wrong one.
    """

    file: str
    line: int
    column: int
    key: str
    message: str
    nearest: str | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        key = f" {self.key}:" if self.key else ""
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest is not None else ""
        return f"{place}:{key} {self.message}{hint}"

    def as_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "key": self.key,
            "message": self.message,
            "nearest": self.nearest,
        }


class PipelineError(InputError):
    """A pipeline that cannot run; ``problems`` has everything that was found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
