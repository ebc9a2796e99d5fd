"""Arrays over the running sequences, kept up to date so that a decode step needs no loop over them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlkernel.ops.head import SamplingKeys
from vime.rollout.native.sequence import TOKEN_RECORD, SequenceState
from vime.types import NAMESPACES

_FIRST_CAPACITY = 64
NO_TOKEN = -1


class RunningRows:
    """One row a running sequence (R = ``max_num_seqs``); a freed row is used again.

    ``table`` int32 [R, B] holds block tables padded with the null page; ``computed`` and ``total`` int64 [R] count the
    tokens whose KV is written and the known tokens; ``num_blocks`` int64 [R] the used entries of the table.

    Records of sampled tokens are kept here until :meth:`sync` hands them to their sequence.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.table: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_blocks: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.computed: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.total: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.last_token: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self.temperature: NDArray[np.float64] = np.ones(max_num_seqs, np.float64)
        self._prompt_index: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._k: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._namespace: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._greedy: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self._top_k: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._top_p: NDArray[np.float64] = np.ones(max_num_seqs, np.float64)
        self._records: NDArray[np.void] = np.empty((max_num_seqs, _FIRST_CAPACITY), TOKEN_RECORD)
        self._synced: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._ends: NDArray[np.int64] = np.zeros(max_num_seqs, np.int64)
        self._stops: NDArray[np.int64] = np.full((max_num_seqs, 1), NO_TOKEN, np.int64)
        self._watched: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def acquire(self, sequence: SequenceState, computed: int) -> None:
        """Give a sequence a row; its blocks are in ``sequence.blocks``, KV of ``computed`` tokens is in them."""
        row = sequence.row = self._free.pop()
        sample, params = sequence.request.sample_id, sequence.request.params
        self.table[row, : len(sequence.blocks)] = sequence.blocks
        self.num_blocks[row] = len(sequence.blocks)
        self.computed[row] = computed
        self.total[row] = self._synced[row] = sequence.length
        self._ends[row] = min(sequence.prompt_length + params.max_new_tokens, sequence.limit)
        stops = sorted(sequence.stop_token_ids)
        if len(stops) > self._stops.shape[1]:
            more = np.full((len(self._stops), len(stops) - self._stops.shape[1]), NO_TOKEN, np.int64)
            self._stops = np.concatenate([self._stops, more], axis=1)
        self._stops[row] = NO_TOKEN
        self._stops[row, : len(stops)] = stops
        self._watched[row] = sequence.stops is not None
        self.last_token[row] = sequence.tokens[sequence.length - 1]
        self.temperature[row] = params.temperature
        self._prompt_index[row] = sample.prompt_index
        self._k[row] = sample.k
        self._namespace[row] = NAMESPACES.index(sample.namespace)
        self._greedy[row] = params.greedy
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p

    def add_block(self, sequence: SequenceState, block: int) -> None:
        """Append a block to a running sequence's table."""
        sequence.blocks.append(block)
        self.table[sequence.row, self.num_blocks[sequence.row]] = block
        self.num_blocks[sequence.row] += 1

    def keep(self, rows: NDArray[np.int64], records: NDArray[np.void]) -> NDArray[np.int64]:
        """Append one record to each of these rows; returns indices of those that may have ended with it."""
        at, tokens = self.total[rows] - self._synced[rows], records["token"]
        if int(at.max()) >= self._records.shape[1]:
            more = np.empty((len(self._records), self._records.shape[1]), TOKEN_RECORD)
            self._records = np.concatenate([self._records, more], axis=1)
        self._records[rows, at] = records
        self.total[rows] += 1
        self.last_token[rows] = tokens
        stopped = (tokens[:, None] == self._stops[rows]).any(axis=1)
        return np.flatnonzero(stopped | self._watched[rows] | (self.total[rows] >= self._ends[rows]))

    def sync(self, sequence: SequenceState) -> None:
        """Hand a running sequence the records that are kept here."""
        row = sequence.row
        count = int(self.total[row] - self._synced[row])
        if count:
            sequence.extend(self._records[row, :count])
            self._synced[row] = self.total[row]

    def drop(self, sequence: SequenceState) -> None:
        """Free a sequence's row; it has all its tokens afterwards."""
        self.sync(sequence)
        row = sequence.row
        self.table[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = self.computed[row] = self.total[row] = 0
        self._free.append(row)
        sequence.row = -1

    def sampling_keys(self, rows: NDArray[np.int64], seed: int) -> SamplingKeys:
        """Keys of the next token of these rows: its position is the number of tokens before it."""
        return SamplingKeys(
            seeds=np.full(len(rows), seed, np.uint64),
            prompt_index=self._prompt_index[rows],
            k=self._k[rows],
            namespace=self._namespace[rows],
            position=self.total[rows],
            greedy=self._greedy[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
        )
