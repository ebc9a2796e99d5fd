"""An engine's own evaluation of a given sequence: the independent forward that answers of a trainer are checked by."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkernel.ops.host import TokenBatch
from vime.train.interface import ScoredSample, TrainSample


def score_sequence(model: Any, sample: TrainSample, temperature: float) -> ScoredSample:
    """Log-probabilities, digests and entropies of the response tokens, from one prefill of the whole sequence.

    ``model`` is what the engine generates with (``hidden`` and ``logprobs`` of a model runner).
    """
    tokens = np.array((*sample.prompt_token_ids, *sample.token_ids[:-1]), dtype=np.int64)
    batch = TokenBatch(tokens, np.arange(len(tokens), dtype=np.int32), np.array([0, len(tokens)], np.int32))
    hidden = model.hidden(batch, None, "rollout_prefill")
    rows = np.arange(len(sample.prompt_token_ids) - 1, len(tokens))
    targets = np.array(sample.token_ids, dtype=np.int64)
    found = model.logprobs(hidden[rows], targets, temperature, "rollout_prefill")
    return ScoredSample(sample.sample_id, found.logprob.copy(), found.digest.copy(), found.entropy.copy())
