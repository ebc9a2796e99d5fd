"""Comparison of one candidate with the interpreter, problem by problem, and the refusal with its explanation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlkernel.contract.build import Contract
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.bits import Difference, Results, compare, differing_elements
from rlkernel.verify.admission.budget import Budget
from rlkernel.verify.admission.certificate import BACKWARD, AdmissionRefused
from rlkernel.verify.admission.classes import ALONE, VIEWS, VIEWS_REFUSED
from rlkernel.verify.admission.conduct import Misconduct, Untouched, called, inputs_by_name
from rlkernel.verify.admission.execute import Executor, reference_operation
from rlkernel.verify.admission.explain import Evidence, Explanation, explain
from rlkernel.verify.admission.generate_linear import long_problem
from rlkernel.verify.admission.generate_wide import admission_problems
from rlkernel.verify.admission.influence import dependency_difference, nan_leak, right_on_exact_sums
from rlkernel.verify.admission.plan import Plan
from rlkernel.verify.admission.problem import Problem
from rlkernel.verify.admission.step import STEP_REGIONS, ReferenceStep, StepProblem
from rlkernel.verify.admission.step_wide import admission_step_problems

OTHERWISE = "the same inputs gave the contract's bits at the first call and others at a later one"
_CALLS = 8  # how often a candidate that gave other bits is called again on the same input


class Comparison:
    """One candidate for one region: compares, counts, and refuses at the first difference."""

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
        # a kernel can be wrong in the share of another thread alone, however many threads the caller has
        self._workers = workers if workers.count > 1 else Workers(2)
        self._budget, self._say = budget, say
        self._executor = Executor(contract, self._workers)
        self._bf16 = contract.dtype == "bfloat16"
        self._seen: list[Evidence] = []
        self.outputs = 0
        self.shape_classes: set[str] = set()
        self.hazards: set[str] = set()

    @property
    def implementation(self) -> str:
        """Id of the candidate."""
        return str(self._candidate.implementation)

    def of(self, candidate: Any) -> Comparison:
        """The same admission of another candidate."""
        return Comparison(candidate, self._region, self._contract, self._workers, self._budget, self._say)

    def _reference(self) -> Any:
        if self._region in STEP_REGIONS:
            return ReferenceStep(self._contract, self._region)
        return reference_operation(self._contract, self._region)

    def _problems(self, case: str, seed: int) -> Sequence[Problem | StepProblem]:
        if self._region in STEP_REGIONS:
            return admission_step_problems(self._region, seed)
        return admission_problems(self._contract, self._region, case, seed)

    def _run(self, operation: Any, problem: Any, case: str) -> Results:
        if isinstance(problem, StepProblem):
            found: Results = called(operation.run, problem.arguments, self._workers, self._bf16)
            return found
        if operation is self._candidate:
            inputs = Untouched(inputs_by_name(problem))
            results: Results = called(self._executor.run, operation, problem, case)
            inputs.confirm()
        else:
            results = self._executor.run(operation, problem, case)
        compared = getattr(self._candidate, "compared", None)  # a function may give only some of a region's outputs
        return results if compared is None else {name: results[name] for name in compared}

    def compare_group(self, cases: tuple[str, ...], seed: int) -> None:
        """All problems of cases with the same entries, in as many rounds as the budget says."""
        reference, at_start = self._reference(), self.outputs
        rounds = 0
        budget = self._budget
        while rounds < budget.rounds or (self.outputs - at_start < budget.outputs and rounds < budget.most_rounds):
            problems = self._problems(cases[0], seed + 1000 * rounds)
            self._seen = []
            for problem in problems:
                self._compare(reference, problem, cases, list(problems))
            self._compare_again(cases[0])
            rounds += 1

    def compare_long(self, plain: Any, cases: tuple[str, ...], seed: int) -> int:
        """Problems with millions of outputs against the plain kernel; returns how many outputs were compared."""
        plan = Plan(self._contract, self._region, cases[0] == BACKWARD, seed)
        total = number = 0
        while total < self._budget.chained:
            problem = long_problem(plan, number)
            want = self._run(plain, problem, cases[0])
            for case in cases:
                compared, difference = compare(want, self._candidate_results(problem, case))
                total += compared
                if difference is not None:
                    sentence = "it parts from the plain kernel on a problem too large for the interpreter"
                    self._refuse_with(problem, case, difference, Explanation(None, sentence, False), "many tiles")
                _, difference = compare(want, self._candidate_results(problem, case))
                if difference is not None:
                    self._refuse_with(problem, case, difference, Explanation(None, OTHERWISE, True), "called again")
            self.shape_classes.add(problem.shape_class)
            self._say(
                f"{self._region}: {problem.shape_class}, {problem.name}: {total} outputs equal the plain kernel's"
            )
            number += 1
        return total

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
        except Exception as error:  # a user's kernel may raise anything
            raise self._failure(problem, case, error) from error

    def _compare_again(self, case: str) -> None:
        """Each problem of the round once more, after all the others: the same bits, and the first results as they were.

        What a kernel does at a call that comes later than these is not seen.
        """
        for one in self._seen:
            _, difference = compare(one.want, one.have)
            if difference is not None:
                sentence = "it was right when it was returned: a later call altered an earlier result"
                self._refuse_with(one.problem, case, difference, Explanation(None, sentence, True), "looked at again")
            _, difference = compare(one.want, self._candidate_results(one.problem, case))
            if difference is not None:
                self._refuse_with(one.problem, case, difference, Explanation(None, OTHERWISE, True), "called again")

    def _failure(self, problem: Any, case: str, error: Exception) -> AdmissionRefused:
        place = f"{problem.shape_class}, {problem.name}"
        if isinstance(error, Misconduct):
            return self._refusal(f"{case}: {error} ({place})", {"case": case, "problem": place, "failure": str(error)})
        said = f"{type(error).__name__}: {error}"
        return self._refusal(
            f"{case}: it fails on a problem that the contract defines ({place}): {said}",
            {"case": case, "problem": place, "failure": said},
        )

    def _misshapen(self, problem: Any, case: str, difference: Difference) -> AdmissionRefused:
        place = f"{problem.shape_class}, {problem.name}"
        said = difference.sentence()
        return self._refusal(f"{case}: {said} ({place})", {"case": case, "problem": place, "failure": said})

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
                self.shape_classes.add(ALONE)
                if difference is None:
                    continue
                explanation = self._unsteady(problem, case) or self._unsteady(part, case)
                if explanation is None:
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
            self.shape_classes.add(VIEWS_REFUSED)
            return
        except Misconduct as error:
            raise self._failure(views, cases[0], error) from error
        compared, difference = compare(want, have)
        self.outputs += compared
        self.shape_classes.add(VIEWS)
        if difference is not None:
            sentence = "strides of the inputs are ignored or enter the arithmetic"
            explanation = self._unsteady(views, cases[0]) or Explanation("dependency", sentence, True)
            self._refuse_with(views, cases[0], difference, explanation, "inputs that are not contiguous")

    def _unsteady(self, problem: Any, case: str) -> Explanation | None:
        """That calls on the same input differ: no point of the contract explains such bits."""
        try:
            first = self._run(self._candidate, problem, case)
            for call in range(_CALLS):
                count = differing_elements(first, self._run(self._candidate, problem, case))
                if count:
                    size = sum(value.size for value in first.values())
                    return Explanation(
                        None,
                        f"it is not deterministic: {count:,} of {size:,} outputs differ between call 1 and call "
                        f"{call + 2} on the same input",
                        True,
                    )
        except Exception:  # it fails there for another reason
            return None
        return None

    def _refuse(self, reference: Any, problem: Any, case: str, difference: Difference, problems: list[Any]) -> None:
        """Look at the other problems too, explain, and refuse."""
        if difference.misshapen:
            raise self._misshapen(problem, case, difference)
        if (unsteady := self._unsteady(problem, case)) is not None:
            self._refuse_with(problem, case, difference, unsteady, "")
        seen = list(self._seen)
        for other in problems[problems.index(problem) + 1 :]:
            if getattr(other, "bulk", False):
                continue
            want = self._run(reference, other, case)
            try:
                seen.append(Evidence(other, want, self._run(self._candidate, other, case)))
            except Exception:  # it fails there for another reason
                continue

        def run(operation: Any, one: Any) -> Results:
            return self._run(operation, one, case)

        def probe(one: Any) -> str | None:
            if not isinstance(one, Problem):
                return None
            sides = (lambda p: run(self._candidate, p), lambda p: run(reference, p))
            return dependency_difference(*sides, one, self._bf16) or nan_leak(*sides, one)

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
        if difference.misshapen:
            raise self._misshapen(problem, case, difference)
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
