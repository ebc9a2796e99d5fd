"""Weights: stage, compare, commit or roll back; caches belong to a version; versions are per token."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rollout.fake import (
    CONFIG,
    SHAPE,
    FakeWeights,
    collect,
    commit,
    make_engine,
    make_requests,
    reference,
    same,
    weights_of,
)
from vime.errors import InvariantViolation
from vime.rollout.interface import CommittedVersion, RolloutEngine
from vime.rollout.native import NativeEngine
from vime.types import VersionRun

REQUESTS = make_requests()


def expected(version: int) -> dict:
    return {r.sample_id: reference(r, 1000 + version, seed=CONFIG.seed, limit=CONFIG.max_position) for r in REQUESTS}


def test_the_engine_keeps_the_protocol() -> None:
    engine: RolloutEngine = make_engine()
    assert engine.engine_id == "e0" and engine.identities().semantic == "0" * 64


def test_nothing_is_generated_before_a_commit() -> None:
    engine = make_engine(version=None)
    with pytest.raises(InvariantViolation, match="no committed weights"):
        engine.generate(REQUESTS)
    engine.stage_weights(0, weights_of(1))
    with pytest.raises(InvariantViolation, match="no committed weights"):
        engine.generate(REQUESTS)
    assert engine.committed() is None


def test_a_commit_needs_the_staged_version_and_digest() -> None:
    engine = make_engine()
    before = engine.committed()
    with pytest.raises(InvariantViolation, match="version 1 is to be committed, none is staged"):
        engine.commit_weights(1, "a" * 64)
    digest = engine.stage_weights(1, weights_of(1001))
    with pytest.raises(InvariantViolation, match="version 2 is to be committed, version 1 is staged"):
        engine.commit_weights(2, digest)
    for wrong in ("b" * 64, ""):
        with pytest.raises(InvariantViolation, match="with digest (bbb|missing).*the staged bytes have " + digest):
            engine.commit_weights(1, wrong)
    assert engine.committed() == before
    assert engine.commit_weights(1, digest) == CommittedVersion(1, digest) == engine.committed()


def test_versions_only_grow_and_one_transaction_is_open() -> None:
    engine = make_engine()
    with pytest.raises(InvariantViolation, match="version 0 is staged, but 0 is served"):
        engine.stage_weights(0, weights_of(3))
    with pytest.raises(InvariantViolation, match="versions start at 0"):
        engine.stage_weights(-1, weights_of(3))
    engine.stage_weights(1, weights_of(3))
    with pytest.raises(InvariantViolation, match="roll it back first"):
        engine.stage_weights(2, weights_of(3))
    engine.rollback_weights()
    commit(engine, 2)


def test_after_a_rollback_the_old_version_serves_on() -> None:
    engine = make_engine()
    engine.stage_weights(1, weights_of(1001))
    engine.rollback_weights()
    samples = collect(engine, REQUESTS)
    assert all(same(samples[s], e) for s, e in expected(0).items())


def test_staged_weights_are_a_copy_and_flipped_bits_of_it_are_noticed() -> None:
    made = []
    engine = NativeEngine(
        CONFIG,
        identities=make_engine().identities(),
        kv_shape=SHAPE,
        vocab_size=97,
        weights_factory=lambda tensors: made.append(FakeWeights(tensors)) or made[-1],
        model_factory=lambda weights: None,
    )
    tensors = weights_of(1000)
    digest = engine.stage_weights(0, tensors)
    tensors["w"][0] = 1
    made[0].data[1] ^= 1
    with pytest.raises(InvariantViolation, match="the staged bytes have"):
        engine.commit_weights(0, digest)
    made[0].data[1] ^= 1
    engine.commit_weights(0, digest)
    made[0].data[0] ^= 4
    assert engine.committed().digest != digest  # served bytes, not a label


def test_a_commit_invalidates_the_prefix_cache() -> None:
    engine = make_engine()
    collect(engine, REQUESTS)
    hits = engine.scheduler.prefix_hit_tokens
    commit(engine, 1)
    assert engine.blocks.cached == 0 and engine.evidence()["facts"]["blocks_invalidated"] > 0
    cold = make_engine(version=1)
    samples, fresh = collect(engine, REQUESTS), collect(cold, REQUESTS)
    assert engine.scheduler.prefix_hit_tokens - hits == cold.scheduler.prefix_hit_tokens
    for sample_id, arrays in expected(1).items():
        assert same(samples[sample_id], arrays) and same(fresh[sample_id], arrays)
        assert {(r.version, r.kv_oldest, r.kv_newest) for r in samples[sample_id].versions} == {(1, 1, 1)}


def keep_stale(engine: NativeEngine) -> None:
    """Break the engine: a commit leaves the prefix cache, and blocks are found under any version."""
    blocks, by_key = engine.blocks, engine.blocks._by_key
    blocks.invalidate = lambda: 0
    find = blocks.lookup
    blocks.lookup = lambda version, keys: find(version - 1 if any(v < version for v, _ in by_key) else version, keys)


def test_a_planted_stale_block_raises() -> None:
    engine = make_engine()
    collect(engine, REQUESTS)
    keep_stale(engine)
    commit(engine, 1)
    with pytest.raises(
        InvariantViolation, match=r"would read KV block .* written by weight versions 0 to 0; version 1"
    ):
        collect(engine, REQUESTS)
    assert engine.unfinished == 0 and engine.blocks.in_use == 0


def test_without_the_check_a_stale_block_would_change_the_samples() -> None:
    engine = make_engine()
    collect(engine, REQUESTS)
    keep_stale(engine)
    commit(engine, 1)
    engine.blocks.oldest[:] = engine.blocks.newest[:] = 1  # forged labels
    samples = collect(engine, REQUESTS)
    assert not all(same(samples[s], e) for s, e in expected(1).items())


def test_a_block_that_nothing_wrote_raises() -> None:
    engine = make_engine()
    iterator = engine.generate(REQUESTS[8:9])
    engine.submit(REQUESTS[:1])
    engine.step()
    sequence = engine.scheduler.running[0]
    engine.blocks.oldest[sequence.blocks[0]] = np.iinfo(np.int64).max
    engine.blocks.newest[sequence.blocks[0]] = -1
    sequence_row = sequence.row
    engine.scheduler.rows.add_block(sequence, engine.blocks.allocate(1)[0])
    engine.scheduler.rows.computed[sequence_row] = 8
    engine.scheduler.rows.total[sequence_row] = 9
    with pytest.raises(InvariantViolation, match="was written by nothing"):
        list(iterator)


# weights that change while samples are in flight


def run_with_commit(policy: str, after: int = 6, **changes):
    engine = make_engine(in_flight_updates=policy, **changes)
    engine.submit(REQUESTS)
    samples = []
    for _ in range(after):
        samples += engine.step()
    commit(engine, 1)
    while engine.unfinished:
        samples += engine.step()
    engine.blocks.check()
    return engine, {s.sample_id: s for s in samples}


def test_in_flight_updates_are_refused_by_default() -> None:
    with pytest.raises(InvariantViolation, match=r"samples are in flight .* in_flight_updates is 'refuse'"):
        run_with_commit("refuse")


def test_a_refused_update_leaves_the_old_version_serving() -> None:
    engine = make_engine()
    iterator = engine.generate(REQUESTS)
    samples = [next(iterator)]
    digest = engine.stage_weights(1, weights_of(1001))
    with pytest.raises(InvariantViolation, match="in flight"):
        engine.commit_weights(1, digest)
    samples += list(iterator)
    by_id = {s.sample_id: s for s in samples}
    assert all(same(by_id[s], e) for s, e in expected(0).items())
    assert engine.commit_weights(1, digest).version == 1


def test_queued_samples_without_tokens_do_not_block_an_update() -> None:
    engine = make_engine()
    engine.submit(REQUESTS)
    commit(engine, 1)
    samples = {}
    while engine.unfinished:
        samples |= {s.sample_id: s for s in engine.step()}
    assert all(same(samples[s], e) for s, e in expected(1).items())


@pytest.mark.parametrize("policy", ["recompute", "keep_kv"])
def test_versions_are_recorded_per_token(policy: str) -> None:
    engine, samples = run_with_commit(policy)
    mixed = [s for s in samples.values() if len({run.version for run in s.versions}) == 2]
    assert mixed
    for sample in samples.values():
        versions = [run.version for run in sample.versions for _ in range(run.count)]
        assert versions == sorted(versions) and len(versions) == len(sample.token_ids)
    intervals = {(r.version, r.kv_oldest, r.kv_newest) for s in samples.values() for r in s.versions}
    assert intervals == {(0, 0, 0), (1, 1, 1)} | ({(1, 0, 1)} if policy == "keep_kv" else set())
    facts = engine.evidence()["facts"]
    assert (facts["sequences_recomputed_in_flight"] > 0) == (policy == "recompute")
    assert (facts["sequences_continued_on_old_kv"] > 0) == (policy == "keep_kv")


def test_recomputed_samples_equal_a_fresh_evaluation_by_the_new_weights() -> None:
    """The first token after the commit sees only KV of the new version: equal to its forced continuation."""
    _, samples = run_with_commit("recompute")
    old = expected(0)
    requests = {r.sample_id: r for r in REQUESTS}
    checked = 0
    for sample_id, sample in samples.items():
        if len(sample.versions) < 2:
            continue
        cut = sample.versions[0].count
        assert sample.token_ids[:cut] == tuple(old[sample_id]["tokens"][:cut].tolist())
        request = requests[sample_id]
        prompt = request.prompt_token_ids + sample.token_ids[:cut]
        forced = type(request)(sample_id, prompt, request.params)
        fresh = reference(forced, 1001, seed=CONFIG.seed, limit=len(prompt) + 1)
        assert sample.token_ids[cut] == int(fresh["tokens"][0])
        assert np.array_equal(sample.digests[cut], fresh["digests"][0])
        checked += 1
    assert checked


def test_blocks_on_old_kv_are_never_shared() -> None:
    engine, _ = run_with_commit("keep_kv")
    # whatever is cached now was written by the new version alone, and so was all before it
    samples = collect(engine, REQUESTS)
    assert all(same(samples[s], e) for s, e in expected(1).items())


def test_versions_runs_join_only_equal_neighbours() -> None:
    _, samples = run_with_commit("keep_kv", after=9)
    for sample in samples.values():
        for a, b in zip(sample.versions, sample.versions[1:], strict=False):
            assert (a.version, a.kv_oldest, a.kv_newest) != (b.version, b.kv_oldest, b.kv_newest)
        assert all(isinstance(run, VersionRun) and run.count > 0 for run in sample.versions)
