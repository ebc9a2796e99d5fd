"""Token losses: bits against an independent float32 transcription, gradients against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.primitives import exp2_full
from vime.errors import InputError
from vime.train.losses import (
    LossConfig,
    first_nonfinite,
    importance_ratios,
    step_weights,
    summarise,
    token_losses,
)

F = np.float32
LOG2E = F(np.uint32(0x3FB8AA3B).view(np.float32))


@kernel
def _exp2(values, out):
    for i in range(values.size):
        out[i] = exp2_full(values[i])


def exp2(values):
    values = np.ascontiguousarray(values, dtype=F)
    out = np.empty_like(values)
    _exp2(values, out)
    return out


def bits(values):
    return np.asarray(values, dtype=F).view(np.uint32).tolist()


def example(count=257, seed=0, spread=0.3):
    random = np.random.default_rng(seed)
    new = (-random.exponential(1.5, count)).astype(F)
    old = (new + random.normal(0, spread, count)).astype(F)
    reference = (new + random.normal(0, spread, count)).astype(F)
    advantage = random.normal(0, 1, count).astype(F)
    trained = random.random(count) < 0.8
    return new, old, reference, advantage, trained


def transcription(config, new, old, reference, advantage, trained, weight):
    """The definition of docs/numerics.md, array-wise in NumPy's float32."""
    ratio = exp2((new - old) * LOG2E)
    low, high, beta = F(1.0 - config.clip_low), F(1.0 + config.clip_high), F(config.kl_coefficient)
    if config.policy == "ppo_clip":
        above, below = (advantage > 0) & (ratio > high), (advantage < 0) & (ratio < low)
        bound = np.where(above, high, np.where(below, low, ratio)).astype(F)
        policy = -(bound * advantage)
        slope = np.where(above | below, F(0), -(ratio * advantage)).astype(F)
    else:
        policy, slope = -(new * advantage), -advantage
    x = reference - new
    if config.kl == "k1":
        kl, dkl = new - reference, np.ones_like(new)
    elif config.kl == "k2":
        kl, dkl = (x * x) * F(0.5), new - reference
    elif config.kl == "k3":
        e = exp2(x * LOG2E)
        kl, dkl = (e - F(1)) - x, F(1) - e
    if config.kl != "none":
        policy, slope = policy + beta * kl, slope + beta * dkl
    return np.where(trained, policy, F(0)), np.where(trained, slope * weight, F(0))


CONFIGS = [
    LossConfig("ppo_clip"),
    LossConfig("ppo_clip", clip_low=0.1, clip_high=0.28),
    LossConfig("ppo_clip", kl="k3", kl_coefficient=0.05),
    LossConfig("reinforce"),
    LossConfig("reinforce", kl="k1", kl_coefficient=0.1),
    LossConfig("reinforce", kl="k2", kl_coefficient=0.1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.policy}-{c.kl}-{c.clip_high}")
def test_losses_and_coefficients_have_the_definitions_bits(config):
    new, old, reference, advantage, trained = example()
    weight = np.full(len(new), F(1 / 211), dtype=F)
    got = token_losses(config, new, trained, advantage, weight, old, reference)
    loss, coefficient = transcription(config, new, old, reference, advantage, trained, weight)
    assert bits(got.loss) == bits(loss)
    assert bits(got.coefficient) == bits(coefficient)


def test_a_changed_bit_of_the_definition_is_noticed():
    new, old, _, advantage, trained = example()
    weight = np.full(len(new), F(1 / 211), dtype=F)
    config = LossConfig("ppo_clip")
    got = token_losses(config, new, trained, advantage, weight, old)
    reordered = np.where(trained, -(exp2((new - old) * LOG2E) * (advantage * weight)), F(0))
    assert bits(got.coefficient) != bits(reordered)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.policy}-{c.kl}-{c.clip_high}")
def test_the_coefficient_is_the_derivative(config):
    new, old, reference, advantage, _ = example(64, seed=3)
    trained = np.ones(64, dtype=bool)
    got = token_losses(config, new, trained, advantage, np.ones(64, dtype=F), old, reference)

    def value(n, i):
        a, ratio = float(advantage[i]), math.exp(n - float(old[i]))
        low, high = 1 - config.clip_low, 1 + config.clip_high
        policy = -a * n if config.policy == "reinforce" else -min(ratio * a, min(max(ratio, low), high) * a)
        x = float(reference[i]) - n
        kl = {"none": 0.0, "k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[config.kl]
        return policy + config.kl_coefficient * kl

    for i in range(64):
        n, h = float(new[i]), 1e-6
        numeric = (value(n + h, i) - value(n - h, i)) / (2 * h)
        assert abs(numeric - float(got.coefficient[i])) < 1e-4
        assert abs(value(n, i) - float(got.loss[i])) < 1e-5


def test_ratio_is_exactly_one_where_the_bits_are_equal_and_nowhere_else():
    values = (-np.random.default_rng(1).exponential(3, 4096)).astype(F)
    assert set(bits(importance_ratios(values, values.copy()))) == {0x3F800000}
    moved = np.nextafter(values, F(-np.inf))
    assert min(importance_ratios(moved, values)) < 1.0


def test_clipping_counts_only_what_loses_its_gradient():
    old = np.zeros(4, dtype=F)
    new = np.log(np.array([1.5, 1.5, 0.5, 0.5])).astype(F)
    advantage = np.array([1, -1, 1, -1], dtype=F)
    got = token_losses(LossConfig(), new, np.ones(4, bool), advantage, np.ones(4, F), old)
    assert got.clipped.tolist() == [True, False, False, True]
    assert (got.coefficient != 0).tolist() == [False, True, True, False]
    assert got.loss[0] == F(-1.2) and got.loss[3] == F(0.8)


def test_untrained_tokens_contribute_exactly_nothing():
    new, old, reference, advantage, trained = example()
    new[~trained] = np.nan
    weight = np.full(len(new), F(0.01), dtype=F)
    got = token_losses(LossConfig(kl="k3", kl_coefficient=0.1), new, trained, advantage, weight, old, reference)
    assert set(bits(got.coefficient[~trained])) == {0}
    assert set(bits(got.loss[~trained])) == {0}
    assert first_nonfinite(got.coefficient) is None


def test_a_nan_of_a_trained_token_reaches_its_coefficient():
    new, old, _, advantage, _ = example(8)
    new[5] = np.nan
    got = token_losses(LossConfig(), new, np.ones(8, bool), advantage, np.ones(8, F), old)
    assert first_nonfinite(got.coefficient) == 5 and first_nonfinite(got.loss) == 5


def test_totals_do_not_depend_on_how_tokens_were_cut_into_parts():
    new, old, reference, advantage, trained = example(1000, seed=5)
    config = LossConfig(kl="k3", kl_coefficient=0.1)
    weight = np.full(1000, F(1 / 777), dtype=F)

    def part(a, b):
        arrays = (new[a:b], trained[a:b], advantage[a:b], weight[a:b], old[a:b], reference[a:b])
        return token_losses(config, *arrays)

    whole = summarise([part(0, 1000)], has_ratio=True, has_reference=True)
    cut = summarise([part(0, 1), part(1, 400), part(400, 1000)], has_ratio=True, has_reference=True)
    assert whole == cut
    # what a mean of micro-batch means would give, is another number
    means = [summarise([part(a, b)], has_ratio=True, has_reference=True) for a, b in ((0, 1), (1, 400), (400, 1000))]
    assert sum(m.reference_kl for m in means) / 3 != whole.reference_kl
    assert whole.trained_tokens == int(trained.sum())


def test_summaries_without_a_ratio_or_reference_do_not_invent_them():
    new, _, _, advantage, trained = example()
    got = token_losses(LossConfig("reinforce"), new, trained, advantage, np.ones(len(new), F))
    summary = summarise([got], has_ratio=False, has_reference=False)
    assert math.isnan(summary.ratio_min) and math.isnan(summary.ratio_max) and math.isnan(summary.reference_kl)


def test_weights_are_those_of_the_step():
    masks = [np.array([1, 1, 0], bool), np.array([1], bool), np.array([0, 0], bool)]
    assert step_weights(masks, "token_mean") == [F(1 / 3)] * 3
    assert step_weights(masks, "sequence_mean") == [F(1 / 4), F(1 / 2), F(0)]
    with pytest.raises(InputError, match="every loss mask is empty"):
        step_weights([np.zeros(3, bool)], "token_mean")


def test_missing_or_unfitting_arrays_are_refused():
    new, old, _, advantage, trained = example(16)
    weight = np.ones(16, F)
    with pytest.raises(InputError, match="needs the old"):
        token_losses(LossConfig(), new, trained, advantage, weight)
    with pytest.raises(InputError, match="needs the reference"):
        token_losses(LossConfig(kl="k2", kl_coefficient=1.0), new, trained, advantage, weight, old)
    with pytest.raises(InputError, match="other shapes"):
        token_losses(LossConfig(), new, trained, advantage, weight, old[:-1])
    with pytest.raises(InputError, match="float64"):
        token_losses(LossConfig(), new.astype(np.float64), trained, advantage, weight, old)


@pytest.mark.parametrize(
    "arguments",
    [
        {"policy": "dpo"},
        {"kl": "k4"},
        {"normalise": "micro_batch"},
        {"clip_low": 1.0},
        {"clip_low": -0.1},
        {"clip_high": math.inf},
        {"kl": "k3"},
        {"kl_coefficient": 0.1},
        {"kl": "k3", "kl_coefficient": math.nan},
    ],
)
def test_impossible_losses_are_refused(arguments):
    with pytest.raises(InputError):
        LossConfig(**arguments)
