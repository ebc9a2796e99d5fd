"""Evaluations are proven too: the trainer scores some of their samples, and draws one of them again."""

from __future__ import annotations

from collections.abc import Sequence

from vime.errors import InvariantViolation
from vime.mismatch.compare import compare_step, unfounded_entropy
from vime.mismatch.independence import check_evidence, check_memory, check_shapes
from vime.mismatch.redraw import check_redrawn, chosen_sample
from vime.train.interface import Trainer, TrainSample
from vime.types import GeneratedSample, SamplingParams

SCORED = 8
"""Samples of an evaluation that are scored; each evaluation begins with others."""


def chosen_samples(samples: Sequence[GeneratedSample], evaluation: int) -> list[GeneratedSample]:
    """Up to :data:`SCORED` samples spread over all of them, other ones in the next evaluation, in sample order."""
    count = min(SCORED, len(samples))
    places = ((evaluation + place * len(samples) // count) % len(samples) for place in range(count))
    return [samples[place] for place in sorted(places)]


def prove(
    samples: Sequence[GeneratedSample],
    trainer: Trainer,
    params: SamplingParams,
    *,
    seed: int,
    evaluation: int,
    version: int,
    digest: str,
    tolerated: bool,
) -> dict[str, int | None]:
    """Compare samples of an evaluation with the trainer's own forward, and the tokens of one with its own draw.

    Args:
        params: how the samples were asked to be drawn.
        evaluation: number that picks the samples.
        version: of the weights that are served, and ``digest`` their digest.
        tolerated: whether the evaluation goes on where bits differ.

    Returns:
        ``compared_tokens``, ``mismatch_count`` and ``distribution_mismatch_count`` (None where nothing was compared),
        ``redrawn_tokens``.

    Raises:
        InvariantViolation: the trainer gives no evidence of a forward of its own; a bit differs, and that is not
            tolerated; an entropy is unfounded; or, where no bit of the scores differs, another token is drawn.
    """
    chosen = chosen_samples(samples, evaluation)
    asked = [TrainSample.of(sample) for sample in chosen]
    scores = trainer.score(asked)
    check_evidence(asked, scores, digest)
    check_shapes(asked, scores)
    check_memory(chosen, scores)
    comparison = compare_step(chosen, scores, version)
    differs = bool(comparison.mismatch_count or comparison.distribution_mismatch_count)
    if differs and not tolerated:
        raise InvariantViolation(
            f"{comparison.mismatch_count} log-probabilities and {comparison.distribution_mismatch_count} distributions "
            f"of {comparison.compared_tokens} compared tokens differ between rollout and trainer"
        )
    unfounded = unfounded_entropy(chosen, scores, version)
    if unfounded is not None:
        raise InvariantViolation(unfounded)
    redrawn = 0
    draw, sample = getattr(trainer, "redraw", None), chosen_sample(chosen, evaluation)
    if draw is not None and sample is not None and not differs:
        redrawn = check_redrawn(sample, draw(TrainSample.of(sample), params, seed), version)
    return {
        "compared_tokens": comparison.compared_tokens,
        "mismatch_count": comparison.mismatch_count,
        "distribution_mismatch_count": comparison.distribution_mismatch_count,
        "redrawn_tokens": redrawn,
    }
