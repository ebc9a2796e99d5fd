"""Replay: logged events are made again in any order inside a segment, and nothing else gets through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.timeline.building import SIDE, A, B, generated, history, sampled
from vime.errors import InvariantViolation
from vime.timeline.event import Event
from vime.timeline.events import (
    BatchAssigned,
    Decision,
    EngineLost,
    RewardGiven,
    RunInterrupted,
    RunResumed,
    SampleAborted,
    SampleFinished,
    SampleStarted,
    StepCompared,
    StepTrained,
)
from vime.timeline.invariants import check_all
from vime.timeline.log import read_log
from vime.timeline.manager import Timeline
from vime.timeline.order import run_digest


def write(folder: Path, events: list[Event]) -> None:
    timeline = Timeline.create(folder)
    for event in events:
        timeline.append(event)
    timeline.close()


def logged(folder: Path) -> list[Event]:
    return [record.event for record in read_log(folder / "timeline.jsonl").records]


def where(events: list[Event], kind: type) -> int:
    return next(i for i, event in enumerate(events) if isinstance(event, kind))


def test_every_prefix_is_replayed_and_completed(tmp_path: Path) -> None:
    whole = history()
    for cut in range(0, len(whole), 3):
        folder = tmp_path / str(cut)
        folder.mkdir()
        write(folder, whole[:cut])
        timeline = Timeline.open_for_resume(folder)
        found = timeline.resumption
        assert found is not None
        start = 0 if found.checkpoint_step is None else len(whole) - 1
        assert timeline.replaying == (cut > start)
        for event in whole[start:]:
            timeline.append(event)
        assert timeline.run_digest() == run_digest(whole) and not timeline.replaying
        timeline.close()
        events = logged(folder)
        assert sum(isinstance(e, RunResumed) for e in events) == (cut > 0)
        assert len(events) == len(whole) + (cut > 0)
        assert check_all(events).finished is not None
        assert run_digest(events) == run_digest(whole)


def test_state_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, history()[:-1])
    timeline = Timeline.open_for_resume(tmp_path)
    assert timeline.resumption is not None and timeline.resumption.checkpoint_step == 0
    assert timeline.state.cursor["train"] == 2 and timeline.state.next_step == 1 and not timeline.replaying
    timeline.close()
    timeline = Timeline.open_for_resume(tmp_path, lambda record, event: f"step {event.step}: gone")
    assert timeline.resumption is not None and timeline.resumption.rejected == ("step 0: gone",)
    assert timeline.state.run is None and timeline.replaying
    timeline.close()


def test_observed_and_deployment_fields_are_not_compared_and_the_first_stay(tmp_path: Path) -> None:
    whole = history()
    write(tmp_path, whole[:20])
    timeline = Timeline.open_for_resume(tmp_path, clock=lambda: 5.0)
    for event in whole[:20]:
        changed = replace(event, observed={"host": "elsewhere"})
        if isinstance(changed, SampleFinished):
            changed = replace(changed, engine="e1")
        kept = timeline.append(changed)
        assert kept.observed["at"] != 5.0 and kept.observed.get("host") != "elsewhere"
    assert timeline.state.samples[A].engine == "e0"
    timeline.close()


def test_order_inside_a_segment_is_free(tmp_path: Path) -> None:
    whole = history()
    first, end = where(whole, SampleStarted), where(whole, BatchAssigned)
    write(tmp_path, whole[: end + 1])
    timeline = Timeline.open_for_resume(tmp_path)
    segment = [*generated(B), *generated(A), *(e for e in whole[first:end] if e not in [*generated(A), *generated(B)])]
    assert len(segment) == end - first
    for event in [*whole[:first], *segment, *whole[end:]]:
        timeline.append(event)
    assert timeline.run_digest() == run_digest(whole) == run_digest([*whole[:first], *segment, *whole[end:]])
    timeline.close()


def test_new_samples_before_logged_ones_in_the_open_segment(tmp_path: Path) -> None:
    whole = history()
    first, end = where(whole, SampleStarted), where(whole, BatchAssigned)
    write(tmp_path, whole[: first + 2])  # A is finished, B was not begun
    timeline = Timeline.open_for_resume(tmp_path)
    for event in [*whole[:first], *generated(B), *generated(A), *whole[first + 4 :]]:
        timeline.append(event)
    timeline.close()
    events = logged(tmp_path)
    check_all(events)
    assert run_digest(events) == run_digest(whole)
    assert end > first


@pytest.mark.parametrize(
    ("position", "change", "words"),
    [
        (SampleFinished, {"content_digest": "other"}, "field content_digest was 'ctrain/0/0' and is now 'other'"),
        (RewardGiven, {"reward": 0.25}, "sample id train/0/0.: field reward was 'f64:3fe0000000000000'"),
        (StepCompared, {"forward_tokens": 11}, "step 0.: field forward_tokens was 10 and is now 11"),
        (StepTrained, {"weights_digest": "w1x"}, "field weights_digest was 'w1' and is now 'w1x'"),
        (StepTrained, {"loss": 0.2}, "field loss was 'f64:"),
    ],
)
def test_difference_is_named_and_nothing_written(
    tmp_path: Path, position: type, change: dict[str, object], words: str
) -> None:
    whole = history()
    write(tmp_path, whole[:-2])
    timeline = Timeline.open_for_resume(tmp_path)
    size = (tmp_path / "timeline.jsonl").stat().st_size
    index = where(whole, position)
    for event in whole[:index]:
        timeline.append(event)
    with pytest.raises(InvariantViolation, match=words) as caught:
        timeline.append(replace(whole[index], **change))  # type: ignore[arg-type]
    assert f"event {index} " in str(caught.value)
    assert (tmp_path / "timeline.jsonl").stat().st_size == size
    timeline.close()


def test_additional_missing_and_other_events_are_refused(tmp_path: Path) -> None:
    whole = history()
    write(tmp_path, whole[:-2])

    def reopened(events: list[Event]) -> Timeline:
        timeline = Timeline.open_for_resume(tmp_path)
        for event in events:
            timeline.append(event)
        return timeline

    assign, reward = where(whole, BatchAssigned), where(whole, RewardGiven)
    timeline = reopened(whole[:assign])
    with pytest.raises(InvariantViolation, match=r"made decision .* does not hold before event \d+ .batch_assigned"):
        timeline.append(Decision(kind="new", key="1", value=1))
    timeline.close()
    timeline = reopened(whole[:reward])
    with pytest.raises(InvariantViolation, match=rf"without making event {reward} again.*reward_given"):
        timeline.append(whole[assign])
    timeline.close()
    timeline = reopened(whole[: assign + 1])
    with pytest.raises(InvariantViolation, match=r"made step_trained .* but event \d+ is step_compared"):
        timeline.append(whole[where(whole, StepTrained)])
    timeline.close()


def test_decisions_are_not_made_twice(tmp_path: Path) -> None:
    whole = history()
    timeline = Timeline.create(tmp_path)
    for event in whole[:2]:
        timeline.append(event)
    assert timeline.decide("timeout", "step 0", lambda: [1.5, {"late": ["x"]}]) == (1.5, {"late": ("x",)})
    for event in whole[2:]:
        if isinstance(event, RewardGiven):
            timeline.give_reward(event.sample_id, "t", lambda: (0.5, {}))
        else:
            timeline.append(event)
        if isinstance(event, StepTrained):
            break
    timeline.close()

    def forbidden() -> tuple[float, dict[str, float]]:
        raise AssertionError("called again")

    timeline = Timeline.open_for_resume(tmp_path)
    for event in whole[:2]:
        timeline.append(event)
    assert timeline.logged_reward(A) is None  # another segment
    assert timeline.decide("timeout", "step 0", forbidden) == (1.5, {"late": ("x",)})
    with pytest.raises(InvariantViolation, match="the log holds none there"):
        timeline.decide("timeout", "step 7", forbidden)
    for event in whole[2:]:
        if isinstance(event, RewardGiven):
            known = timeline.logged_reward(event.sample_id)
            assert known is not None and known.reward == 0.5
            assert timeline.give_reward(event.sample_id, "t", forbidden).reward == 0.5
        else:
            timeline.append(event)
        if isinstance(event, StepTrained):
            break
    assert not timeline.replaying
    timeline.close()


def test_bookkeeping_and_scheduling_do_not_count(tmp_path: Path) -> None:
    whole = history()
    first = where(whole, SampleStarted)
    extra: list[Event] = [
        SampleStarted(sample_id=A),
        SampleAborted(sample_id=A, reason="engine lost"),
        EngineLost(engine="e1", reason="died"),
        RunInterrupted(reason="signal"),
        RunResumed(checkpoint_step=None),
    ]
    events = [*whole[:first], *extra, *whole[first:]]
    check_all(events)
    assert run_digest(events) == run_digest(whole)
    end = where(events, BatchAssigned)
    write(tmp_path, events[: end + 1])
    timeline = Timeline.open_for_resume(tmp_path)
    for event in whole:  # the re-execution has no lost engine
        timeline.append(event)
    assert timeline.run_digest() == run_digest(whole)
    timeline.close()


def test_digest_counts_what_it_should() -> None:
    whole = history()
    base = run_digest(whole)
    for index, event in enumerate(whole):
        rest = [*whole[:index], *whole[index + 1 :]]
        assert (run_digest(rest) == base) == (event.scope.value != "run"), event
    moved = sampled()
    assert run_digest(moved) == run_digest(moved[::-1])
    assert SIDE


def test_refused_events_are_not_logged(tmp_path: Path) -> None:
    whole = history()
    write(tmp_path, whole[:-1])
    timeline = Timeline.open_for_resume(tmp_path)
    size = (tmp_path / "timeline.jsonl").stat().st_size
    with pytest.raises(InvariantViolation):
        timeline.append(whole[2])
    assert (tmp_path / "timeline.jsonl").stat().st_size == size
    timeline.append(whole[-1])
    timeline.close()
    assert check_all(logged(tmp_path)).finished is not None


def test_a_log_that_breaks_an_invariant_is_not_resumed(tmp_path: Path) -> None:
    from vime.timeline.log import LogWriter

    writer = LogWriter.create(tmp_path / "timeline.jsonl")
    for event in [*history()[:12], history()[2]]:
        writer.append(event)
    writer.close()
    with pytest.raises(InvariantViolation, match="event 12"):
        Timeline.open_for_resume(tmp_path)
