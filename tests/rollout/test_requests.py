"""Stops, limits, refusals, abort, early close, failures, fairness."""

from __future__ import annotations

import pytest

from tests.rollout.fake import CONFIG, FakeModel, collect, commit, make_engine, make_requests, reference, same
from vime.errors import InputError, InvariantViolation
from vime.rollout.native.stops import StopStrings
from vime.types import RolloutRequest, SampleId, SamplingParams


def spell(tokens) -> str:
    """Each id as two letters; id 96 is the first half of a character that id 95 completes."""
    text = "".join({96: "\x96", 95: "\x95"}.get(t, f"{chr(97 + t // 26)}{chr(97 + t % 26)}") for t in tokens)
    return text.replace("\x96\x95", "é").replace("\x96", "\ufffd").replace("\x95", "\ufffd")


def request(prompt=(1, 2, 3), sample=("train", 0, 0), **params) -> RolloutRequest:
    return RolloutRequest(SampleId(*sample), tuple(prompt), SamplingParams(**params))


def one(engine, item):
    (sample,) = engine.generate([item])
    return sample


def free_run(**params) -> tuple[int, ...]:
    return one(make_engine(), request(**params)).token_ids


def test_the_stop_token_is_kept_as_the_last_one() -> None:
    tokens = free_run(max_new_tokens=12)
    sample = one(make_engine(), request(max_new_tokens=12, stop_token_ids=(tokens[5], 96)))
    assert sample.finish_reason == "stop" and sample.token_ids == tokens[: tokens.index(tokens[5]) + 1]


def test_length_and_context_limits() -> None:
    sample = one(make_engine(), request(max_new_tokens=4))
    assert sample.finish_reason == "length" and len(sample.token_ids) == 4
    sample = one(make_engine(), request(prompt=[1] * 60, max_new_tokens=100))
    assert sample.finish_reason == "context" and len(sample.token_ids) == CONFIG.max_position - 60
    sample = one(make_engine(), request(prompt=[1] * 63, max_new_tokens=100))
    assert sample.finish_reason == "context" and len(sample.token_ids) == 1


def test_a_stop_has_precedence_over_the_length() -> None:
    tokens = free_run(max_new_tokens=4)
    sample = one(make_engine(), request(max_new_tokens=4, stop_token_ids=(tokens[3],)))
    assert sample.finish_reason == "stop" and sample.token_ids == tokens


def test_a_stop_string_may_span_tokens_and_the_completing_token_is_kept() -> None:
    tokens = free_run(max_new_tokens=12)
    text = spell(tokens)
    stop = text[9:12]  # the second half of token 4 and all of token 5
    first = text.index(stop) + 3
    kept = -(-first // 2)
    sample = one(make_engine(detokenize=spell), request(max_new_tokens=12, stop_strings=("never", stop)))
    assert sample.finish_reason == "stop" and sample.token_ids == tokens[:kept]
    assert sample.text == text[: 2 * kept] and stop in sample.text


@pytest.mark.parametrize("schedule", [{}, {"num_blocks": 9}, {"max_num_seqs": 1}, {"max_batched_tokens": 2}])
def test_stop_strings_do_not_depend_on_the_schedule(schedule: dict) -> None:
    requests = make_requests(stop_strings=("a", "zz"), max_new_tokens=20)
    expected = collect(make_engine(detokenize=spell), requests)
    samples = collect(make_engine(detokenize=spell, **schedule), requests)
    for sample_id, sample in samples.items():
        assert (sample.token_ids, sample.text) == (expected[sample_id].token_ids, expected[sample_id].text)
        hits = [
            n for n in range(1, len(sample.token_ids) + 1) if any(s in spell(sample.token_ids[:n]) for s in ("a", "zz"))
        ]
        assert (sample.finish_reason == "stop") == bool(hits or sample.token_ids[-1] == 3)
        assert not hits or hits[0] == len(sample.token_ids)


def test_a_character_of_two_tokens_is_found_once_complete() -> None:
    stops = StopStrings(["é"], spell)
    assert [stops.push(t) for t in (1, 96, 2, 96, 95)] == [None, None, None, None, "é"]
    stops = StopStrings(["b"], spell)
    assert [stops.push(t) for t in (96, 95, 1)] == [None, None, "b"]
    stops = StopStrings(["éab"], spell)
    assert [stops.push(t) for t in (5, 96, 95, 1)] == [None, None, None, "éab"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(prompt=()), "sample train/0/0: the prompt has length 0"),
        (request(prompt=[1] * 64), "length 64; the context of 64 tokens leaves room for a prompt of at most 63"),
        (request(prompt=(1, 97)), "reach from 1 to 97; the vocabulary has 97"),
        (request(prompt=(-1,)), "reach from -1 to -1"),
        (request(max_new_tokens=0), "max_new_tokens = 0"),
        (request(temperature=0.0), "temperature = 0.0; a finite number above 0"),
        (request(temperature=float("nan")), "temperature = nan"),
        (request(top_p=0.0), "top_p = 0.0"),
        (request(top_p=1.5), "top_p = 1.5"),
        (request(top_k=-1), "top_k = -1"),
        (request(stop_token_ids=(97,)), "the vocabulary has 97"),
        (request(stop_strings=("",)), "an empty string"),
        (request(stop_strings=("x",)), "need an engine with a tokenizer"),
        (request(sample=("test", 0, 0)), "a namespace of train, eval"),
        (request(sample=("train", 1 << 32, 0)), "a prompt index below 2"),
        (request(sample=("train", 0, 1 << 24)), "k below 2"),
    ],
)
def test_bad_requests_are_named_before_anything_runs(bad: RolloutRequest, message: str) -> None:
    engine = make_engine()
    with pytest.raises(InputError, match=message):
        engine.generate([request(sample=("train", 7, 7)), bad])
    assert engine.unfinished == 0


def test_a_sample_that_can_never_fit_is_refused_with_the_numbers() -> None:
    engine = make_engine(num_blocks=4)
    with pytest.raises(InputError, match=r"prompt \(3 tokens\) and response \(up to 31\) need 5 KV blocks .* has 4"):
        engine.generate([request(max_new_tokens=31)])
    sample = one(engine, request(max_new_tokens=30))
    assert len(sample.token_ids) == 30 and engine.evidence()["facts"]["blocks_peak"] == 4


def test_a_sample_is_requested_once() -> None:
    engine = make_engine()
    with pytest.raises(InputError, match="requested twice"):
        engine.generate([request(), request()])
    iterator = engine.generate([request(), request(sample=("eval", 0, 0), max_new_tokens=3)])
    next(iterator)
    with pytest.raises(InputError, match="train/0/0 is requested twice"):
        engine.generate([request()])


def test_evaluation_has_its_own_randomness() -> None:
    train, evaluation = free_run(), one(make_engine(), request(sample=("eval", 0, 0))).token_ids
    assert train != evaluation


def test_an_aborted_sample_is_returned_with_its_tokens_and_others_are_untouched() -> None:
    requests = make_requests(stop_token_ids=())
    target = requests[6].sample_id
    engine = make_engine()
    engine.progress = lambda p: engine.abort(target) if p.steps == 6 else None
    samples = collect(engine, requests)
    assert samples[target].finish_reason == "aborted" and 0 < len(samples[target].token_ids) < 12
    for item in requests:
        expected = reference(item, 1000, seed=5, limit=64)
        if item.sample_id == target:
            count = len(samples[target].token_ids)
            expected = {name: values[:count] for name, values in expected.items()}
        assert same(samples[item.sample_id], expected)
    with pytest.raises(InputError, match="it is not in progress"):
        engine.abort(target)


def test_a_waiting_sample_can_be_aborted() -> None:
    engine = make_engine(max_num_seqs=1)
    iterator = engine.generate([request(), request(sample=("train", 0, 1))])
    engine.progress = lambda p: engine.abort(SampleId("train", 0, 1)) if p.steps == 1 else None
    by_id = {s.sample_id.k: s for s in iterator}
    assert by_id[1].finish_reason == "aborted" and by_id[1].token_ids == () and by_id[1].versions == ()
    assert by_id[0].finish_reason == "length"


def test_an_iterator_that_is_closed_early_gives_its_blocks_back() -> None:
    engine = make_engine()
    iterator = engine.generate(make_requests())
    next(iterator)
    assert engine.blocks.in_use > 0
    iterator.close()
    assert engine.blocks.in_use == 0 and engine.unfinished == 0
    engine.blocks.check()


class FailsOnce(FakeModel):
    """Writes half of its KV and then fails, in its fourth pass."""

    def read(self, state, layer, row, position):
        if len(self.cases) == 4:
            self.cases.append("failed")
            raise MemoryError("planted")
        return super().read(state, layer, row, position)


def test_a_failing_step_leaves_nothing_half_computed_behind() -> None:
    engine = make_engine(model=FailsOnce, max_batched_tokens=13)
    requests = make_requests()
    with pytest.raises(MemoryError, match="planted"):
        list(engine.generate(requests))
    assert engine.unfinished == 0 and engine.blocks.in_use == 0 and engine.blocks.cached == 0
    samples = collect(engine, requests)
    assert all(same(samples[r.sample_id], reference(r, 1000, seed=5, limit=64)) for r in requests)


class BeyondVocabulary(FakeModel):
    def sample(self, hidden, keys, temperature, case):
        tokens, statistics = super().sample(hidden, keys, temperature, case)
        return tokens + 97, statistics


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvariantViolation, match=r"the model sampled token ids from .* the vocabulary has 97"):
        one(make_engine(model=BeyondVocabulary), request())


@pytest.mark.parametrize(
    "schedule", [{"num_blocks": 9, "max_num_seqs": 6}, {"max_batched_tokens": 3}, {"max_num_seqs": 2}]
)
def test_every_step_advances_the_sequence_that_was_admitted_first(schedule: dict) -> None:
    engine = make_engine(**schedule)
    engine.submit(make_requests())
    while engine.unfinished:
        first = engine.scheduler.running[0] if engine.scheduler.running else None
        before = (first.generated, int(engine.scheduler.rows.computed[first.row])) if first else None
        finished = engine.step()
        if first is not None and first.request.sample_id not in {s.sample_id for s in finished}:
            assert first.preemptions == 0 or first.row >= 0
            assert (first.generated, int(engine.scheduler.rows.computed[first.row])) > before


def test_samples_are_admitted_in_order_of_arrival() -> None:
    engine = make_engine(num_blocks=10, max_num_seqs=3)
    requests = make_requests()
    engine.submit(requests)
    admitted: list = []
    while engine.unfinished:
        engine.step()
        admitted += [s.request.sample_id for s in engine.scheduler.running if s.request.sample_id not in admitted]
    order = [r.sample_id for r in requests]
    assert [s for s in order if s in admitted] == admitted


def test_a_closed_engine_refuses_work() -> None:
    engine = make_engine()
    engine.submit(make_requests())
    engine.close()
    assert engine.blocks.in_use == 0
    for call in (lambda: engine.generate([]), engine.step, lambda: commit(engine, 1)):
        with pytest.raises(InvariantViolation, match="is closed"):
            call()


def test_groups_share_the_prompt_from_the_first_step() -> None:
    engine = make_engine()
    samples = collect(engine, [request(prompt=range(33), sample=("train", 0, k)) for k in range(4)])
    assert [samples[SampleId("train", 0, k)].cached_prompt_tokens for k in range(4)] == [0, 32, 32, 32]
    assert engine.evidence()["facts"]["prefix_hit_tokens"] == 96


def test_progress_and_evidence_count_what_ran() -> None:
    seen = []
    engine = make_engine(progress=seen.append)
    samples = collect(engine, make_requests())
    assert seen[-1].finished == len(samples) and seen[-1].running == seen[-1].waiting == seen[-1].blocks_in_use == 0
    assert seen[-1].generated_tokens == sum(len(s.token_ids) for s in samples.values())
    facts = engine.evidence()["facts"]
    assert facts["tokens_generated"] == seen[-1].generated_tokens and facts["paged_kv"] is True
    assert facts["steps_prefill"] + facts["steps_decode"] == seen[-1].steps == len(seen)
    assert all((sample.sampled_at == 1.0).all() and sample.engine_id == "e0" for sample in samples.values())
