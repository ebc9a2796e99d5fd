"""Faults of the reference's scores and of what a step trains on: caught, named, and nothing is published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.helpers import caught, clean
from vime.runtime.assembly import Sides
from vime.train.interface import ScoreResult, TrainResult, TrainSample

WITH_KL = ("stages.train.loss.kl.coefficient=0.1", "stages.train.loss.kl.reference=initial")
Plant = Callable[[Sides], None]


def changes_reference(change: Callable[[ScoreResult], ScoreResult]) -> Plant:
    """A trainer whose scores of the reference model are altered; those of the policy are not."""

    def plant(sides: Sides) -> None:
        trainer: Any = sides.trainer
        whole = trainer.score

        def score(samples: Sequence[TrainSample], model: str = "policy") -> ScoreResult:
            result = whole(samples, model)
            return change(result) if model == "reference" else result

        trainer.score = score

    return plant


def follows_the_policy(sides: Sides) -> None:
    """The reference is the policy itself: equal in the first step, and from then on another model."""
    trainer: Any = sides.trainer
    whole = trainer.score
    trainer.score = lambda samples, model="policy": whole(samples)


def shortened(scores: ScoreResult) -> ScoreResult:
    first = scores.samples[0]
    return replace(scores, samples=(replace(first, logprobs=first.logprobs[:-1]), *scores.samples[1:]))


def widened(scores: ScoreResult) -> ScoreResult:
    first = scores.samples[0]
    return replace(scores, samples=(replace(first, logprobs=first.logprobs.astype("f8")), *scores.samples[1:]))


def with_a_stranger(scores: ScoreResult) -> ScoreResult:
    first = scores.samples[0]
    return replace(scores, samples=(*scores.samples, replace(first, sample_id=replace(first.sample_id, k=77))))


def test_a_run_with_a_reference_is_clean(vime):
    """The positive twin."""
    clean(vime.run(*WITH_KL))
    clean(vime.run("stages.train.updates_per_step=2"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: replace(r, manifest_digest="0" * 64), "the trainer evaluated with weights 0000"),
        (lambda r: replace(r, manifest_digest=""), "the trainer evaluated with weights without a digest"),
        (lambda r: replace(r, forward_tokens=r.forward_tokens - 1), "its evidence shows"),
        (lambda r: replace(r, case="rollout_prefill"), "come from case 'rollout_prefill'"),
        (lambda r: replace(r, samples=r.samples[:-1]), "the reference returned no log-probabilities for train/1/3"),
        (with_a_stranger, "the trainer returned scores of train/0/77, which it was not asked for"),
        (shortened, "but the trainer's logprobs are float32 of shape"),
        (widened, "but the trainer's logprobs are float64 of shape"),
    ],
)
def test_wrong_reference_scores_are_caught(vime, change, text):
    ended = vime.run(*WITH_KL, plant=changes_reference(change))
    caught(ended, "step 0, train: ", text, trained=0)
    assert ended.count("version_published") == 1


def test_a_reference_that_follows_the_policy_is_caught(vime):
    ended = vime.run(*WITH_KL, plant=follows_the_policy)
    caught(ended, "step 1, train: the trainer evaluated with weights", trained=1)


def changes_training(
    before: Callable[[Sequence[TrainSample]], Sequence[TrainSample]] = lambda samples: samples,
    after: Callable[[TrainResult, Sequence[TrainSample]], TrainResult] = lambda result, samples: result,
) -> Plant:
    """A trainer that trains on something else than it is given, or says something else than it did."""

    def plant(sides: Sides) -> None:
        trainer: Any = sides.trainer
        whole = trainer.train
        trainer.train = lambda step, samples: after(whole(step, before(samples)), samples)

    return plant


def says(**facts: Any) -> Callable[[TrainResult, Any], TrainResult]:
    return lambda result, samples: replace(result, facts={**result.facts, **facts})


def without_counts(result: TrainResult, samples: Any) -> TrainResult:
    return replace(result, facts={k: v for k, v in result.facts.items() if k != "trained_tokens"})


def as_if_whole(result: TrainResult, samples: Sequence[TrainSample]) -> TrainResult:
    """Says that the whole batch was trained; the forward that was not done is made of the last scores."""
    first = result.first_forward
    assert first is not None
    known = first.samples[0]
    done = {score.sample_id for score in first.samples}
    made = [
        replace(known, sample_id=s.sample_id, logprobs=s.old_logprobs, digests=DIGESTS[s.sample_id])
        for s in samples
        if s.sample_id not in done
    ]
    forward = replace(first, samples=tuple(sorted((*first.samples, *made), key=lambda s: s.sample_id)))
    tokens = sum(int(s.loss_mask.sum()) for s in samples)
    return replace(result, first_forward=forward, facts={**result.facts, "trained_tokens": tokens})


DIGESTS: dict[Any, Any] = {}


def keeps_digests(plant: Plant) -> Plant:
    """Whoever wants to pass for a forward needs the digests of the scores."""

    def planted(sides: Sides) -> None:
        trainer: Any = sides.trainer
        whole = trainer.score

        def score(*args: Any) -> ScoreResult:
            result = whole(*args)
            DIGESTS.update({s.sample_id: s.digests for s in result.samples})
            return result

        trainer.score = score
        plant(sides)

    return planted


def unmasked(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The last token of every sample is not trained on."""
    lengths = [len(sample.token_ids) for sample in samples]
    assert max(lengths) > 1
    return [
        replace(s, loss_mask=s.loss_mask & ([True] * (count - 1) + [count == 1]))
        for s, count in zip(samples, lengths, strict=True)
    ]


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (changes_training(lambda samples: samples[:-1]), "step 0, train: the training forward is not one of the step"),
        (changes_training(unmasked), "step 0, train: the trainer trained on"),
        (changes_training(after=says(trained_tokens=1)), "step 0, train: the trainer trained on 1 tokens; the step"),
        (changes_training(after=without_counts), "does not say on how many tokens it trained"),
        (
            keeps_digests(changes_training(lambda samples: samples[:-1], as_if_whole)),
            "step 0, train: the trainer computed logprob over",
        ),
    ],
)
def test_a_step_that_is_not_trained_whole_is_caught(vime, plant, text):
    ended = vime.run(plant=plant)
    assert ended.code == 1 and text in ended.message, ended.message
    assert ended.count("version_published") == 1 and ended.count("run_finished") == 0


def test_a_part_of_the_updates_is_not_the_whole_step(vime):
    """With several updates the first forward is of a part, and the counted tokens are what shows."""
    plant = changes_training(lambda samples: samples[:4])
    ended = vime.run("stages.train.updates_per_step=2", "stages.rollout.prompts_per_step=4", plant=plant)
    assert ended.code in (1, 2) and ended.count("step_trained") == 0, ended.message
    plant = changes_training(lambda samples: samples[:8])
    ended = vime.run("stages.train.updates_per_step=2", "stages.rollout.prompts_per_step=4", plant=plant)
    caught(ended, "step 0, train: the trainer trained on", trained=0)
