"""Frozen data that crosses the rooms of vime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vime.errors import InvariantViolation

Namespace = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "context", "aborted"]
NAMESPACES: tuple[Namespace, ...] = ("train", "eval")


@dataclass(frozen=True, order=True)
class SampleId:
    """Identity of a sample: never its order of arrival. ``k`` counts samples of one prompt (the group)."""

    namespace: Namespace
    prompt_index: int
    k: int

    def __str__(self) -> str:
        return f"{self.namespace}/{self.prompt_index}/{self.k}"

    @classmethod
    def parse(cls, text: str) -> SampleId:
        """Inverse of ``str``. Raises ValueError for anything else."""
        namespace, prompt_index, k = text.split("/")
        if namespace not in NAMESPACES:
            raise ValueError(f"{text!r}: a sample is NAMESPACE/PROMPT/K with namespace one of {NAMESPACES}")
        return cls(namespace, int(prompt_index), int(k))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Prompt:
    """One prompt: its cursor position in the seeded permutation, its tokens, and the row it came from."""

    namespace: Namespace
    prompt_index: int
    token_ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. ``temperature`` > 0 divides the logits; ``greedy`` takes the largest."""

    temperature: float = 1.0
    max_new_tokens: int = 16
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @property
    def truncated(self) -> bool:
        """Whether candidates are removed, so that the sampler is not the full distribution."""
        return self.top_k > 0 or self.top_p < 1.0


@dataclass(frozen=True)
class RolloutRequest:
    """One sample to generate."""

    sample_id: SampleId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class VersionRun:
    """``count`` consecutive generated tokens that share a weight version and the versions of the KV they read."""

    count: int
    version: int
    kv_oldest: int
    kv_newest: int


@dataclass(frozen=True)
class GeneratedSample:
    """A finished sample as the engine made it. Arrays have one entry a generated token (T)."""

    sample_id: SampleId
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: NDArray[np.float32]
    digests: NDArray[np.uint64]  # [T, 2]
    entropies: NDArray[np.float32]
    sampled_at: NDArray[np.float64]  # seconds since the epoch; provenance only, never compared
    versions: tuple[VersionRun, ...]
    finish_reason: FinishReason
    engine_id: str
    text: str = ""
    preemptions: int = 0
    cached_prompt_tokens: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        lengths = {
            "logprobs": len(self.logprobs),
            "digests": len(self.digests),
            "entropies": len(self.entropies),
            "sampled_at": len(self.sampled_at),
            "versions": sum(run.count for run in self.versions),
        }
        wrong = {name: length for name, length in lengths.items() if length != n}
        if wrong:
            raise InvariantViolation(
                f"sample {self.sample_id} has {n} tokens, but these arrays have other lengths: {wrong}"
            )
