"""What is generated never depends on how it was scheduled."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.fake import CONFIG, FakeModel, collect, make_engine, make_requests, reference, same
from vime.types import VersionRun

REQUESTS = make_requests()
EXPECTED = {r.sample_id: reference(r, 1000, seed=CONFIG.seed, limit=CONFIG.max_position) for r in REQUESTS}


def wrong_samples(samples) -> list:
    return [sample_id for sample_id, sample in samples.items() if not same(sample, EXPECTED[sample_id])]


SCHEDULES = {
    "default": {},
    "one sequence at a time": {"max_num_seqs": 1},
    "all at once": {"max_num_seqs": 64, "max_batched_tokens": 4096},
    "one token a step": {"max_batched_tokens": 1},
    "three tokens a step": {"max_batched_tokens": 3, "max_num_seqs": 5},
    "chunks across blocks": {"max_batched_tokens": 13},
    "block 16": {"block_size": 16},
    "block 24": {"block_size": 24},
    "block 64": {"block_size": 64},
    "no prefix cache": {"prefix_caching": False},
    "few blocks": {"num_blocks": 9},
    "few blocks, no prefix cache": {"num_blocks": 11, "prefix_caching": False, "max_num_seqs": 20},
    "few blocks, chunks": {"num_blocks": 9, "max_batched_tokens": 7},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_reference(name: str) -> None:
    engine = make_engine(**SCHEDULES[name])
    samples = collect(engine, REQUESTS)
    assert wrong_samples(samples) == []
    for sample in samples.values():
        assert sample.versions == (VersionRun(len(sample.token_ids), 0, 0, 0),)
    facts = engine.evidence()["facts"]
    assert (facts["preemptions"] > 0) == name.startswith("few blocks"), facts
    assert (facts["prefix_hit_tokens"] > 0) == (
        name not in ("no prefix cache", "few blocks, no prefix cache", "block 64")
    )
    assert facts["samples_finished"] == len(REQUESTS)


@pytest.mark.parametrize("seed", range(3))
def test_order_of_arrival_changes_nothing(seed: int) -> None:
    requests = list(REQUESTS)
    random.Random(seed).shuffle(requests)
    assert wrong_samples(collect(make_engine(num_blocks=12), requests)) == []


def test_several_calls_in_progress_share_the_steps() -> None:
    engine = make_engine()
    first, second = engine.generate(REQUESTS[:9]), engine.generate(REQUESTS[9:])
    samples = {}
    for iterator in (first, second, first, second):
        sample = next(iterator)
        samples[sample.sample_id] = sample
    samples |= {sample.sample_id: sample for iterator in (second, first) for sample in iterator}
    assert len(samples) == len(REQUESTS) and wrong_samples(samples) == []


def test_the_order_of_results_is_reproducible() -> None:
    orders = [[s.sample_id for s in make_engine(num_blocks=12).generate(REQUESTS)] for _ in range(2)]
    assert orders[0] == orders[1]


def test_a_warm_prefix_cache_changes_nothing() -> None:
    engine = make_engine()
    collect(engine, REQUESTS)
    cold = engine.evidence()["facts"]["tokens_computed"]
    assert wrong_samples(collect(engine, REQUESTS)) == []
    assert engine.evidence()["facts"]["tokens_computed"] - cold < cold


def test_cases_say_whether_a_sequence_had_more_than_one_new_token() -> None:
    models = []
    engine = make_engine(model=lambda weights: models.append(FakeModel(weights)) or models[-1])
    collect(engine, make_requests(prompts=1, group=1, max_new_tokens=4, stop_token_ids=()))
    assert models[0].cases == ["rollout_prefill", "rollout_decode", "rollout_decode", "rollout_decode"]


def test_temperatures_and_greedy_rows_may_be_mixed() -> None:
    requests = [
        request
        for index, settings_ in enumerate([{"temperature": 0.5}, {"temperature": 2.0, "top_k": 4}, {"greedy": True}])
        for request in make_requests(prompts=4, group=3, **settings_)
        if request.sample_id.k == index
    ]
    for schedule in ({}, {"max_num_seqs": 3, "max_batched_tokens": 5}):
        samples = collect(make_engine(**schedule), requests)
        for request in requests:
            assert same(samples[request.sample_id], reference(request, 1000, seed=5, limit=64))


@given(
    max_num_seqs=st.integers(1, 20),
    max_batched_tokens=st.integers(1, 80),
    block_size=st.sampled_from([8, 16, 32]),
    spare=st.integers(0, 12),
    prefix_caching=st.booleans(),
    order=st.permutations(range(len(REQUESTS))),
)
@settings(max_examples=12, deadline=None)
def test_any_schedule_ends_and_gives_the_reference(
    max_num_seqs, max_batched_tokens, block_size, spare, prefix_caching, order
) -> None:
    # at least what the longest request needs by itself
    need = max(len(r.prompt_token_ids) + r.params.max_new_tokens - 1 for r in REQUESTS)
    engine = make_engine(
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        block_size=block_size,
        num_blocks=-(-need // block_size) + spare,
        prefix_caching=prefix_caching,
    )
    assert wrong_samples(collect(engine, [REQUESTS[i] for i in order])) == []


# negative twins: faults of a model that the equality above notices


class WrongSlot(FakeModel):
    """Reads the last key of the second block from the slot before it."""

    def read(self, state, layer, row, position):
        keys, values = super().read(state, layer, row, position)
        at = 2 * state.page_size - 1
        if position >= at:
            keys = keys.copy()
            keys[at] = keys[at - 1]
        return keys, values


class MissedToken(FakeModel):
    """Does not see its own key when it decodes."""

    def read(self, state, layer, row, position):
        keys, values = super().read(state, layer, row, position)
        if self.cases[-1] == "rollout_decode" and position % 8 == 3:
            keys = np.concatenate([keys[:-1], keys[-1:] * 0])
        return keys, values


class ReadsBeyond(FakeModel):
    """Reads one key past its own position."""

    def read(self, state, layer, row, position):
        return super().read(state, layer, row, min(position + 1, state.block_table.shape[1] * state.page_size - 1))


class NeighboursTable(FakeModel):
    """Uses the first sequence's block table for all."""

    def read(self, state, layer, row, position):
        width = int((state.block_table[0] > 0).sum()) * state.page_size
        return super().read(state, layer, 0 if position < width else row, position)


@pytest.mark.parametrize("fault", [WrongSlot, MissedToken, ReadsBeyond, NeighboursTable])
def test_a_faulty_model_is_noticed(fault) -> None:
    assert wrong_samples(collect(make_engine(model=fault), REQUESTS))


@pytest.mark.parametrize("fault", [WrongSlot, MissedToken, ReadsBeyond, NeighboursTable])
def test_a_faulty_model_disagrees_with_itself_between_schedules(fault) -> None:
    runs = [
        collect(make_engine(model=fault, **schedule), REQUESTS)
        for schedule in ({}, {"block_size": 16, "max_num_seqs": 2, "max_batched_tokens": 9})
    ]
    assert any(runs[0][s].token_ids != runs[1][s].token_ids for s in runs[0])
