"""Why a token differs: both sides evaluate its sequence once more, and the first region whose bits part is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from rlkernel.errors import RlkernelError
from vime.errors import InvariantViolation
from vime.mismatch.compare import NonfiniteToken, StepComparison
from vime.mismatch.localise import Boundary, Divergence, first_divergence
from vime.rollout.interface import CommittedVersion
from vime.train.interface import TrainSample

Policy = Literal["stop", "continue"]
Trace = Callable[[TrainSample, float], list[Boundary]]


class Engine(Protocol):
    """What the diagnosis asks of an engine; one in this process also has ``trace(sample, temperature)``."""

    @property
    def engine_id(self) -> str: ...

    def committed(self) -> CommittedVersion | None: ...


@dataclass(frozen=True)
class Diagnosis:
    """The first differing region boundary of one sample; ``divergence`` is None where the forwards agree.

    ``sentence`` says what was found in words, and what it means where nothing was found.
    """

    sample: str
    divergence: Divergence | None
    sentence: str

    def as_json(self) -> Mapping[str, Any]:
        """Plain data for the step's report."""
        found = None if self.divergence is None else asdict(self.divergence)
        return {"sample": self.sample, "boundary": found, "sentence": self.sentence}


def judge(
    comparison: StepComparison,
    diagnosis: Diagnosis | None,
    nonfinite: Sequence[NonfiniteToken],
    on_mismatch: Policy,
    on_nonfinite: Policy,
) -> None:
    """Raise InvariantViolation where a step may not be trained; the token, the samples and the region are named."""
    if nonfinite and on_nonfinite == "stop":
        samples = len({token.sample_id for token in nonfinite})
        raise InvariantViolation(
            f"{len(nonfinite)} log-probabilities of {samples} samples are not finite; the first is "
            f"{nonfinite[0].sentence()}. Nothing of this step was trained"
        )
    if diagnosis is not None and on_mismatch == "stop":
        worst = comparison.worst_token
        assert worst is not None
        raise InvariantViolation(
            f"{comparison.mismatch_count} of {comparison.compared_tokens} log-probabilities and "
            f"{comparison.distribution_mismatch_count} distributions differ between rollout and trainer; the worst is "
            f"sample {worst.sample}, position {worst.position}; {diagnosis.sentence}"
        )


def diagnose(trainer: Any, engine: Engine, sample: TrainSample, temperature: float) -> Diagnosis:
    """Trace one sample on both sides, rollout left and trainer right. Changes nothing; never raises for a side that
    cannot be traced, as the mismatch itself is what has to be reported."""
    name = str(sample.sample_id)
    traces: list[Trace] = []
    for side, owner in ((f"engine {engine.engine_id}", engine), ("the trainer", trainer)):
        trace = getattr(owner, "trace", None)
        if trace is None:
            return Diagnosis(name, None, f"not localised: {side} cannot be traced from this process")
        traces.append(trace)
    try:
        rollout, own = (trace(sample, temperature) for trace in traces)
    except RlkernelError as error:
        return Diagnosis(name, None, f"not localised: {error}")
    divergence = first_divergence(rollout, own)
    if divergence is not None:
        return Diagnosis(name, divergence, divergence.sentence())
    return Diagnosis(
        name,
        None,
        "a forward over the whole sequence gives the same bits on both sides: what differed is what the sample met "
        "while it was generated (cached keys and values, decode kernels, weights served then) or what was done to "
        "the arrays afterwards",
    )
