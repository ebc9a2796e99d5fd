"""A short valid history, event by event, for tests that break it."""

from __future__ import annotations

from typing import Any

from vime.timeline.event import Event
from vime.timeline.events import (
    ArraysWritten,
    BatchAssigned,
    CheckpointWritten,
    ContractFixed,
    Evaluated,
    PromptDrawn,
    RewardGiven,
    RunFinished,
    RunStarted,
    SampleDropped,
    SampleFinished,
    SampleStarted,
    StepCompared,
    StepFinished,
    StepTrained,
    SyncCommitted,
    SyncStaged,
    SyncVerified,
    VersionPublished,
)
from vime.types import SampleId, VersionRun

SIDE = {"semantic": "s", "numerical_policy": "n"}
A, B, C = SampleId("train", 0, 0), SampleId("train", 0, 1), SampleId("train", 1, 0)


def started(engines: tuple[str, ...] = ("e0", "e1"), **kwargs: Any) -> list[Event]:
    """Run and contract."""
    sides = {name: {**SIDE, "deployment": "d"} for name in ("trainer", *engines)}
    run: dict[str, Any] = {"run_seed": 1, "pipeline_digest": "p", "steps": 1, "engines": engines, **kwargs}
    return [RunStarted(**run), ContractFixed(trainer=SIDE, rollout=SIDE, sides=sides)]


def synced(version: int, digest: str, engines: tuple[str, ...] = ("e0", "e1")) -> list[Event]:
    """A version, published and committed everywhere."""
    events: list[Event] = [
        VersionPublished(version=version, digest=digest, parent=None if version == 0 else version - 1)
    ]
    for kind in (SyncStaged, SyncVerified, SyncCommitted):
        events += [kind(engine=engine, version=version, digest=digest) for engine in engines]
    return events


def generated(sample_id: SampleId, version: int = 0, tokens: int = 3, **kwargs: Any) -> list[Event]:
    """A sample, started and finished."""
    made: dict[str, Any] = {
        "sample_id": sample_id,
        "num_prompt_tokens": 2,
        "num_tokens": tokens,
        "finish_reason": "stop",
        "versions": (VersionRun(tokens, version, version, version),),
        "content_digest": f"c{sample_id}",
        "engine": "e0",
        **kwargs,
    }
    return [SampleStarted(sample_id=sample_id), SampleFinished(**made)]


def sampled() -> list[Event]:
    """Two prompts; a group of two and a third sample, dropped."""
    events: list[Event] = [PromptDrawn(namespace="train", prompt_index=i, prompt_digest="x") for i in range(2)]
    events += [*generated(A), *generated(B), *generated(C)]
    events += [RewardGiven(sample_id=i, reward=0.5, source="t") for i in (A, B)]
    return [*events, SampleDropped(sample_id=C, reason="too easy")]


def compared(**kwargs: Any) -> StepCompared:
    """Six tokens compared, none differs."""
    values: dict[str, Any] = {
        "step": 0,
        "num_tokens": 6,
        "compared_tokens": 6,
        "incomparable_tokens": {},
        "mismatch_count": 0,
        "distribution_mismatch_count": 0,
        "case": "trainer_score",
        "forward_tokens": 10,
        "manifest_digest": "w0",
    }
    return StepCompared(**{**values, **kwargs})


def trained(**kwargs: Any) -> StepTrained:
    """The step's update."""
    values: dict[str, Any] = {"step": 0, "weights_digest": "w1", "gradient_digest": "g", "loss": 0.1, "updates": 1}
    return StepTrained(**{**values, "grad_norm": 1.0, "learning_rate": 0.1, **kwargs})


def reported(**kwargs: Any) -> StepFinished:
    """The end of the step."""
    event = compared()
    names = ("num_tokens", "compared_tokens", "incomparable_tokens", "mismatch_count", "distribution_mismatch_count")
    return StepFinished(step=0, report={"step": 0, **{name: getattr(event, name) for name in names}, **kwargs})


def history(**kwargs: Any) -> list[Event]:
    """A whole run of one step."""
    return [
        *started(**kwargs),
        *synced(0, "w0"),
        *sampled(),
        BatchAssigned(step=0, policy_version=0, sample_ids=(A, B)),
        compared(),
        ArraysWritten(step=0, arrays={"tokens": {"digest": "t", "dtype": "int64", "shape": (6,)}}),
        trained(),
        *synced(1, "w1"),
        Evaluated(step=0, version=1, num_samples=0, reward_mean=None),
        reported(),
        CheckpointWritten(step=0, files={"weights": "h"}),
        RunFinished(weights_digest="w1"),
    ]
