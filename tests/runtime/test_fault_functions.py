"""Rewards and filters that fail: the run stops resumably, or the sample is dropped with the reason, as declared."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.runtime.helpers import caught, clean, reward
from vime.errors import InputError, Interrupted
from vime.runtime.stages import StepStages
from vime.timeline.events import Evaluated, RewardGiven, SampleDropped
from vime.types import GeneratedSample

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


def huge_reward(prompt: Any, sample: Any, text: str) -> Any:
    """A whole number that no float holds, for one sample."""
    return 10**400 if str(sample.sample_id) == "train/0/2" else reward(prompt, sample, text)


def leaving_reward(prompt: Any, sample: Any, text: str) -> float:
    """Tries to end the process."""
    if str(sample.sample_id) == "train/0/2":
        sys.exit("not installed: judge")
    return reward(prompt, sample, text)


def interrupting_reward(prompt: Any, sample: Any, text: str) -> float:
    """Raises what no ``except Exception`` catches."""
    if str(sample.sample_id) == "train/0/2":
        raise KeyboardInterrupt("of its own")
    return reward(prompt, sample, text)


def cancelled_reward(prompt: Any, sample: Any, text: str) -> float:
    """Raises an exception that is no ``Exception``."""
    if str(sample.sample_id) == "train/0/2":
        raise asyncio.CancelledError("the judge gave up")
    return reward(prompt, sample, text)


def enormous_reward(prompt: Any, sample: Any, text: str) -> float:
    """A finite number whose square is not."""
    return -1.7e308 if str(sample.sample_id) == "train/0/2" else reward(prompt, sample, text)


REWARDS = {
    "cancelled_reward": "it raised CancelledError: the judge gave up",
    "enormous_reward": "it returned -1.7e+308; rewards beyond ±1e+100 have no advantages",
    "leaving_reward": "it raised SystemExit: not installed: judge",
    "interrupting_reward": "it raised KeyboardInterrupt: of its own",
    "huge_reward": "it returned an integer beyond the range of a float; a finite number is needed",
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
    assert str(dropped.sample_id) == "train/0/2"
    place = r" \(test_fault_functions\.py:\d+\)" if "it raised" in REWARDS[name] else ""
    assert re.fullmatch(re.escape(f"reward: {REWARDS[name]}") + place, dropped.reason)
    (report,) = ended.reports
    assert report["num_samples"] == 7 and report["dropped_samples"] == {"reward": 1}


def test_what_a_function_raised_is_named_with_its_file_and_line(vime):
    ended = vime.run(f"stages.reward.function={PUBLIC}.leaving_reward")
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, start=1) if text.strip() == 'sys.exit("not installed: judge")')
    assert f"SystemExit: not installed: judge (test_fault_functions.py:{line})" in ended.message
    ended = vime.run(f"stages.filter.function={PUBLIC}.raising_filter")
    begin = lines.index("def raising_filter(samples: Any, rewards: Any) -> list[bool]:")
    line = next(n for n, text in enumerate(lines, start=1) if n > begin and "raise RuntimeError" in text)
    assert f"no judge (test_fault_functions.py:{line}); mend it and resume" in ended.message


def test_an_incomplete_group_is_dropped_as_a_whole_where_so_declared(vime):
    ended = vime.run(f"stages.reward.function={PUBLIC}.nan_reward", "stages.reward.on_error=drop", "steps=1")
    assert ended.code == 0
    dropped = {str(e.sample_id): e.reason for e in ended.events if isinstance(e, SampleDropped)}
    assert set(dropped) == {f"train/0/{k}" for k in range(4)}
    assert dropped["train/0/0"] == "incomplete group: 3 of 4 samples are left"
    (report,) = ended.reports
    assert report["num_samples"] == 4 and report["dropped_samples"] == {"reward": 1, "incomplete group": 3}


def forking_reward(prompt: Any, sample: Any, text: str) -> float:
    """Goes on in two processes."""
    if str(sample.sample_id) == "train/0/2":
        Children.started.append(os.fork())
    return reward(prompt, sample, text)


class Children:
    """Processes that :func:`forking_reward` made, 0 in each of them."""

    started: ClassVar[list[int]] = []


@pytest.mark.parametrize("timeout", ["null", "20"])
def test_a_reward_that_forks_goes_on_once(vime, monkeypatch, timeout):
    monkeypatch.setattr(Children, "started", [])
    ended = vime.run(
        f"stages.reward.function={PUBLIC}.forking_reward", f"stages.reward.timeout_s={timeout}", "threads=2"
    )
    clean(ended)
    (child,) = Children.started
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 70


def scribbling_reward(prompt: Any, sample: Any, text: str) -> float:
    """Writes into the prompt's row, and is 0 where somebody did before."""
    seen = "seen" in prompt.row
    prompt.row["seen"] = True
    return 0.0 if seen else reward(prompt, sample, text)


def test_every_reward_sees_the_row_as_the_source_gave_it(vime):
    scribbled = vime.run(f"stages.reward.function={PUBLIC}.scribbling_reward")
    plain = vime.run("stages.reward.function=tests.runtime.helpers.reward")
    clean(scribbled)
    rewards = [[e.reward for e in ended.events if isinstance(e, RewardGiven)] for ended in (scribbled, plain)]
    assert len(rewards[0]) > 0 and rewards[0] == rewards[1]


def failing_late(prompt: Any, sample: Any, text: str) -> float:
    """Raises in step 2 while it is broken."""
    if Judge.broken and str(sample.sample_id) == "train/4/0":
        raise RuntimeError("no judge")
    return reward(prompt, sample, text)


class Judge:
    """Whether :func:`failing_late` fails."""

    broken = True


@pytest.mark.parametrize(("every", "first", "repeated"), [(10, 0, [True, True, False]), (1, 2, [False])])
def test_a_resume_tells_what_it_repeats(vime, monkeypatch, every, first, repeated):
    evaluate = ("stages.evaluate.prompts=1", "stages.evaluate.every=1")
    ended = vime.run(f"stages.reward.function={PUBLIC}.failing_late", "steps=3", f"checkpoint.every={every}", *evaluate)
    assert ended.code == 3 and ended.count("step_finished") == 2
    monkeypatch.setattr(Judge, "broken", False)
    code, printed = vime.call("resume", str(ended.directory), "--json")
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    steps = [line for line in lines if line["event"] == "step"]
    assert code == 0 and [line["step"] for line in steps] == list(range(first, 3))
    assert [line["repeated"] for line in steps] == repeated
    # evaluations after 0 .. 3 steps; that after the last step before the stop is logged in any case
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    assert [line["repeated"] for line in evaluations] == [True] * (3 if first == 0 else 0) + [False]
    last = lines[-1]
    assert (last["steps_recalled"], last["steps_repeated"], last["steps_done"]) == (first, sum(repeated), 3)
    assert last["seconds_in_steps"] == pytest.approx(sum(r["time_s"]["total"] for r in ended.reports))
    code, printed = vime.call("resume", str(ended.directory))
    assert code == 0 and "3 read from the log" in printed


def every_reward_fails(prompt: Any, sample: Any, text: str) -> float:
    """NaN always."""
    return float("nan")


def test_a_step_without_samples_trains_on_nothing(vime):
    ended = vime.run(f"stages.reward.function={PUBLIC}.every_reward_fails", "stages.reward.on_error=drop")
    caught(ended, "step 0: all 8 samples were dropped (8 reward)", trained=0, kind=InputError, code=2)


def held_out_reward_fails(prompt: Any, sample: Any, text: str) -> float:
    """NaN for whatever is evaluated before the first step, and for one sample afterwards."""
    name = str(sample.sample_id)
    late = sample.versions[0].version > 0
    bad = name.startswith("eval/") and (not late or name == "eval/1/0")
    return float("nan") if bad else reward(prompt, sample, text)


def test_an_evaluation_whose_rewards_all_fail_evaluates_nothing(vime):
    settings = ("stages.reward.on_error=drop", "steps=1", "stages.evaluate.prompts=2")
    ended = vime.run(f"stages.reward.function={PUBLIC}.held_out_reward_fails", *settings)
    assert ended.code == 0
    before, after = (event for event in ended.events if isinstance(event, Evaluated))
    assert (before.reward_mean, before.num_samples, before.metrics["dropped_samples"]) == (None, 0, 2)
    assert after.reward_mean is not None and (after.num_samples, after.metrics["dropped_samples"]) == (1, 1)
    code, printed = vime.call("report", str(ended.directory), "--json")
    lines = [json.loads(line) for line in printed.splitlines() if '"event": "evaluation"' in line]
    assert code == 0 and [line["reward_mean"] for line in lines] == [None, after.reward_mean]
    assert "evaluated nothing" in vime.call("report", str(ended.directory))[1]
    assert "evaluated nothing" in (ended.directory / "report.html").read_text()
    # the same when the run is resumed from its log
    (ended.directory / "report.html").unlink()
    code, printed = vime.call("resume", str(ended.directory))
    assert code == 0 and "unknown: nothing was evaluated" in printed and "0.000" not in printed


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


def lines_filter(samples: Any, rewards: Any) -> Any:
    """The answers of a model, as it wrote them."""
    return ["yes", *["no"] * (len(samples) - 1)]


def scores_filter(samples: Any, rewards: Any) -> Any:
    """Numbers in place of answers."""
    return [float("nan")] * len(samples)


def counts_filter(samples: Any, rewards: Any) -> Any:
    """Whole numbers in place of answers."""
    return [1] * len(samples)


def empty_filter(samples: Any, rewards: Any) -> Any:
    """Forgets to return."""


def leaving_filter(samples: Any, rewards: Any) -> Any:
    """Tries to end the process."""
    sys.exit("no judge")


def numpy_filter(samples: Any, rewards: Any) -> Any:
    """Answers as numpy computes them: these are True and False."""
    return np.asarray(rewards) >= min(rewards)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lines_filter", "answered 'yes' for sample train/0/0; True or False is needed"),
        ("scores_filter", "answered nan for sample train/0/0; True or False is needed"),
        ("counts_filter", "answered 1 for sample train/0/0; True or False is needed"),
        ("empty_filter", "returned None for prompt 0; True or False for every sample is needed"),
        ("leaving_filter", "raised SystemExit for prompt 0: no judge"),
        ("raising_filter", "raised RuntimeError for prompt 1: no judge"),
        ("short_filter", "gave 3 answers for 4 samples of prompt 0"),
    ],
)
def test_a_failing_filter_stops_the_run_resumably(vime, name, text):
    caught(vime.run(f"stages.filter.function={PUBLIC}.{name}"), text, trained=0, kind=Interrupted, code=3)


def test_a_filter_of_numpy_answers_works(vime):
    ended = vime.run(f"stages.filter.function={PUBLIC}.numpy_filter", "steps=1")
    assert ended.code == 0 and ended.reports[0]["num_samples"] == 8


def test_a_filter_that_works_is_logged(vime):
    keep = "stages.filter.incomplete_group=keep"
    ended = vime.run(f"stages.filter.function={PUBLIC}.choosing_filter", keep, "steps=1")
    assert ended.code == 0 and ended.reports[0]["num_samples"] == 6
    dropped = {str(e.sample_id): e.reason for e in ended.events if isinstance(e, SampleDropped)}
    assert set(dropped) == {"train/0/0", "train/1/0"} and all(r.startswith("filter: ") for r in dropped.values())


# ------------------------------------------------------------------------------------------ functions that write


class Forger:
    """What the functions below do to a sample that they can reach; a test sets it."""

    changes: Mapping[str, Any] = MappingProxyType({})
    deep = False


def forge(sample: GeneratedSample) -> None:
    """Alter a frozen sample; with ``deep`` the run's own one, found among everything that lives in the process."""
    targets = [sample]
    if Forger.deep:
        known = (item for item in gc.get_objects() if type(item) is GeneratedSample)
        targets = [item for item in known if item.sample_id == sample.sample_id and item is not sample]
        assert targets
    for target in targets:
        for name, value in Forger.changes.items():
            object.__setattr__(target, name, value(getattr(target, name)))


def forging_reward(prompt: Any, sample: Any, text: str) -> float:
    """Alters one sample, and the prompt that it was given."""
    value = reward(prompt, sample, text)
    if str(sample.sample_id) == "train/1/1":
        forge(sample)
        if Forger.changes:
            object.__setattr__(prompt, "token_ids", ())
    return value


def forging_filter(samples: Any, rewards: Any) -> Any:
    """Alters a sample of the second group, and the list that it was given."""
    if samples[0].sample_id.prompt_index == 1:
        forge(samples[0])
        rewards.clear()
        del samples[1:]
        return [True] * 4
    return [True] * len(samples)


def longer(array: np.ndarray) -> np.ndarray:
    """Twice the values."""
    return array * array.dtype.type(2)


CHANGES: dict[str, Any] = {
    "text": lambda text: text + "!",
    "finish_reason": lambda reason: "stop" if reason == "length" else "length",
    "entropies": longer,
    "logprobs": longer,
    "sampled_at": longer,
    "token_ids": lambda ids: tuple(token ^ 1 for token in ids),
    "versions": lambda runs: (),
}


@pytest.fixture
def forger() -> Iterator[type[Forger]]:
    """Undone afterwards."""
    yield Forger
    Forger.changes, Forger.deep = MappingProxyType({}), False


@pytest.mark.parametrize("kind", ["reward", "filter"])
def test_what_a_function_does_to_its_copy_changes_nothing(vime, forger, kind):
    setting = f"stages.{kind}.function={PUBLIC}.forging_{kind}"
    honest = vime.run(setting, "steps=1")
    forger.changes = CHANGES
    forged = vime.run(setting, "steps=1")
    assert honest.code == forged.code == 0
    assert vime.call("diff", str(honest.directory), str(forged.directory))[0] == 0


@pytest.mark.parametrize("kind", ["reward", "filter"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_function_that_alters_the_runs_own_sample_is_named(vime, forger, kind, name):
    forger.changes, forger.deep = {name: CHANGES[name]}, True
    ended = vime.run(f"stages.{kind}.function={PUBLIC}.forging_{kind}")
    sample = "train/1/1" if kind == "reward" else "train/1/0"
    what = {"finish_reason": "finish reason", "token_ids": "tokens", "versions": "weight versions"}.get(name, name)
    named = f"step 0, {kind}: the {kind} '{PUBLIC}.forging_{kind}' altered the {what} of sample {sample} after it was"
    caught(ended, named, trained=0)


def test_an_alteration_after_all_functions_is_noticed_too(vime, monkeypatch):
    score = StepStages.score

    def altered(self: StepStages, batch: Any) -> Any:
        object.__setattr__(self.record.samples[3], "text", "another")
        return score(self, batch)

    monkeypatch.setattr(StepStages, "score", wraps(score)(altered))
    named = "step 0, compare: something in this process altered the text of sample train/0/3"
    caught(vime.run(), named, trained=0)
