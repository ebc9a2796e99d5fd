"""Faults by name of method: what one side returns is changed, at once or from a commit on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vime.runtime.assembly import Sides

Plant = Callable[[Sides], None]


def on(side: str, name: str, change: Callable[[Any], Any]) -> Plant:
    """Change what a method of one side returns."""

    def plant(sides: Sides) -> None:
        owner: Any = sides.trainer if side == "trainer" else sides.engine.native  # type: ignore[attr-defined]
        whole = getattr(owner, name)
        setattr(owner, name, lambda *args: change(whole(*args)))

    return plant


def from_commit(version: int, plant: Plant) -> Plant:
    """The fault begins when a version has been committed."""

    def later(sides: Sides) -> None:
        engine: Any = sides.engine.native  # type: ignore[attr-defined]
        whole = engine.commit_weights

        def commit(number: int, weights: str) -> Any:
            result = whole(number, weights)
            if number == version:
                plant(sides)
            return result

        engine.commit_weights = commit

    return later


def facts(**changes: Any) -> Callable[[Any], Any]:
    return lambda evidence: {**evidence, "facts": {**evidence["facts"], **changes}}


def without_fact(name: str) -> Callable[[Any], Any]:
    return lambda evidence: {**evidence, "facts": {k: v for k, v in evidence["facts"].items() if k != name}}
