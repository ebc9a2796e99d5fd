"""Advantages: exact values, order, incomplete groups, zero variance."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.errors import InputError, InvariantViolation
from vime.train.estimators import EstimatorConfig, compute_advantages, sample_groups
from vime.train.ordered import ordered_sum
from vime.types import SampleId


def ids(*sizes: int) -> list[SampleId]:
    return [SampleId("train", p, k) for p, size in enumerate(sizes) for k in range(size)]


def bits(values) -> list[int]:
    return [struct.unpack("<Q", struct.pack("<d", v))[0] for v in values]


def test_grpo_is_the_written_formula_bit_for_bit():
    rewards = [0.1, 0.7, 0.2, 1.0]
    got = compute_advantages(ids(4), rewards, EstimatorConfig(group_size=4)).values
    mean = (((0.1 + 0.7) + 0.2) + 1.0) / 4
    squares = [(r - mean) * (r - mean) for r in rewards]
    std = math.sqrt((((squares[0] + squares[1]) + squares[2]) + squares[3]) / 3)
    assert bits(got) == bits([(r - mean) / (std + 1e-6) for r in rewards])


def test_normalise_none_and_group_mean_are_centred_only():
    rewards = [0.0, 1.0, 1.0, 0.0]
    for config in (
        EstimatorConfig(group_size=4, normalise="none"),
        EstimatorConfig("reinforce_baseline", 4, "none", baseline="group_mean"),
    ):
        assert compute_advantages(ids(4), rewards, config).values.tolist() == [-0.5, 0.5, 0.5, -0.5]


def test_leave_one_out_compares_with_the_others_only():
    config = EstimatorConfig("reinforce_baseline", 3, "none")
    got = compute_advantages(ids(3), [1.0, 0.0, 0.5], config).values
    assert got.tolist() == [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5]


def test_step_mean_crosses_groups_and_admits_groups_of_one():
    config = EstimatorConfig("reinforce_baseline", 1, "none", baseline="step_mean")
    got = compute_advantages(ids(1, 1, 1, 1), [1.0, 0.0, 0.0, 1.0], config)
    assert got.values.tolist() == [0.5, -0.5, -0.5, 0.5]
    assert got.zero_variance_groups == 4


def test_a_group_without_variance_has_advantages_of_exactly_zero():
    # three times 0.1 has a mean of 0.10000000000000002: the formula would give -1.4e-17 / 1e-6
    mean = ((0.1 + 0.1) + 0.1) / 3
    assert mean != 0.1
    for kind in ("grpo", "reinforce_baseline"):
        got = compute_advantages(ids(3, 3), [0.1, 0.1, 0.1, 0.0, 1.0, 0.0], EstimatorConfig(kind, 3))
        assert bits(got.values[:3]) == [0, 0, 0]
        assert (got.zero_variance_groups, got.groups) == (1, 2)
        assert all(v != 0 for v in got.values[3:])


def test_incomplete_groups_are_an_error_unless_declared():
    with pytest.raises(InputError, match=r"group train/1 has 2 of 3 samples \(k = \[0, 1\]\)"):
        compute_advantages(ids(3, 2), [0.0, 1, 0, 1, 0], EstimatorConfig(group_size=3))
    kept = compute_advantages(
        ids(3, 2), [0.0, 1, 0, 1, 0], EstimatorConfig(group_size=3, incomplete_groups="keep", normalise="none")
    )
    # a group of two is normalised as two, never as part of a larger one
    assert kept.values[3:].tolist() == [0.5, -0.5]


@pytest.mark.parametrize("kind", ["grpo", "reinforce_baseline"])
def test_a_sample_left_alone_in_a_declared_incomplete_group_prefers_nothing(kind):
    config = EstimatorConfig(kind, 2, incomplete_groups="keep")
    got = compute_advantages(ids(2, 1), [0.0, 1, 0.7], config)
    assert bits(got.values[2:]) == [0] and got.zero_variance_groups == 1 and got.values[0] < 0 < got.values[1]


def test_a_group_larger_than_declared_is_refused():
    with pytest.raises(InputError, match="more than group_size = 2"):
        compute_advantages(ids(3), [0.0, 1, 0], EstimatorConfig(group_size=2, incomplete_groups="keep"))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_name_the_sample(bad):
    with pytest.raises(InputError, match="train/0/1"):
        compute_advantages(ids(2), [0.0, bad], EstimatorConfig(group_size=2))


def test_lengths_order_and_repetition_are_checked():
    with pytest.raises(InputError, match="2 samples came with 1 rewards"):
        compute_advantages(ids(2), [0.0], EstimatorConfig(group_size=2))
    with pytest.raises(InputError, match="empty"):
        compute_advantages([], [], EstimatorConfig(group_size=2))
    for wrong in (list(reversed(ids(2))), [ids(2)[0]] * 2):
        with pytest.raises(InvariantViolation, match="sample order"):
            sample_groups(wrong)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "ppo"},
        {"normalise": "max"},
        {"baseline": "value"},
        {"incomplete_groups": "drop"},
        {"group_size": 1},
        {"epsilon": 0.0},
        {"epsilon": math.nan},
    ],
)
def test_impossible_configurations_are_refused(arguments):
    with pytest.raises(InputError):
        EstimatorConfig(**arguments)


rewards_of_a_group = st.lists(st.floats(-100, 100), min_size=4, max_size=4)


@given(rewards_of_a_group, rewards_of_a_group)
def test_a_group_never_sees_another(first, second):
    config = EstimatorConfig(group_size=4)
    both = compute_advantages(ids(4, 4), first + second, config).values
    alone = compute_advantages(ids(4), first, config).values
    assert bits(both[:4]) == bits(alone)


@given(rewards_of_a_group)
def test_advantages_are_close_to_exact_arithmetic(rewards):
    got = compute_advantages(ids(4), rewards, EstimatorConfig(group_size=4, normalise="none")).values
    mean = sum(map(Fraction, rewards)) / 4
    assert all(
        abs(Fraction(g) - (Fraction(r) - mean)) <= Fraction(1, 10**12) for g, r in zip(got, rewards, strict=True)
    )


def test_ordered_sum_is_left_to_right_and_uncompensated():
    values = [1e16, 1.0, -1e16, 1.0]
    assert ordered_sum(values) == 1.0  # the first 1.0 is lost; a compensated sum gives 2.0
    assert math.fsum(values) == 2.0
    long = np.random.default_rng(0).normal(size=1000)
    total = 0.0
    for value in long:
        total += float(value)
    assert bits([ordered_sum(long)]) == bits([total])
