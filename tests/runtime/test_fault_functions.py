"""Rewards and filters that fail: the run stops resumably, or the sample is dropped with the reason, as declared."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.runtime.helpers import caught, reward
from vime.errors import InputError, Interrupted
from vime.timeline.events import SampleDropped

PUBLIC = "tests.runtime.test_fault_functions"


def nan_reward(prompt: Any, sample: Any, text: str) -> float:
    """NaN for one sample."""
    return float("nan") if str(sample.sample_id) == "train/0/2" else reward(prompt, sample, text)


def raising_reward(prompt: Any, sample: Any, text: str) -> float:
    """Raises for one sample."""
    if str(sample.sample_id) == "train/0/2":
        raise KeyError("answer")
    return reward(prompt, sample, text)


NEVER = threading.Event()


def late_reward(prompt: Any, sample: Any, text: str) -> float:
    """Waits for something that never happens, for one sample."""
    if str(sample.sample_id) == "train/0/2":
        NEVER.wait()
    return reward(prompt, sample, text)


def text_reward(prompt: Any, sample: Any, text: str) -> Any:
    """Returns no number for one sample."""
    return "good" if str(sample.sample_id) == "train/0/2" else reward(prompt, sample, text)


def tampering_reward(prompt: Any, sample: Any, text: str) -> float:
    """Tries to write into the sample."""
    sample.logprobs[0] = 0.0
    return 1.0


REWARDS = {
    "nan_reward": "it returned nan; a finite number is needed",
    "raising_reward": "it raised KeyError: 'answer'",
    "late_reward": "no answer within 0.2 s",
    "text_reward": "it returned 'good'; a finite number is needed",
    "tampering_reward": "it raised ValueError: assignment destination is read-only",
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_failing_reward_stops_the_run_resumably(vime, name):
    ended = vime.run(f"stages.reward.function={PUBLIC}.{name}", "stages.reward.timeout_s=0.2")
    sample = "train/0/0" if name == "tampering_reward" else "train/0/2"
    caught(ended, f"of sample {sample} failed: {REWARDS[name]}", trained=0, kind=Interrupted, code=3)
    assert f"vime resume {ended.directory}" in ended.message


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "tampering_reward"])
def test_a_failing_reward_drops_its_sample_with_the_reason(vime, name):
    drop = ("stages.reward.on_error=drop", "stages.reward.timeout_s=0.2", "stages.filter.incomplete_group=keep")
    ended = vime.run(f"stages.reward.function={PUBLIC}.{name}", "steps=1", *drop)
    assert (ended.code, ended.error) == (0, None)
    (dropped,) = (event for event in ended.events if isinstance(event, SampleDropped))
    assert (str(dropped.sample_id), dropped.reason) == ("train/0/2", f"reward: {REWARDS[name]}")
    (report,) = ended.reports
    assert report["num_samples"] == 7 and report["dropped_samples"] == {"reward": 1}


def test_an_incomplete_group_is_dropped_as_a_whole_where_so_declared(vime):
    ended = vime.run(f"stages.reward.function={PUBLIC}.nan_reward", "stages.reward.on_error=drop", "steps=1")
    assert ended.code == 0
    dropped = {str(e.sample_id): e.reason for e in ended.events if isinstance(e, SampleDropped)}
    assert set(dropped) == {f"train/0/{k}" for k in range(4)}
    assert dropped["train/0/0"] == "incomplete group: 3 of 4 samples are left"
    (report,) = ended.reports
    assert report["num_samples"] == 4 and report["dropped_samples"] == {"reward": 1, "incomplete group": 3}


def every_reward_fails(prompt: Any, sample: Any, text: str) -> float:
    """NaN always."""
    return float("nan")


def test_a_step_without_samples_trains_on_nothing(vime):
    ended = vime.run(f"stages.reward.function={PUBLIC}.every_reward_fails", "stages.reward.on_error=drop")
    caught(ended, "step 0: all 8 samples were dropped (8 reward)", trained=0, kind=InputError, code=2)


def raising_filter(samples: Any, rewards: Any) -> list[bool]:
    """Raises for the second group."""
    if samples[0].sample_id.prompt_index == 1:
        raise RuntimeError("no judge")
    return [True] * len(samples)


def short_filter(samples: Any, rewards: Any) -> list[bool]:
    """One answer too few."""
    return [True] * (len(samples) - 1)


def choosing_filter(samples: Any, rewards: Any) -> list[bool]:
    """All but the first of each group."""
    return [sample.sample_id.k > 0 for sample in samples]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("raising_filter", "raised RuntimeError for prompt 1: no judge"),
        ("short_filter", "gave 3 answers for 4 samples of prompt 0"),
    ],
)
def test_a_failing_filter_stops_the_run_resumably(vime, name, text):
    caught(vime.run(f"stages.filter.function={PUBLIC}.{name}"), text, trained=0, kind=Interrupted, code=3)


def test_a_filter_that_works_is_logged(vime):
    keep = "stages.filter.incomplete_group=keep"
    ended = vime.run(f"stages.filter.function={PUBLIC}.choosing_filter", keep, "steps=1")
    assert ended.code == 0 and ended.reports[0]["num_samples"] == 6
    dropped = {str(e.sample_id): e.reason for e in ended.events if isinstance(e, SampleDropped)}
    assert set(dropped) == {"train/0/0", "train/1/0"} and all(r.startswith("filter: ") for r in dropped.values())
