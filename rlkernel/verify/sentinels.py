"""Whether what ran is what the contract declares: judged from the evidence of one side between two looks at it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlkernel.contract.build import Contract
from rlkernel.errors import ContractError
from rlkernel.models.definition import define_model

ENGINE_CASES = ("rollout_prefill", "rollout_decode")
TRAINER_CASES = ("trainer_score", "trainer_forward", "trainer_recompute", "trainer_backward", "optimizer_step")
HEAD = "logprob"

Key = tuple[str, str]
"""(case, region)."""


def host_region(entry: str) -> str:
    """The region under which evidence counts an entry: one implementation serves a region and its weight gradients
    (``KIND.wgrad``, ``KIND.bias``), and the head's logits (``lm_head``) with its log-probabilities."""
    kind = entry.partition(".")[0]
    return HEAD if kind == "lm_head" else kind


@dataclass(frozen=True)
class Declaration:
    """What one side may run.

    ``implementations`` maps (case, region) to the one implementation that may run there. ``occurrences`` says how
    often a region kind occurs in the model: every occurrence has to see every token of its case. Empty: not checked.
    """

    side: str
    implementations: Mapping[Key, str]
    occurrences: Mapping[str, int] = field(default_factory=dict)

    def regions(self, case: str) -> tuple[str, ...]:
        """Regions that are declared for a case."""
        return tuple(region for declared, region in self.implementations if declared == case)

    def as_json(self) -> dict[str, str]:
        """``CASE/REGION`` -> implementation."""
        return {f"{case}/{region}": name for (case, region), name in self.implementations.items()}


def declare(
    contract: Contract, side: str, cases: Iterable[str], implementations: Mapping[str, str], *, every_occurrence: bool
) -> Declaration:
    """Declare one implementation a region kind, for every entry that the contract has in these cases.

    Args:
        implementations: region kind -> implementation, as a composition names them.
        every_occurrence: check that all occurrences of all kinds saw the same tokens.

    Raises:
        ContractError: an entry of the contract has no implementation.
    """
    wanted, found = set(cases), {}
    for case, entry in contract.entries:
        if case not in wanted:
            continue
        region = host_region(entry)
        if region not in implementations:
            raise ContractError(f"{side} has no implementation of {entry} in {case}, which the contract declares")
        found[case, region] = implementations[region]
    occurrences: Mapping[str, int] = {}
    if every_occurrence:
        occurrences = Counter(region.kind for region in define_model(contract.config).body)
    return Declaration(side, found, occurrences)


@dataclass(frozen=True)
class Counts:
    """Evidence as numbers: executions by (case, region, implementation), tokens by (case, region)."""

    calls: Mapping[tuple[str, str, str], int]
    tokens: Mapping[Key, int]

    def since(self, earlier: Counts) -> Counts:
        """What was added after ``earlier``. Raises ContractError if a counter went back."""
        calls = {key: count - earlier.calls.get(key, 0) for key, count in self.calls.items()}
        tokens = {key: count - earlier.tokens.get(key, 0) for key, count in self.tokens.items()}
        gone = [key for key in earlier.calls if key not in self.calls]
        if gone or any(count < 0 for count in (*calls.values(), *tokens.values())):
            raise ContractError("its evidence counts less than before: counters only grow")
        return Counts(
            {key: count for key, count in calls.items() if count},
            {key: count for key, count in tokens.items() if count},
        )

    def ran(self, case: str) -> set[str]:
        """Regions that ran in a case."""
        return {region for ran_in, region, _ in self.calls if ran_in == case}


NOTHING = Counts({}, {})


def read_counts(evidence: Mapping[str, Any]) -> Counts:
    """Counts of what ``Evidence.as_json`` returned. Raises ContractError for anything else."""
    calls: dict[tuple[str, str, str], int] = {}
    tokens: dict[Key, int] = {}
    try:
        for call in evidence["calls"]:
            case, region = str(call["case"]), str(call["region"])
            calls[case, region, str(call["implementation"])] = int(call["count"])
            tokens[case, region] = int(call["tokens"])
    except (KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ContractError(f"its evidence cannot be read ({what}): nothing shows what ran") from error
    return Counts(calls, tokens)


@dataclass(frozen=True)
class Duty:
    """What has to have run: at least one of ``cases``, whole, and the head over ``rows`` rows in all of them."""

    cases: tuple[str, ...]
    rows: int = 0


def undeclared(declaration: Declaration, counts: Counts) -> list[str]:
    """One sentence for each implementation that ran where the contract does not have it."""
    problems = []
    for (case, region, implementation), count in sorted(counts.calls.items()):
        due = declaration.implementations.get((case, region))
        if due == implementation:
            continue
        what = "nothing is declared there" if due is None else f"declared is {due!r}"
        problems.append(f"{declaration.side} ran {implementation!r} {count} times as {region} in {case}; {what}")
    return problems


def missing(declaration: Declaration, counts: Counts, duties: Iterable[Duty]) -> list[str]:
    """One sentence for each declared region that never ran, or did not see every token, in the cases that are due."""
    problems = []
    for duty in duties:
        ran = [case for case in duty.cases if counts.ran(case)]
        if not ran:
            problems.append(f"{declaration.side} ran nothing in {' or '.join(duty.cases)}, which the step needs")
            continue
        for case in ran:
            # logits are made only where a token is due, perhaps in one of several cases
            due = {r for r in declaration.regions(case) if r != HEAD or len(duty.cases) == 1}
            problems += [
                f"{declaration.side} never ran {region} in {case}, which the contract declares"
                for region in sorted(due - counts.ran(case))
            ]
            problems += _uneven(declaration, counts, case)
        rows = sum(counts.tokens.get((case, HEAD), 0) for case in duty.cases)
        if rows < duty.rows:
            problems.append(
                f"{declaration.side} computed {HEAD} over {rows} rows in {' and '.join(ran)}; {duty.rows} tokens came "
                "of it"
            )
    return problems


def _uneven(declaration: Declaration, counts: Counts, case: str) -> list[str]:
    """A region that saw other tokens than the others did."""
    seen = {
        region: (counts.tokens.get((case, region), 0), declaration.occurrences[region])
        for region in declaration.regions(case)
        if region in declaration.occurrences and region in counts.ran(case)
    }
    if not seen:
        return []
    most = max(tokens / times for tokens, times in seen.values())
    return [
        f"{declaration.side} ran {region} in {case} over {tokens} tokens; {times} in the model, over {most:g} tokens "
        f"each, are {int(most * times)}"
        for region, (tokens, times) in sorted(seen.items())
        if tokens != most * times
    ]
