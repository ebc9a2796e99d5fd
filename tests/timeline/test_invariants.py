"""Every invariant holds for a valid history and is caught when an event breaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.timeline.building import A, B, C, compared, generated, history, reported, sampled, started, synced, trained
from vime.errors import InvariantViolation
from vime.timeline.event import Event
from vime.timeline.events import (
    ArraysRestored,
    ArraysWritten,
    BatchAssigned,
    CheckpointWritten,
    ContractFixed,
    Decision,
    EngineLost,
    EngineRejoined,
    Evaluated,
    FilterApplied,
    PromptDrawn,
    RewardGiven,
    RunFinished,
    RunResumed,
    RunStarted,
    SampleAborted,
    SampleDropped,
    SampleFinished,
    SampleStarted,
    StepFinished,
    SyncCommitted,
    SyncRolledBack,
    SyncStaged,
    SyncVerified,
    VersionPublished,
)
from vime.timeline.invariants import check_all
from vime.types import SampleId, VersionRun

READY = [*started(), *synced(0, "w0")]
SAMPLED = [*READY, *sampled()]
ASSIGN = BatchAssigned(step=0, policy_version=0, sample_ids=(A, B))
ASSIGNED = [*SAMPLED, ASSIGN]
ARRAYS = ArraysWritten(step=0, arrays={})
TRAINED = [*ASSIGNED, compared(), ARRAYS, trained(), *synced(1, "w1")]
FINISHED = [*TRAINED, reported()]
PROMPT = PromptDrawn(namespace="train", prompt_index=0, prompt_digest="x")
EVAL = SampleId("eval", 0, 0)
SIDE = {"semantic": "s", "numerical_policy": "n"}


def refused(events: list[Event], words: str) -> None:
    """All but the last event are fine; the last is refused with these words and its number and content."""
    check_all(events[:-1])
    with pytest.raises(InvariantViolation, match=words) as caught:
        check_all(events)
    message = str(caught.value)
    assert message.startswith(f"event {len(events) - 1}, {events[-1].type} {{")


def test_valid_history() -> None:
    state = check_all(history())
    assert state.finished is not None
    assert state.engines["e1"].committed == 1 and state.samples[A].step == 0 and not state.open_samples
    assert state.cursor["train"] == 2 and state.checkpoints[0].files == {"weights": "h"} and state.next_step == 1


def test_every_event_is_needed_or_may_be_left_out() -> None:
    """Deleting any single event of a valid history is noticed, unless nothing later depends on it."""
    events = history()
    unused = {("sync_committed", "e1", 0), ("sync_committed", "e0", 1), ("sync_committed", "e1", 1)}
    for index, event in enumerate(events):
        rest = events[:index] + events[index + 1 :]
        commit = (event.type, getattr(event, "engine", ""), getattr(event, "version", -1))
        dropped_later = event.type == "sample_finished" and getattr(event, "sample_id", None) == C
        if event.type in ("evaluated", "checkpoint_written", "run_finished") or commit in unused or dropped_later:
            check_all(rest)
        else:
            with pytest.raises(InvariantViolation):
                check_all(rest)


def test_start_and_contract() -> None:
    refused([PROMPT], "first event of a run is run_started")
    refused([*started(), started()[0]], "started already")
    refused([RunStarted(run_seed=1, pipeline_digest="p", steps=1, engines=())], "at least one rollout engine")
    refused([RunStarted(run_seed=1, pipeline_digest="p", steps=1, engines=("a", "a"))], "repeat")
    refused([*started(), started()[1]], "fixed already")
    refused([started()[0], VersionPublished(version=0, digest="w", parent=None)], "before the contract is fixed")


@pytest.mark.parametrize(
    ("side", "change", "words"),
    [
        ("e1", {"numerical_policy": "other"}, "numerical_policy identity of e1 is other"),
        ("trainer", {"semantic": "other"}, "semantic identity of trainer is other"),
        ("e0", {"semantic": ""}, "missing digest is a refusal"),
        ("e0", {"deployment": ""}, "deployment identity of e0 is missing"),
    ],
)
def test_identities(side: str, change: dict[str, str], words: str) -> None:
    start, contract = started()
    assert isinstance(contract, ContractFixed)
    sides = {name: dict(identities) for name, identities in contract.sides.items()}
    sides[side] |= change
    refused([start, replace(contract, sides=sides)], words)


def test_identities_of_both_sides() -> None:
    start, contract = started()
    assert isinstance(contract, ContractFixed)
    other = {**SIDE, "numerical_policy": "stock"}
    sides = {"trainer": contract.sides["trainer"], **{e: {**other, "deployment": "d"} for e in ("e0", "e1")}}
    refused([start, replace(contract, rollout=other, sides=sides)], "identities differ: trainer n, rollout stock")
    check_all([start, replace(contract, rollout=other, sides=sides, exact=False)])  # declared: the production arm
    refused([start, replace(contract, sides={"trainer": contract.sides["trainer"]})], "are due")


def test_versions_are_consecutive() -> None:
    refused([*started(), VersionPublished(version=1, digest="w", parent=None)], "version 0 is due")
    refused([*READY, VersionPublished(version=2, digest="w", parent=0)], "version 1 is due")
    refused([*READY, VersionPublished(version=1, digest="w", parent=None)], "parent of version 1 is 0")
    refused([*started(), VersionPublished(version=0, digest="", parent=None)], "without a digest")
    done = [*ASSIGNED, compared(), ARRAYS, trained()]
    refused([*done, VersionPublished(version=1, digest="other", parent=0)], "left weights with the digest w1")


def test_commit_needs_every_engine() -> None:
    published = [*started(), VersionPublished(version=0, digest="w0", parent=None)]
    staged = [*published, *(SyncStaged(engine=e, version=0, digest="w0") for e in ("e0", "e1"))]
    commit = SyncCommitted(engine="e0", version=0, digest="w0")
    one = [*staged, SyncVerified(engine="e0", version=0, digest="w0")]
    refused([*one, commit], "engine e1 has verified nothing")
    check_all([*one, SyncVerified(engine="e1", version=0, digest="w0"), commit])
    refused([*published, SyncVerified(engine="e0", version=0, digest="w0")], "has staged nothing")
    refused([*staged, SyncVerified(engine="e0", version=0, digest="bad")], "the trainer published w0")
    wrong = [*published, SyncStaged(engine="e0", version=0, digest="flipped")]
    refused([*wrong, SyncVerified(engine="e0", version=0, digest="w0")], "staged .0, 'flipped'.")
    check_all([*wrong, SyncRolledBack(engine="e0", version=0, reason="digest differs")])
    refused([*wrong, SyncRolledBack(engine="e0", version=0, reason="")], "rollback says why")
    refused([*published, SyncStaged(engine="e9", version=0, digest="w0")], "no engine 'e9'")
    refused([*published, SyncStaged(engine="e0", version=1, digest="w0")], "version 1 was not published")
    both = [*one, SyncVerified(engine="e1", version=0, digest="w0")]
    refused([*both, SyncCommitted(engine="e0", version=0, digest="x")], "published digest is w0")


def test_engine_one_version_behind_cannot_commit() -> None:
    published = [*TRAINED[: -len(synced(1, "w1"))], VersionPublished(version=1, digest="w1", parent=0)]
    events = [*published, SyncStaged(engine="e0", version=1, digest="w1")]
    events += [SyncVerified(engine="e0", version=1, digest="w1")]
    refused([*published, SyncStaged(engine="e1", version=0, digest="w0")], "version 1 is published; an older one")
    refused([*events, SyncCommitted(engine="e0", version=1, digest="w1")], "engine e1 has verified version 0, w0")


def test_lost_engines() -> None:
    lost = [*READY, EngineLost(engine="e1", reason="died")]
    refused([*READY, EngineRejoined(engine="e1", version=0, digest="w0")], "was not lost")
    refused([*lost, EngineLost(engine="e1", reason="died")], "lost already")
    refused([*lost, EngineRejoined(engine="e1", version=0, digest="other")], "digest of version 0 is w0")
    check_all([*lost, EngineRejoined(engine="e1", version=0, digest="w0")])
    refused([*lost, SyncStaged(engine="e1", version=0, digest="w0")], "is lost")
    advanced = [*lost, PROMPT, *generated(A), RewardGiven(sample_id=A, reward=1.0, source="t")]
    advanced += [replace(ASSIGN, sample_ids=(A,)), compared(num_tokens=3, compared_tokens=3), ARRAYS, trained()]
    advanced += synced(1, "w1", ("e0",))
    refused([*advanced, EngineRejoined(engine="e1", version=0, digest="w0")], "version 1 is committed")
    check_all([*lost, RunResumed(checkpoint_step=None), SyncStaged(engine="e1", version=0, digest="w0")])


def test_prompts_in_order() -> None:
    refused([*READY, replace(PROMPT, prompt_index=1)], "prompt 0 of train is due")
    refused([*READY, PROMPT, PROMPT], "prompt 1 of train is due")
    evaluated = [*READY, PromptDrawn(namespace="eval", prompt_index=0, prompt_digest="x")]
    evaluated += [Evaluated(step=0, version=0, num_samples=1, reward_mean=0.0)]
    check_all([*evaluated, PromptDrawn(namespace="eval", prompt_index=0, prompt_digest="x")])
    check_all([*evaluated, PromptDrawn(namespace="eval", prompt_index=1, prompt_digest="x")])
    refused([*evaluated, PromptDrawn(namespace="eval", prompt_index=2, prompt_digest="x")], "prompt 1 of eval is due")


def test_samples() -> None:
    drawn = [*READY, PROMPT]
    start, finish = generated(A)
    refused([*READY, start], "prompt 0 was not drawn")
    refused([*drawn, start, start], "is started already")
    refused([*drawn, finish], "was not started")
    refused([*drawn, start, finish, finish], "is finished, not being generated")
    refused([*drawn, start, SampleAborted(sample_id=A, reason="")], "abort says why")
    check_all([*drawn, start, SampleAborted(sample_id=A, reason="engine lost"), start, finish])
    refused([*drawn, start, finish, SampleAborted(sample_id=A, reason="x")], "not being generated")
    refused([*drawn, SampleStarted(sample_id=A, engine="e1"), finish], "started in engine e1, not in e0")
    refused([*started(), PROMPT, SampleStarted(sample_id=A, engine="e0")], "no committed version")


def test_tokens_carry_the_committed_version() -> None:
    start, finish = generated(A)
    assert isinstance(finish, SampleFinished)

    def made(*runs: VersionRun) -> SampleFinished:
        return replace(finish, versions=runs)

    drawn = [*READY, PROMPT, start]
    refused([*drawn, made(VersionRun(3, 1, 1, 1))], r"carry version 1, but engine e0 had committed \[0\]")
    refused([*drawn, made(VersionRun(2, 0, 0, 0))], "has 3 tokens, but versions of 2")
    refused([*drawn, made(VersionRun(3, 0, 0, 0), VersionRun(0, 0, 0, 0))], "has 3 tokens")
    refused([*drawn, replace(finish, engine="e7")], "no engine 'e7'")
    old = [*FINISHED, PromptDrawn(namespace="train", prompt_index=2, prompt_digest="x")]
    late = SampleId("train", 2, 0)
    begin, end = generated(late)
    refused([*old, begin, end], r"carry version 0, but engine e0 had committed \[1\]")
    fresh = generated(late, version=1)[1]
    assert isinstance(fresh, SampleFinished)
    stale = replace(fresh, versions=(VersionRun(3, 1, 0, 1),))
    refused([*old, begin, stale], "read KV of version 0: a stale cache")
    refused([*old, begin, replace(fresh, versions=(VersionRun(3, 1, 1, 2),))], "read KV of versions 1 to 2")
    check_all([*old, begin, fresh])


def in_flight(**kwargs: Any) -> list[Event]:
    """A sample during whose generation version 1 was committed."""
    events = [*started(**kwargs), *synced(0, "w0"), PROMPT]
    events += [SampleStarted(sample_id=A), *synced(1, "w1")]
    finish = generated(A)[1]
    assert isinstance(finish, SampleFinished)
    return [*events, replace(finish, versions=(VersionRun(1, 0, 0, 0), VersionRun(2, 1, 0, 1)))]


def test_in_flight_updates_only_where_allowed() -> None:
    refused(in_flight(), "stale cache")
    check_all(in_flight(in_flight_updates=True))
    backwards = in_flight(in_flight_updates=True)
    last = backwards[-1]
    assert isinstance(last, SampleFinished)
    mixed = (VersionRun(1, 1, 1, 1), VersionRun(2, 0, 0, 0))
    refused([*backwards[:-1], replace(last, versions=mixed)], "version 0 follows version 1")
    clean = (VersionRun(1, 0, 0, 0), VersionRun(2, 1, 1, 1))
    refused([*in_flight()[:-1], replace(last, versions=clean)], "changed under the sample")


def test_only_comparable_tokens_are_compared() -> None:
    events = in_flight(in_flight_updates=True, max_staleness=1)
    events += [RewardGiven(sample_id=A, reward=1.0, source="t")]
    events += [BatchAssigned(step=0, policy_version=1, sample_ids=(A,))]
    nothing = compared(
        num_tokens=3, compared_tokens=0, incomparable_tokens={"older_version": 1, "mixed_kv": 2}, mismatch_count=None
    )
    check_all([*events, replace(nothing, distribution_mismatch_count=None)])
    some = compared(num_tokens=3, compared_tokens=1, incomparable_tokens={"x": 2}, manifest_digest="w1")
    refused([*events, some], "only 0 are of version 1 with all their KV")


def test_drops_and_rewards() -> None:
    done = [*READY, PROMPT, *generated(A)]
    refused([*done, SampleDropped(sample_id=A, reason="")], "without a reason")
    drop = SampleDropped(sample_id=A, reason="x")
    refused([*done, drop, drop], "is dropped already")
    refused([*ASSIGNED, drop], "is assigned already")
    refused([*READY, drop], "was not drawn")
    check_all([*READY, PROMPT, drop])
    reward = RewardGiven(sample_id=A, reward=1.0, source="t")
    refused([*done, reward, reward], "has a reward already")
    refused([*done, replace(reward, reward=float("nan"))], "a finite number is required")
    refused([*READY, PROMPT, SampleStarted(sample_id=A), reward], "not finished")
    refused([*READY, FilterApplied(filter="f", subject="0", kept=False)], "says why")
    decision = Decision(kind="k", key="1", value=1)
    refused([*READY, decision, decision], "decided before")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 1}, "step 0 is due"),
        ({"policy_version": 1}, "the policy is version 0"),
        ({"sample_ids": ()}, "without samples"),
        ({"sample_ids": (B, A)}, "ascending"),
        ({"sample_ids": (A, A)}, "ascending"),
        ({"sample_ids": (A, B, C)}, "is dropped, not finished"),
        ({"sample_ids": (A,)}, "group 0 is incomplete: train/0/1"),
        ({"sample_ids": (A, B, SampleId("train", 9, 0))}, "was not started"),
        ({"sample_ids": (EVAL, A, B)}, "not a training sample"),
    ],
)
def test_assignment(change: dict[str, object], words: str) -> None:
    refused([*SAMPLED, replace(ASSIGN, **change)], words)  # type: ignore[arg-type]


def test_assigned_twice_and_unrewarded() -> None:
    refused([*FINISHED, BatchAssigned(step=1, policy_version=1, sample_ids=(A, B))], "assigned to step 0 already")
    refused([*ASSIGNED, replace(ASSIGN, step=1)], "step 0 is not finished")
    events = [*READY, PROMPT, *generated(A)]
    refused([*events, replace(ASSIGN, sample_ids=(A,))], "has no reward")


def test_staleness_budget() -> None:
    def stale(budget: int) -> list[Event]:
        events = [*started(max_staleness=budget), *synced(0, "w0"), PROMPT, *generated(A)]
        return [
            *events,
            RewardGiven(sample_id=A, reward=1.0, source="t"),
            *synced(1, "w1"),
            BatchAssigned(step=0, policy_version=1, sample_ids=(A,)),
        ]

    refused(stale(0), "1 versions behind the policy")
    check_all(stale(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_tokens": 7}, "have 6 tokens"),
        ({"compared_tokens": 5}, "every token is compared or counted"),
        ({"compared_tokens": 5, "incomparable_tokens": {"": 1}}, "need a reason"),
        ({"compared_tokens": 5, "incomparable_tokens": {"x": 1, "y": 0}}, "need a reason"),
        ({"compared_tokens": 0, "incomparable_tokens": {"x": 6}}, "nothing was compared, so mismatch_count is unknown"),
        (
            {"compared_tokens": 0, "incomparable_tokens": {"x": 6}, "mismatch_count": None},
            "so distribution_mismatch_count is unknown, not 0",
        ),
        (
            {"compared_tokens": 0, "mismatch_count": None, "distribution_mismatch_count": None},
            "every token is compared or counted",
        ),
        ({"mismatch_count": None}, "mismatch_count is None of 6"),
        ({"distribution_mismatch_count": 7}, "is 7 of 6"),
        ({"case": "rollout_decode"}, "come from 'rollout_decode'"),
        ({"forward_tokens": 5}, "saw 5 tokens, fewer than the 6"),
        ({"manifest_digest": "w9"}, "evaluated weights w9; version 0 is w0"),
    ],
)
def test_comparison(change: dict[str, object], words: str) -> None:
    refused([*ASSIGNED, replace(compared(), **change)], words)  # type: ignore[arg-type]


def test_training_needs_a_comparison() -> None:
    refused([*ASSIGNED, trained()], "no evidence")
    refused([*SAMPLED, compared()], "no batch was assigned")
    refused([*ASSIGNED, compared(), compared()], "compared already")
    refused([*ASSIGNED, compared(), trained(), trained()], "trained already")
    refused([*ASSIGNED, ARRAYS, ARRAYS], "written already")
    refused([*ASSIGNED, compared(), trained(weights_digest="")], "digest of the trained weights is missing")


def test_end_of_a_step() -> None:
    refused([*ASSIGNED, compared(), trained(), *synced(1, "w1"), reported()], "arrays missing")
    refused([*ASSIGNED, compared(), ARRAYS, trained(), reported()], "were not published")
    refused([*TRAINED, reported(mismatch_count=1)], "the report says mismatch_count 1, the comparison 0")
    refused([*TRAINED, StepFinished(step=0, report={"step": 0})], "the report says num_tokens None")
    refused([*ASSIGNED, ArraysRestored(step=0)], "no arrays of step 0 were announced")
    check_all([*FINISHED, ArraysRestored(step=0)])
    left = [e for e in TRAINED if not isinstance(e, SampleDropped)]
    refused([*left, reported()], "1 samples are neither assigned nor dropped: train/1/0")
    allowed: list[Event] = [
        replace(e, max_staleness=1) if isinstance(e, RunStarted) else e for e in [*left, reported()]
    ]
    check_all(allowed)
    refused([*allowed, RunFinished(weights_digest="w1")], "neither assigned nor dropped")
    refused([*FINISHED, reported()], "finished already")


def test_checkpoint_and_end() -> None:
    point = CheckpointWritten(step=0, files={"w": "h"})
    refused([*TRAINED, point], "after a finished step")
    refused([*FINISHED, replace(point, files={})], "restores nothing")
    refused([*FINISHED, point, point], "has a checkpoint already")
    end = RunFinished(weights_digest="w1")
    refused([*READY, end], "0 of 1 steps")
    refused([*FINISHED, replace(end, weights_digest="w0")], "last published weights are w1")
    refused([*FINISHED, end, PROMPT], "after its end")
    begun = [*FINISHED, PromptDrawn(namespace="eval", prompt_index=0, prompt_digest="x"), SampleStarted(sample_id=EVAL)]
    refused([*begun, Evaluated(step=0, version=1, num_samples=1, reward_mean=0.0)], "eval/0/0")
    for count, mean, words in (
        (0, 0.0, "the mean reward of 0 samples is 0.0: only that of none is None"),
        (2, None, "the mean reward of 2 samples is None"),
        (2, float("inf"), "is not finite"),
    ):
        refused([*FINISHED, Evaluated(step=0, version=1, num_samples=count, reward_mean=mean)], words)
    check_all([*FINISHED, Evaluated(step=0, version=1, num_samples=0, reward_mean=None)])


def test_order_of_engines_does_not_matter() -> None:
    events = history()
    check_all([*events[:5], events[6], events[5], *events[7:]])
