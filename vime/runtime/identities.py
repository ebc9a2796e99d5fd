"""Identities of both sides: what a pipeline makes them, and their exchange at start and at every weight commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rlkernel.contract.build import Contract
from rlkernel.contract.canonical import digest
from rlkernel.contract.identity import Identities
from rlkernel.errors import ContractError
from vime.errors import InvariantViolation
from vime.pipeline.prepare import Prepared
from vime.runtime.sides import ENGINE_ID, engine_sources, side_deployment, side_identities

TRAINER = "trainer"


def trainer_sources(prepared: Prepared) -> dict[str, str]:
    """Source digests of the user functions that decide what is trained."""
    sources = {"reward": prepared.reward.source_digest, "data": prepared.source.source_digest}
    if prepared.filter is not None:
        sources["filter"] = prepared.filter.source_digest
    return sources


def expected_identities(prepared: Prepared, contract: Contract) -> dict[str, Identities]:
    """What the embedded sides of a pipeline show."""
    numerics, device = prepared.pipeline.numerics, prepared.pipeline.device
    return {
        TRAINER: side_identities(contract, numerics.trainer, trainer_sources(prepared), device),
        ENGINE_ID: side_identities(contract, numerics.rollout, engine_sources(), device),
    }


def described_deployments(prepared: Prepared, shown: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Side -> what its deployment identity was made of; the digest alone for a side that is not an embedded one."""
    numerics, device = prepared.pipeline.numerics, prepared.pipeline.device
    embedded = {
        TRAINER: side_deployment(numerics.trainer, trainer_sources(prepared), device),
        ENGINE_ID: side_deployment(numerics.rollout, engine_sources(), device),
    }
    return {
        side: embedded[side]
        if side in embedded and digest(embedded[side]) == identities["deployment"]
        else {"digest": identities["deployment"]}
        for side, identities in shown.items()
    }


@dataclass
class IdentityExchange:
    """Compares what the sides show, whenever they show it.

    Every side shows all three digests. ``semantic`` has to be the contract's on every side, ``numerical_policy`` on
    those that are exact. ``deployment`` is recorded and may differ between sides, but no identity of a side may change
    while a run goes on.
    """

    contract: Contract
    first: dict[str, Identities] = field(default_factory=dict)
    own: Identities = field(init=False)

    def __post_init__(self) -> None:
        self.own = self.contract.identities({})  # of frozen data; worth keeping, it hashes thousands of fields

    def compare(self, shown: Mapping[str, Any], numerics: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Check what every side shows now, and return it as plain data.

        Args:
            shown: side (``trainer``, or an engine's id) -> its identities.
            numerics: side -> ``exact`` or ``native``.

        Raises:
            InvariantViolation: naming the side, the identity and the digests.
        """
        found = {side: _complete(side, identities) for side, identities in shown.items()}
        problems = []
        for name in ("semantic", "numerical_policy"):
            due = getattr(self.own, name)
            for side, identities in found.items():
                value = getattr(identities, name)
                if value != due and (name == "semantic" or numerics[side] == "exact"):
                    problems.append(f"{name} is {value} in {_named(side)}; the contract of this run has {due}")
        if problems:
            sides = " and ".join(_named(side) for side in found)
            raise InvariantViolation(f"{sides} do not compute the same function: " + "; ".join(problems))
        for side, identities in found.items():
            before = self.first.setdefault(side, identities)
            for name, value in asdict(identities).items():
                if value != getattr(before, name):
                    raise InvariantViolation(
                        f"the {name} identity of {_named(side)} changed under the run, from {getattr(before, name)} to "
                        f"{value}: a kernel, a function or a library was exchanged"
                    )
        return {side: identities.as_json() for side, identities in found.items()}


def _named(side: str) -> str:
    return "the trainer" if side == TRAINER else f"engine {side}"


def _complete(side: str, identities: Any) -> Identities:
    if not isinstance(identities, Identities):
        raise InvariantViolation(
            f"{_named(side)} shows {identities!r} in place of its identities: all three are exchanged at start and at "
            "every commit, and a missing one is a refusal"
        )
    try:
        return Identities(**asdict(identities))
    except (ContractError, TypeError) as error:
        raise InvariantViolation(f"{_named(side)}: {error}") from error
