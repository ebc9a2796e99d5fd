"""The claims of a contract, checked while running: which check ran when, on which side, and what did not run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlkernel.contract.build import Contract
from rlkernel.contract.claims import AXES, STATE_CLAIMS, StateClaim, Topology, check_degrees
from rlkernel.contract.decode import decode
from rlkernel.errors import ContractError

Facts = Mapping[str, Any]
Role = Literal["trainer", "engine"]
Checker = Callable[[Contract, Facts, Facts], str | None]
"""(contract, facts before the moment, facts after it) -> what is wrong, or None."""

TOPOLOGY = "topology"
START, WEIGHT_COMMIT = "start", "weight_commit"


@dataclass(frozen=True)
class Moment:
    """When claims are due: the ``start``, or a ``weight_commit`` of one version."""

    kind: str
    version: int | None = None

    def __str__(self) -> str:
        return self.kind if self.version is None else f"{self.kind} of version {self.version}"


def check_topology_degrees(contract: Contract, before: Facts, after: Facts) -> str | None:
    """The degrees that a side runs at (fact ``degrees``: axis -> degree) lie within the claim."""
    degrees = decode(Topology, _fact(after, "degrees"), "degrees")
    if any(getattr(degrees, axis) < 1 for axis in AXES):
        return f"degrees are {degrees.as_json()}: each is 1 or more"
    try:
        check_degrees(contract.topology, degrees)
    except ContractError as error:
        return str(error)
    return None


def check_prefix_cache(contract: Contract, before: Facts, after: Facts) -> str | None:
    """No block stays findable, and every block that was findable before is counted as invalidated."""
    kept, versions = _fact(after, "blocks_cached"), _fact(after, "cached_versions")
    if kept or versions:
        return f"{kept} cached blocks were kept, written by weight versions {versions}"
    had = _fact(before, "blocks_cached")
    gone = _fact(after, "blocks_invalidated") - _fact(before, "blocks_invalidated")
    return None if gone >= had else f"{had} blocks were cached and {gone} were invalidated"


def check_paged_kv(contract: Contract, before: Facts, after: Facts) -> str | None:
    """No block in use holds entries of an old version, unless the engine was told to continue samples on them."""
    versions, policy = _fact(after, "kv_versions"), _fact(after, "in_flight_updates")
    if not versions or policy == "continue":
        return None  # the tokens that read them carry the versions, and are counted apart
    return f"KV blocks in use hold entries of weight versions {versions}, and in_flight_updates is {policy!r}"


CHECKERS: Mapping[str, Checker] = {
    TOPOLOGY: check_topology_degrees,
    "paged_kv": check_paged_kv,
    "prefix_cache": check_prefix_cache,
}


def _fact(facts: Facts, name: str) -> Any:
    if name not in facts:
        raise ContractError(f"its evidence has no fact {name!r}")
    return facts[name]


@dataclass
class ClaimRegister:
    """Which checks ran. Built from the contract: a claim without a checker is an error.

    Args:
        contract: whose claims are checked.
        checkers: claim -> checker.

    Raises:
        ContractError: naming the claims that have none.
    """

    contract: Contract
    checkers: Mapping[str, Checker] = field(default_factory=lambda: CHECKERS)
    states: tuple[StateClaim, ...] = STATE_CLAIMS
    ran: dict[tuple[str, Moment, str], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        without = [name for name in (TOPOLOGY, *(claim.state for claim in self.states)) if name not in self.checkers]
        if without:
            raise ContractError(f"the claims {', '.join(without)} have no checker: a claim that nobody checks is none")

    def due(self, moment: Moment, role: Role) -> tuple[str, ...]:
        """Claims that have to be checked at a moment on a side of this role."""
        if moment.kind == START:
            return (TOPOLOGY,)
        if role == "trainer":
            return ()
        return tuple(claim.state for claim in self.states if moment.kind in claim.invalidated_by)

    def check(self, moment: Moment, side: str, role: Role, before: Facts, after: Facts) -> list[str]:
        """Run every check that is due; one sentence for each claim that is broken or cannot be checked."""
        problems = []
        for claim in self.due(moment, role):
            try:
                problem = self.checkers[claim](self.contract, before, after)
            except ContractError as error:
                problems.append(f"the claim {claim} of {side} could not be checked at the {moment}: {error}")
                continue
            self.ran[claim, moment, side] = None
            if problem is not None:
                problems.append(f"{side} breaks the claim {claim} at the {moment}: {problem}")
        return problems

    def missing(self, moment: Moment, side: str, role: Role) -> list[str]:
        """One sentence for each check that was due and did not run."""
        return [
            f"the claim {claim} of {side} was not checked at the {moment}: a check that did not run is a violation"
            for claim in self.due(moment, role)
            if (claim, moment, side) not in self.ran
        ]

    def as_json(self) -> dict[str, Any]:
        """In the form of evidence: claim and kind of moment -> how many checks ran on which side."""
        facts: dict[str, dict[str, int]] = {}
        for claim, moment, side in self.ran:
            sides = facts.setdefault(f"{claim} at {moment.kind}", {})
            sides[side] = sides.get(side, 0) + 1
        return {"owner": "claims", "calls": [], "facts": dict(sorted(facts.items())), "refused": []}
