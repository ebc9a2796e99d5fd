"""What must hold of every event, given the state before it. Checked on each append and again on every replay.

The numbers of the rules in messages are those of the seven invariants:

1. a sample is assigned to exactly one step, or dropped with a reason;
2. versions are consecutive, and committed only when every engine reports the digest that the trainer published;
3. each token carries the version that was committed in its engine when it was sampled;
4. caches belong to a version; versions change under a sample only where the pipeline allows it;
5. a step trains only on samples within its staleness budget;
6. only comparable tokens are compared, the rest is counted by reason, and nothing compared is never 0 mismatches;
7. the trainer's log-probabilities come from a forward of its own, shown by evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from vime.errors import InvariantViolation
from vime.timeline import invariants_of_samples as of_samples
from vime.timeline import invariants_of_steps as of_steps
from vime.timeline.event import Event, Scope
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
    RunStarted,
    SampleAborted,
    SampleDropped,
    SampleFinished,
    SampleStarted,
    StepCompared,
    StepFinished,
    StepTrained,
    SyncCommitted,
    SyncRolledBack,
    SyncStaged,
    SyncVerified,
    VersionPublished,
)
from vime.timeline.rules import Broken, require
from vime.timeline.state import State, advance


def check(state: State, event: Event, seq: int) -> None:
    """Check one event against the state before it.

    Raises InvariantViolation naming the event's number, its content and the rule it breaks.
    """
    try:
        _check(state, event)
    except Broken as broken:
        raise InvariantViolation(f"event {seq}, {event.describe()}: {broken}") from None


def check_all(events: Iterable[Event], state: State | None = None) -> State:
    """Fold events from the start, checking each; returns the state after the last."""
    state = State() if state is None else state
    for seq, event in enumerate(events, start=state.num_events):
        check(state, event, seq)
        advance(state, event)
    return state


def _check(state: State, event: Event) -> None:
    require(state.finished is None, "the run is finished; nothing can happen after its end")
    if isinstance(event, RunStarted):
        return _run_started(state, event)
    require(state.run is not None, "the first event of a run is run_started")
    if event.scope is not Scope.BOOKKEEPING and not isinstance(event, ContractFixed | Decision | PromptDrawn):
        require(state.contract is not None, "nothing is computed before the contract is fixed")
    match event:
        case ContractFixed():
            _contract_fixed(state, event)
        case VersionPublished():
            _version_published(state, event)
        case SyncStaged() | SyncVerified() | SyncCommitted() | SyncRolledBack():
            _sync(state, event)
        case EngineLost() | EngineRejoined():
            _engine(state, event)
        case PromptDrawn():
            of_samples.prompt_drawn(state, event)
        case SampleStarted():
            of_samples.started(state, event)
        case SampleFinished():
            of_samples.finished(state, event)
        case SampleAborted():
            of_samples.aborted(state, event)
        case SampleDropped():
            of_samples.dropped(state, event)
        case RewardGiven():
            of_samples.reward_given(state, event)
        case FilterApplied():
            require(event.kept or bool(event.reason), "a filter that refuses says why")
        case Decision():
            known = (event.kind, event.key) in state.decisions
            require(not known, "this was decided before; a key names one decision of the whole run")
        case BatchAssigned():
            of_steps.assigned(state, event)
        case ArraysWritten():
            of_steps.arrays_written(state, event)
        case ArraysRestored():
            of_steps.arrays_restored(state, event)
        case StepCompared():
            of_steps.compared(state, event)
        case StepTrained():
            of_steps.trained(state, event)
        case StepFinished():
            of_steps.finished(state, event)
        case Evaluated():
            _evaluated(state, event)
        case CheckpointWritten():
            of_steps.checkpoint_written(state, event)
        case RunFinished():
            of_steps.run_finished(state, event)


def _run_started(state: State, event: RunStarted) -> None:
    require(state.run is None, "the run has started already")
    require(len(event.engines) > 0, "a run needs at least one rollout engine")
    require(len(set(event.engines)) == len(event.engines), f"engine ids repeat: {list(event.engines)}")
    require("trainer" not in event.engines, "an engine cannot be called 'trainer', the other side's name")
    require(event.max_staleness >= 0, "max_staleness is a number of versions, 0 or more")
    require(event.steps >= 0, "steps is 0 or more")


def _contract_fixed(state: State, event: ContractFixed) -> None:
    require(state.contract is None, "the contract is fixed already")
    due = {"trainer", *state.engines}
    require(set(event.sides) == due, f"identities of {sorted(due)} are due, those of {sorted(event.sides)} were given")
    names = ("semantic", "numerical_policy")
    for side, identities in event.sides.items():
        claimed = event.trainer if side == "trainer" else event.rollout
        for name in names:
            value = identities.get(name)
            require(bool(value), f"the {name} identity of {side} is missing; a missing digest is a refusal")
            other = claimed.get(name)
            require(value == other, f"the {name} identity of {side} is {value}, but that of its side is {other}")
        require(bool(identities.get("deployment")), f"the deployment identity of {side} is missing")
    if event.exact:
        for name in names:
            trainer, rollout = event.trainer[name], event.rollout[name]
            require(trainer == rollout, f"the {name} identities differ: trainer {trainer}, rollout {rollout}")


def _version_published(state: State, event: VersionPublished) -> None:
    latest = state.latest_version
    due = 0 if latest is None else latest.version + 1
    require(event.version == due, f"version {due} is due: versions are consecutive (invariant 2)")
    parent = None if latest is None else latest.version
    require(event.parent == parent, f"the parent of version {event.version} is {parent} (invariant 2)")
    require(bool(event.digest), "a version without a digest cannot be published (invariant 2)")
    last = state.last_step
    trained = state.steps[last].trained if last is not None else None
    if trained is not None:
        same = event.digest == trained.weights_digest
        require(same, f"step {last} left weights with the digest {trained.weights_digest} (invariant 2)")


def _sync(state: State, event: SyncStaged | SyncVerified | SyncCommitted | SyncRolledBack) -> None:
    engine = state.engines.get(event.engine)
    if engine is None:
        raise Broken(f"there is no engine {event.engine!r}; registered are {sorted(state.engines)}")
    require(engine.live, f"engine {event.engine} is lost")
    published = state.versions.get(event.version)
    if published is None:
        raise Broken(f"version {event.version} was not published (invariant 2)")
    if isinstance(event, SyncStaged):
        newest = len(state.versions) - 1
        return require(event.version == newest, f"version {newest} is published; an older one is stale (invariant 2)")
    if isinstance(event, SyncCommitted):
        for name, other in state.engines.items():
            good = not other.live or other.verified == (event.version, published.digest)
            found = "nothing" if other.verified is None else f"version {other.verified[0]}, {other.verified[1]}"
            require(
                good,
                f"version {event.version} ({published.digest}) cannot be committed: engine {name} has verified "
                f"{found}; every engine has to report the published digest first (invariant 2)",
            )
        require(event.digest == published.digest, f"the published digest is {published.digest} (invariant 2)")
    staged = engine.staged
    require(
        staged is not None and staged[0] == event.version,
        f"engine {event.engine} has staged {'nothing' if staged is None else f'version {staged[0]}'} (invariant 2)",
    )
    if isinstance(event, SyncVerified):
        require(
            staged == (event.version, event.digest) and event.digest == published.digest,
            f"engine {event.engine} staged {staged}, the trainer published {published.digest} (invariant 2)",
        )
    elif isinstance(event, SyncRolledBack):
        require(bool(event.reason), "a rollback says why")


def _engine(state: State, event: EngineLost | EngineRejoined) -> None:
    engine = state.engines.get(event.engine)
    if engine is None:
        raise Broken(f"there is no engine {event.engine!r}; registered are {sorted(state.engines)}")
    if isinstance(event, EngineLost):
        return require(engine.live, f"engine {event.engine} is lost already")
    require(not engine.live, f"engine {event.engine} was not lost")
    served = {name: e.committed for name, e in state.engines.items() if e.live}
    due = max((v for v in served.values() if v is not None), default=engine.committed)
    require(event.version == due, f"version {due} is committed; an engine rejoins at that version only (invariant 2)")
    published = state.versions[event.version].digest
    require(event.digest == published, f"the digest of version {event.version} is {published} (invariant 2)")


def _evaluated(state: State, event: Evaluated) -> None:
    require(event.version in state.versions, f"version {event.version} was not published")
    left = sorted(state.open_evaluation_samples)
    require(not left, f"evaluation samples are neither finished nor dropped: {', '.join(map(str, left[:5]))}")
    mean, count = event.reward_mean, event.num_samples
    require((mean is None) == (count == 0), f"the mean reward of {count} samples is {mean}: only that of none is None")
    require(mean is None or math.isfinite(mean), "the mean reward is not finite")
