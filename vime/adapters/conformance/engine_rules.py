"""What holds of every rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rlkernel.contract.identity import manifest_digest
from rlkernel.errors import RlkernelError
from rlkernel.verify.claims import check_paged_kv, check_prefix_cache
from rlkernel.verify.sentinels import ENGINE_CASES, Duty
from vime.adapters.conformance.harness import (
    CLOSE,
    EngineHarness,
    check_arrays,
    check_distribution,
    check_identities,
    counts_of,
    single_tokens,
    with_token,
)
from vime.adapters.conformance.rules import ConformanceReport, Rule, check_rules, expect, expect_raises
from vime.adapters.conformance.trainer_rules import check_evidence_form
from vime.adapters.interface import ENGINE_FACTS
from vime.adapters.tools import weights_digest
from vime.errors import InputError, InvariantViolation, VimeError
from vime.train.interface import ScoredSample, TrainSample
from vime.types import GeneratedSample, RolloutRequest, SampleId, SamplingParams


def _serve(h: EngineHarness, engine: Any, version: int, seed: int) -> str:
    """Stage and commit the weights of a seed."""
    digest = engine.stage_weights(version, h.tensors(seed))
    engine.commit_weights(version, digest)
    return str(digest)


def _requests(h: EngineHarness, **params: Any) -> list[RolloutRequest]:
    """Four prompts of several lengths with a beginning in common, two samples each."""
    random = np.random.default_rng(1)
    common = tuple(int(t) for t in random.integers(0, h.vocab_size, 2 * h.block_size))
    result = []
    for index in range(4):
        prompt = (*common[: h.block_size * (index % 3)], *(int(t) for t in random.integers(0, h.vocab_size, 2 + index)))
        for k in range(2):
            most = min(3 + index + 2 * k, h.longest - len(prompt))
            settings = SamplingParams(**{"max_new_tokens": most, "stop_token_ids": (0,), **params})
            result.append(RolloutRequest(SampleId("train", index, k), prompt, settings))
    return result


def _generate(engine: Any, requests: Sequence[RolloutRequest]) -> dict[SampleId, GeneratedSample]:
    given = list(engine.generate(list(requests)))
    names = [sample.sample_id for sample in given]
    lost = [str(r.sample_id) for r in requests if r.sample_id not in names]
    expect(not lost, f"samples were lost: {', '.join(lost)}")
    expect(len(names) == len(requests), f"{len(requests)} samples were asked for, and {len(names)} came")
    return {sample.sample_id: sample for sample in given}


def _consume(engine: Any, requests: Sequence[RolloutRequest]) -> None:
    """Generate, and forget what came."""
    for _ in engine.generate(requests):
        pass


def _as_scored(sample: GeneratedSample) -> ScoredSample:
    return ScoredSample(sample.sample_id, sample.logprobs, sample.digests, sample.entropies)


def _identities(h: EngineHarness) -> None:
    check_identities(h.make)


def _nothing(h: EngineHarness) -> None:
    engine = h.make()
    expect(engine.committed() is None, f"committed() is {engine.committed()} before anything was committed")
    expect_raises(InvariantViolation, lambda: _consume(engine, _requests(h)), "generation without weights")
    expect_raises(InvariantViolation, lambda: engine.commit_weights(0, "0" * 64), "a commit of nothing")


def _staging(h: EngineHarness) -> None:
    engine = h.make()
    given = {name: tensor.clone() for name, tensor in h.tensors(0).items()}
    due = weights_digest(given)
    staged = engine.stage_weights(0, given)
    expect(staged == due, f"the digest of staged weights is {staged}; that of their bytes is {due}")
    manifest = manifest_digest(engine.staged_manifest())
    expect(manifest == due, f"the manifest of staged weights has the digest {manifest}; that of their bytes is {due}")
    for tensor in given.values():
        tensor.zero_()
    committed = engine.commit_weights(0, due)
    expect((committed.version, committed.digest) == (0, due), f"the commit of version 0 returned {committed}")
    served = engine.committed()
    expect(
        served is not None and served.digest == due,
        "writing into the tensors after they were staged changed what is served: they were not copied",
    )
    name = sorted(given)[0]
    altered = {key: tensor.clone() for key, tensor in h.tensors(1).items()}
    altered[name].view(-1)[0] += 1
    expect(
        engine.stage_weights(1, altered) == weights_digest(altered) != weights_digest(h.tensors(1)),
        f"one element of {name} was altered, and the digest of the staged weights does not show it",
    )


def _digest(h: EngineHarness) -> None:
    engine = h.make()
    digest = _serve(h, engine, 0, 0)
    h.corrupt(engine)
    try:
        served = engine.committed()
    except (RlkernelError, VimeError):
        return  # it noticed, and says so
    expect(
        served is not None and served.digest != digest,
        "a bit of the served weights was flipped and the digest stayed: it is a label, not read off bytes",
    )


def _transaction(h: EngineHarness) -> None:
    engine = h.make()
    first = _serve(h, engine, 0, 0)

    def still_first(what: str) -> None:
        served = engine.committed()
        found = None if served is None else (served.version, served.digest)
        expect(found == (0, first), f"after {what} the engine serves {found}")

    expect_raises(InvariantViolation, lambda: engine.stage_weights(0, h.tensors(1)), "version 0 again")
    second = engine.stage_weights(1, h.tensors(1))
    still_first("staging version 1")
    expect_raises(InvariantViolation, lambda: engine.stage_weights(2, h.tensors(2)), "a second set beside a staged one")
    expect_raises(InvariantViolation, lambda: engine.commit_weights(1, first), "a commit with another digest")
    expect_raises(InvariantViolation, lambda: engine.commit_weights(2, second), "a commit of another version")
    expect_raises(InvariantViolation, lambda: engine.commit_weights(1, ""), "a commit without a digest")
    still_first("refused commits")
    engine.rollback_weights()
    expect_raises(InvariantViolation, lambda: engine.commit_weights(1, second), "a commit of what was rolled back")
    still_first("a roll-back")
    _serve(h, engine, 1, 1)
    served = engine.committed()
    expect(served is not None and (served.version, served.digest) == (1, second), f"version 1 was committed: {served}")


def _samples(h: EngineHarness) -> None:
    engine = h.make()
    _serve(h, engine, 0, 0)
    requests = _requests(h)
    samples = _generate(engine, requests)
    for request in requests:
        _check_sample(h, engine, request, samples[request.sample_id], 0)


def _check_sample(
    h: EngineHarness, engine: Any, request: RolloutRequest, sample: GeneratedSample, version: int
) -> None:
    where, count, most = f"sample {sample.sample_id}", len(sample.token_ids), request.params.max_new_tokens
    expect(sample.prompt_token_ids == request.prompt_token_ids, f"{where} has another prompt than it was asked for")
    expect(sample.engine_id == engine.engine_id, f"{where} says that engine {sample.engine_id!r} made it")
    expect(1 <= count <= most, f"{where} has {count} tokens; 1 to {most} were asked for")
    expect(all(0 <= t < h.vocab_size for t in sample.token_ids), f"{where} holds a token outside the vocabulary")
    check_arrays(_as_scored(sample), count, where)
    stops, last = request.params.stop_token_ids, sample.token_ids[-1]
    due = "stop" if last in stops else "length" if count == most else "context"
    expect(sample.finish_reason == due, f"{where} ended with {sample.finish_reason!r}; {due!r} is due")
    expect(not set(sample.token_ids[:-1]) & set(stops), f"{where} goes on after a stop token")
    if due == "context":
        expect(len(request.prompt_token_ids) + count >= h.longest, f"{where} ended for its context, which is not full")
    expect(sum(run.count for run in sample.versions) == count, f"{where} has versions for another number of tokens")
    for run in sample.versions:
        expect(
            (run.version, run.kv_oldest, run.kv_newest) == (version,) * 3,
            f"{where} has tokens of version {run.version} that read KV of {run.kv_oldest} to {run.kv_newest}; version "
            f"{version} is served",
        )


def _scheduling(h: EngineHarness) -> None:
    engine = h.make()
    _serve(h, engine, 0, 0)
    requests = _requests(h)
    together = _generate(engine, requests)
    other = h.make()
    _serve(h, other, 0, 0)
    for request in reversed(requests):
        alone = _generate(other, [request])[request.sample_id]
        mine = together[request.sample_id]
        expect(
            alone.token_ids == mine.token_ids and h.agree(alone.logprobs, mine.logprobs),
            f"sample {request.sample_id} has other tokens or bits alone than among others: they depend on scheduling",
        )


def _scores(h: EngineHarness) -> None:
    engine = h.make()
    _serve(h, engine, 0, 0)
    for sample in _generate(engine, _requests(h)).values():
        before = counts_of(engine)
        scored = engine.score(TrainSample.of(sample), 1.0)
        expect(scored.sample_id == sample.sample_id, f"the score of {sample.sample_id} is that of {scored.sample_id}")
        check_arrays(scored, len(sample.token_ids), f"score of {sample.sample_id}")
        expect(
            not np.shares_memory(scored.logprobs, sample.logprobs),
            f"the score of {sample.sample_id} shares memory with what was generated",
        )
        expect(
            h.agree(scored.logprobs, sample.logprobs),
            f"a forward over the whole of {sample.sample_id} does not give the log-probabilities of its generation",
        )
        h.judge(before, counts_of(engine), [Duty(ENGINE_CASES, len(sample.token_ids))])
        token = (sample.token_ids[0] + 1) % h.vocab_size
        changed = engine.score(with_token(TrainSample.of(sample), 0, token), 1.0)
        later = (changed.digests[1:] != scored.digests[1:]).any(axis=1)
        expect(bool(later.all()), f"a token of {sample.sample_id} was replaced, and a distribution after it stayed")
    bad = replace(TrainSample.of(sample), prompt_token_ids=(0, h.vocab_size))
    expect_raises((VimeError, RlkernelError), lambda: engine.score(bad, 1.0), "a token outside the vocabulary")


def _distribution(h: EngineHarness) -> None:
    engine = h.make()
    _serve(h, engine, 0, 0)
    check_distribution([engine.score(sample, 1.0) for sample in single_tokens(h.vocab_size, (1, 0, 1))])


def _temperature(h: EngineHarness) -> None:
    engine = h.make()
    _serve(h, engine, 0, 0)
    one, hot = single_tokens(h.vocab_size, (1, 0, 1)), 1.7
    cold = np.array([engine.score(sample, 1.0).logprobs[0] for sample in one], np.float64) / hot
    due = cold - np.log(np.exp(cold).sum())
    found = np.array([engine.score(sample, hot).logprobs[0] for sample in one], np.float64)
    expect(bool((np.abs(due - found) <= 10 * CLOSE).all()), "log-probabilities are not those of logits / temperature")


def _caches(h: EngineHarness) -> None:
    engine, fresh = h.make(), h.make()
    _serve(h, engine, 0, 0)
    requests = _requests(h)
    _generate(engine, requests)
    before = engine.evidence()["facts"]
    _serve(h, engine, 1, 1)
    after = engine.evidence()["facts"]
    for check in (check_prefix_cache, check_paged_kv):
        problem = check(None, before, after)  # type: ignore[arg-type]
        expect(problem is None, f"a commit left caches behind: {problem}")
    _serve(h, fresh, 1, 1)
    due = _generate(fresh, requests)
    for sample_id, sample in _generate(engine, requests).items():
        expect(
            all((run.version, run.kv_oldest, run.kv_newest) == (1, 1, 1) for run in sample.versions),
            f"sample {sample_id} was made by version 1, and says {sample.versions}",
        )
        other = due[sample_id]
        # sides with numerics of their own may draw another token where two are almost equally likely
        comparable = h.exact or sample.token_ids == other.token_ids
        expect(
            not comparable or (sample.token_ids == other.token_ids and h.agree(sample.logprobs, other.logprobs)),
            f"after a commit sample {sample_id} differs from that of an engine that never had the old weights",
        )


def _requests_refused(h: EngineHarness) -> None:
    engine = h.make()
    _serve(h, engine, 0, 0)
    good = _requests(h)[0]
    bad = {
        "an empty prompt": [replace(good, prompt_token_ids=())],
        "a prompt token outside the vocabulary": [replace(good, prompt_token_ids=(h.vocab_size,))],
        "a prompt that leaves no room": [replace(good, prompt_token_ids=(1,) * h.longest)],
        "no new tokens": [replace(good, params=replace(good.params, max_new_tokens=0))],
        "a temperature of 0": [replace(good, params=replace(good.params, temperature=0.0))],
        "the same sample twice": [good, good],
    }
    for what, requests in bad.items():
        expect_raises(InputError, partial(_consume, engine, requests), what)
    before = counts_of(engine)
    expect_raises(InputError, lambda: _consume(engine, [good, bad["an empty prompt"][0]]), "one bad request of two")
    expect(
        not counts_of(engine).since(before).calls, "tokens were computed for requests of which one cannot be generated"
    )
    _generate(engine, [good])


def _evidence(h: EngineHarness) -> None:
    engine = h.make()
    _serve(h, engine, 0, 0)
    before = counts_of(engine)
    samples = _generate(engine, _requests(h))
    h.judge(before, counts_of(engine), [Duty(ENGINE_CASES, sum(len(s.token_ids) for s in samples.values()))])
    check_evidence_form(engine.evidence(), ENGINE_FACTS)


def _closed(h: EngineHarness) -> None:
    engine = h.make()
    _serve(h, engine, 0, 0)
    engine.close()
    expect_raises(InvariantViolation, lambda: _consume(engine, _requests(h)), "generation after close()")
    expect_raises(InvariantViolation, lambda: engine.stage_weights(1, h.tensors(1)), "staging after close()")


ENGINE_RULES: tuple[Rule, ...] = (
    Rule("identities", "all three identities are shown and stay", _identities),
    Rule("nothing", "nothing is served before the first commit", _nothing),
    Rule("staging", "staged weights are a copy, and their digest is that of its bytes", _staging),
    Rule("digest", "the served digest is recomputed from bytes", _digest),
    Rule("transaction", "a commit takes exactly what was staged, or nothing changes", _transaction),
    Rule("samples", "every request comes back once, whole, with its tokens' versions", _samples),
    Rule("scores", "scores are a forward of its own over the tokens, and agree with generation", _scores),
    Rule("distribution", "log-probabilities are those of a distribution", _distribution),
    Rule("temperature", "logits are divided by the temperature", _temperature),
    Rule("caches", "a commit invalidates every cache of the old weights", _caches),
    Rule("requests", "impossible requests are refused before anything is generated", _requests_refused),
    Rule("evidence", "what generation took is in the evidence, declared, with the facts of the claims", _evidence),
    Rule("closed", "a closed engine serves nothing", _closed),
)

EXACT_ENGINE_RULES: tuple[Rule, ...] = (
    Rule("scheduling", "tokens and bits depend on the sample, never on its neighbours or on order", _scheduling),
)
"""Rules of engines that keep the contract, beside the others."""


def check_engine(harness: EngineHarness) -> ConformanceReport:
    """Check every rule that the harness is subject to."""
    return check_rules(ENGINE_RULES + (EXACT_ENGINE_RULES if harness.exact else ()), harness)
