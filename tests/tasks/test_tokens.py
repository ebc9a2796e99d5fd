"""Digit strings of one length, and the share of low tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from vime.errors import InputError
from vime.tasks.tokens import digit_rows, low_tokens


def test_rows_are_distinct_and_of_one_length() -> None:
    train, held = digit_rows("train", length=16, size=500, held_out=20), digit_rows("eval", length=16, held_out=20)
    texts = [row["text"] for row in (*train, *held)]
    assert len(train) == 500 and len(held) == 20 and len(set(texts)) == 520
    assert {len(text) for text in texts} == {16} and all(text.isdigit() for text in texts)
    for n in (8, 64, 512, 4096):
        assert {len(row["text"]) for row in digit_rows("train", length=n, size=3)} == {n}
    assert digit_rows("train", size=1) == [{"text": "0000064313515265"}]


@pytest.mark.parametrize("given", [{"length": 7}, {"length": 4097}, {"size": 0}, {"held_out": -1}])
def test_impossible_rows_are_named(given: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(iter(given))):
        digit_rows("train", **given)


def test_low_tokens_are_counted_and_an_early_end_wins_nothing() -> None:
    def reward(*tokens: int) -> float:
        sample = cast(Any, SimpleNamespace(token_ids=tokens))
        return low_tokens(cast(Any, None), sample, "", vocabulary=10, length=4)

    assert reward(0, 4, 5, 9) == 0.5 and reward(0, 1, 2, 4) == 1.0 and reward(5, 6, 7, 9) == 0.0
    assert reward(0) == 0.25
