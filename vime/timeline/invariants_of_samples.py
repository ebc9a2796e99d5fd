"""Invariants of prompts, samples and rewards."""

from __future__ import annotations

import math

from vime.timeline.events import (
    PromptDrawn,
    RewardGiven,
    SampleAborted,
    SampleDropped,
    SampleFinished,
    SampleStarted,
)
from vime.timeline.rules import Broken, require
from vime.timeline.state import EngineState, SampleState, State
from vime.types import SampleId


def prompt_drawn(state: State, event: PromptDrawn) -> None:
    """Prompts are drawn in order; each evaluation may begin its namespace anew."""
    due = state.cursor[event.namespace]
    anew = event.namespace == "eval" and not state.evaluation_open and event.prompt_index == 0
    require(anew or event.prompt_index == due, f"prompt {due} of {event.namespace} is due: prompts are drawn in order")


def started(state: State, event: SampleStarted) -> None:
    """A sample starts once its prompt is drawn, and again only after it was aborted."""
    sample_id = event.sample_id
    drawn = state.cursor[sample_id.namespace]
    require(0 <= sample_id.prompt_index < drawn, f"prompt {sample_id.prompt_index} was not drawn; {drawn} were")
    before = state.samples.get(sample_id)
    if before is not None:
        require(before.status == "aborted", f"sample {sample_id} is {before.status} already (invariant 1)")
    if event.engine is not None:
        engine = _engine(state, event.engine)
        require(engine.committed is not None, f"engine {event.engine} has no committed version (invariant 3)")


def _engine(state: State, name: str) -> EngineState:
    engine = state.engines.get(name)
    if engine is None:
        raise Broken(f"there is no engine {name!r}; registered are {sorted(state.engines)}")
    require(engine.live, f"engine {name} is lost")
    return engine


def _known(state: State, sample_id: SampleId) -> SampleState:
    sample = state.samples.get(sample_id)
    if sample is None:
        raise Broken(f"sample {sample_id} was not started (invariant 1)")
    return sample


def finished(state: State, event: SampleFinished) -> None:
    """Every token has a version that its engine had committed while the sample was generated."""
    sample = _known(state, event.sample_id)
    require(
        sample.status == "started", f"sample {event.sample_id} is {sample.status}, not being generated (invariant 1)"
    )
    require(
        sample.engine in (None, event.engine),
        f"sample {event.sample_id} was started in engine {sample.engine}, not in {event.engine}",
    )
    engine = _engine(state, event.engine)
    counted = sum(run.count for run in event.versions)
    require(
        counted == event.num_tokens and all(run.count > 0 for run in event.versions),
        f"the sample has {event.num_tokens} tokens, but versions of {counted} (invariant 3)",
    )
    served = _served_since(engine, sample.tick)
    previous = -1
    for run in event.versions:
        require(
            run.version in served,
            f"tokens carry version {run.version}, but engine {event.engine} had committed {sorted(served)} while "
            "the sample was generated (invariant 3)",
        )
        require(run.version >= previous, f"version {run.version} follows version {previous} (invariant 3)")
        previous = run.version
        require(
            0 <= run.kv_oldest <= run.kv_newest <= run.version,
            f"tokens of version {run.version} read KV of versions {run.kv_oldest} to {run.kv_newest} (invariant 4)",
        )
        in_flight = state.run is not None and state.run.in_flight_updates
        require(
            in_flight or run.kv_oldest == run.version,
            f"tokens of version {run.version} read KV of version {run.kv_oldest}: a stale cache (invariant 4)",
        )
    require(
        len({run.version for run in event.versions}) <= 1 or (state.run is not None and state.run.in_flight_updates),
        "the weights changed under the sample, but the pipeline allows no in-flight updates (invariant 4)",
    )


def _served_since(engine: EngineState, tick: int) -> set[int]:
    """Versions that the engine had committed at ``tick`` or later."""
    served = set()
    for committed_at, version in reversed(engine.commits):
        served.add(version)
        if committed_at <= tick:
            break
    return served


def aborted(state: State, event: SampleAborted) -> None:
    """Only a sample that is being generated can be aborted."""
    sample = _known(state, event.sample_id)
    require(sample.status == "started", f"sample {event.sample_id} is {sample.status}, not being generated")
    require(bool(event.reason), "an abort says why")


def dropped(state: State, event: SampleDropped) -> None:
    """A sample is dropped once, with a reason, and never after it was assigned."""
    require(bool(event.reason), f"sample {event.sample_id} is dropped without a reason (invariant 1)")
    sample = state.samples.get(event.sample_id)
    if sample is None:
        drawn = state.cursor[event.sample_id.namespace]
        return require(event.sample_id.prompt_index < drawn, f"prompt {event.sample_id.prompt_index} was not drawn")
    require(
        sample.status not in ("dropped", "assigned"),
        f"sample {event.sample_id} is {sample.status} already (invariant 1)",
    )


def reward_given(state: State, event: RewardGiven) -> None:
    """A finished sample gets one finite reward."""
    sample = _known(state, event.sample_id)
    require(sample.status == "finished", f"sample {event.sample_id} is {sample.status}, not finished")
    require(sample.reward is None, f"sample {event.sample_id} has a reward already")
    require(math.isfinite(event.reward), f"the reward is {event.reward}; a finite number is required")
