"""The state of a run: a fold over its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from vime.timeline.event import Event
from vime.timeline.events import (
    ArraysWritten,
    BatchAssigned,
    CheckpointWritten,
    ContractFixed,
    Decision,
    EngineLost,
    EngineRejoined,
    Evaluated,
    PromptDrawn,
    RewardGiven,
    RunFinished,
    RunResumed,
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
from vime.types import SampleId

SampleStatus = Literal["started", "aborted", "finished", "dropped", "assigned"]


@dataclass(frozen=True, slots=True)
class SampleState:
    """A sample. ``tick`` counts folded events up to its start; ``oldest_version`` is None for an empty sample.

    ``comparable_tokens``: version -> how many of its tokens read KV of that version only.
    """

    status: SampleStatus
    tick: int
    engine: str | None = None
    num_tokens: int = 0
    comparable_tokens: Mapping[int, int] = field(default_factory=dict)
    oldest_version: int | None = None
    reward: float | None = None
    step: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine: what is staged and verified beside what is served. ``commits``: (tick, version), ascending."""

    live: bool = True
    staged: tuple[int, str] | None = None
    verified: tuple[int, str] | None = None
    commits: tuple[tuple[int, int], ...] = ()

    @property
    def committed(self) -> int | None:
        """The version served now."""
        return self.commits[-1][1] if self.commits else None


@dataclass(frozen=True, slots=True)
class StepState:
    """A step, from the assignment of its batch on."""

    assigned: BatchAssigned
    arrays: ArraysWritten | None = None
    compared: StepCompared | None = None
    trained: StepTrained | None = None
    finished: StepFinished | None = None


class State:
    """Everything that is known after some events. Read-only for all but the fold in this module.

    ``Timeline.state`` is a live view of the run; :func:`fold` returns a state that nothing changes any more.
    """

    def __init__(self) -> None:
        self._tick = 0
        self._run: RunStarted | None = None
        self._contract: ContractFixed | None = None
        self._finished: RunFinished | None = None
        self._versions: dict[int, VersionPublished] = {}
        self._engines: dict[str, EngineState] = {}
        self._cursor: dict[str, int] = {"train": 0, "eval": 0}
        self._evaluation_open = False
        self._samples: dict[SampleId, SampleState] = {}
        self._groups: dict[tuple[str, int], list[SampleId]] = {}
        self._open: dict[str, set[SampleId]] = {"train": set(), "eval": set()}
        self._steps: dict[int, StepState] = {}
        self._decisions: dict[tuple[str, str], Any] = {}
        self._checkpoints: dict[int, CheckpointWritten] = {}
        self._evaluations: list[Evaluated] = []

    @property
    def num_events(self) -> int:
        """How many events were folded."""
        return self._tick

    @property
    def run(self) -> RunStarted | None:
        """How the run started."""
        return self._run

    @property
    def contract(self) -> ContractFixed | None:
        """The identities of both sides."""
        return self._contract

    @property
    def finished(self) -> RunFinished | None:
        """The end of the run."""
        return self._finished

    @property
    def versions(self) -> Mapping[int, VersionPublished]:
        """Published versions."""
        return MappingProxyType(self._versions)

    @property
    def latest_version(self) -> VersionPublished | None:
        """The version published last."""
        return self._versions[len(self._versions) - 1] if self._versions else None

    @property
    def engines(self) -> Mapping[str, EngineState]:
        """Registered engines by id."""
        return MappingProxyType(self._engines)

    @property
    def cursor(self) -> Mapping[str, int]:
        """The index of the next prompt of each namespace."""
        return MappingProxyType(self._cursor)

    @property
    def evaluation_open(self) -> bool:
        """Whether evaluation prompts were drawn since the last ``evaluated``."""
        return self._evaluation_open

    @property
    def samples(self) -> Mapping[SampleId, SampleState]:
        """Samples by id; those of a complete evaluation are forgotten."""
        return MappingProxyType(self._samples)

    def group(self, namespace: str, prompt_index: int) -> tuple[SampleId, ...]:
        """Samples that were started for a prompt."""
        return tuple(self._groups.get((namespace, prompt_index), ()))

    @property
    def open_samples(self) -> AbstractSet[SampleId]:
        """Training samples that are neither assigned to a step nor dropped."""
        return frozenset(self._open["train"])

    @property
    def open_evaluation_samples(self) -> AbstractSet[SampleId]:
        """Evaluation samples that are neither finished nor dropped."""
        return frozenset(self._open["eval"])

    @property
    def steps(self) -> Mapping[int, StepState]:
        """Steps whose batch is assigned."""
        return MappingProxyType(self._steps)

    @property
    def last_step(self) -> int | None:
        """The step assigned last."""
        return next(reversed(self._steps), None)

    @property
    def next_step(self) -> int:
        """The step that the next batch belongs to."""
        last = self.last_step
        return last + 1 if last is not None else self._run.first_step if self._run else 0

    @property
    def decisions(self) -> Mapping[tuple[str, str], Any]:
        """Logged decisions by (kind, key)."""
        return MappingProxyType(self._decisions)

    @property
    def checkpoints(self) -> Mapping[int, CheckpointWritten]:
        """Announced checkpoints by step."""
        return MappingProxyType(self._checkpoints)

    @property
    def evaluations(self) -> tuple[Evaluated, ...]:
        """Complete evaluations."""
        return tuple(self._evaluations)


def fold(events: Iterable[Event]) -> State:
    """The state after the events. Checks nothing: see ``vime.timeline.invariants``."""
    state = State()
    for event in events:
        advance(state, event)
    return state


def advance(state: State, event: Event) -> None:
    """Fold one more event into a state that the caller owns."""
    state._tick += 1
    match event:
        case RunStarted():
            state._run = event
            state._engines.update({engine: EngineState() for engine in event.engines})
        case ContractFixed():
            state._contract = event
        case RunFinished():
            state._finished = event
        case VersionPublished():
            state._versions[event.version] = event
        case SampleStarted() | SampleFinished() | SampleAborted() | SampleDropped() | RewardGiven():
            _advance_sample(state, event)
        case PromptDrawn():
            state._cursor[event.namespace] = event.prompt_index + 1
            state._evaluation_open |= event.namespace == "eval"
        case Decision():
            state._decisions[(event.kind, event.key)] = event.value
        case BatchAssigned() | ArraysWritten() | StepCompared() | StepTrained() | StepFinished():
            _advance_step(state, event)
        case Evaluated():
            state._evaluations.append(event)
            state._evaluation_open = False
            for sample_id in [s for s in state._samples if s.namespace == "eval"]:
                del state._samples[sample_id]
            for group in [g for g in state._groups if g[0] == "eval"]:
                del state._groups[group]
        case CheckpointWritten():
            state._checkpoints[event.step] = event
        case RunResumed():
            for name, engine in state._engines.items():
                if not engine.live:
                    state._engines[name] = _rejoined(state, engine)
        case SyncStaged() | SyncVerified() | SyncCommitted() | SyncRolledBack() | EngineLost() | EngineRejoined():
            _advance_engine(state, event)
        case _:
            pass


def _rejoined(state: State, engine: EngineState) -> EngineState:
    served = [e.committed for e in state._engines.values() if e.live and e.committed is not None]
    commits = engine.commits + (((state._tick, max(served)),) if served else ())
    return EngineState(live=True, commits=commits)


def _advance_engine(
    state: State, event: SyncStaged | SyncVerified | SyncCommitted | SyncRolledBack | EngineLost | EngineRejoined
) -> None:
    engine = state._engines[event.engine]
    match event:
        case SyncStaged():
            engine = replace(engine, staged=(event.version, event.digest), verified=None)
        case SyncVerified():
            engine = replace(engine, verified=(event.version, event.digest))
        case SyncCommitted():
            # ``verified`` stays until the next staging: the other engines' commits look at it.
            engine = replace(engine, staged=None, commits=(*engine.commits, (state._tick, event.version)))
        case SyncRolledBack():
            engine = replace(engine, staged=None, verified=None)
        case EngineLost():
            engine = EngineState(live=False, commits=engine.commits)
        case EngineRejoined():
            engine = EngineState(live=True, commits=(*engine.commits, (state._tick, event.version)))
    state._engines[event.engine] = engine


def _advance_sample(
    state: State, event: SampleStarted | SampleFinished | SampleAborted | SampleDropped | RewardGiven
) -> None:
    sample_id = event.sample_id
    still_open = state._open[sample_id.namespace]
    if isinstance(event, SampleStarted):
        if sample_id not in state._samples:
            state._groups.setdefault((sample_id.namespace, sample_id.prompt_index), []).append(sample_id)
        state._samples[sample_id] = SampleState("started", state._tick, event.engine)
        still_open.add(sample_id)
        return
    if sample_id not in state._samples:  # dropped before it was started
        state._groups.setdefault((sample_id.namespace, sample_id.prompt_index), []).append(sample_id)
    sample = state._samples.get(sample_id, SampleState("started", state._tick))
    match event:
        case SampleFinished():
            comparable: dict[int, int] = {}
            for run in event.versions:
                if run.kv_oldest == run.kv_newest == run.version:
                    comparable[run.version] = comparable.get(run.version, 0) + run.count
            sample = replace(
                sample,
                status="finished",
                engine=event.engine,
                num_tokens=event.num_tokens,
                comparable_tokens=comparable,
                oldest_version=min((min(r.version, r.kv_oldest) for r in event.versions), default=None),
            )
            if sample_id.namespace == "eval":
                still_open.discard(sample_id)
        case SampleAborted():
            sample = replace(sample, status="aborted", reason=event.reason)
        case SampleDropped():
            sample = replace(sample, status="dropped", reason=event.reason)
            still_open.discard(sample_id)
        case RewardGiven():
            sample = replace(sample, reward=event.reward)
    state._samples[sample_id] = sample


def _advance_step(
    state: State, event: BatchAssigned | ArraysWritten | StepCompared | StepTrained | StepFinished
) -> None:
    match event:
        case BatchAssigned():
            state._steps[event.step] = StepState(event)
            for sample_id in event.sample_ids:
                state._samples[sample_id] = replace(state._samples[sample_id], status="assigned", step=event.step)
                state._open["train"].discard(sample_id)
        case ArraysWritten():
            state._steps[event.step] = replace(state._steps[event.step], arrays=event)
        case StepCompared():
            state._steps[event.step] = replace(state._steps[event.step], compared=event)
        case StepTrained():
            state._steps[event.step] = replace(state._steps[event.step], trained=event)
        case StepFinished():
            state._steps[event.step] = replace(state._steps[event.step], finished=event)
