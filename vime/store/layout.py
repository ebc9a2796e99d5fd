"""Names and shapes of a step's arrays, and which sample and token an element belongs to.

S samples ascending, P prompt tokens and T generated tokens in all, flat; ``prompt_offsets`` and ``response_offsets``
[S+1] say where each sample's tokens lie. ``prompt_index`` and ``k`` [S] name the samples. Any other array belongs
to generated tokens, samples or prompt tokens by its first dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from vime.errors import InputError
from vime.types import GeneratedSample, SampleId

if TYPE_CHECKING:  # readers of a run need no torch
    from vime.train.interface import ScoredSample

PROMPT_OFFSETS = "prompt_offsets"
RESPONSE_OFFSETS = "response_offsets"
PER_SAMPLE = ("prompt_index", "k", "rewards", "advantages")
OBSERVED_ARRAYS = ("sampled_at",)
"""Arrays of wall times, which nothing compares."""
ORDER = ("prompt_tokens", "tokens", "weight_version", "kv_oldest", "kv_newest", "rollout_logprobs", "rollout_digests",
         "rollout_entropies", "rewards")  # fmt: skip
"""Where to look first for a difference: causes before consequences."""

Axis = Literal["token", "prompt_token", "sample", "none"]


def rollout_arrays(samples: Sequence[GeneratedSample]) -> dict[str, NDArray[Any]]:
    """The arrays that the rollout's side of a step consists of. Samples in ascending order; raises InputError else."""
    ids = [sample.sample_id for sample in samples]
    if ids != sorted(set(ids)):
        raise InputError("the samples of a step are stored in ascending order, each once")

    def flat(dtype: Any, parts: list[Any]) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)]).astype(dtype)

    def per_run(name: str) -> NDArray[Any]:
        runs = [run for sample in samples for run in sample.versions]
        return np.repeat(flat(np.int64, [[getattr(run, name) for run in runs]]), [run.count for run in runs])

    empty = np.zeros((0, 2), np.uint64)
    return {
        "prompt_index": np.asarray([i.prompt_index for i in ids], np.int64),
        "k": np.asarray([i.k for i in ids], np.int64),
        PROMPT_OFFSETS: _offsets([len(s.prompt_token_ids) for s in samples]),
        RESPONSE_OFFSETS: _offsets([len(s.token_ids) for s in samples]),
        "prompt_tokens": flat(np.int64, [s.prompt_token_ids for s in samples]),
        "tokens": flat(np.int64, [s.token_ids for s in samples]),
        "weight_version": per_run("version"),
        "kv_oldest": per_run("kv_oldest"),
        "kv_newest": per_run("kv_newest"),
        "rollout_logprobs": flat(np.float32, [s.logprobs for s in samples]),
        "rollout_digests": np.concatenate([empty, *(s.digests.reshape(-1, 2) for s in samples)]).astype(np.uint64),
        "rollout_entropies": flat(np.float32, [s.entropies for s in samples]),
        "sampled_at": flat(np.float64, [s.sampled_at for s in samples]),
    }


def trainer_arrays(scored: Sequence[ScoredSample]) -> dict[str, NDArray[Any]]:
    """The trainer's side of a step, in the order of :func:`rollout_arrays`."""
    empty, none = np.zeros((0, 2), np.uint64), np.zeros(0, np.float32)
    return {
        "trainer_logprobs": np.concatenate([none, *(s.logprobs for s in scored)]).astype(np.float32),
        "trainer_digests": np.concatenate([empty, *(s.digests.reshape(-1, 2) for s in scored)]).astype(np.uint64),
        "trainer_entropies": np.concatenate([none, *(s.entropies for s in scored)]).astype(np.float32),
    }


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64))])


@dataclass(frozen=True)
class Layout:
    """Which samples a step's arrays hold, and where."""

    samples: tuple[SampleId, ...]
    prompt_offsets: tuple[int, ...]
    response_offsets: tuple[int, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Layout | None:
        """The layout of stored arrays; None where they do not follow the names above."""
        if not {"prompt_index", "k", PROMPT_OFFSETS, RESPONSE_OFFSETS} <= set(arrays):
            return None
        pairs = zip(arrays["prompt_index"].tolist(), arrays["k"].tolist(), strict=True)
        return cls(
            tuple(SampleId("train", prompt_index, k) for prompt_index, k in pairs),
            tuple(arrays[PROMPT_OFFSETS].tolist()),
            tuple(arrays[RESPONSE_OFFSETS].tolist()),
        )

    def axis(self, name: str, array: NDArray[Any]) -> Axis:
        """What the first dimension of an array counts."""
        length = len(array) if array.ndim else -1
        if name in (PROMPT_OFFSETS, RESPONSE_OFFSETS):
            return "none"
        if name in PER_SAMPLE and length == len(self.samples):
            return "sample"
        if name == "prompt_tokens":
            return "prompt_token"
        if length == self.response_offsets[-1]:
            return "token"
        if length == len(self.samples):
            return "sample"
        return "prompt_token" if length == self.prompt_offsets[-1] else "none"

    def rows(self, axis: Axis, index: int) -> slice:
        """Rows of sample number ``index`` in an array of this axis."""
        if axis == "sample":
            return slice(index, index + 1)
        offsets = self.response_offsets if axis == "token" else self.prompt_offsets
        return slice(offsets[index], offsets[index + 1])

    def position(self, axis: Axis, index: int, row: int) -> int | None:
        """Absolute token index (prompt included) of row ``row`` of sample number ``index``."""
        if axis == "token":
            return self.prompt_offsets[index + 1] - self.prompt_offsets[index] + row
        return row if axis == "prompt_token" else None
