"""One sample a step is drawn again by the trainer: tokens of another sampler are caught, though all bits agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.runtime.helpers import caught, clean
from vime.errors import InvariantViolation
from vime.mismatch.redraw import check_redrawn, chosen_sample
from vime.types import GeneratedSample, SampleId, VersionRun

OPTIONS = (
    (),
    ("stages.rollout.sampling.top_k=5", "stages.train.require_full_distribution=false"),
    (
        "stages.rollout.sampling.top_p=0.8",
        "stages.rollout.sampling.temperature=0.7",
        "stages.train.require_full_distribution=false",
    ),
)


def _redrawn(ended):
    return [event.metrics["redrawn_tokens"] for event in ended.events if event.type == "step_compared"]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_trainer_draws_the_engines_tokens(vime, options):
    ended = vime.run(*options)
    clean(ended)
    assert len(_redrawn(ended)) == 2 and all(count > 0 for count in _redrawn(ended))


def other_seed(sides):
    """An engine that samples by another seed than it was told; its probabilities are right."""
    engine = sides.engine.native
    engine.config = replace(engine.config, seed=engine.config.seed + 1)


def largest_only(sides):
    """An engine that takes the largest logit whatever was asked."""
    engine = sides.engine.native
    acquire = engine.scheduler.rows.acquire

    def greedy(sequence, computed):
        acquire(sequence, computed)
        engine.scheduler.rows._greedy[sequence.row] = True

    engine.scheduler.rows.acquire = greedy


def next_position(sides):
    """An engine whose random numbers are those of the next position."""
    rows = sides.engine.native.scheduler.rows
    keys = rows.sampling_keys

    def shifted(chosen, seed):
        found = keys(chosen, seed)
        return replace(found, position=found.position + 1)

    rows.sampling_keys = shifted


@pytest.mark.parametrize("plant", [other_seed, largest_only, next_position])
def test_an_engine_with_another_sampler_is_caught(vime, plant):
    ended = vime.run(plant=plant)
    caught(ended, "step 0, compare: sample train/", "says that it drew token", "from the trainer's logits", trained=0)


def _sample(tokens, runs):
    count = len(tokens)
    return GeneratedSample(
        SampleId("train", 0, 0), (5, 6), tuple(tokens), np.zeros(count, np.float32), np.zeros((count, 2), np.uint64),
        np.zeros(count, np.float32), np.zeros(count), runs, "length", "native-0",
    )  # fmt: skip


def test_only_comparable_tokens_are_judged():
    sample = _sample([1, 2, 3], (VersionRun(1, 0, 0, 0), VersionRun(2, 1, 1, 1)))
    assert check_redrawn(sample, np.array([9, 2, 3]), 1) == 2
    with pytest.raises(InvariantViolation, match="response token 0"):
        check_redrawn(sample, np.array([9, 2, 3]), 0)
    with pytest.raises(InvariantViolation, match="which has 3"):
        check_redrawn(sample, np.array([1, 2]), 1)


def test_every_step_draws_another_sample():
    samples = [replace(_sample([1], (VersionRun(1, 0, 0, 0),)), sample_id=SampleId("train", i, 0)) for i in range(3)]
    empty = replace(_sample([], ()), sample_id=SampleId("train", 9, 0))
    assert [chosen_sample([empty, *samples], step).sample_id.prompt_index for step in range(4)] == [0, 1, 2, 0]
    assert chosen_sample([empty], 0) is None
