"""Which of the six points explains a difference: a dependency probe,
then one variation of the interpreter at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlkernel.contract.build import Contract
from rlkernel.errors import RlkernelError
from rlkernel.verify.admission.bits import Results, differing_elements
from rlkernel.verify.admission.catalogue import variations_for
from rlkernel.verify.admission.variants import Variation, varied_operation

_SMALL = 4000  # outputs of a problem that is tried first

RunOperation = Callable[[Any, Any], Results]
"""(operation, problem) -> results."""


@dataclass(frozen=True)
class Explanation:
    """What a difference comes from.

    Attributes:
        point: one of the six points, or None where nothing was found.
        sentence: the explanation in words.
        certain: whether it reproduces every bit of the candidate (or was observed directly).
        alternatives: other explanations that give the same bits on everything tried.
    """

    point: str | None
    sentence: str
    certain: bool
    alternatives: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "point": self.point,
            "sentence": self.sentence,
            "certain": self.certain,
            "alternatives": list(self.alternatives),
        }


@dataclass(frozen=True)
class Evidence:
    """A problem with what the interpreter and the candidate gave."""

    problem: Any
    want: Results
    have: Results

    @property
    def size(self) -> int:
        """Elements of the results."""
        return sum(value.size for value in self.want.values())

    @property
    def differing(self) -> int:
        """Elements that differ."""
        return differing_elements(self.want, self.have)


@dataclass
class _Trial:
    variation: Variation
    left: int  # elements that still differ from the candidate
    tried: int  # problems that it was tried on


def _try(run: RunOperation, operation: Any, cases: Sequence[Evidence]) -> tuple[int, int]:
    left = 0
    for tried, case in enumerate(cases, 1):
        left += differing_elements(case.have, run(operation, case.problem))
        if left:
            return left, tried
    return left, len(cases)


def choose(cases: Sequence[Evidence], most: int = 4) -> list[Evidence]:
    """Problems that an explanation has to reproduce: a few with differences,
    the most telling of the small first, and one without.
    """
    failing = [c for c in cases if c.differing]
    telling = sorted(failing, key=lambda c: (c.size > _SMALL, -c.differing if c.size <= _SMALL else c.size))
    passing = sorted((c for c in cases if not c.differing and c.size >= 100), key=lambda c: c.size)
    return telling[:most] + passing[:1]


def explain(
    contract: Contract,
    region: str,
    case: str,
    cases: Sequence[Evidence],
    run: RunOperation,
    probe: Callable[[Any], str | None] | None = None,
    limit_seconds: float = 60.0,
) -> Explanation:
    """Name the point that explains why the candidate's bits are others.

    Args:
        cases: problems that were run, with both results; at least one with differences.
        run: executes an operation on a problem.
        probe: the dependency probe for a problem.
        limit_seconds: after this much CPU time no further variation is tried.
    """
    chosen = choose(cases)
    if probe is not None:
        plain = [c for c in cases if c.differing and set(c.problem.hazards) == {"normal"}]
        for item in [*sorted(plain, key=lambda c: c.size)[:3], *[c for c in chosen if c.differing][:1]]:
            if (found := probe(item.problem)) is not None:
                return Explanation("dependency", found, True)
    trials: list[_Trial] = []
    until = time.process_time() + limit_seconds
    for variation in variations_for(region, case):
        if time.process_time() > until:
            break
        try:
            operation = varied_operation(contract, region, case, variation)
            if operation is None:
                continue
            left, tried = _try(run, operation, chosen)
        except (RlkernelError, RuntimeError, IndexError, ValueError, TypeError):
            continue  # a variation that cannot be executed on these shapes explains nothing
        trials.append(_Trial(variation, left, tried))
    exact = [t for t in trials if t.left == 0]
    if exact:
        return _exact(exact)
    return _nearest(trials, chosen)


def _exact(exact: list[_Trial]) -> Explanation:
    first = exact[0].variation
    others = tuple(f"{t.variation.point}: {t.variation.what}" for t in exact[1:] if t.variation.what != first.what)
    return Explanation(first.point, f"the bits are those of {first.what}", True, others)


def _nearest(trials: list[_Trial], chosen: list[Evidence]) -> Explanation:
    whole = chosen[0].differing
    close = [t for t in trials if (t.tried == 1 and t.left < whole) or t.tried > 1]
    if close:
        best = min(close, key=lambda t: (-t.tried, t.left))
        share = "every" if best.tried > 1 else f"{whole - best.left} of {whole}"
        return Explanation(
            best.variation.point,
            f"no single change gives exactly these bits; the nearest is {best.variation.what}, which explains "
            f"{share} of the differing outputs of the smallest failing problem",
            False,
        )
    return Explanation(None, "no single change of the six points that is known here gives these bits", False)
