"""Layout of whole sequences, micro-batches, updates of whole groups."""

from __future__ import annotations

import numpy as np
import pytest

from vime.errors import InputError
from vime.train.batching import flatten, micro_batches, required_rows, update_batches
from vime.train.interface import TrainSample
from vime.types import SampleId


def sample(prompt, k, prompt_ids=(1, 2, 3), response=(4, 5), **arrays):
    return TrainSample(SampleId("train", prompt, k), prompt_ids, response, np.ones(len(response), bool), **arrays)


def test_rows_predict_response_tokens():
    flat = flatten([sample(0, 0), sample(0, 1, (7,), (8, 9, 10))])
    assert flat.tokens.tolist() == [1, 2, 3, 4, 7, 8, 9]
    assert flat.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert flat.starts.tolist() == [0, 4, 7]
    assert flat.rows.tolist() == [2, 3, 4, 5, 6]
    assert flat.targets.tolist() == [4, 5, 8, 9, 10]
    assert flat.count == required_rows(sample(0, 0)) + required_rows(sample(0, 1, (7,), (8, 9, 10)))
    assert [part.tolist() for part in flat.responses(flat.targets)] == [[4, 5], [8, 9, 10]]
    assert (flat.tokens.dtype, flat.positions.dtype, flat.starts.dtype) == (np.int64, np.int32, np.int32)


@pytest.mark.parametrize("bad", [{"prompt_ids": ()}, {"response": ()}])
def test_empty_parts_name_the_sample(bad):
    with pytest.raises(InputError, match="train/3/0"):
        flatten([sample(3, 0, **bad)])


def test_lengths_are_checked_where_arrays_meet_tokens():
    with pytest.raises(InputError, match=r"2 response tokens.*old_logprobs.*3"):
        flatten([sample(0, 0, old_logprobs=np.zeros(3, np.float32))])


def test_micro_batches_are_whole_samples():
    assert micro_batches(7, 3) == [range(0, 3), range(3, 6), range(6, 7)]
    with pytest.raises(InputError):
        micro_batches(7, 0)


def test_updates_take_whole_groups():
    samples = [sample(p, k) for p, size in ((0, 2), (1, 3), (5, 1)) for k in range(size)]
    assert update_batches(samples, 1) == [range(0, 6)]
    assert update_batches(samples, 2) == [range(0, 2), range(2, 6)]
    assert update_batches(samples, 3) == [range(0, 2), range(2, 5), range(5, 6)]
    with pytest.raises(InputError, match="cannot be made of 3 groups"):
        update_batches(samples, 4)
