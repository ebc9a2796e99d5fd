"""What a run shows: plain lines, JSON lines, the bar, the final table."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vime.cli.progress import BarObserver, JsonObserver, PlainObserver, StopSwitch
from vime.cli.tables import evaluation_line, report_line, summary, summary_table
from vime.runtime.observer import Observer, RunOutcome

REPORT: dict[str, Any] = {
    "step": 0, "num_tokens": 100, "compared_tokens": 90, "incomparable_tokens": {"kv_version": 10}, "mismatch_count": 0,
    "distribution_mismatch_count": 0, "nonfinite_count": 0, "reward_mean": 0.5, "loss": 0.25, "grad_norm": 1.0,
    "tokens_per_s": 1234.0, "time_s": {"total": 2.0},
}  # fmt: skip
NOTHING = {**REPORT, "step": 1, "compared_tokens": 0, "mismatch_count": None, "distribution_mismatch_count": None,
           "nonfinite_count": None, "reward_mean": None, "loss": None}  # fmt: skip
BROKEN = {**REPORT, "step": 1, "mismatch_count": 3, "distribution_mismatch_count": 4}


def outcome(*reports: dict[str, Any]) -> RunOutcome:
    evaluations = ({"step": 0, "reward_mean": 0.1}, {"step": 2, "reward_mean": 0.9})
    return RunOutcome("completed", Path("runs/x"), 2, reports, evaluations, 4.0, "ab" * 32)


def drive(observer: Observer, *reports: dict[str, Any]) -> None:
    observer.started(Path("runs/x"), 0, 2)
    for report in reports:
        observer.step_started(report["step"])
        observer.stage("rollout")
        observer.progress(3, 4)
        observer.progress(4, 4)
        observer.step_finished(report)
    observer.evaluated({"step": 2, "reward_mean": 0.9})
    observer.finished(outcome(*reports))


def test_plain_lines() -> None:
    stream = io.StringIO()
    drive(PlainObserver(StopSwitch(), stream), REPORT, NOTHING)
    shown = stream.getvalue()
    figures = "0 log-probabilities and 0 whole distributions of 90 tokens differ"
    assert f"step 0 (1 of 2)  reward 0.500  {figures}" in shown
    assert "step 1 (2 of 2)  reward -  nothing compared: 10 kv_version  loss" in shown
    assert "steps that compared nothing" in shown
    assert "held-out reward 0.900 after 2 steps" in shown
    assert shown.count("  rollout: samples are generated\n") == 1  # until the first step is done
    assert shown.splitlines()[-1] == "report: runs/x/report.html"


def test_json_lines() -> None:
    stream = io.StringIO()
    drive(JsonObserver(StopSwitch(), stream), REPORT, BROKEN)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines if line["event"] != "stage"] == [
        "started", "step", "step", "evaluation", "finished",
    ]  # fmt: skip
    last = lines[-1]
    assert (last["mismatch_count"], last["distribution_mismatch_count"], last["exit_code"]) == (3, 4, 0)
    assert (last["held_out_before"], last["held_out_after"], last["reward_first"]) == (0.1, 0.9, 0.5)


def test_the_bar_shows_mismatches_above_itself() -> None:
    stream = io.StringIO()
    bar = BarObserver(StopSwitch(), Console(file=stream, force_terminal=True, width=120, color_system=None))
    drive(bar, REPORT, BROKEN)
    shown = stream.getvalue()
    assert "3 log-probabilities and 4 whole distributions of 90 tokens differ" in shown
    assert "completed: runs/x" in shown
    assert bar.done


def test_nothing_compared_is_never_zero() -> None:
    assert summary(outcome(NOTHING))["mismatch_count"] is None
    assert summary(outcome(NOTHING))["steps_without_comparison"] == 1
    assert summary(outcome(REPORT, NOTHING))["mismatch_count"] == 0
    assert summary(outcome())["reward_first"] is None
    assert "0 log-probabilities" not in report_line(NOTHING, 0)


def test_the_first_and_the_last_steps_are_never_the_same_steps() -> None:
    def shown(count: int) -> str:
        console = Console(file=io.StringIO(), width=100, color_system=None)
        reports = [{**REPORT, "step": step, "reward_mean": float(step)} for step in range(count)]
        console.print(summary_table(outcome(*reports)))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    for count, edge in ((2, 1), (3, 1), (4, 2), (9, 4), (10, 5), (40, 5)):
        figures = summary(outcome(*[{**REPORT, "reward_mean": float(step)} for step in range(count)]))
        assert figures["reward_window"] == edge
        assert figures["reward_first"] == (edge - 1) / 2 and figures["reward_last"] == count - 1 - (edge - 1) / 2
        assert f"reward, first {'step ' if edge == 1 else f'{edge} steps'}" in shown(count)
    assert "first" not in shown(1) and "reward" in shown(1)
    assert summary(outcome())["reward_window"] == 0


def test_one_of_something_has_no_plural() -> None:
    stream = io.StringIO()
    observer = PlainObserver(StopSwitch(), stream)
    observer.started(Path("runs/x"), 0, 1)
    observer.evaluated({"step": 1, "reward_mean": 0.9})
    observer.step_finished({**REPORT, "compared_tokens": 1})
    shown = stream.getvalue()
    assert ": 1 step\n" in shown and "after 1 step\n" in shown and "of 1 token differ" in shown


def test_an_evaluation_of_nothing_is_never_zero() -> None:
    nothing = {"step": 0, "reward_mean": None, "num_samples": 0, "dropped_samples": 4}
    some = {"step": 2, "reward_mean": 0.25, "num_samples": 3, "dropped_samples": 1}
    assert evaluation_line(nothing) == "held-out reward unknown after 0 steps: nothing was evaluated, 4 rewards failed"
    assert evaluation_line(some) == "held-out reward 0.250 after 2 steps (1 reward failed, 3 samples evaluated)"
    for evaluations, before, after, shown in (
        ((nothing, some), None, 0.25, "unknown: nothing was evaluated"),
        ((some, nothing), 0.25, None, "unknown: nothing was evaluated"),
        ((some,), 0.25, None, "0.250"),
    ):
        ended = replace(outcome(REPORT), evaluations=evaluations)
        figures = summary(ended)
        assert (figures["held_out_before"], figures["held_out_after"]) == (before, after)
        assert figures["evaluations_of_nothing"] == evaluations.count(nothing)
        stream = io.StringIO()
        PlainObserver(StopSwitch(), stream).finished(ended)
        assert shown in stream.getvalue() and "0.000" not in stream.getvalue()


def test_what_a_resume_repeats_is_told_from_what_it_runs() -> None:
    stream = io.StringIO()
    plain = PlainObserver(StopSwitch(), stream)
    plain.step_finished({**REPORT, "repeated": True})
    plain.evaluated({"step": 1, "reward_mean": 0.5, "repeated": True})
    plain.step_finished({**REPORT, "step": 1, "repeated": False})
    plain.evaluated({"step": 2, "reward_mean": 0.5, "repeated": False})
    assert [line.endswith("(repeated: as in the log)") for line in stream.getvalue().splitlines()] == [
        True, True, False, False,
    ]  # fmt: skip
    whole = replace(outcome(REPORT, REPORT, REPORT, REPORT), recalled=1, repeated=2)
    figures = summary(whole)
    assert (figures["steps_recalled"], figures["steps_repeated"], figures["steps_done"]) == (1, 2, 4)
    assert (figures["seconds"], figures["seconds_in_steps"]) == (4.0, 8.0)
    plain.finished(whole)
    shown = " ".join(stream.getvalue().split())
    assert "1 run now, 2 repeated, 1 read from the log" in shown
    assert "seconds of this call │ 4.0" in shown and "seconds in all steps, when they first ran │ 8.0" in shown
    stream.truncate(0)
    plain.finished(outcome(REPORT, REPORT))
    assert "of these" not in stream.getvalue() and "of this call" not in stream.getvalue()


def test_the_switch_asks_a_run_to_stop() -> None:
    switch = StopSwitch()
    observer = PlainObserver(switch, io.StringIO())
    assert not observer.stop_requested()
    switch.set = True
    assert observer.stop_requested()
