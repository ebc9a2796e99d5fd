"""Evaluations are proven too: the trainer scores some of their samples, and draws one of them again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    return [samples[(evaluation + place * len(samples) // count) % len(samples)] for place in range(count)]


def prove(
    samples: Sequence[GeneratedSample],
    trainer: Trainer,
    params: SamplingParams,
    *,
    seed: int,
    evaluation: int,
    version: int,
    digest: str,
) -> dict[str, int]:
    """Compare samples of an evaluation with the trainer's own forward, and the tokens of one with its own draw.

    Args:
        params: how the samples were asked to be drawn.
        evaluation: number that picks the samples.
        version: of the weights that are served, and ``digest`` their digest.

    Returns:
        ``compared_tokens``, ``mismatch_count``, ``distribution_mismatch_count`` and ``redrawn_tokens``.

    Raises:
        InvariantViolation: the trainer gives no evidence of a forward of its own; an entropy is unfounded; or, where
            no bit of the scores differs, another token is drawn.
    """
    chosen = chosen_samples(samples, evaluation)
    asked = [_asked(sample) for sample in chosen]
    scores = trainer.score(asked)
    check_evidence(asked, scores, digest)
    check_shapes(asked, scores)
    check_memory(chosen, scores)
    comparison = compare_step(chosen, scores, version)
    unfounded = unfounded_entropy(chosen, scores, version)
    if unfounded is not None:
        raise InvariantViolation(unfounded)
    redrawn = 0
    draw, sample = getattr(trainer, "redraw", None), chosen_sample(chosen, evaluation)
    if draw is not None and sample is not None and not comparison.mismatch_count:
        redrawn = check_redrawn(sample, draw(_asked(sample), params, seed), version)
    return {
        "compared_tokens": comparison.compared_tokens,
        "mismatch_count": comparison.mismatch_count or 0,
        "distribution_mismatch_count": comparison.distribution_mismatch_count or 0,
        "redrawn_tokens": redrawn,
    }


def _asked(sample: GeneratedSample) -> TrainSample:
    mask = np.ones(len(sample.token_ids), np.bool_)
    return TrainSample(sample.sample_id, sample.prompt_token_ids, sample.token_ids, mask)
