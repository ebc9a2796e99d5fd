"""Small steps of both sides."""

from __future__ import annotations

import numpy as np

from vime.train.interface import ScoredSample, ScoreResult, TrainSample
from vime.types import GeneratedSample, SampleId, VersionRun

DIGEST = "ab" * 32


def generated(prompt, k, count=5, versions=None, seed=0, prompt_ids=(1, 2, 3)):
    random = np.random.default_rng(seed * 1000 + prompt * 10 + k)
    return GeneratedSample(
        SampleId("train", prompt, k),
        prompt_ids,
        tuple(int(t) for t in random.integers(0, 50, count)),
        (-random.exponential(1.0, count)).astype(np.float32),
        random.integers(0, 2**64, (count, 2), dtype=np.uint64),
        random.random(count).astype(np.float32),
        np.zeros(count),
        versions or (VersionRun(count, 7, 7, 7),),
        "stop",
        "engine-0",
    )


def own_scores(samples, forward_tokens=None, case="trainer_score", digest=DIGEST):
    scored = tuple(ScoredSample(s.sample_id, s.logprobs.copy(), s.digests.copy(), s.entropies.copy()) for s in samples)
    needed = sum(len(s.prompt_token_ids) + len(s.token_ids) - 1 for s in samples)
    return ScoreResult(scored, case, needed if forward_tokens is None else forward_tokens, digest)


def train_samples(samples):
    return [TrainSample(s.sample_id, s.prompt_token_ids, s.token_ids, np.ones(len(s.token_ids), bool)) for s in samples]


def step():
    return [generated(p, k) for p in (3, 9) for k in (0, 1)]
