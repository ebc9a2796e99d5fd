"""Whether the engine's tokens are those that the pipeline's sampler draws from the trainer's own logits.

Log-probabilities and distributions of both sides agree whatever tokens were drawn: an engine with another seed, or
one that leaves out candidates that nobody asked it to, passes every comparison of bits. Sampling is a function of
(seed, sample, position, logits), so that a trainer can draw again: one sample a step is, from logits of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vime.errors import InvariantViolation
from vime.mismatch.compare import token_reasons
from vime.types import GeneratedSample


def chosen_sample(samples: Sequence[GeneratedSample], step: int) -> GeneratedSample | None:
    """The sample of a step that is drawn again: another one every step; None if no sample has a token."""
    candidates = [sample for sample in samples if sample.token_ids]
    return candidates[step % len(candidates)] if candidates else None


def check_redrawn(sample: GeneratedSample, drawn: NDArray[np.int64], version: int) -> int:
    """Compare a sample's tokens with those drawn again, int64 [T]; returns how many were compared.

    Raises InvariantViolation at the first comparable token that differs, or for another number of tokens.
    """
    if drawn.shape != (len(sample.token_ids),):
        raise InvariantViolation(
            f"the trainer drew {drawn.shape} tokens again for sample {sample.sample_id}, which has "
            f"{len(sample.token_ids)}"
        )
    comparable = np.array([reason is None for reason in token_reasons(sample, version)], np.bool_)
    differs = (drawn != np.asarray(sample.token_ids, np.int64)) & comparable
    if differs.any():
        index = int(np.argmax(differs))
        raise InvariantViolation(
            f"sample {sample.sample_id}, response token {index} (position {len(sample.prompt_token_ids) + index}): "
            f"engine {sample.engine_id} says that it drew token {sample.token_ids[index]}; the pipeline's seed and "
            f"sampling options draw token {int(drawn[index])} from the trainer's logits, whose bits are the engine's"
        )
    return int(comparable.sum())
