"""Sums: all pairs, split without overlap."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vime.errors import InputError
from vime.tasks.sums import rows


def test_every_pair_is_in_one_half_with_its_sum() -> None:
    train, held = rows("train", digits=1, held_out=20), rows("eval", digits=1, held_out=20)
    assert (len(train), len(held)) == (61, 20)
    pairs = set()
    for row in (*train, *held):
        a, b = map(int, re.findall(r"\d+", row["messages"][0]["content"]))
        assert row["answer"] == str(a + b)
        pairs.add((a, b))
    assert pairs == {(a, b) for a in range(1, 10) for b in range(1, 10)}
    assert len(rows("train")) == 99 * 99 - 500


@pytest.mark.parametrize("given", [{"digits": 0}, {"digits": 4}, {"held_out": 99 * 99}, {"held_out": -1}])
def test_impossible_splits_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(given))):
        rows("train", **given)
