"""One sequence while the engine works on it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vime.rollout.native.blocks import ROOT, BlockKey
from vime.rollout.native.stops import StopStrings
from vime.types import FinishReason, GeneratedSample, RolloutRequest, VersionRun

TOKEN_RECORD = np.dtype(
    [
        ("token", np.int64),
        ("logprob", np.float32),
        ("entropy", np.float32),
        ("digest", np.uint64, (2,)),
        ("version", np.int64),
        ("kv_oldest", np.int64),
        ("kv_newest", np.int64),
        ("sampled_at", np.float64),
    ]
)


class SequenceState:
    """Tokens, records of the generated ones, blocks, and the row among the running sequences (-1 while waiting).

    While it runs, its newest tokens are in the rows alone, where a step writes those of all sequences at once.
    """

    def __init__(self, request: RolloutRequest, limit: int, stops: StopStrings | None) -> None:
        self.request = request
        self.prompt_length = len(request.prompt_token_ids)
        self.limit = limit
        self.stop_token_ids = frozenset(request.params.stop_token_ids)
        self.stops = stops
        self.length = self.prompt_length  # of known tokens, without what a running row holds
        self._tokens = np.array(request.prompt_token_ids, np.int64)
        self._records: list[NDArray[np.void]] = []
        self.row = -1
        self.blocks: list[int] = []
        self.registered = 0
        self.preemptions = 0
        self.cached_prompt_tokens: int | None = None
        self._keys: list[BlockKey] = []

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Known tokens, int64 [length]."""
        return self._tokens[: self.length]

    @property
    def generated(self) -> int:
        """Number of generated tokens among them."""
        return self.length - self.prompt_length

    def keys(self, count: int, block_size: int) -> list[BlockKey]:
        """Content keys of the first ``count`` full blocks."""
        while len(self._keys) < count:
            first = len(self._keys) * block_size
            parent = self._keys[-1].digest if self._keys else ROOT
            self._keys.append(BlockKey.of(parent, self.tokens[first : first + block_size]))
        return self._keys[:count]

    def extend(self, records: NDArray[np.void]) -> None:
        """Keep sampled tokens that the running rows held (:meth:`RunningRows.sync`)."""
        last = self.length + len(records)
        if last > len(self._tokens):
            self._tokens = np.concatenate([self.tokens, np.empty(last, np.int64)])
        self._tokens[self.length : last] = records["token"]
        self.length = last
        self._records.append(records.copy())

    def end(self, token: int, length: int) -> FinishReason | None:
        """Why the sequence ends with its newest token, which makes it ``length`` tokens long; None if it goes on."""
        if token in self.stop_token_ids or (self.stops is not None and self.stops.push(token) is not None):
            return "stop"
        if length - self.prompt_length == self.request.params.max_new_tokens:
            return "length"
        return "context" if length == self.limit else None

    def sample(self, reason: FinishReason, engine_id: str, text: str) -> GeneratedSample:
        """The finished sample."""
        records, first = np.empty(self.generated, TOKEN_RECORD), 0
        for part in self._records:
            records[first : first + len(part)] = part
            first += len(part)
        columns = {name: np.ascontiguousarray(records[name]) for name in ("logprob", "digest", "entropy", "sampled_at")}
        return GeneratedSample(
            sample_id=self.request.sample_id,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=tuple(records["token"].tolist()),
            logprobs=columns["logprob"],
            digests=columns["digest"],
            entropies=columns["entropy"],
            sampled_at=columns["sampled_at"],
            versions=version_runs(records),
            finish_reason=reason,
            engine_id=engine_id,
            text=text,
            preemptions=self.preemptions,
            cached_prompt_tokens=self.cached_prompt_tokens or 0,
        )


def version_runs(records: NDArray[np.void]) -> tuple[VersionRun, ...]:
    """Run lengths of (version, oldest and newest version of the KV read) over the records of generated tokens."""
    if not len(records):
        return ()
    columns = np.stack([records["version"], records["kv_oldest"], records["kv_newest"]], axis=1)
    firsts = np.concatenate([[0], np.flatnonzero((columns[1:] != columns[:-1]).any(axis=1)) + 1])
    counts = np.diff(np.concatenate([firsts, [len(records)]]))
    return tuple(
        VersionRun(count, *(int(value) for value in columns[first]))
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
    )
