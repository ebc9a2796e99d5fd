"""Checks of a run that its sides cannot skip: claims at start and at every commit, sentinels in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlkernel.errors import ContractError
from rlkernel.verify.claims import START, WEIGHT_COMMIT, Facts, Moment, Role
from rlkernel.verify.sentinels import ENGINE_CASES, NOTHING, Counts, Duty, missing, read_counts, undeclared
from vime.errors import InvariantViolation
from vime.runtime.assembly import Sides

_SHOWN = 5


def facts_of(evidence: Mapping[str, Any]) -> Facts:
    """The facts of a side's evidence; none where it shows none."""
    facts = evidence.get("facts")
    return facts if isinstance(facts, Mapping) else {}


class ClaimChecks:
    """Runs the checks of a run's claims, and raises for those that are broken or did not run."""

    def __init__(self, sides: Sides) -> None:
        self._sides, self._register = sides, sides.claims
        self._moments: list[tuple[Moment, str, Role]] = []

    def start(self) -> None:
        """Check the claims that are due before anything runs. Raises InvariantViolation."""
        trainer, engine = self._sides.trainer, self._sides.engine
        self._check(Moment(START), "trainer", "trainer", {}, facts_of(trainer.evidence()))
        self._check(Moment(START), engine.engine_id, "engine", {}, facts_of(engine.evidence()))

    def before_commit(self) -> Facts:
        """The engine's facts as they are before a commit."""
        return facts_of(self._sides.engine.evidence())

    def committed(self, version: int) -> None:
        """Note that an engine serves a version: its caches have to be checked from now on."""
        self._moments.append((Moment(WEIGHT_COMMIT, version), self._sides.engine.engine_id, "engine"))

    def after_commit(self, version: int, before: Facts) -> None:
        """Check what a commit invalidates. Raises InvariantViolation."""
        engine = self._sides.engine
        self._check(Moment(WEIGHT_COMMIT, version), engine.engine_id, "engine", before, facts_of(engine.evidence()))

    def _check(self, moment: Moment, side: str, role: Role, before: Facts, after: Facts) -> None:
        if moment.kind == START:
            self._moments.append((moment, side, role))
        problems = self._register.check(moment, side, role, before, after)
        _refuse(problems or self._register.missing(moment, side, role))

    def finish(self) -> None:
        """Raise InvariantViolation for every check that was due in this process and did not run."""
        _refuse([found for moment in self._moments for found in self._register.missing(*moment)])


class Sentinels:
    """Looks at a side's evidence after every stage that it computes in, and fails the step in which anything
    undeclared ran, or anything that is due did not: before anything is made of its results."""

    def __init__(self, sides: Sides, *, checkpointing: bool) -> None:
        self._sides, self._checkpointing = sides, checkpointing
        self._seen: dict[str, Counts] = {}

    def begin(self) -> None:
        """Whatever ran since the last look (an evaluation) was declared. Raises InvariantViolation."""
        for side in self._sides.declared:
            self._look(side)

    def after(self, stage: str, results: Mapping[str, Any]) -> None:
        """Look at the side that computed in a stage.

        Args:
            stage: its name; stages that run no region are not looked at.
            results: the values of the stage's ports.

        Raises:
            InvariantViolation: naming side, region and case.
        """
        if stage == "rollout":
            duty = Duty(ENGINE_CASES, _tokens(results["samples"], "token_ids"))
            self._look(self._sides.engine.engine_id, duty)
        elif stage == "score":
            scores = results["scores"]
            self._look("trainer", Duty((scores.case,), _tokens(scores.samples, "logprobs")))
        elif stage == "train":
            first = results["trained"].first_forward
            cases = ["trainer_backward", "optimizer_step", *(["trainer_recompute"] if self._checkpointing else [])]
            forward = Duty(("trainer_forward",), _tokens(first.samples, "logprobs"))
            self._look("trainer", forward, *(Duty((case,)) for case in cases))

    def _look(self, side: str, *duties: Duty) -> None:
        declaration = self._sides.declared[side]
        owner = self._sides.trainer if side == "trainer" else self._sides.engine
        try:
            now = read_counts(owner.evidence())
            counts = now.since(self._seen.get(side, NOTHING))
        except ContractError as error:
            raise InvariantViolation(f"{declaration.side}: {error}") from error
        self._seen[side] = now
        _refuse(undeclared(declaration, counts) + missing(declaration, counts, duties))


def _tokens(items: Sequence[Any], name: str) -> int:
    return sum(len(getattr(item, name)) for item in items)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise InvariantViolation("; ".join(problems[:_SHOWN]) + more)
