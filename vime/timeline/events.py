"""Every event of a run. The log of these is the truth; all state is a fold over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vime.timeline.event import Event, OrderKey, Scope, deployment
from vime.timeline.sample_events import (
    Decision,
    FilterApplied,
    PromptDrawn,
    RewardGiven,
    SampleAborted,
    SampleDropped,
    SampleFinished,
    SampleStarted,
)
from vime.types import SampleId

__all__ = [
    "EVENT_TYPES",
    "OBSERVED_IN_REPORTS",
    "ArraysRestored",
    "ArraysWritten",
    "BatchAssigned",
    "CheckpointWritten",
    "ContractFixed",
    "Decision",
    "EngineLost",
    "EngineRejoined",
    "Evaluated",
    "FileAnnounced",
    "FilterApplied",
    "PromptDrawn",
    "RewardGiven",
    "RunFinished",
    "RunInterrupted",
    "RunResumed",
    "RunStarted",
    "SampleAborted",
    "SampleDropped",
    "SampleFinished",
    "SampleStarted",
    "StepCompared",
    "StepFinished",
    "StepTrained",
    "SyncCommitted",
    "SyncRolledBack",
    "SyncStaged",
    "SyncVerified",
    "VersionPublished",
]

# ---------------------------------------------------------------------------------------------------- run


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The first event. ``pipeline_digest`` covers the settings that decide bits; ``resolved_digest`` all of them.

    ``data_digest`` covers every row of the data source, training and evaluation.
    ``steps`` training steps are numbered from ``first_step``. ``max_staleness`` is how many versions a sample may
    lie behind the policy that trains on it; with ``in_flight_updates`` weights may change under a sample.
    """

    type: ClassVar[str] = "run_started"
    barrier: ClassVar[bool] = True
    run_seed: int
    pipeline_digest: str
    steps: int
    first_step: int = 0
    max_staleness: int = 0
    in_flight_updates: bool = False
    data_digest: str = ""
    engines: tuple[str, ...] = deployment()
    resolved_digest: str = deployment(default="")
    placement: Mapping[str, Any] = deployment(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ContractFixed(Event):
    """Identities of both sides: ``{"semantic": ..., "numerical_policy": ...}`` each.

    ``exact``: both sides claim equal bits. ``sides`` holds all three identities of the trainer (``"trainer"``)
    and of every engine (by its id).
    """

    type: ClassVar[str] = "contract_fixed"
    barrier: ClassVar[bool] = True
    trainer: Mapping[str, str]
    rollout: Mapping[str, str]
    exact: bool = True
    sides: Mapping[str, Mapping[str, str]] = deployment()


@dataclass(frozen=True, kw_only=True)
class RunInterrupted(Event):
    """The run stopped before its end, and can be resumed."""

    type: ClassVar[str] = "run_interrupted"
    scope: ClassVar[Scope] = Scope.BOOKKEEPING
    barrier: ClassVar[bool] = True
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunResumed(Event):
    """The run goes on from the checkpoint of ``checkpoint_step`` (None: from the start)."""

    type: ClassVar[str] = "run_resumed"
    scope: ClassVar[Scope] = Scope.BOOKKEEPING
    barrier: ClassVar[bool] = True
    checkpoint_step: int | None


@dataclass(frozen=True, kw_only=True)
class FileAnnounced(Event):
    """A file beside the log, and the SHA-256 (hex) of the bytes that it holds from now on.

    It is announced before it is written: a crash in between leaves the file that was announced before.
    """

    type: ClassVar[str] = "file_announced"
    scope: ClassVar[Scope] = Scope.BOOKKEEPING
    barrier: ClassVar[bool] = True
    file: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    """The last event. ``weights_digest`` is that of the final weights."""

    type: ClassVar[str] = "run_finished"
    barrier: ClassVar[bool] = True
    weights_digest: str


# ----------------------------------------------------------------------------------------- weight versions


@dataclass(frozen=True, kw_only=True)
class VersionPublished(Event):
    """The trainer offers weights: ``digest`` is the manifest digest of their bytes."""

    type: ClassVar[str] = "version_published"
    barrier: ClassVar[bool] = True
    version: int
    digest: str
    parent: int | None


@dataclass(frozen=True, kw_only=True)
class _Sync(Event):
    scope: ClassVar[Scope] = Scope.SCHEDULING
    free: ClassVar[bool] = True
    rank: ClassVar[int] = 0
    engine: str
    version: int

    def order_key(self) -> OrderKey:
        return ("sync", self.version, 0, self.rank, self.engine)


@dataclass(frozen=True, kw_only=True)
class SyncStaged(_Sync):
    """An engine holds a copy of the version beside what it serves; ``digest`` as recomputed by the engine."""

    type: ClassVar[str] = "sync_staged"
    rank: ClassVar[int] = 0
    digest: str


@dataclass(frozen=True, kw_only=True)
class SyncVerified(_Sync):
    """The engine's digest was compared with the published one and is equal."""

    type: ClassVar[str] = "sync_verified"
    rank: ClassVar[int] = 1
    digest: str


@dataclass(frozen=True, kw_only=True)
class SyncCommitted(_Sync):
    """The engine serves the version from now on."""

    type: ClassVar[str] = "sync_committed"
    barrier: ClassVar[bool] = True
    rank: ClassVar[int] = 2
    digest: str


@dataclass(frozen=True, kw_only=True)
class SyncRolledBack(_Sync):
    """The engine forgot the staged version and serves the old one on."""

    type: ClassVar[str] = "sync_rolled_back"
    rank: ClassVar[int] = 3
    reason: str


@dataclass(frozen=True, kw_only=True)
class EngineLost(Event):
    """An engine takes no part any more."""

    type: ClassVar[str] = "engine_lost"
    scope: ClassVar[Scope] = Scope.BOOKKEEPING
    engine: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class EngineRejoined(Event):
    """A lost engine serves the committed version again."""

    type: ClassVar[str] = "engine_rejoined"
    scope: ClassVar[Scope] = Scope.BOOKKEEPING
    engine: str
    version: int
    digest: str


# -------------------------------------------------------------------------------------------------- steps

OBSERVED_IN_REPORTS = ("tokens_per_s", "peak_memory_bytes", "time_s")
"""Fields of a step report that the same bits may come with in any value."""


@dataclass(frozen=True, kw_only=True)
class BatchAssigned(Event):
    """The samples of a step, ascending; ``policy_version`` is the version whose weights are trained on them."""

    type: ClassVar[str] = "batch_assigned"
    barrier: ClassVar[bool] = True
    step: int
    policy_version: int
    sample_ids: tuple[SampleId, ...]


@dataclass(frozen=True, kw_only=True)
class ArraysWritten(Event):
    """The step's arrays are on disk: ``name -> {"digest", "dtype", "shape"}``.

    ``observed["arrays"]`` says the same of arrays of wall times, which no two runs share, and ``observed["metadata"]``
    is the digest of the metadata files.
    """

    type: ClassVar[str] = "arrays_written"
    barrier: ClassVar[bool] = True
    step: int
    arrays: Mapping[str, Mapping[str, Any]]

    @property
    def stored(self) -> dict[str, Mapping[str, Any]]:
        """Everything that is stored of the step, arrays of wall times included."""
        return {**self.arrays, **self.observed.get("arrays", {})}

    @property
    def metadata(self) -> str | None:
        """Digest of the metadata files; None where none was announced."""
        return self.observed.get("metadata")


@dataclass(frozen=True, kw_only=True)
class ArraysRestored(Event):
    """Announced arrays were gone or damaged when the run was resumed, and were made again.

    ``observed["arrays"]`` says what the arrays of wall times hold now, ``observed["metadata"]`` the digest of the
    metadata files; all others are as they were announced.
    """

    type: ClassVar[str] = "arrays_restored"
    scope: ClassVar[Scope] = Scope.BOOKKEEPING
    barrier: ClassVar[bool] = True
    step: int


@dataclass(frozen=True, kw_only=True)
class StepCompared(Event):
    """Both sides' log-probabilities were compared, and what made the trainer's.

    ``num_tokens`` generated tokens = ``compared_tokens`` + the sum over ``incomparable_tokens`` (reason -> count).
    The mismatch counts are None exactly when nothing was compared. ``case``, ``forward_tokens`` and ``manifest_digest``
    are the evidence of the trainer's own forward. ``metrics`` are further fields of the step report.
    """

    type: ClassVar[str] = "step_compared"
    step: int
    num_tokens: int
    compared_tokens: int
    incomparable_tokens: Mapping[str, int]
    mismatch_count: int | None
    distribution_mismatch_count: int | None
    case: str
    forward_tokens: int
    manifest_digest: str
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepTrained(Event):
    """All updates of a step are done; the digests are manifest digests after the last of them."""

    type: ClassVar[str] = "step_trained"
    barrier: ClassVar[bool] = True
    step: int
    weights_digest: str
    gradient_digest: str
    loss: float
    grad_norm: float
    learning_rate: float
    updates: int
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepFinished(Event):
    """The step is closed, with its report. What a clock measured of it (``OBSERVED_IN_REPORTS``) is in ``observed``."""

    type: ClassVar[str] = "step_finished"
    step: int
    report: Mapping[str, Any]

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> StepFinished:
        """The event of a step report, given as plain data under the exact names."""
        seen = {name: report[name] for name in OBSERVED_IN_REPORTS if name in report}
        return cls(
            step=report["step"], report={k: v for k, v in report.items() if k not in seen}, observed={"report": seen}
        )


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """An evaluation of a version is complete; its samples are forgotten.

    ``reward_mean`` is over the ``num_samples`` samples that have a reward; None where none has: nothing was evaluated.
    """

    type: ClassVar[str] = "evaluated"
    step: int
    version: int
    num_samples: int
    reward_mean: float | None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Event):
    """Everything that the next step depends on is on disk: ``files`` name -> SHA-256.

    How often one is written is nothing that a run computes: equal runs may differ in it.
    """

    type: ClassVar[str] = "checkpoint_written"
    scope: ClassVar[Scope] = Scope.SCHEDULING
    barrier: ClassVar[bool] = True
    step: int
    files: Mapping[str, str]


EVENT_TYPES: tuple[type[Event], ...] = (
    RunStarted, ContractFixed, FileAnnounced, RunInterrupted, RunResumed, RunFinished,
    VersionPublished, SyncStaged, SyncVerified, SyncCommitted, SyncRolledBack, EngineLost, EngineRejoined,
    PromptDrawn, SampleStarted, SampleAborted, SampleFinished, RewardGiven, SampleDropped, FilterApplied, Decision,
    BatchAssigned, ArraysWritten, ArraysRestored, StepCompared, StepTrained, StepFinished, Evaluated,
    CheckpointWritten,
)  # fmt: skip
