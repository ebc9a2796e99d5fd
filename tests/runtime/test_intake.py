"""Where a response ends and why: what an engine says is held against the tokens, one sample at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlkernel.models.tokenizer import character_tokenizer
from vime.errors import InvariantViolation
from vime.runtime.held_out import SCORED, chosen_samples, prove
from vime.runtime.intake import check_sample
from vime.train.interface import ScoredSample, ScoreResult
from vime.types import GeneratedSample, RolloutRequest, SampleId, SamplingParams, VersionRun

TOKENIZER = character_tokenizer()
NAME = SampleId("train", 0, 0)
PROMPT = tuple(TOKENIZER.encode("12=", special=False))
END = 0
CONTEXT = 12


def sample(said: str, reason: Any, *, ended: bool = False, **changes: Any) -> GeneratedSample:
    """A response of these characters, with the end of sequence behind them where ``ended``."""
    tokens = (*TOKENIZER.encode(said, special=False), *((END,) if ended else ()))
    count = len(tokens)
    fields: dict[str, Any] = {
        "sample_id": NAME, "prompt_token_ids": PROMPT, "token_ids": tokens, "finish_reason": reason,
        "engine_id": "engine", "text": TOKENIZER.decode(tokens), "versions": (VersionRun(count, 0, 0, 0),),
        "logprobs": np.zeros(count, np.float32), "digests": np.zeros((count, 2), np.uint64),
        "entropies": np.zeros(count, np.float32), "sampled_at": np.zeros(count), "preemptions": 0,
    }  # fmt: skip
    return GeneratedSample(**{**fields, **changes})


def check(made: GeneratedSample, most: int = 6, stops: tuple[str, ...] = ()) -> None:
    params = SamplingParams(max_new_tokens=most, stop_token_ids=(END,), stop_strings=stops)
    due = {NAME: RolloutRequest(NAME, PROMPT, params)}
    check_sample(
        made, due, "engine", vocab_size=TOKENIZER.vocab_size, context=CONTEXT, detokenize=TOKENIZER.decode
    )  # fmt: skip


@pytest.mark.parametrize(
    ("made", "most", "stops"),
    [
        (sample("34", "stop", ended=True), 6, ()),
        (sample("", "stop", ended=True), 6, ()),
        (sample("345678", "length"), 6, ()),
        (sample("34567", "stop", ended=True), 6, ()),  # the last token that is asked for may also end it
        (sample("345678901", "context"), 20, ()),  # three of the prompt and nine fill the context
        (sample("345", "stop"), 6, ("45",)),
        (sample("345", "stop"), 6, ("9", "5")),
    ],
)
def test_a_response_that_ends_where_it_has_to_is_taken(made: GeneratedSample, most: int, stops: Any) -> None:
    check(made, most, stops)


@pytest.mark.parametrize(
    ("made", "most", "stops", "words"),
    [
        (sample("34", "stop"), 6, (), "ends after 2 of 6 tokens with 'stop': no stop token or string ended it"),
        (sample("34", "length"), 6, (), "ends after 2 of 6 tokens with 'length'"),
        (sample("34", "context"), 6, (), "and the context of 12 tokens is not full"),
        (sample("34", "length", ended=True), 6, (), "says that it ended with 'length'; it ended with 'stop'"),
        (sample("345678", "stop"), 6, (), "says that it ended with 'stop'; it ended with 'length'"),
        (sample("345678901", "length"), 20, (), "says that it ended with 'length'; it ended with 'context'"),
        (sample("3456", "length"), 4, ("45",), "goes on after its token 2, which ends it"),
        (sample("345", "length"), 3, ("45",), "says that it ended with 'length'; it ended with 'stop'"),
        (sample("345", "stop"), 6, ("54",), "ends after 3 of 6 tokens"),
        (sample("34", "stop", ended=True, text="35"), 6, (), "came with the text '35'; its tokens are '34'"),
    ],
)
def test_any_other_end_is_refused(made: GeneratedSample, most: int, stops: Any, words: str) -> None:
    with pytest.raises(InvariantViolation) as refused:
        check(made, most, stops)
    assert words in str(refused.value)


def test_a_response_that_goes_on_after_a_stop_token_is_refused() -> None:
    tokens = (*TOKENIZER.encode("3", special=False), END, *TOKENIZER.encode("45", special=False))
    made = sample("3344", "length", token_ids=tokens, text=TOKENIZER.decode(tokens))
    with pytest.raises(InvariantViolation, match="goes on after its token 1, which ends it"):
        check(made, 4)


@pytest.mark.parametrize("count", [1, 7, SCORED, SCORED + 1, 100])
def test_samples_of_an_evaluation_are_spread_and_others_every_time(count: int) -> None:
    made = [sample("34", "stop", ended=True) for _ in range(count)]
    names = {id(one): place for place, one in enumerate(made)}
    seen = set()
    for evaluation in range(count):
        places = [names[id(one)] for one in chosen_samples(made, evaluation)]
        assert len(places) == min(count, SCORED) and places == sorted(set(places))
        seen.update(places)
    assert seen == set(range(count))


class Repeats:
    """A trainer that answers with copies of the samples' own values, with one bit changed on request."""

    def __init__(self, made: list[GeneratedSample], flip: str = "") -> None:
        self._made, self._flip = made, flip

    def score(self, asked: Any, model: str = "policy") -> ScoreResult:
        own = []
        for one in self._made:
            arrays = {name: getattr(one, name).copy() for name in ("logprobs", "digests", "entropies")}
            if self._flip:
                arrays[self._flip].view(np.uint8).reshape(-1)[0] ^= 1
            own.append(ScoredSample(one.sample_id, **arrays))
        tokens = sum(len(one.prompt_token_ids) + len(one.token_ids) for one in asked)
        return ScoreResult(tuple(own), "trainer_score", tokens, "digest")

    def redraw(self, own: Any, params: Any, seed: int) -> Any:
        return np.asarray(own.token_ids, np.int64)


def proven(made: GeneratedSample, flip: str = "", tolerated: bool = False) -> dict[str, int | None]:
    trainer: Any = Repeats([made], flip)
    given: dict[str, Any] = {"seed": 0, "evaluation": 0, "version": 0, "digest": "digest", "tolerated": tolerated}
    return prove([made], trainer, SamplingParams(), **given)


def test_an_evaluation_that_compared_nothing_never_says_zero() -> None:
    names = ("compared_tokens", "mismatch_count", "distribution_mismatch_count", "redrawn_tokens")
    made = sample("34", "stop", ended=True)
    assert [proven(made)[name] for name in names] == [3, 0, 0, 3]
    older = sample("34", "stop", ended=True, versions=(VersionRun(3, 7, 7, 7),))
    assert [proven(older)[name] for name in names] == [0, None, None, 0]


@pytest.mark.parametrize(("flip", "counts"), [("logprobs", (1, 0)), ("digests", (0, 1))])
def test_a_differing_bit_of_an_evaluation_ends_it_or_is_counted(flip: str, counts: tuple[int, int]) -> None:
    made = sample("34", "stop", ended=True)
    with pytest.raises(InvariantViolation, match=rf"{counts[0]} log-probabilities and {counts[1]} distributions of 3"):
        proven(made, flip)
    found = proven(made, flip, tolerated=True)
    assert (found["mismatch_count"], found["distribution_mismatch_count"], found["redrawn_tokens"]) == (*counts, 0)
