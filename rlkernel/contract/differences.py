"""What differs between two pieces of plain data, field by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Absent:
    """Stands for a field that one side does not have."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = Absent()


@dataclass(frozen=True)
class Difference:
    """A field, as its path from the top, and its value on both sides."""

    path: tuple[str, ...]
    left: Any
    right: Any

    def sentence(self, left: str = "one side", right: str = "the other") -> str:
        """The field and both values in words; ``left`` and ``right`` name the sides."""
        return f"{'.'.join(self.path)}: {self.left!r} on {left}, {self.right!r} on {right}"


def differences(left: Any, right: Any, path: tuple[str, ...] = ()) -> list[Difference]:
    """Every differing field, in the order of its path; lists of pairs are compared by the pairs' first element."""
    left, right = _named(left), _named(right)
    if isinstance(left, dict) and isinstance(right, dict):
        return [
            found
            for key in sorted(left.keys() | right.keys())
            for found in differences(left.get(key, ABSENT), right.get(key, ABSENT), (*path, key))
        ]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return [
            found
            for index, (one, other) in enumerate(zip(left, right, strict=True))
            for found in differences(one, other, (*path[:-1], f"{path[-1] if path else ''}[{index}]"))
        ]
    return [] if _same(left, right) else [Difference(path, left, right)]


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)  # 1 is not true


def _named(value: Any) -> Any:
    """A list of (name, value) pairs with distinct names as an object; anything else as it is."""
    if not isinstance(value, list) or not value:
        return value
    if not all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in value):
        return value
    found = {item[0]: item[1] for item in value}
    return found if len(found) == len(value) else value
