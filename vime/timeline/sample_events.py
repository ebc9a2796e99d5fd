"""Events of prompts, samples, rewards, filters and decisions: all free, their order inside a step does not count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from vime.store.digests import arrays_digest
from vime.timeline.event import Event, OrderKey, Scope, deployment
from vime.types import FinishReason, GeneratedSample, Namespace, Prompt, SampleId, VersionRun


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
