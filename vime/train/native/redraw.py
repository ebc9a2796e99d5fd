"""Draws a sample's tokens again from logits that the trainer's model computes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkernel.ops.head import SamplingKeys
from vime.train.batching import flatten
from vime.train.interface import TrainSample
from vime.train.native.model import token_batch
from vime.types import NAMESPACES, SamplingParams


def redrawn(model: Any, sample: TrainSample, params: SamplingParams, seed: int) -> NDArray[np.int64]:
    """Tokens that the sampler draws at every response position of a sample, int64 [T].

    Args:
        model: has ``hidden`` and ``sample`` of :class:`rlkernel.ops.runner.ModelRunner`.
        params: temperature, greedy, top-k and top-p of the request.
        seed: the run's.
    """
    flat = flatten([sample])
    hidden = model.hidden(token_batch(flat), None, "trainer_score")
    count, first = len(sample.token_ids), len(sample.prompt_token_ids)
    keys = SamplingKeys(
        seeds=np.full(count, seed, np.uint64),
        prompt_index=np.full(count, sample.sample_id.prompt_index, np.int64),
        k=np.full(count, sample.sample_id.k, np.int64),
        namespace=np.full(count, NAMESPACES.index(sample.sample_id.namespace), np.int64),
        position=np.arange(first, first + count, dtype=np.int64),
        greedy=np.full(count, params.greedy),
        top_k=np.full(count, params.top_k, np.int64),
        top_p=np.full(count, params.top_p, np.float64),
    )
    drawn, _ = model.sample(hidden[flat.rows], keys, params.temperature, "trainer_score")
    return np.asarray(drawn, np.int64)
