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

    def sentence(self, left: str = "on one side", right: str = "on the other") -> str:
        """The field and both values in words; ``left`` and ``right`` say where they stand."""
        return f"{'.'.join(self.path)}: {self.left!r} {left}, {self.right!r} {right}"


def differences(left: Any, right: Any, path: tuple[str, ...] = ()) -> list[Difference]:
    """Every differing field, in the order of its path.

    Lists of pairs are compared by the pairs' first element, lists of objects by their ``name``, where these are
    distinct; of those that both have, another order is a difference too.
    """
    if _are_objects(left) and _are_objects(right):
        one, other = ({item["name"]: item for item in side} for side in (left, right))
        return [*differences(one, other, path), *_order(list(one), list(other), path)]
    lists = isinstance(left, list) and isinstance(right, list)
    left, right = _named(left), _named(right)
    if lists and isinstance(left, dict) and isinstance(right, dict):
        return [*differences(left, right, path), *_order(list(left), list(right), path)]
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


def _order(left: list[str], right: list[str], path: tuple[str, ...]) -> list[Difference]:
    """The first place where two lists have the names that are in both in another order."""
    common = set(left) & set(right)
    pairs = zip((name for name in left if name in common), (name for name in right if name in common), strict=True)
    parted = next((pair for pair in pairs if pair[0] != pair[1]), None)
    return [] if parted is None else [Difference((*path, "order"), *parted)]


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)  # 1 is not true


def _are_objects(value: Any) -> bool:
    """Whether a value is a list of objects with distinct names."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return False
    names = [item.get("name") for item in value]
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def _named(value: Any) -> Any:
    """A list of (name, value) pairs with distinct names as an object; anything else as it is."""
    if not isinstance(value, list) or not value:
        return value
    if not all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in value):
        return value
    found = {item[0]: item[1] for item in value}
    return found if len(found) == len(value) else value
