"""The embedded sides keep every rule, and for every rule there is an adapter that breaks it and is told so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlkernel.kernels.cpu.threads import Workers
from rlkernel.ops.composition import compose
from rlkernel.ops.portable import RmsNorm
from rlkernel.ops.weights import tensors_manifest_digest
from rlkernel.verify.evidence import Evidence
from tests.adapters.native import ENGINE, TRAINER, make_engine, make_trainer, packed, runner
from vime.adapters.conformance import (
    ENGINE_RULES,
    EXACT_ENGINE_RULES,
    EXACT_TRAINER_RULES,
    TRAINER_RULES,
    ConformanceError,
    check_engine,
    check_trainer,
)
from vime.errors import InputError
from vime.rollout.interface import CommittedVersion
from vime.train.interface import ScoredSample

Plant = Callable[[Any], None]
ALL_TRAINER_RULES, ALL_ENGINE_RULES = TRAINER_RULES + EXACT_TRAINER_RULES, ENGINE_RULES + EXACT_ENGINE_RULES
SETTINGS: list[dict[str, Any]] = [
    {},
    {"activation_checkpointing": True, "updates_per_step": 3, "micro_batch_samples": 1},
]


@pytest.mark.parametrize("rule", ALL_TRAINER_RULES, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "several updates"])
def test_the_embedded_trainer_keeps_every_rule(rule, settings):
    rule.verify(replace(TRAINER, make=lambda: make_trainer(**settings), checkpointing=bool(settings)))


@pytest.mark.parametrize("rule", ALL_ENGINE_RULES, ids=str)
@pytest.mark.parametrize("settings", [{}, {"prefix_caching": False, "max_num_seqs": 2}], ids=["cached", "uncached"])
def test_the_embedded_engine_keeps_every_rule(rule, settings):
    rule.verify(replace(ENGINE, make=lambda: make_engine(**settings)))


def test_reports_name_every_broken_rule():
    check_trainer(TRAINER).require()
    check_engine(ENGINE).require()
    broken = check_trainer(replace(TRAINER, make=lambda: planted(make_trainer(), forgets_degrees)))
    assert [outcome.rule.name for outcome in broken.broken] == ["evidence"]
    with pytest.raises(ConformanceError, match=r"1 of 16 rules are broken:\nevidence \(.*has no fact degrees"):
        broken.require()


def test_a_vocabulary_that_is_too_large_for_the_suite_is_refused():
    with pytest.raises(InputError, match="a vocabulary of 5000 tokens"):
        replace(TRAINER, vocab_size=5000)


def planted(adapter: Any, plant: Plant) -> Any:
    plant(adapter)
    return adapter


def wraps(name: str, change: Callable[[Any, Any], Any]) -> Plant:
    """A plant that changes what a method returns: ``change(adapter, result)``."""

    def plant(adapter: Any) -> None:
        whole = getattr(adapter, name)
        setattr(adapter, name, lambda *args, **kwargs: change(adapter, whole(*args, **kwargs)))

    return plant


# ------------------------------------------------------------------------------------------ trainers


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


def other_norm(trainer: Any) -> None:
    """A kernel that nobody declared."""

    class Faster(RmsNorm):
        implementation = "test.faster_norm"

    composition = compose("exact")
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


@pytest.mark.parametrize(("name", "plant", "text"), BROKEN_TRAINERS)
def test_a_trainer_that_breaks_a_rule_is_told_which(name, plant, text):
    (rule,) = (rule for rule in ALL_TRAINER_RULES if rule.name == name)
    problem = rule.problem(replace(TRAINER, make=lambda: planted(make_trainer(), plant)))
    assert problem is not None and text in problem
    with pytest.raises(ConformanceError, match=f"{name} \\("):
        rule.verify(replace(TRAINER, make=lambda: planted(make_trainer(), plant)))


def test_every_rule_is_broken_once():
    assert {name for name, _, _ in BROKEN_TRAINERS} == {rule.name for rule in ALL_TRAINER_RULES}
    assert {name for name, _, _ in BROKEN_ENGINES} == {rule.name for rule in ALL_ENGINE_RULES}


# ------------------------------------------------------------------------------------------ engines


def labels_staged_weights(engine: Any) -> None:
    """The digest of what was sent is returned for what is staged; the sent tensors are used as they are."""
    whole = engine.stage_weights

    def stage(version: int, tensors: Any) -> str:
        whole(version, {name: tensor.clone().zero_() for name, tensor in tensors.items()})
        workers = Workers(1)
        return tensors_manifest_digest(tensors, "float32", workers)

    engine.stage_weights = stage


def labels_served_weights(engine: Any) -> None:
    whole, label = engine.commit_weights, {}

    def commit(version: int, digest: str) -> CommittedVersion:
        label["served"] = whole(version, digest)
        return label["served"]

    engine.commit_weights, engine.committed = commit, lambda: label.get("served")


def commits_anything(engine: Any) -> None:
    whole = engine.commit_weights

    def commit(version: int, digest: str) -> CommittedVersion:
        staged = engine._weights._staged
        return whole(version, staged.digest if staged is not None else digest)

    engine.commit_weights = commit


def each_sample(change: Callable[[Any], Any]) -> Plant:
    def plant(engine: Any) -> None:
        whole = engine.generate
        engine.generate = lambda requests: (change(sample) for sample in whole(requests))

    return plant


def loses_a_sample(engine: Any) -> None:
    whole = engine.generate

    def generate(requests: Any) -> Any:
        return (sample for i, sample in enumerate(whole(requests)) if i != 2)

    engine.generate = generate


def draws_by_arrival(engine: Any) -> None:
    """Random numbers are keyed by the order of arrival."""
    whole = engine.generate

    def generate(requests: Any) -> Any:
        names = {replace(r.sample_id, k=100 + i): r.sample_id for i, r in enumerate(requests)}
        renamed = [replace(r, sample_id=n) for n, r in zip(names, requests, strict=True)]
        return (replace(sample, sample_id=names[sample.sample_id]) for sample in whole(renamed))

    engine.generate = generate


def returns_what_it_generated(engine: Any) -> None:
    made: dict[Any, Any] = {}
    generate, whole = engine.generate, engine.score

    def watched(requests: Any) -> Any:
        for sample in generate(requests):
            made[sample.sample_id] = sample
            yield sample

    def score(sample: Any, temperature: float) -> ScoredSample:
        known = made.get(sample.sample_id)
        if known is None:
            return whole(sample, temperature)
        return ScoredSample(sample.sample_id, known.logprobs.copy(), known.digests.copy(), known.entropies.copy())

    engine.generate, engine.score = watched, score


def shifts(engine: Any) -> None:
    wraps("score", lambda _, s: replace(s, logprobs=s.logprobs - np.float32(0.1)))(engine)


def forgets_the_temperature(engine: Any) -> None:
    whole = engine.score
    engine.score = lambda sample, temperature: whole(sample, 1.0)


def keeps_its_cache(engine: Any) -> None:
    """A commit that leaves what was cached, labelled as the new version's."""
    blocks, whole = engine.blocks, engine.commit_weights

    def commit(version: int, digest: str) -> CommittedVersion:
        invalidate, blocks.invalidate = blocks.invalidate, lambda: 0
        try:
            result = whole(version, digest)
        finally:
            blocks.invalidate = invalidate
        blocks._key_of = {block: (version, key) for block, (_, key) in blocks._key_of.items()}
        blocks._by_key = {(version, key.digest): block for block, (_, key) in blocks._key_of.items()}
        blocks.oldest[list(blocks._key_of)] = blocks.newest[list(blocks._key_of)] = version
        return result

    engine.commit_weights = commit


def hides_its_cache(engine: Any) -> None:
    """The same, and the evidence says that nothing is cached."""
    keeps_its_cache(engine)
    whole, gone = engine.evidence, []

    def evidence() -> Any:
        found = whole()
        gone.append(found["facts"]["blocks_cached"])
        facts = {**found["facts"], "blocks_cached": 0, "cached_versions": [], "blocks_invalidated": sum(gone)}
        return {**found, "facts": facts}

    engine.evidence = evidence


def skips_impossible_requests(engine: Any) -> None:
    whole = engine.generate
    engine.generate = lambda requests: whole([r for r in requests if r.prompt_token_ids])


def without_fact(engine: Any) -> None:
    wraps("evidence", lambda _, e: {**e, "facts": {k: v for k, v in e["facts"].items() if k != "kv_versions"}})(engine)


def old_version(sample: Any) -> Any:
    return replace(sample, versions=tuple(replace(run, kv_oldest=run.kv_oldest - 1) for run in sample.versions))


BROKEN_ENGINES: list[tuple[str, Plant, str]] = [
    ("identities", new_identities, "they changed from"),
    (
        "nothing",
        lambda e: setattr(e, "committed", lambda: CommittedVersion(0, "0" * 64)),
        "before anything was committed",
    ),
    ("staging", labels_staged_weights, "InvariantViolation"),
    ("staging", wraps("stage_weights", lambda _, digest: digest[::-1]), "that of their bytes is"),
    ("digest", labels_served_weights, "it is a label, not read off bytes"),
    ("transaction", commits_anything, "a commit with another digest was accepted"),
    ("samples", loses_a_sample, "samples were lost: train/"),
    ("samples", each_sample(lambda s: replace(s, finish_reason="context")), "ended with 'context'"),
    ("samples", each_sample(old_version), "that read KV of -1 to 0"),
    ("samples", each_sample(lambda s: replace(s, engine_id="other")), "says that engine 'other' made it"),
    ("scheduling", draws_by_arrival, "they depend on scheduling"),
    ("scores", returns_what_it_generated, "ran nothing in rollout_prefill or rollout_decode"),
    ("scores", shifts, "does not give the log-probabilities of its generation"),
    ("distribution", shifts, "sum to 0.90"),
    ("temperature", forgets_the_temperature, "not those of logits / temperature"),
    ("caches", keeps_its_cache, "cached blocks were kept, written by weight versions [1]"),
    ("caches", hides_its_cache, "differs from that of an engine that never had the old weights"),
    ("requests", skips_impossible_requests, "an empty prompt was accepted"),
    ("evidence", without_fact, "evidence has no fact kv_versions"),
    ("closed", lambda e: setattr(e, "close", lambda: None), "generation after close() was accepted"),
]


@pytest.mark.parametrize(("name", "plant", "text"), BROKEN_ENGINES)
def test_an_engine_that_breaks_a_rule_is_told_which(name, plant, text):
    (rule,) = (rule for rule in ALL_ENGINE_RULES if rule.name == name)
    problem = rule.problem(replace(ENGINE, make=lambda: planted(make_engine(), plant)))
    assert problem is not None and text in problem
