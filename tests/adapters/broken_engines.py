"""Engines that break one rule each: (rule, what alters the embedded engine, what is said of it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rlkernel.kernels.cpu.threads import Workers
from rlkernel.ops.weights import tensors_manifest_digest
from tests.adapters.broken_trainers import Plant, new_identities, wraps
from vime.rollout.interface import CommittedVersion
from vime.train.interface import ScoredSample


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
    ("staging", labels_staged_weights, "the manifest of staged weights has"),
    ("staging", wraps("stage_weights", lambda _, digest: digest[::-1]), "that of their bytes is"),
    ("staging", wraps("staged_manifest", lambda _, entries: entries[1:]), "the manifest of staged weights has"),
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
