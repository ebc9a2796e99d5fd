"""Why a token differs: both sides evaluate its sequence once more, and the first region whose bits part is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np

from rlkernel.errors import RlkernelError
from vime.errors import InvariantViolation, VimeError
from vime.mismatch.compare import NonfiniteToken, StepComparison, canonical_bits
from vime.mismatch.localise import Boundary, Divergence, first_divergence
from vime.train.interface import ScoredSample, TrainSample
from vime.types import GeneratedSample

Policy = Literal["stop", "continue"]
Trace = Callable[[TrainSample, float], list[Boundary]]


class Engine(Protocol):
    """What the diagnosis asks of an engine; one in this process also has ``trace(sample, temperature)``."""

    @property
    def engine_id(self) -> str: ...


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


def diagnose(
    trainer: Any, engine: Engine, rollout: GeneratedSample, scored: ScoredSample, temperature: float
) -> Diagnosis:
    """Trace one sample on both sides, rollout left and trainer right. Changes nothing.

    Never raises for a side that cannot be traced, as the mismatch itself is what has to be reported.
    """
    name = str(rollout.sample_id)
    sample = TrainSample.of(rollout)
    traces: list[list[Boundary]] = []
    for side, owner in ((f"engine {engine.engine_id}", engine), ("the trainer", trainer)):
        trace: Trace | None = getattr(owner, "trace", None)
        if trace is None:
            return Diagnosis(name, None, f"not localised: {side} cannot be traced")
        try:
            traces.append(trace(sample, temperature))
        except (RlkernelError, VimeError) as error:
            return Diagnosis(name, None, f"not localised: {error}")
    divergence = first_divergence(*traces)
    if divergence is not None:
        return Diagnosis(name, divergence, divergence.sentence())
    first = len(rollout.prompt_token_ids) - 1
    again = canonical_bits(traces[0][-1].values[first:])
    if not np.array_equal(again, canonical_bits(rollout.logprobs)):
        whose, why = "rollout", "cached keys and values, decode kernels, or the weights served while it was generated"
    elif not np.array_equal(again, canonical_bits(scored.logprobs)):
        whose, why = "trainer", "its scoring forward, or what was done to its arrays afterwards"
    else:
        return Diagnosis(name, None, "a forward over the whole sequence has the same log-probabilities on both sides")
    return Diagnosis(
        name,
        None,
        f"a forward over the whole sequence has the same bits on both sides, and it is the {whose}'s array that it "
        f"does not reproduce: look at {why}",
    )
