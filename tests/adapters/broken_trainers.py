"""Trainers that break one rule each: (rule, what alters the embedded trainer, what is said of it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rlkernel.ops.composition import without_certificates
from rlkernel.ops.portable import RmsNorm
from rlkernel.verify.evidence import Evidence
from tests.adapters.native import packed, runner
from vime.errors import InputError
from vime.train.interface import ScoredSample

Plant = Callable[[Any], None]


def wraps(name: str, change: Callable[[Any, Any], Any]) -> Plant:
    """A plant that changes what a method returns: ``change(adapter, result)``."""

    def plant(adapter: Any) -> None:
        whole = getattr(adapter, name)
        setattr(adapter, name, lambda *args, **kwargs: change(adapter, whole(*args, **kwargs)))

    return plant


def forgets_degrees(trainer: Any) -> None:
    wraps("evidence", lambda _, e: {**e, "facts": {k: v for k, v in e["facts"].items() if k != "degrees"}})(trainer)


def labels_its_weights(trainer: Any) -> None:
    """The digest is computed once and remembered."""
    label = trainer.manifest_digest()
    trainer.manifest_digest = lambda: label


def new_identities(adapter: Any) -> None:
    """Another deployment at every call."""
    own, calls = adapter.identities(), []

    def identities() -> Any:
        calls.append(None)
        return replace(own, deployment=f"{len(calls):064x}")

    adapter.identities = identities


def each_score(change: Callable[[ScoredSample], ScoredSample]) -> Plant:
    return wraps("score", lambda _, r: replace(r, samples=tuple(change(s) for s in r.samples)))


def answers_with_the_old_values(trainer: Any) -> None:
    """Log-probabilities that came with a request are returned as its own."""
    whole = trainer.score

    def score(samples: Any, *rest: Any) -> Any:
        result = whole(samples, *rest)
        given = {s.sample_id: s.old_logprobs for s in samples}
        answers = [s if given[s.sample_id] is None else replace(s, logprobs=given[s.sample_id]) for s in result.samples]
        return replace(result, samples=tuple(answers))

    trainer.score = score


def answers_from_memory(trainer: Any) -> None:
    """What was evaluated under a name before is returned for it again."""
    known: dict[Any, ScoredSample] = {}

    def change(_: Any, result: Any) -> Any:
        answers = []
        for score in result.samples:
            old = known.setdefault(score.sample_id, score)
            answers.append(old if len(old.logprobs) == len(score.logprobs) else score)
        return replace(result, samples=tuple(answers))

    wraps("score", change)(trainer)


def depends_on_the_batch(trainer: Any) -> None:
    """The number of samples in a request leaks into the first value."""

    def change(_: Any, result: Any) -> Any:
        nudge = np.float32(1e-6 * len(result.samples))
        return replace(result, samples=tuple(replace(s, logprobs=s.logprobs - nudge) for s in result.samples))

    wraps("score", change)(trainer)


def evaluates_elsewhere(trainer: Any) -> None:
    """Scores are made by a model that nobody counts."""
    hidden = runner(packed(trainer.weights(), False), Evidence("hidden"))
    counted, trainer._model = trainer._model, hidden
    whole = trainer.score
    trainer.score = lambda *args: replace(whole(*args), forward_tokens=1000)
    trainer.evidence = counted.evidence.as_json


def ignores_the_step(trainer: Any) -> None:
    whole = trainer.train

    def train(step: int, samples: Any) -> Any:
        trainer._steps = step
        return whole(step, samples)

    trainer.train = train


def every_sample(change: Callable[[Any], Any]) -> Plant:
    """Samples are altered before they are trained on."""

    def plant(trainer: Any) -> None:
        whole = trainer.train
        trainer.train = lambda step, samples: whole(step, [change(s) for s in samples])

    return plant


def without_last_token(sample: Any) -> Any:
    """The last token is not trained on."""
    return replace(sample, loss_mask=np.arange(len(sample.loss_mask)) < len(sample.loss_mask) - 1)


def other_norm(trainer: Any) -> None:
    """A kernel that nobody declared."""

    class Faster(RmsNorm):
        implementation = "test.faster_norm"

    composition = without_certificates("exact")
    trainer._model.composition = replace(composition, ops={**composition.ops, "rms_norm": Faster()})


def wraps_tokens_around(trainer: Any) -> None:
    """Token ids outside the vocabulary are silently brought into it."""
    whole = trainer.score

    def score(samples: Any, *rest: Any) -> Any:
        return whole([replace(s, token_ids=tuple(t % 23 for t in s.token_ids)) for s in samples], *rest)

    trainer.score = score


def forgets_moments(trainer: Any) -> None:
    whole = trainer.load

    def load(folder: Any) -> None:
        whole(folder)
        for moment in trainer._optimizer.state().moment1.values():
            moment[...] = 0

    trainer.load = load


def loads_anything(trainer: Any) -> None:
    whole = trainer.load

    def load(folder: Any) -> None:
        try:
            whole(folder)
        except InputError:
            return

    trainer.load = load


_made: list[None] = []


def depends_on_its_making(trainer: Any) -> None:
    """The learning rate depends on how many trainers were made before."""
    _made.append(None)
    schedule = replace(trainer._optimizer.config.schedule, peak=1e-2 + 1e-4 * len(_made))
    trainer._optimizer.config = replace(trainer._optimizer.config, schedule=schedule)


def first_forward(change: Callable[[Any], Any]) -> Plant:
    return wraps("train", lambda _, result: replace(result, first_forward=change(result.first_forward)))


BROKEN_TRAINERS: list[tuple[str, Plant, str]] = [
    ("identities", new_identities, "they changed from"),
    ("identities", lambda t: setattr(t, "identities", lambda: None), "identities() returned None"),
    ("weights", lambda t: setattr(t, "weights", lambda: t._tensors), "NumericsError"),
    ("digest", labels_its_weights, "it is a label, not read off bytes"),
    ("scores", wraps("score", lambda _, r: replace(r, samples=r.samples[:-1])), "samples were lost: train/"),
    ("scores", wraps("score", lambda _, r: replace(r, samples=r.samples[::-1])), "not in the order of the request"),
    ("scores", each_score(lambda s: replace(s, logprobs=s.logprobs[:-1])), "logprobs are float32 of shape"),
    ("scores", depends_on_the_batch, "depend on its neighbours"),
    ("scores", wraps("score", lambda _, r: replace(r, case="rollout_prefill")), "come from case 'rollout_prefill'"),
    ("scores", wraps("score", lambda _, r: replace(r, manifest_digest="")), "is not that of the trainer's weights"),
    ("tokens", answers_with_the_old_values, "follow the log-probabilities that came with the request"),
    ("tokens", answers_from_memory, "answered from memory"),
    ("tokens", each_score(lambda s: replace(s, digests=np.zeros_like(s.digests))), "later tokens do not see it"),
    ("distribution", each_score(lambda s: replace(s, logprobs=s.logprobs - 1)), "sum to 0.36"),
    ("distribution", each_score(lambda s: replace(s, entropies=s.entropies / 2)), "the entropy of a distribution is"),
    ("score evidence", evaluates_elsewhere, "the trainer ran nothing in trainer_score"),
    ("score evidence", wraps("score", lambda _, r: replace(r, forward_tokens=9999)), "forward_tokens is 9999"),
    ("score evidence", other_norm, "ran 'test.faster_norm'"),
    ("steps", ignores_the_step, "step 1 before step 0 was accepted"),
    ("training", first_forward(lambda f: None), "first_forward is missing"),
    ("training", first_forward(lambda f: replace(f, samples=f.samples[:-1])), "first_forward has 5 samples"),
    ("training", first_forward(lambda f: replace(f, manifest_digest="0" * 64)), "other weights than those before"),
    ("training", wraps("train", lambda _, r: replace(r, facts={})), "the fact trained_tokens is None"),
    ("training", every_sample(without_last_token), "the fact trained_tokens is"),
    ("training", every_sample(lambda s: replace(s, advantage=-s.advantage)), "moved against the advantages"),
    ("training", every_sample(lambda s: replace(s, advantage=0.0)), "left the weights as they were"),
    ("mask", every_sample(lambda s: replace(s, loss_mask=np.ones_like(s.loss_mask))), "the mask leaves out changed"),
    ("training evidence", other_norm, "ran 'test.faster_norm'"),
    ("training evidence", lambda t: setattr(t._optimizer, "_ran", lambda region: None), "never ran adamw"),
    ("refusals", wraps_tokens_around, "score: the response token 23 outside the vocabulary was accepted"),
    ("checkpoint", forgets_moments, "state is missing"),
    ("checkpoint", wraps("save", lambda _, files: {**files, "more.bin": "0" * 64}), "save() names"),
    ("damage", loads_anything, "was accepted; InputError is due"),
    ("evidence", forgets_degrees, "evidence has no fact degrees"),
    ("repeatable", depends_on_its_making, "ended with other bits"),
]
