"""Every event of a run. The log of these is the truth; all state is a fold over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from vime.store.digests import arrays_digest
from vime.timeline.event import Event, OrderKey, Scope, deployment
from vime.types import FinishReason, GeneratedSample, Namespace, Prompt, SampleId, VersionRun

# ---------------------------------------------------------------------------------------------------- run


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The first event. ``pipeline_digest`` covers the settings that decide bits; ``resolved_digest`` all of them.

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


# ------------------------------------------------------------------------------------------------ samples


@dataclass(frozen=True, kw_only=True)
class PromptDrawn(Event):
    """The cursor of a namespace moved by one prompt; ``row`` is the row of the data set, if it has numbers."""

    type: ClassVar[str] = "prompt_drawn"
    free: ClassVar[bool] = True
    namespace: Namespace
    prompt_index: int
    prompt_digest: str
    row: int | None = None

    def order_key(self) -> OrderKey:
        return (self.namespace, self.prompt_index, -1, 0, "")

    @classmethod
    def of(cls, prompt: Prompt, row: int | None = None) -> PromptDrawn:
        """The event of a prompt; the digest covers its token ids."""
        content = arrays_digest(token_ids=np.asarray(prompt.token_ids, dtype=np.int64))
        return cls(namespace=prompt.namespace, prompt_index=prompt.prompt_index, prompt_digest=content, row=row)


@dataclass(frozen=True, kw_only=True)
class _Sample(Event):
    free: ClassVar[bool] = True
    rank: ClassVar[int] = 0
    sample_id: SampleId

    def order_key(self) -> OrderKey:
        return (self.sample_id.namespace, self.sample_id.prompt_index, self.sample_id.k, self.rank, "")


@dataclass(frozen=True, kw_only=True)
class SampleStarted(_Sample):
    """A sample was handed to an engine (None: to whichever takes it)."""

    type: ClassVar[str] = "sample_started"
    scope: ClassVar[Scope] = Scope.SCHEDULING
    rank: ClassVar[int] = 0
    engine: str | None = deployment(default=None)


@dataclass(frozen=True, kw_only=True)
class SampleAborted(_Sample):
    """Generation stopped before the end; the sample is started again, or dropped."""

    type: ClassVar[str] = "sample_aborted"
    scope: ClassVar[Scope] = Scope.SCHEDULING
    rank: ClassVar[int] = 1
    reason: str


@dataclass(frozen=True, kw_only=True)
class SampleFinished(_Sample):
    """A sample is complete. ``versions`` covers its generated tokens, in order, with the versions of KV they read."""

    type: ClassVar[str] = "sample_finished"
    rank: ClassVar[int] = 2
    num_prompt_tokens: int
    num_tokens: int
    finish_reason: FinishReason
    versions: tuple[VersionRun, ...]
    content_digest: str
    engine: str = deployment()

    @classmethod
    def of(cls, sample: GeneratedSample, observed: Mapping[str, Any] | None = None) -> SampleFinished:
        """The event of a generated sample; the digest covers tokens, log-probabilities, digests and entropies."""
        content = arrays_digest(
            token_ids=np.asarray(sample.token_ids, dtype=np.int64),
            logprobs=sample.logprobs,
            digests=sample.digests,
            entropies=sample.entropies,
        )
        seen = {"preemptions": sample.preemptions, "cached_prompt_tokens": sample.cached_prompt_tokens}
        return cls(
            sample_id=sample.sample_id,
            num_prompt_tokens=len(sample.prompt_token_ids),
            num_tokens=len(sample.token_ids),
            finish_reason=sample.finish_reason,
            versions=sample.versions,
            content_digest=content,
            engine=sample.engine_id,
            observed={**seen, **(observed or {})},
        )


@dataclass(frozen=True, kw_only=True)
class RewardGiven(_Sample):
    """The reward of a finished sample; never computed again in a replay."""

    type: ClassVar[str] = "reward_given"
    rank: ClassVar[int] = 3
    reward: float
    source: str
    components: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SampleDropped(_Sample):
    """A sample leaves the run without being trained on."""

    type: ClassVar[str] = "sample_dropped"
    rank: ClassVar[int] = 4
    reason: str


@dataclass(frozen=True, kw_only=True)
class FilterApplied(Event):
    """What a filter said about a subject (a sample or a group, as text). A refusal has a reason."""

    type: ClassVar[str] = "filter_applied"
    free: ClassVar[bool] = True
    filter: str
    subject: str
    kept: bool
    reason: str = ""

    def order_key(self) -> OrderKey:
        return ("~filter", 0, 0, 0, f"{self.filter}\n{self.subject}")


@dataclass(frozen=True, kw_only=True)
class Decision(Event):
    """A value that depends on a clock, on arrival or on a user's function. ``value`` is plain data."""

    type: ClassVar[str] = "decision"
    free: ClassVar[bool] = True
    kind: str
    key: str
    value: Any

    def order_key(self) -> OrderKey:
        return ("~decision", 0, 0, 0, f"{self.kind}\n{self.key}")


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
    """The step's arrays are on disk: ``name -> {"digest", "dtype", "shape"}``."""

    type: ClassVar[str] = "arrays_written"
    barrier: ClassVar[bool] = True
    step: int
    arrays: Mapping[str, Mapping[str, Any]]


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
    """An evaluation of a version is complete; its samples are forgotten."""

    type: ClassVar[str] = "evaluated"
    step: int
    version: int
    num_samples: int
    reward_mean: float
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten(Event):
    """Everything that the next step depends on is on disk: ``files`` name -> SHA-256."""

    type: ClassVar[str] = "checkpoint_written"
    barrier: ClassVar[bool] = True
    step: int
    files: Mapping[str, str]


EVENT_TYPES: tuple[type[Event], ...] = (
    RunStarted, ContractFixed, RunInterrupted, RunResumed, RunFinished,
    VersionPublished, SyncStaged, SyncVerified, SyncCommitted, SyncRolledBack, EngineLost, EngineRejoined,
    PromptDrawn, SampleStarted, SampleAborted, SampleFinished, RewardGiven, SampleDropped, FilterApplied, Decision,
    BatchAssigned, ArraysWritten, StepCompared, StepTrained, StepFinished, Evaluated, CheckpointWritten,
)  # fmt: skip
