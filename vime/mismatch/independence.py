"""Whether the trainer's log-probabilities come from a forward of its own (invariant 7 of the timeline).

Three questions, each asked of something that the trainer cannot answer by copying:

* memory: do its arrays share storage with the rollout's?
* evidence: did enough tokens go through its layers, in a trainer's case, with the weights that were published?
* challenge: a sample of the step with one response token replaced is scored among the others. It bears the original's
  identity, and the original an identity that the rollout does not know, so that whoever looks arrays up by sample
  answers with those of other tokens. The rollout never evaluated the altered tokens, so there is nothing to copy; an
  independent forward says what the bits have to be. Up to and including the replaced token its distributions must also
  have the bits of the original sample's, since they read the same prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime.errors import InputError, InvariantViolation
from vime.mismatch.compare import canonical_bits
from vime.train.batching import required_rows
from vime.train.interface import ScoredSample, ScoreResult, TrainResult, TrainSample
from vime.types import GeneratedSample, SampleId

TRAINER_CASES = ("trainer_score", "trainer_forward")


@dataclass(frozen=True)
class Challenge:
    """``sample`` is ``original`` with response token ``index`` replaced by ``replacement``, under a new identity."""

    original: SampleId
    sample: TrainSample
    index: int
    replacement: int


def check_memory(rollout: Sequence[GeneratedSample], scores: ScoreResult) -> None:
    """Raise InvariantViolation if any array of the trainer shares memory with any array of the rollout."""
    named = [item for sample in rollout for item in _arrays(sample, True)]
    named += [item for score in scores.samples for item in _arrays(score, False)]
    named.sort(key=lambda item: item[:2])
    open_items: list[_Extent] = []
    for item in named:
        open_items = [other for other in open_items if other[1] > item[0]]
        for other in open_items:
            if other[2] != item[2] and np.shares_memory(other[4], item[4]):
                ours, theirs = (item, other) if other[2] else (other, item)
                raise InvariantViolation(
                    f"the trainer's {ours[3]} share memory with the rollout's {theirs[3]}: a trainer's "
                    "log-probabilities come from a forward of its own, never from the rollout's array"
                )
        open_items.append(item)


def check_evidence(samples: Sequence[TrainSample], scores: ScoreResult, published_digest: str) -> None:
    """Raise InvariantViolation unless a trainer's forward with the published weights saw every token that it had to."""
    if scores.case not in TRAINER_CASES:
        raise InvariantViolation(
            f"the trainer's log-probabilities come from case {scores.case!r}: only {' and '.join(TRAINER_CASES)} are "
            "forwards of its own"
        )
    needed = sum(required_rows(sample) for sample in samples)
    if scores.forward_tokens < needed:
        raise InvariantViolation(
            f"the trainer returned log-probabilities of {len(samples)} samples, for which {needed} tokens have to go "
            f"through its layers; its evidence shows {scores.forward_tokens} in case {scores.case}"
        )
    if scores.manifest_digest != published_digest:
        raise InvariantViolation(
            f"the trainer evaluated with weights {scores.manifest_digest or 'without a digest'}, "
            f"published are {published_digest}"
        )


def check_first_forward(first: ScoreResult | None, scores: ScoreResult, published_digest: str, *, exact: bool) -> None:
    """Raise InvariantViolation unless the first training forward used the published weights and, where both sides are
    exact, has the bits of the scoring forward."""
    if first is None or not first.samples:
        raise InvariantViolation("the trainer shows no training forward")
    if first.manifest_digest != published_digest:
        raise InvariantViolation(
            f"the training forward used weights {first.manifest_digest or 'without a digest'}; published are "
            f"{published_digest}"
        )
    own = {score.sample_id: score for score in scores.samples}
    for forward in first.samples if exact else ():
        score = own[forward.sample_id]
        differs = canonical_bits(forward.logprobs) != canonical_bits(score.logprobs)
        differs |= (forward.digests != score.digests).any(axis=1)
        if differs.any():
            raise InvariantViolation(
                f"the training forward of sample {forward.sample_id} differs from its scoring forward at response "
                f"token {int(np.flatnonzero(differs)[0])}"
            )


def check_trained(samples: Sequence[TrainSample], trained: TrainResult) -> None:
    """Raise InvariantViolation unless the trainer trained on the tokens that it was given: all of them, once.

    With one update the first training forward is of the whole batch, with several of a part of it;
    ``facts["trained_tokens"]`` counts the tokens of all updates.
    """
    first = [score.sample_id for score in trained.first_forward.samples] if trained.first_forward else []
    given = {sample.sample_id for sample in samples}
    odd = set(first) ^ given if trained.updates == 1 else set(first) - given
    if odd or len(set(first)) != len(first):
        named = ", ".join(map(str, sorted(odd or first)[:5]))
        raise InvariantViolation(f"the training forward is not one of the step's batch; they differ in {named}")
    due = sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples)
    told = trained.facts.get("trained_tokens")
    if told is None:
        raise InvariantViolation(
            f"the trainer does not say on how many tokens it trained (its result has no fact trained_tokens); the "
            f"step's batch has {due}"
        )
    if told != due:
        raise InvariantViolation(f"the trainer trained on {told} tokens; the step's batch has {due}")


def check_shapes(samples: Sequence[TrainSample], scores: ScoreResult) -> None:
    """Raise InvariantViolation for an array of the trainer whose length or dtype does not fit its sample's tokens."""
    lengths = {sample.sample_id: len(sample.token_ids) for sample in samples}
    dtypes = {"logprobs": np.float32, "digests": np.uint64, "entropies": np.float32}
    for score in scores.samples:
        count = lengths.get(score.sample_id)
        if count is None:
            raise InvariantViolation(f"the trainer returned scores of {score.sample_id}, which it was not asked for")
        for name, dtype in dtypes.items():
            array, shape = getattr(score, name), (count, 2) if name == "digests" else (count,)
            if array.dtype != dtype or array.shape != shape:
                raise InvariantViolation(
                    f"sample {score.sample_id} has {count} tokens, but the trainer's {name} are {array.dtype.name} of "
                    f"shape {list(array.shape)}; due is {np.dtype(dtype).name} of shape {list(shape)}"
                )


def make_challenge(samples: Sequence[TrainSample], seed: int, step: int, vocab_size: int) -> Challenge:
    """Choose a sample of the step and alter one response token, keyed by ``seed`` and ``step``.

    Raises InputError for an empty step or a vocabulary of fewer than two tokens.
    """
    if not samples or vocab_size < 2:
        raise InputError(f"a challenge needs a sample and two tokens; the step has {len(samples)}, {vocab_size} tokens")
    draw = _Draws(seed, step)
    chosen = samples[draw.below(len(samples))]
    # in the first half: then at least half of the distributions read the replaced token
    index = draw.below((len(chosen.token_ids) + 1) // 2)
    # any of the other vocab_size - 1 tokens
    replacement = (chosen.token_ids[index] + 1 + draw.below(vocab_size - 1)) % vocab_size
    tokens = (*chosen.token_ids[:index], replacement, *chosen.token_ids[index + 1 :])
    identity = chosen.sample_id
    free = 1 + max(
        s.sample_id.k
        for s in samples
        if (s.sample_id.namespace, s.sample_id.prompt_index) == (identity.namespace, identity.prompt_index)
    )
    sample = TrainSample(
        SampleId(identity.namespace, identity.prompt_index, free),
        chosen.prompt_token_ids,
        tokens,
        np.zeros(len(tokens), dtype=np.bool_),
    )
    return Challenge(identity, sample, index, replacement)


def with_challenge(samples: Sequence[TrainSample], challenge: Challenge) -> list[TrainSample]:
    """The step's samples and the challenge among them, in sample order; the challenge and its original change names."""
    asked = [_renamed(s, challenge.sample.sample_id) if s.sample_id == challenge.original else s for s in samples]
    return sorted([*asked, _renamed(challenge.sample, challenge.original)], key=lambda sample: sample.sample_id)


def _renamed(sample: Any, sample_id: SampleId) -> Any:
    return replace(sample, sample_id=sample_id)


def split_challenge(scores: ScoreResult, challenge: Challenge) -> tuple[ScoreResult, ScoredSample]:
    """Take the challenge's scores out, and give them and the original's their own names.

    Raises InvariantViolation if either is missing.
    """
    first, second = challenge.original, challenge.sample.sample_id
    for sample_id in (first, second):
        count = sum(score.sample_id == sample_id for score in scores.samples)
        if count != 1:
            raise InvariantViolation(f"the trainer returned {count} scores of {sample_id}: one is needed")
    names = {first: second, second: first}
    named = [_renamed(s, names.get(s.sample_id, s.sample_id)) for s in scores.samples]
    rest = sorted((s for s in named if s.sample_id != second), key=lambda s: s.sample_id)
    answer = next(s for s in named if s.sample_id == second)
    return ScoreResult(tuple(rest), scores.case, scores.forward_tokens, scores.manifest_digest), answer


def verify_challenge(
    challenge: Challenge, answer: ScoredSample, independent: ScoredSample, original: ScoredSample | None = None
) -> None:
    """Compare the trainer's answer with an independent forward over the same altered tokens.

    ``original`` is the trainer's own score of the unaltered sample.

    Raises:
        InvariantViolation: naming the first token at which bits differ.
    """
    found = difference_from(challenge, answer, independent)
    if found is not None:
        raise InvariantViolation(found)
    if original is not None:
        verify_prefix(challenge, answer, original)


def difference_from(challenge: Challenge, answer: ScoredSample, independent: ScoredSample) -> str | None:
    """The first token at which the answer differs from an independent forward, as a sentence; None: equal.

    Where both sides' arrays of the step are equal, a difference here says that the trainer's are no forward of its
    own. Where they differ too, the sides compute different functions, and nothing is said about the origin.
    """
    count = len(challenge.sample.token_ids)
    return _first_difference(challenge, answer, independent, "an independent forward", count)


def verify_prefix(challenge: Challenge, answer: ScoredSample, original: ScoredSample) -> None:
    """Raise InvariantViolation unless the trainer's own answers to challenge and original agree on what they share."""
    # the distribution at the replaced token still reads only what came before it
    for count, digests_only in ((challenge.index + 1, True), (challenge.index, False)):
        found = _first_difference(challenge, answer, original, "the unaltered sample", count, digests_only=digests_only)
        if found is not None:
            raise InvariantViolation(found)


def _first_difference(
    challenge: Challenge,
    answer: ScoredSample,
    other: ScoredSample,
    whose: str,
    count: int,
    *,
    digests_only: bool = False,
) -> str | None:
    if len(answer.logprobs) != len(challenge.sample.token_ids) or len(other.logprobs) < count:
        return (
            f"the challenge {challenge.sample.sample_id} has {len(challenge.sample.token_ids)} tokens; the trainer "
            f"answered {len(answer.logprobs)}, {whose} has {len(other.logprobs)}"
        )
    differs = (answer.digests[:count] != other.digests[:count]).any(axis=1)
    if not digests_only:
        differs |= canonical_bits(answer.logprobs[:count]) != canonical_bits(other.logprobs[:count])
    wrong = np.flatnonzero(differs)
    if not len(wrong):
        return None
    t = int(wrong[0])
    return (
        f"the trainer's answer to the challenge made of sample {challenge.original} (response token "
        f"{challenge.index} replaced by {challenge.replacement}) differs from {whose} at response token {t}: "
        f"log-probability bits {int(canonical_bits(answer.logprobs)[t]):08x} and "
        f"{int(canonical_bits(other.logprobs)[t]):08x}: its log-probabilities are not a forward over these tokens"
    )


_Extent = tuple[int, int, bool, str, NDArray[Any]]  # first byte, last byte + 1, of the rollout?, name, array


def _arrays(sample: GeneratedSample | ScoredSample, of_rollout: bool) -> list[_Extent]:
    items: list[_Extent] = []
    for name in ("logprobs", "digests", "entropies"):
        array: NDArray[Any] = getattr(sample, name)
        first, last = np.lib.array_utils.byte_bounds(array)
        items.append((first, last, of_rollout, f"{name} of {sample.sample_id}", array))
    return items


class _Draws:
    """A short stream of numbers keyed by (seed, step): SplitMix64."""

    def __init__(self, seed: int, step: int) -> None:
        self._state = (seed * 0xD1B54A32D192ED03 + step * 0x9E3779B97F4A7C15) % 2**64

    def below(self, limit: int) -> int:
        """A number in 0..limit-1 (the bias of the remainder does not matter here)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        z = self._state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return (z ^ (z >> 31)) % limit
