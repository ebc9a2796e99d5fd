"""Learning rates and bias corrections."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.contract.schedules import BetaPowers, Schedule
from rlkernel.errors import ContractError


def test_warmup_and_constant():
    schedule = Schedule(peak=0.5, warmup_updates=4)
    assert [schedule.learning_rate(i) for i in range(6)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]


def test_linear():
    schedule = Schedule(peak=1.0, kind="linear", warmup_updates=2, total_updates=6, final_fraction=0.5)
    assert [schedule.learning_rate(i) for i in range(8)] == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 300), st.floats(0, 1))
def test_cosine_is_the_cosine(update, fraction):
    schedule = Schedule(peak=3e-4, kind="cosine", warmup_updates=10, total_updates=200, final_fraction=fraction)
    if update >= 10:
        shape = 0.5 * (1 + math.cos(math.pi * min(update - 10, 190) / 190))
        assert schedule.learning_rate(update) == pytest.approx(3e-4 * (fraction + (1 - fraction) * shape), rel=1e-12)
    assert 0.0 <= schedule.learning_rate(update) <= 3e-4


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 0.999), st.floats(0, 0.9999), st.integers(1, 200))
def test_beta_powers_recomputed_have_the_same_bits(beta1, beta2, updates):
    powers = BetaPowers(beta1, beta2)
    for _ in range(updates):
        powers = powers.advance()
    assert powers == BetaPowers.at(beta1, beta2, updates)
    assert powers.corrections()[0] == 1.0 / (1.0 - powers.power1)
    assert powers.power1 == pytest.approx(beta1**updates, rel=1e-12, abs=1e-300)


def test_digest_changes_with_every_field():
    schedules = [
        Schedule(1e-3),
        Schedule(2e-3),
        Schedule(1e-3, warmup_updates=1),
        Schedule(1e-3, "linear", total_updates=5),
        Schedule(1e-3, "cosine", total_updates=5),
        Schedule(1e-3, "cosine", total_updates=6),
        Schedule(1e-3, "cosine", total_updates=6, final_fraction=0.1),
    ]
    assert len({schedule.digest() for schedule in schedules}) == len(schedules)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peak": -1.0}, "learning rate of -1.0"),
        ({"peak": float("nan")}, "learning rate of nan"),
        ({"peak": 1.0, "kind": "step"}, "accepted are constant, linear, cosine"),
        ({"peak": 1.0, "kind": "linear"}, "needs total_updates above warmup_updates"),
        ({"peak": 1.0, "warmup_updates": -1}, "-1 warmup updates"),
        ({"peak": 1.0, "final_fraction": 2.0}, "final fraction of 2.0"),
    ],
)
def test_impossible_schedules(arguments, message):
    with pytest.raises(ContractError, match=message):
        Schedule(**arguments)


def test_corrections_need_an_update():
    with pytest.raises(ContractError, match="none was made"):
        BetaPowers(0.9, 0.99).corrections()
    with pytest.raises(ContractError, match=r"beta2 = 1\.0"):
        BetaPowers(0.9, 1.0)
    with pytest.raises(ContractError, match="update -1"):
        Schedule(1.0).learning_rate(-1)
