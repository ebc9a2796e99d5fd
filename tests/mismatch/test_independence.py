"""Invariant 7: every way of not running the forward that is known here is caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.mismatch.helpers import DIGEST, own_scores, step, train_samples
from vime.errors import InputError, InvariantViolation
from vime.mismatch.independence import (
    check_evidence,
    check_memory,
    make_challenge,
    split_challenge,
    verify_challenge,
    with_challenge,
)
from vime.train.interface import ScoredSample, ScoreResult


def honest(samples):
    """A causal toy model: the distribution at t is a hash of everything before it."""
    scored = []
    for sample in samples:
        state, logprobs, digests = 1, [], []
        for token in sample.prompt_token_ids:
            state = (state * 1_000_003 + token) % 2**61
        for token in sample.token_ids:
            digests.append((state, state ^ 0xFFFF))
            logprobs.append(-((state * 31 + token) % 9973) / 1000)
            state = (state * 1_000_003 + token) % 2**61
        count = len(logprobs)
        scored.append(
            ScoredSample(
                sample.sample_id,
                np.array(logprobs, np.float32),
                np.array(digests, np.uint64),
                np.zeros(count, np.float32),
            )
        )
    needed = sum(len(s.prompt_token_ids) + len(s.token_ids) - 1 for s in samples)
    return ScoreResult(tuple(scored), "trainer_score", needed, DIGEST)


def test_arrays_of_the_trainers_own_pass():
    rollout = step()
    check_memory(rollout, own_scores(rollout))


@pytest.mark.parametrize("name", ["logprobs", "digests", "entropies"])
@pytest.mark.parametrize("view", [lambda a: a, lambda a: a[:], lambda a: a[1:], lambda a: a[::2]])
def test_shared_memory_is_named(name, view):
    rollout = step()
    scores = own_scores(rollout)
    # even where it stands under another sample
    object.__setattr__(scores.samples[0], name, view(getattr(rollout[2], name)))
    with pytest.raises(InvariantViolation, match=f"trainer's {name} of train/3/0 share memory.*{name} of train/9/0"):
        check_memory(rollout, scores)


def test_interleaved_arrays_of_one_buffer_do_not_share_memory():
    rollout = step()
    scores = own_scores(rollout)
    buffer = np.zeros(10, np.float32)
    object.__setattr__(rollout[0], "logprobs", buffer[::2])
    object.__setattr__(scores.samples[0], "logprobs", buffer[1::2])
    check_memory(rollout, scores)


def test_evidence_of_an_own_forward_passes():
    rollout = step()
    check_evidence(train_samples(rollout), own_scores(rollout), DIGEST)
    check_evidence(train_samples(rollout), own_scores(rollout, case="trainer_forward"), DIGEST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_tokens": 0}, "28 tokens have to go through its layers; its evidence shows 0"),
        ({"forward_tokens": 27}, "evidence shows 27"),
        ({"case": "rollout_decode"}, "rollout_decode"),
        ({"digest": "cd" * 32}, "evaluated with weights cdcd"),
        ({"digest": ""}, "without a digest"),
    ],
)
def test_missing_evidence_is_a_violation(change, message):
    rollout = step()
    with pytest.raises(InvariantViolation, match=message):
        check_evidence(train_samples(rollout), own_scores(rollout, **change), DIGEST)


def test_an_honest_trainer_meets_the_challenge():
    samples = train_samples(step())
    for number in range(20):
        challenge = make_challenge(samples, seed=5, step=number, vocab_size=50)
        asked = with_challenge(samples, challenge)
        assert [s.sample_id for s in asked] == sorted(s.sample_id for s in asked)
        scores, answer = split_challenge(honest(asked), challenge)
        assert [s.sample_id for s in scores.samples] == [s.sample_id for s in samples]
        original = next(s for s in scores.samples if s.sample_id == challenge.original)
        verify_challenge(challenge, answer, honest([challenge.sample]).samples[0], original)


def test_the_challenge_is_keyed_and_alters_one_token():
    samples = train_samples(step())
    seen = set()
    for number in range(50):
        challenge = make_challenge(samples, 5, number, 50)
        again = make_challenge(samples, 5, number, 50)
        assert (again.original, again.sample.token_ids) == (challenge.original, challenge.sample.token_ids)
        original = next(s for s in samples if s.sample_id == challenge.original)
        pairs = zip(original.token_ids, challenge.sample.token_ids, strict=True)
        assert [i for i, (a, b) in enumerate(pairs) if a != b] == [challenge.index]
        assert challenge.index < 3 and 0 <= challenge.replacement < 50
        assert challenge.sample.sample_id not in {s.sample_id for s in samples}
        seen.add((challenge.original, challenge.index, challenge.replacement))
    assert len(seen) > 30


def test_a_copy_of_the_rollouts_array_fails_the_challenge():
    """The cheater copies what the rollout has, forwards something else for the counters, and lies about nothing."""
    samples = train_samples(step())
    challenge = make_challenge(samples, 5, 1, 50)
    known = {s.sample_id: s for s in honest(samples).samples}
    copied = replace(known[challenge.original], sample_id=challenge.sample.sample_id)
    with pytest.raises(InvariantViolation, match="not a forward over these tokens"):
        verify_challenge(challenge, copied, honest([challenge.sample]).samples[0], known[challenge.original])


def test_one_bit_of_the_answer_is_enough():
    samples = train_samples(step())
    challenge = make_challenge(samples, 5, 1, 50)
    independent = honest([challenge.sample]).samples[0]
    for name, index in (("logprobs", 4), ("digests", (4, 0))):
        answer = honest([challenge.sample]).samples[0]
        array = getattr(answer, name)
        unsigned = array.view(np.uint32) if name == "logprobs" else array
        unsigned[index] ^= unsigned.dtype.type(1)
        with pytest.raises(InvariantViolation, match="response token 4"):
            verify_challenge(challenge, answer, independent)


def test_answers_that_disagree_with_the_shared_prefix_are_caught():
    """Both the answer and the independent forward come from other weights than the step's scores."""
    samples = train_samples(step())
    challenge = next(c for c in (make_challenge(samples, 5, n, 50) for n in range(50)) if c.index > 0)
    other = honest([challenge.sample]).samples[0]
    original = honest([s for s in samples if s.sample_id == challenge.original]).samples[0]
    original.digests[0, 0] ^= np.uint64(1)
    with pytest.raises(InvariantViolation, match="the unaltered sample at response token 0"):
        verify_challenge(challenge, other, other, original)


def test_a_trainer_that_drops_the_challenge_is_caught():
    samples = train_samples(step())
    challenge = make_challenge(samples, 5, 1, 50)
    with pytest.raises(InvariantViolation, match="0 scores of"):
        split_challenge(honest(samples), challenge)
    short = honest([challenge.sample]).samples[0]
    short = replace(short, logprobs=short.logprobs[:-1], digests=short.digests[:-1])
    with pytest.raises(InvariantViolation, match="answered 4"):
        verify_challenge(challenge, short, honest([challenge.sample]).samples[0])


def test_a_challenge_needs_something_to_alter():
    with pytest.raises(InputError):
        make_challenge([], 0, 0, 50)
    with pytest.raises(InputError):
        make_challenge(train_samples(step()), 0, 0, 1)
