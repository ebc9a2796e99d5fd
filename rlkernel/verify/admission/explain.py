"""Which of the six points explains a difference: a dependency probe, then variations of the interpreter one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlkernel.contract.build import Contract
from rlkernel.errors import RlkernelError
from rlkernel.verify.admission.bits import Results, differing_elements
from rlkernel.verify.admission.catalogue import variations_for
from rlkernel.verify.admission.fitting import fitted_variations
from rlkernel.verify.admission.symptoms import is_coarse, is_fine, normal_size, special_values
from rlkernel.verify.admission.variants import Variation, varied_operation

_SMALL = 4000  # cost of a problem that is tried first
_MORE = 8  # how often other values are drawn to part explanations
_MORE_OF_ONE_POINT = 2  # and where all of them name one point, unless it costs little

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
    def cost(self) -> int:
        """How long the interpreter takes, in steps that are about equal within a region."""
        return int(getattr(self.problem, "cost", 0)) or self.size

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


def choose(cases: Sequence[Evidence], most: int = 4, elements: int = 64) -> list[Evidence]:
    """Problems that an explanation has to reproduce: a few with differences (more, where they have so few elements that
    they may agree by chance), the most telling of the small first, and one without.
    """
    failing = [c for c in cases if c.differing]
    telling = sorted(failing, key=lambda c: (c.cost > _SMALL, -c.differing if c.cost <= _SMALL else c.cost))
    while most < len(telling) and sum(c.size for c in telling[:most]) < elements:
        most += 1
    passing = [c for c in cases if not c.differing and c.size >= 100]
    passing.sort(
        key=lambda c: (set(c.problem.hazards) != {"normal"}, c.cost)
    )  # of plain values: nearly all variations show
    return telling[:most] + passing[:1]


def explain(
    contract: Contract,
    region: str,
    case: str,
    cases: Sequence[Evidence],
    run: RunOperation,
    probe: Callable[[Any], str | None] | None = None,
    exact_sums: Callable[[Any], bool | None] | None = None,
    more: Callable[[int], Sequence[Evidence]] | None = None,
    limit_seconds: float = 60.0,
) -> Explanation:
    """Name the point that explains why the candidate's bits are others.

    Args:
        cases: problems that were run, with both results; at least one with differences.
        run: executes an operation on a problem.
        probe: the dependency probe for a problem.
        exact_sums: whether the candidate's bits are right on the problem with inputs whose sums are exact.
        more: problems like those chosen with other values, by a number: they part variations that agree on these.
        limit_seconds: after this much CPU time no further variation is tried.
    """
    chosen = choose(cases)
    if probe is not None:
        plain = [c for c in cases if c.differing and set(c.problem.hazards) == {"normal"}]
        for item in [*sorted(plain, key=lambda c: c.cost)[:3], *[c for c in chosen if c.differing][:1]]:
            if (sentence := probe(item.problem)) is not None:
                return Explanation("dependency", sentence, True)
    trials: list[_Trial] = []
    until = time.process_time() + limit_seconds
    for variation in (*variations_for(region, case), *fitted_variations(contract, region, case, cases)):
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
    exact = [t.variation for t in trials if t.left == 0]
    for number in range(1, _MORE + 1):
        points = len({variation.point for variation in exact})
        alike = points < 2 and number > _MORE_OF_ONE_POINT and sum(c.cost for c in chosen) > _SMALL
        if more is None or len(exact) < 2 or alike or time.process_time() > until:
            break
        others = more(number)
        exact = [v for v in exact if _try(run, varied_operation(contract, region, case, v), others)[0] == 0] or exact
    if exact:
        return _exact(exact)
    if (sentence := special_values(cases)) is not None:
        return Explanation("primitives", sentence, True)
    found = _nearest(trials, chosen)
    return found if found.point is not None else _by_size(cases, chosen, exact_sums) or found


def _by_size(
    cases: Sequence[Evidence], chosen: Sequence[Evidence], exact_sums: Callable[[Any], bool | None] | None
) -> Explanation | None:
    """What the size of the differences in rows of normal values tells, where no variation is near."""
    size = normal_size(cases)
    if is_coarse(size):
        return Explanation(
            "precision",
            f"no single change that is known here gives these bits; half of the outputs that differ are off by "
            f"{size:.1g} of their value or more, as where something is kept in a format narrower than float32",
            False,
        )
    if is_fine(size) and exact_sums is not None and exact_sums(chosen[0].problem):
        return Explanation(
            "merge order",
            "its bits are right where sums are exact in any order, so that it adds in an order, or with cuts (split), "
            "that is none of those known here; `vime reveal` finds a sum's tree",
            False,
        )
    return None


def _exact(exact: list[Variation]) -> Explanation:
    first = exact[0]
    others = tuple(f"{v.point}: {v.what}" for v in exact[1:] if v.what != first.what)
    return Explanation(first.point, f"the bits are those of {first.what}", True, others)


def _nearest(trials: list[_Trial], chosen: list[Evidence]) -> Explanation:
    whole = chosen[0].differing
    close = [t for t in trials if (t.tried == 1 and t.left < whole) or t.tried > 1]
    best = min(close, key=lambda t: (-t.tried, t.left)) if close else None
    if best is not None and (best.tried > 1 or best.left <= whole // 2):
        explains = (
            f"gives them on {best.tried - 1} of {len(chosen)} problems that were tried"
            if best.tried > 1
            else f"explains {whole - best.left} of {whole} of the differing outputs of the smallest failing problem"
        )
        return Explanation(
            best.variation.point,
            "no single change gives exactly these bits everywhere; the nearest is "
            f"{best.variation.what}, which {explains}",
            False,
        )
    return Explanation(None, "no single change of the six points that is known here gives these bits", False)
