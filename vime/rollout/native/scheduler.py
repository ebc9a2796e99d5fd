"""Decides what every step computes: continuous batching, chunked prefill, admission and preemption.

A step first gives one token to each running sequence that only lacks its newest token, then the rest of the token
budget to prefills, both in order of admission, and then admits waiting sequences in order of arrival. When a decode
needs a block and none is available, the latest-admitted sequence is preempted: it keeps its tokens, gives back its
blocks, and waits in front. The sequence admitted first is never preempted and every sequence alone fits (checked at
submission), so each step makes progress.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vime.errors import InvariantViolation
from vime.rollout.native.blocks import BlockManager
from vime.rollout.native.config import EngineConfig, blocks_of
from vime.rollout.native.rows import RunningRows
from vime.rollout.native.sequence import SequenceState


@dataclass(frozen=True)
class StepPlan:
    """S sequences of one step in order of admission; ``takes`` [S] tokens each, from ``rows`` [S]."""

    sequences: list[SequenceState]
    rows: NDArray[np.int64]
    takes: NDArray[np.int64]
    kv_oldest: NDArray[np.int64]
    kv_newest: NDArray[np.int64]


class Scheduler:
    """Waiting and running sequences over one block manager."""

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self.rows = RunningRows(config.max_num_seqs, config.max_blocks_per_sequence)
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_lookup_tokens = 0
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)

    def submit(self, sequence: SequenceState) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def plan(self, version: int) -> StepPlan:
        """Choose the tokens of the next step, take the blocks they need, and check what they will read.

        Raises:
            InvariantViolation: a sequence would read a KV block that another weight version wrote (unless the
                engine's policy for in-flight updates keeps old KV), or one that nothing wrote.
        """
        rows, budget = self.rows, self._config.max_batched_tokens
        preempted = self._grow_decodes(budget)
        order = self._order
        pending = rows.total[order] - rows.computed[order]
        takes = np.zeros(len(order), np.int64)
        single = np.flatnonzero(pending == 1)[:budget]
        takes[single] = 1
        budget -= len(single)
        if len(single) < len(order):
            for index in np.flatnonzero(pending > 1):
                takes[index] = min(int(pending[index]), budget)
                budget -= int(takes[index])
        chosen = np.flatnonzero(takes)
        sequences = self.running if len(chosen) == len(order) else [self.running[i] for i in chosen]
        sequences, takes = list(sequences), takes[chosen]
        self._write(sequences, order[chosen], takes, version)
        if not preempted:
            admitted = self._admit(budget, version)
            sequences += [sequence for sequence, _ in admitted]
            takes = np.concatenate([takes, np.array([take for _, take in admitted], np.int64)])
        chosen_rows = np.array([sequence.row for sequence in sequences], np.int64)
        oldest, newest = self._check_versions(sequences, chosen_rows, takes, version)
        return StepPlan(sequences, chosen_rows, takes, oldest, newest)

    def _grow_decodes(self, budget: int) -> bool:
        """A block for every decode of this step that begins one; returns whether a sequence was preempted."""
        rows, order = self.rows, self._order
        decoding = order[np.flatnonzero(rows.total[order] - rows.computed[order] == 1)[:budget]]
        full = decoding[rows.computed[decoding] == rows.num_blocks[decoding] * self._config.block_size]
        if not len(full):
            return False
        preempted = False
        wanted = set(full.tolist())
        for sequence in [s for s in self.running if s.row in wanted]:
            # an earlier turn of this loop may have preempted it
            while sequence.row >= 0 and not self._blocks.available:
                self.preempt(self.running[-1])
                self.preemptions += 1
                preempted = True
            if sequence.row >= 0:
                rows.add_block(sequence, self._blocks.allocate(1)[0])
        return preempted

    def _admit(self, budget: int, version: int) -> list[tuple[SequenceState, int]]:
        """Admit waiting sequences while budget, rows and blocks suffice; none overtakes one that does not fit."""
        size, blocks = self._config.block_size, self._blocks
        admitted: list[tuple[SequenceState, int]] = []
        while self.waiting and budget > 0 and len(self.running) < self._config.max_num_seqs:
            sequence = self.waiting[0]
            shared: list[int] = []
            if self._config.prefix_caching:
                # at least one token is computed: its hidden state predicts the next one
                shared = blocks.lookup(version, sequence.keys((sequence.length - 1) // size, size))
            fresh = blocks_of(sequence.length, size) - len(shared)
            # each running sequence may soon need a block: without headroom the newcomer would be preempted at once
            headroom = len(self.running)
            if blocks.available - blocks.unreferenced(shared) - fresh < headroom and self.running:
                break
            self.waiting.popleft()
            blocks.share(shared)
            sequence.blocks = shared + blocks.allocate(fresh)
            sequence.registered = len(shared)
            computed = len(shared) * size
            self.prefix_hit_tokens += computed
            self.prefix_lookup_tokens += sequence.length
            if sequence.cached_prompt_tokens is None:
                sequence.cached_prompt_tokens = computed
            self.rows.acquire(sequence, computed)
            self.running.append(sequence)
            take = min(sequence.length - computed, budget)
            budget -= take
            self._write([sequence], np.array([sequence.row]), np.array([take]), version)
            admitted.append((sequence, take))
        if admitted:
            self._reorder()
        return admitted

    def _write(
        self, sequences: list[SequenceState], rows: NDArray[np.int64], takes: NDArray[np.int64], version: int
    ) -> None:
        """Mark the blocks that this step writes and register those that it fills.

        A block may be shared before it is computed: a model appends the KV of the whole batch before it attends. What
        was registered is computed for certain, since nothing is preempted after this in the same step.
        """
        size, table = self._config.block_size, self.rows.table
        computed = self.rows.computed[rows]
        first, last = computed // size, (computed + takes - 1) // size
        self._blocks.mark_written(table[rows, first], version)
        for i in np.flatnonzero(last > first):
            self._blocks.mark_written(table[rows[i], first[i] : last[i] + 1], version)
        if self._config.prefix_caching:
            full = (computed + takes) // size
            for i in np.flatnonzero(full > first):
                self._register(sequences[i], int(full[i]), version)

    def _register(self, sequence: SequenceState, full: int, version: int) -> None:
        # a block's KV depends on all before it: one block of another version makes the rest unfit for sharing
        if self._blocks.written_by(self.rows.table[sequence.row, :full], version):
            self.rows.sync(sequence)
            keys = sequence.keys(full, self._config.block_size)
            for index in range(sequence.registered, full):
                self._blocks.register(sequence.blocks[index], version, keys[index])
            sequence.registered = full

    def _check_versions(
        self, sequences: list[SequenceState], rows: NDArray[np.int64], takes: NDArray[np.int64], version: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Oldest and newest version of the KV that each sequence reads in this step, int64 [S] each."""
        if not len(rows):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        used = (self.rows.computed[rows] + takes - 1) // self._config.block_size + 1
        width = int(used.max())
        table = self.rows.table[rows, :width]
        oldest, newest = self._blocks.oldest[table], self._blocks.newest[table]
        if int(used.min()) < width:
            beyond = np.arange(width) >= used[:, None]
            oldest[beyond] = newest[beyond] = version
        low, high = oldest.min(axis=1), newest.max(axis=1)
        keeps_old = self._config.in_flight_updates == "keep_kv"
        # an unwritten block has newest -1; reading it is an error under every policy
        wrong = (high > version) | (newest.min(axis=1) < 0) | ((low < version) & (not keeps_old))
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            bad = (newest[i] < 0) | (newest[i] > version) | ((oldest[i] < version) & (not keeps_old))
            j = int(np.flatnonzero(bad)[0])
            state = (
                "was written by nothing"
                if newest[i, j] < 0
                else f"was written by weight versions {oldest[i, j]} to {newest[i, j]}"
            )
            raise InvariantViolation(
                f"engine {self._config.engine_id}: sample {sequences[i].request.sample_id} would read KV block "
                f"{table[i, j]} (tokens from {j * self._config.block_size} on), which {state}; "
                f"version {version} is committed"
            )
        return low, high

    def preempt(self, sequence: SequenceState) -> None:
        """Take blocks and row from a running sequence; it waits in front and will be recomputed."""
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        self._reorder()

    def remove(self, sequences: list[SequenceState]) -> None:
        """Forget finished or aborted sequences."""
        gone = set(map(id, sequences))
        if any(sequence.row < 0 for sequence in sequences):
            self.waiting = deque(s for s in self.waiting if id(s) not in gone)
        self.running = [s for s in self.running if id(s) not in gone]
        for sequence in sequences:
            if sequence.row >= 0:
                self._give_back(sequence)
        self._reorder()

    def _give_back(self, sequence: SequenceState) -> None:
        self._blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.registered = 0
        self.rows.drop(sequence)

    def _reorder(self) -> None:
        self._order = np.array([sequence.row for sequence in self.running], np.int64)
