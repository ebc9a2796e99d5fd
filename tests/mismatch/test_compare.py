"""Comparison of both sides: every count has a fault that changes it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.mismatch.helpers import generated, own_scores, step
from vime.errors import InvariantViolation
from vime.mismatch.compare import WorstToken, canonical_bits, compare_step, percentiles, unfounded_entropy
from vime.types import SampleId, VersionRun


def flip(array, index, bit=0):
    array.view(np.uint32)[index] ^= np.uint32(1 << bit)


def test_equal_sides_compare_every_token():
    rollout = step()
    result = compare_step(rollout, own_scores(rollout), 7)
    assert (result.compared_tokens, result.mismatch_count, result.distribution_mismatch_count) == (20, 0, 0)
    assert (result.max_abs_diff, result.mean_abs_diff, result.nonfinite_count) == (0.0, 0.0, 0)
    assert (result.ratio_min, result.ratio_max, result.k1, result.k2, result.k3) == (1.0, 1.0, 0.0, 0.0, 0.0)
    assert result.worst_token is None and result.incomparable_tokens == {} and result.equal


@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 22))
def test_one_flipped_bit_is_one_mismatch_and_is_named(sample, token, bit):
    rollout = step()
    scores = own_scores(rollout)
    flip(scores.samples[sample].logprobs, token, bit)
    result = compare_step(rollout, scores, 7)
    assert result.mismatch_count == 1 and not result.equal
    assert result.worst_token == WorstToken(rollout[sample].sample_id, 3 + token)
    difference = abs(float(scores.samples[sample].logprobs[token]) - float(rollout[sample].logprobs[token]))
    assert result.max_abs_diff == difference > 0


def test_the_sign_of_zero_is_a_bit():
    rollout = step()
    scores = own_scores(rollout)
    rollout[0].logprobs[1] = np.float32(0.0)
    scores.samples[0].logprobs[1] = np.float32(-0.0)
    result = compare_step(rollout, scores, 7)
    assert (result.mismatch_count, result.max_abs_diff) == (1, 0.0)
    assert result.worst_token == WorstToken(SampleId("train", 3, 0), 4)


def test_an_entropy_that_is_not_that_of_its_distribution_is_named():
    rollout = step()
    scores = own_scores(rollout)
    assert compare_step(rollout, scores, 7).entropy_mismatch_count == 0
    assert unfounded_entropy(rollout, scores, 7) is None
    flip(scores.samples[1].entropies, 2)
    assert compare_step(rollout, scores, 7).entropy_mismatch_count == 1
    assert compare_step(rollout, scores, 7).equal  # a count of its own
    assert unfounded_entropy(rollout, scores, 7).startswith("sample train/3/1, position 5: rollout and trainer have")
    assert unfounded_entropy(rollout, scores, 8) is None  # nothing of version 8 was sampled
    scores.samples[1].digests[2, 0] ^= np.uint64(1)  # two distributions have two entropies
    assert compare_step(rollout, scores, 7).entropy_mismatch_count == 1
    assert unfounded_entropy(rollout, scores, 7) is None


def test_distributions_can_differ_where_tokens_agree():
    rollout = step()
    scores = own_scores(rollout)
    scores.samples[2].digests[4, 1] ^= np.uint64(1)
    result = compare_step(rollout, scores, 7)
    assert (result.mismatch_count, result.distribution_mismatch_count) == (0, 1)
    assert not result.equal and result.worst_token == WorstToken(SampleId("train", 9, 0), 7)


def test_nan_patterns_are_one_and_are_counted_apart():
    rollout = step()
    scores = own_scores(rollout)
    rollout[0].logprobs.view(np.uint32)[0] = 0xFFC00000
    scores.samples[0].logprobs.view(np.uint32)[0] = 0x7FFFFFFF
    result = compare_step(rollout, scores, 7)
    assert (result.mismatch_count, result.nonfinite_count) == (0, 1)
    assert result.max_abs_diff == 0.0 and result.compared_tokens == 20


def test_a_nan_on_one_side_is_a_mismatch_and_the_worst_token():
    rollout = step()
    scores = own_scores(rollout)
    scores.samples[0].logprobs[0] -= np.float32(5)
    scores.samples[3].logprobs[2] = np.nan
    result = compare_step(rollout, scores, 7)
    assert (result.mismatch_count, result.nonfinite_count) == (2, 1)
    assert result.worst_token == WorstToken(SampleId("train", 9, 1), 5)
    assert math.isfinite(result.mean_abs_diff) and math.isfinite(result.k3)


def test_only_tokens_of_the_scored_version_are_comparable():
    mixed = generated(3, 0, 6, (VersionRun(2, 6, 6, 6), VersionRun(1, 7, 6, 7), VersionRun(3, 7, 7, 7)))
    result = compare_step([mixed], own_scores([mixed]), 7)
    assert result.compared_tokens == 3
    assert result.incomparable_tokens == {"weight_version": 2, "kv_version": 1}


def test_differences_of_incomparable_tokens_are_not_mismatches_but_their_neighbours_are():
    mixed = generated(3, 0, 4, (VersionRun(2, 6, 6, 6), VersionRun(2, 7, 7, 7)))
    scores = own_scores([mixed])
    flip(scores.samples[0].logprobs, 0)
    assert compare_step([mixed], scores, 7).mismatch_count == 0
    flip(scores.samples[0].logprobs, 2)
    result = compare_step([mixed], scores, 7)
    assert result.mismatch_count == 1 and result.worst_token == WorstToken(mixed.sample_id, 5)


def test_a_step_that_compared_nothing_never_says_zero():
    old = [generated(3, 0, 4, (VersionRun(4, 6, 6, 6),))]
    result = compare_step(old, own_scores(old), 7)
    assert result.compared_tokens == 0 and result.incomparable_tokens == {"weight_version": 4}
    assert result.mismatch_count is None and result.distribution_mismatch_count is None
    assert result.max_abs_diff is None and not result.equal


def test_a_missing_sample_is_an_error_unless_declared_unaudited():
    rollout = step()
    scores = own_scores(rollout[:3])
    with pytest.raises(InvariantViolation, match="no log-probabilities for sample train/9/1"):
        compare_step(rollout, scores, 7)
    result = compare_step(rollout, scores, 7, unaudited={rollout[3].sample_id})
    assert result.compared_tokens == 15 and result.incomparable_tokens == {"not_audited": 5}


def test_samples_of_only_one_side_or_twice_are_errors():
    rollout = step()
    with pytest.raises(InvariantViolation, match="step does not have"):
        compare_step(rollout[:3], own_scores(rollout), 7)
    with pytest.raises(InvariantViolation, match="twice"):
        compare_step(rollout, own_scores([*rollout, rollout[0]]), 7)
    with pytest.raises(InvariantViolation, match="twice"):
        compare_step([*rollout, rollout[0]], own_scores(rollout), 7)


def test_lengths_and_types_are_checked_never_truncated():
    rollout = step()
    scores = own_scores(rollout)
    object.__setattr__(scores.samples[1], "logprobs", scores.samples[1].logprobs[:-1])
    with pytest.raises(InvariantViolation, match=r"train/3/1 has 5 tokens.*trainer logprobs"):
        compare_step(rollout, scores, 7)
    scores = own_scores(rollout)
    object.__setattr__(scores.samples[1], "logprobs", scores.samples[1].logprobs.astype(np.float64))
    with pytest.raises(InvariantViolation, match="float64"):
        compare_step(rollout, scores, 7)


def test_diagnostics_are_estimators_of_the_divergence():
    rollout = step()
    scores = own_scores(rollout)
    for score in scores.samples:
        score.logprobs[:] = score.logprobs - np.float32(0.25)
    result = compare_step(rollout, scores, 7)
    assert result.mismatch_count == 20
    assert abs(result.k1 - 0.25) < 1e-6 and abs(result.k2 - 0.03125) < 1e-6
    assert abs(result.k3 - (math.exp(-0.25) - 1 + 0.25)) < 1e-6
    assert abs(result.ratio_max - math.exp(-0.25)) < 1e-6


def test_percentiles_are_values_that_occurred():
    assert percentiles([float(i) for i in range(100, 0, -1)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}


def test_canonical_bits_touch_only_nan():
    patterns = np.array([0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x3F800000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    got = canonical_bits(patterns.view(np.float32)).tolist()
    assert got == [0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x3F800000, 0x7FC00000, 0x7FC00000]
