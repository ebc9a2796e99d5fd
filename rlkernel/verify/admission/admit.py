"""Admission of one implementation for a region: comparison over shape classes and hazards,
and a certificate or a refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlkernel.contract.build import FORWARD_CASES, Contract
from rlkernel.errors import ContractError, RlkernelError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.bits import Difference, Results, compare
from rlkernel.verify.admission.certificate import (
    BACKWARD,
    OPTIMIZER,
    AdmissionRefused,
    Certificate,
    Link,
    entry_digests,
)
from rlkernel.verify.admission.execute import Executor, reference_operation
from rlkernel.verify.admission.explain import Evidence, Explanation, explain
from rlkernel.verify.admission.generate import problems_of
from rlkernel.verify.admission.influence import dependency_difference, right_on_exact_sums
from rlkernel.verify.admission.problem import Problem
from rlkernel.verify.admission.sources import identity_of
from rlkernel.verify.admission.step import STEP_REGIONS, ReferenceStep, StepProblem, step_problems


@dataclass(frozen=True)
class Budget:
    """How much is compared: ``rounds`` of all problems with other values, more until ``outputs`` were compared."""

    name: str
    rounds: int = 1
    outputs: int = 0
    explain_seconds: float = 60.0


QUICK = Budget("quick")
FULL = Budget("full", rounds=3, outputs=1_000_000)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """The interpreter's operations are small: more threads only slow them down. No bit depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cases_of(region: str, contract: Contract) -> tuple[str, ...]:
    """All cases in which a region runs."""
    if region in STEP_REGIONS:
        return (OPTIMIZER,)
    names = {(case, name.partition(".")[0]) for case, name in contract.entries}
    return tuple(case for case in (*FORWARD_CASES, BACKWARD) if (case, region) in names)


def admit(
    candidate: Any,
    region: str,
    case: str | Sequence[str],
    contract: Contract,
    target: str = "cpu",
    budget: Budget = QUICK,
    *,
    workers: Workers | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Compare an implementation with the interpreter of the contract's entries, as integers.

    Args:
        candidate: has ``implementation`` (its id), and ``forward`` and ``backward`` of a region operation, or
        ``run`` of
            a computation of the optimizer step (``gradient_norm``, ``adamw``, ``loss``).
        region, case: what it wants to be picked for; several cases of one region share the interpreter's work.
        target: where it runs; ``cpu`` here.
        seed: of the values.
        say: gets a sentence for each problem.

    Returns:
        The certificate.

    Raises:
        AdmissionRefused: a bit differs, or the implementation fails; the message names the problem, the first
        difference
            with both bit patterns, and which of the six points explains it.
        ContractError: the contract has no such region or case, or the target cannot be admitted here.
    """
    cases = (case,) if isinstance(case, str) else tuple(case)
    identity = identity_of(candidate, target)
    entries = entry_digests(contract, region, cases)
    admission = _Admission(candidate, region, contract, workers or Workers(), budget, say)
    with one_torch_thread():
        for group in _groups(region, cases, contract):
            admission.compare_group(group, seed)
    return Certificate(
        implementation=identity.implementation,
        source=identity.source,
        region=region,
        cases=cases,
        profile=contract.profile,
        dtype=contract.dtype,
        entries=entries,
        target=target,
        toolchain=identity.toolchain,
        specification=identity.specification,
        shape_classes=tuple(sorted(admission.shape_classes)),
        hazards=tuple(sorted(admission.hazards)),
        links=(Link("interpreter", identity.implementation, admission.outputs),),
        budget=budget.name,
    )


def _groups(region: str, cases: tuple[str, ...], contract: Contract) -> list[tuple[str, ...]]:
    """Cases that share problems and entries: the interpreter runs once for each group."""
    groups: dict[Any, list[str]] = {}
    for case in cases:
        kind = "paged" if region == "attention" and case.startswith("rollout") else case in (BACKWARD, OPTIMIZER)
        points = tuple(value for name, value in entry_digests(contract, region, (case,)))
        groups.setdefault((kind, points), []).append(case)
    return [tuple(group) for group in groups.values()]


class _Admission:
    def __init__(
        self,
        candidate: Any,
        region: str,
        contract: Contract,
        workers: Workers,
        budget: Budget,
        say: Callable[[str], None],
    ) -> None:
        self._candidate, self._region, self._contract = candidate, region, contract
        self._workers, self._budget, self._say = workers, budget, say
        self._executor = Executor(contract, workers)
        self._bf16 = contract.dtype == "bfloat16"
        self._seen: list[Evidence] = []
        self.outputs = 0
        self.shape_classes: set[str] = set()
        self.hazards: set[str] = set()

    def _reference(self) -> Any:
        if self._region in STEP_REGIONS:
            return ReferenceStep(self._contract, self._region)
        return reference_operation(self._contract, self._region)

    def _problems(self, case: str, seed: int) -> Sequence[Problem | StepProblem]:
        if self._region in STEP_REGIONS:
            return step_problems(self._region, seed)
        return problems_of(self._contract, self._region, case, seed)

    def _run(self, operation: Any, problem: Any, case: str) -> Results:
        if isinstance(problem, StepProblem):
            found: Results = operation.run(problem.arguments, self._workers, self._bf16)
            return found
        results = self._executor.run(operation, problem, case)
        compared = getattr(self._candidate, "compared", None)  # a function may give only some of a region's outputs
        return results if compared is None else {name: results[name] for name in compared}

    def compare_group(self, cases: tuple[str, ...], seed: int) -> None:
        """All problems of cases with the same entries, in as many rounds as the budget says."""
        reference, at_start = self._reference(), self.outputs
        rounds = 0
        while rounds < self._budget.rounds or self.outputs - at_start < self._budget.outputs:
            problems = self._problems(cases[0], seed + 1000 * rounds)
            self._seen = []
            for problem in problems:
                self._compare(reference, problem, cases, list(problems))
            rounds += 1

    def _compare(self, reference: Any, problem: Any, cases: tuple[str, ...], problems: list[Any]) -> None:
        want = self._run(reference, problem, cases[0])
        self.shape_classes.add(problem.shape_class)
        self.hazards.update(problem.hazards)
        for case in cases:
            have = self._candidate_results(problem, case)
            compared, difference = compare(want, have)
            self.outputs += compared
            if not self._seen or self._seen[-1].problem is not problem:
                self._seen.append(Evidence(problem, want, have))
            if difference is not None:
                self._refuse(reference, problem, case, difference, problems)
        if isinstance(problem, Problem):
            self._compare_alone(problem, want, cases)
            self._compare_views(problem, want, cases)
        self._say(f"{self._region}: {problem.shape_class}, {problem.name}: {compared} outputs equal")

    def _candidate_results(self, problem: Any, case: str) -> Results:
        try:
            return self._run(self._candidate, problem, case)
        except (
            RlkernelError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
        ) as error:
            raise self._refusal(
                f"{case}: it fails on a problem that the contract defines "
                f"({problem.shape_class}, {problem.name}): {type(error).__name__}: {error}",
                {"case": case, "problem": f"{problem.shape_class}, {problem.name}", "failure": str(error)},
            ) from error

    def _compare_alone(self, problem: Problem, want: Results, cases: tuple[str, ...]) -> None:
        """Rows without their neighbours have the bits that they have among them."""
        for row in problem.alone:
            part = problem.take([row])
            rows = problem.rows_of([row])
            for case in cases:
                have = self._candidate_results(part, case)
                names = [n for n, v in want.items() if len(v) == len(problem.batch.tokens) and not _of_weights(n)]
                expected = {n: want[n][rows] for n in names}
                compared, difference = compare(expected, have)
                self.outputs += compared
                self.shape_classes.add("a row without its neighbours")
                if difference is None:
                    continue
                explanation = Explanation("dependency", "a row's bits depend on the other rows of its batch", True)
                self._refuse_with(part, case, difference, explanation, f"row {row} without its neighbours")

    def _compare_views(self, problem: Problem, want: Results, cases: tuple[str, ...]) -> None:
        """Inputs that are not contiguous give the same bits, or are refused with a ContractError."""
        if not problem.views:
            return
        views = replace(problem, inputs=tuple(_strided(x) for x in problem.inputs))
        try:
            have = self._run(self._candidate, views, cases[0])
        except ContractError:
            self.shape_classes.add("views that are not contiguous (refused)")
            return
        compared, difference = compare(want, have)
        self.outputs += compared
        self.shape_classes.add("views that are not contiguous")
        if difference is not None:
            sentence = "strides of the inputs are ignored or enter the arithmetic"
            self._refuse_with(
                views, cases[0], difference, Explanation("dependency", sentence, True), "inputs that are not contiguous"
            )

    def _refuse(self, reference: Any, problem: Any, case: str, difference: Difference, problems: list[Any]) -> None:
        """Look at the other problems too, explain, and refuse."""
        seen = list(self._seen)
        for other in problems[problems.index(problem) + 1 :]:
            if getattr(other, "bulk", False):
                continue
            want = self._run(reference, other, case)
            try:
                seen.append(Evidence(other, want, self._run(self._candidate, other, case)))
            except (RlkernelError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError):
                continue

        def run(operation: Any, one: Any) -> Results:
            return self._run(operation, one, case)

        def probe(one: Any) -> str | None:
            if not isinstance(one, Problem):
                return None
            return dependency_difference(
                lambda p: run(self._candidate, p), lambda p: run(reference, p), one, self._bf16
            )

        def exact_sums(one: Any) -> bool | None:
            if not isinstance(one, Problem):
                return None
            return right_on_exact_sums(lambda p: run(self._candidate, p), lambda p: run(reference, p), one)

        def more(number: int) -> list[Evidence]:
            shapes = {(e.problem.shape_class, e.problem.name) for e in seen if e.differing}
            drawn = self._problems(case, 7919 * number)
            chosen = [p for p in drawn if (p.shape_class, p.name) in shapes]
            return [Evidence(p, run(reference, p), run(self._candidate, p)) for p in chosen]

        limit = self._budget.explain_seconds
        explanation = explain(self._contract, self._region, case, seen, run, probe, exact_sums, more, limit)
        self._refuse_with(problem, case, difference, explanation, "")

    def _refuse_with(
        self, problem: Any, case: str, difference: Difference, explanation: Explanation, circumstance: str
    ) -> None:
        hazard = problem.hazard(difference.index)
        place = f"{problem.shape_class}, {problem.name}" + (f", {circumstance}" if circumstance else "")
        kind = f"point {explanation.point}" if explanation.point else "no point found"
        certainty = "" if explanation.certain or explanation.point is None else "probably "
        raise self._refusal(
            f"{case}: {difference.sentence()} ({place}; values: {hazard}). {certainty}{kind}: {explanation.sentence}",
            {
                "case": case,
                "problem": place,
                "shape_class": problem.shape_class,
                "hazard": hazard,
                "difference": {
                    "output": difference.output,
                    "index": list(difference.index),
                    "expected": difference.expected,
                    "found": difference.found,
                    "differing": difference.differing,
                    "compared": difference.compared,
                },
                "explanation": explanation.as_json(),
            },
        )

    def _refusal(self, sentence: str, report: dict[str, Any]) -> AdmissionRefused:
        name = self._candidate.implementation
        return AdmissionRefused(
            f"{name} is not admitted for {self._region}, {self._contract.profile} {self._contract.dtype}, {sentence}",
            {"implementation": name, "region": self._region, **report},
        )


def _of_weights(name: str) -> bool:
    return name.endswith((".weight", ".bias"))


def _strided(x: Any) -> Any:
    """The same values in memory that is not contiguous."""
    if not isinstance(x, np.ndarray) or x.ndim < 2 or x.dtype != np.float32:
        return x
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.float32(np.nan))
    wide[..., ::2] = x
    return wide[..., ::2]
