"""The per-step report: exact names, JSON without NaN, unknown is never zero."""

from __future__ import annotations

import json
import math

import pytest

from tests.mismatch.helpers import generated, own_scores, step
from tests.report.synthetic import step as report_data
from vime.errors import InputError
from vime.mismatch.compare import compare_step
from vime.mismatch.report import StepReport, build_report
from vime.train.estimators import EstimatorConfig, compute_advantages
from vime.train.interface import TrainResult
from vime.types import VersionRun

NAMES = [
    "step",
    "weight_version",
    "num_samples",
    "num_tokens",
    "compared_tokens",
    "incomparable_tokens",
    "mismatch_count",
    "max_abs_diff",
    "mean_abs_diff",
    "nonfinite_count",
    "distribution_mismatch_count",
    "worst_token",
    "k1",
    "k2",
    "k3",
    "ratio_min",
    "ratio_max",
    "clip_fraction",
    "entropy",
    "reward_mean",
    "reward_std",
    "zero_variance_groups",
    "response_length_mean",
    "truncated_fraction",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_s",
    "peak_memory_bytes",
    "time_s",
]
TIMES = {"rollout": 2.0, "reward": 0.5, "score": 1.0, "train": 3.0, "sync": 0.1, "total": 7.0}


def build(samples, scores=None, trained=None, rewards=(1.0, 0.0, 0.5, 0.5)):
    ids = [s.sample_id for s in samples]
    return build_report(
        step=4,
        weight_version=7,
        samples=samples,
        comparison=compare_step(samples, scores or own_scores(samples), 7),
        advantages=compute_advantages(ids, rewards, EstimatorConfig(group_size=2)),
        trained=trained,
        time_s=TIMES,
        peak_memory_bytes=1000,
    )


def test_the_line_has_the_formats_names_first_and_in_order():
    line = build(step()).as_json()
    assert list(line)[: len(NAMES)] == NAMES
    assert set(line["time_s"]) == set(TIMES)


def test_values_come_from_where_they_were_measured():
    trained = TrainResult(0.25, 1.5, 1e-3, 0.125, 0.9, 1.1, 2, facts={"reference_kl": 0.01})
    report = build(step(), trained=trained)
    assert (report.num_samples, report.num_tokens, report.compared_tokens) == (4, 20, 20)
    assert (report.mismatch_count, report.distribution_mismatch_count, report.equal) == (0, 0, True)
    assert (report.ratio_min, report.ratio_max) == (1.0, 1.0)
    assert (report.update_ratio_min, report.update_ratio_max) == (0.9, 1.1)
    assert (report.loss, report.grad_norm, report.learning_rate, report.clip_fraction) == (0.25, 1.5, 1e-3, 0.125)
    assert (report.reward_mean, report.zero_variance_groups, report.tokens_per_s) == (0.5, 1, 10.0)
    assert (report.response_length_mean, report.truncated_fraction, report.updates) == (5.0, 0.0, 2)


def test_a_mismatch_reaches_the_report_with_its_token():
    samples = step()
    scores = own_scores(samples)
    scores.samples[1].logprobs[2] -= 1
    report = build(samples, scores)
    assert report.mismatch_count == 1 and not report.equal
    assert report.worst_token == {"sample": "train/3/1", "position": 5}


def test_round_trip_through_json():
    report = build(step(), trained=TrainResult(0.25, 1.5, 1e-3, 0.125, 0.9, 1.1, 2))
    text = json.dumps(report.as_json(), allow_nan=False)
    assert StepReport.from_json(json.loads(text)) == report


def test_nan_and_infinity_become_null_never_zero():
    trained = TrainResult(math.nan, math.inf, 1e-3, math.nan, math.nan, math.nan, 1)
    line = build(step(), trained=trained).as_json()
    json.dumps(line, allow_nan=False)
    assert [line[n] for n in ("loss", "grad_norm", "clip_fraction", "update_ratio_min")] == [None] * 4


def test_a_step_that_compared_nothing_is_written_as_unknown():
    old = [generated(3, k, 4, (VersionRun(4, 6, 6, 6),)) for k in (0, 1)]
    line = build(old, rewards=(1.0, 0.0)).as_json()
    assert line["compared_tokens"] == 0 and line["incomparable_tokens"] == {"weight_version": 8}
    assert [line[n] for n in ("mismatch_count", "distribution_mismatch_count", "max_abs_diff", "k1")] == [None] * 4
    assert not StepReport.from_json(line).equal


def test_nobody_can_write_zero_mismatches_of_nothing():
    with pytest.raises(InputError, match="compared no token"):
        StepReport.from_json(report_data(3, compared_tokens=0))
    with pytest.raises(InputError, match="has no mismatch count"):
        StepReport.from_json(report_data(3, mismatch_count=None))


def test_unknown_and_missing_fields_are_named():
    data = report_data(3)
    del data["entropy"]
    with pytest.raises(InputError, match=r"step 3.*unknown fields \['entropie'\] and lacks \['entropy'\]"):
        StepReport.from_json({**data, "entropie": 1.0})
    with pytest.raises(InputError, match="time_s lacks sync"):
        StepReport.from_json(report_data(3, time_s={k: v for k, v in TIMES.items() if k != "sync"}))
