"""What the differing outputs have in common, where no single change of the interpreter gives their bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlkernel.verify.admission.bits import Results, pattern
from rlkernel.verify.admission.values import SPECIAL_HAZARDS

_COARSE = 2.0**-14
"""Relative differences from here on are those of a format narrower than float32: tf32 keeps 11 bits, bfloat16 8."""
_FINE = 2.0**-18
"""Another order of a sum of normal values gives smaller ones, but where terms cancel."""


class Seen(Protocol):
    """A problem with what the interpreter and the candidate gave."""

    @property
    def problem(self) -> Any:
        """What was run."""

    @property
    def want(self) -> Results:
        """The interpreter's results."""

    @property
    def have(self) -> Results:
        """The candidate's results."""


def _differences(case: Seen) -> Iterator[tuple[str, NDArray[Any], NDArray[Any], NDArray[np.bool_]]]:
    """Of every output: name, what the contract gives, what the candidate gives, where they differ."""
    for name, want in case.want.items():
        have = case.have.get(name)
        if have is not None and have.shape == want.shape and have.dtype == want.dtype:
            yield name, want, have, pattern(want) != pattern(have)


def _classes(problem: Any, differs: NDArray[np.bool_]) -> set[str]:
    """Classes of values of the rows that hold a difference."""
    if not differs.ndim:
        return {str(problem.hazard(()))}
    places = np.unique(np.argwhere(differs)[:, :2], axis=0)
    rest = (0,) * max(0, differs.ndim - 2)
    return {str(problem.hazard((*(int(i) for i in place), *rest))) for place in places}


def special_values(cases: Sequence[Seen]) -> str | None:
    """What the candidate does with NaN or infinities, if that is all that differs; None if finite rows differ too."""
    first = None
    classes: set[str] = set()
    for case in cases:
        for name, want, have, differs in _differences(case):
            if not differs.any():
                continue
            if name.endswith((".weight", ".bias")):
                return None  # a sum over rows of all classes
            classes |= _classes(case.problem, differs)
            if first is None:
                index = tuple(np.argwhere(differs)[0])
                first = f"{name} is {_text(have[index])} where the contract gives {_text(want[index])}"
    if first is None or not classes <= set(SPECIAL_HAZARDS):
        return None
    words = " and ".join(sorted(classes, key=SPECIAL_HAZARDS.index))
    return (
        f"its bits are the contract's in every row of finite values; in rows with {words} they are not ({first}): what "
        "a primitive gives for NaN and infinities is part of its definition"
    )


def _text(value: Any) -> str:
    return "NaN" if np.isnan(value) else f"{float(value):.6g}"


def normal_size(cases: Sequence[Seen]) -> float | None:
    """Median relative difference of the outputs that differ in rows of normal values; None where none does."""
    sizes = []
    for case in cases:
        for name, want, have, differs in _differences(case):
            if want.dtype != np.float32 or not differs.any() or name.endswith((".weight", ".bias")):
                continue
            places = [tuple(index) for index in np.argwhere(differs)]
            chosen = [place for place in places if case.problem.hazard(tuple(int(i) for i in place)) == "normal"]
            for place in chosen:
                right, wrong = float(want[place]), float(have[place])
                if np.isfinite(right) and np.isfinite(wrong) and right != 0:
                    sizes.append(abs(wrong - right) / abs(right))
    return float(np.median(sizes)) if sizes else None


def is_coarse(size: float | None) -> bool:
    """Whether differences of that size come from a format narrower than float32."""
    return size is not None and _COARSE <= size <= 2.0**-5


def is_fine(size: float | None) -> bool:
    """Whether differences of that size may come from another order of additions."""
    return size is not None and size <= _FINE
