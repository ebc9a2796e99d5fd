"""How a step's samples are cut: updates of whole groups, micro-batches of whole sequences, flat token arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime.errors import InputError
from vime.train.estimators import sample_groups
from vime.train.interface import TrainSample


@dataclass(frozen=True)
class FlatSequences:
    """Whole sequences laid out one after another. N = rows, S = sequences, R = response tokens.

    A row is an input token. The last token of a sequence predicts nothing that is asked for, so it is no row:
    a sequence of P prompt and T response tokens has P + T - 1 rows, and row P - 1 + t predicts response token t.
    """

    tokens: NDArray[np.int64]  # [N]
    positions: NDArray[np.int32]  # [N], counted from the sequence's first token
    starts: NDArray[np.int32]  # [S + 1]
    rows: NDArray[np.int64]  # [R], the rows that predict response tokens, ascending
    targets: NDArray[np.int64]  # [R], the response tokens
    response_starts: NDArray[np.int64]  # [S + 1], offsets of each sequence's response among the R

    @property
    def count(self) -> int:
        """Number of rows that go through the layers."""
        return len(self.tokens)

    def responses(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Cut an array over the R response tokens into one array a sequence."""
        return [values[a:b] for a, b in zip(self.response_starts[:-1], self.response_starts[1:], strict=True)]


def required_rows(sample: TrainSample) -> int:
    """Tokens that have to go through the layers to evaluate the response of one sample alone."""
    return len(sample.prompt_token_ids) + len(sample.token_ids) - 1


def flatten(samples: Sequence[TrainSample]) -> FlatSequences:
    """Lay out whole sequences in the given order. Raises InputError for an empty prompt or response."""
    tokens: list[int] = []
    positions: list[int] = []
    starts, response_starts = [0], [0]
    rows: list[int] = []
    targets: list[int] = []
    for sample in samples:
        check_sample(sample)
        prompt, response = len(sample.prompt_token_ids), len(sample.token_ids)
        first = len(tokens)
        tokens.extend(sample.prompt_token_ids)
        tokens.extend(sample.token_ids[:-1])
        positions.extend(range(prompt + response - 1))
        rows.extend(range(first + prompt - 1, first + prompt + response - 1))
        targets.extend(sample.token_ids)
        starts.append(len(tokens))
        response_starts.append(len(targets))
    return FlatSequences(
        np.array(tokens, dtype=np.int64),
        np.array(positions, dtype=np.int32),
        np.array(starts, dtype=np.int32),
        np.array(rows, dtype=np.int64),
        np.array(targets, dtype=np.int64),
        np.array(response_starts, dtype=np.int64),
    )


def check_sample(sample: TrainSample) -> None:
    """Lengths are checked where arrays meet tokens. Raises InputError naming the sample."""
    if not sample.prompt_token_ids or not sample.token_ids:
        raise InputError(
            f"sample {sample.sample_id} has {len(sample.prompt_token_ids)} prompt and {len(sample.token_ids)} response "
            "tokens: at least one of each is needed"
        )
    count = len(sample.token_ids)
    arrays = {
        "loss_mask": sample.loss_mask,
        "old_logprobs": sample.old_logprobs,
        "reference_logprobs": sample.reference_logprobs,
    }
    wrong = {name: a.shape for name, a in arrays.items() if a is not None and a.shape != (count,)}
    if wrong:
        raise InputError(f"sample {sample.sample_id} has {count} response tokens, but arrays of other shapes: {wrong}")


def check_vocabulary(samples: Sequence[TrainSample], vocab_size: int) -> None:
    """Raise InputError naming a token id that the vocabulary does not have, and its sample."""
    for sample in samples:
        for token in (*sample.prompt_token_ids, *sample.token_ids):
            if not 0 <= token < vocab_size:
                raise InputError(
                    f"sample {sample.sample_id} holds the token id {token}; the vocabulary has {vocab_size}"
                )


def micro_batches(count: int, size: int) -> list[range]:
    """Consecutive ranges of at most ``size`` whole samples."""
    if size < 1:
        raise InputError(f"micro_batch_samples = {size}: at least 1 is needed")
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def update_batches(samples: Sequence[TrainSample], updates: int) -> list[range]:
    """Cut a step into ``updates`` consecutive parts of whole groups, as even as whole groups allow.

    Raises InputError when there are fewer groups than updates.
    """
    groups = sample_groups([sample.sample_id for sample in samples])
    if not 1 <= updates <= len(groups):
        raise InputError(
            f"updates_per_step = {updates} cannot be made of {len(groups)} groups: an update takes whole groups, so "
            f"1 to {len(groups)} are possible"
        )
    bounds = [len(groups) * i // updates for i in range(updates + 1)]
    return [range(groups[first].start, groups[last - 1].stop) for first, last in itertools.pairwise(bounds)]
