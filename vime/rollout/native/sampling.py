"""Draws the next token of every sequence that a step caught up with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime.rollout.native.batch import StepInputs
from vime.rollout.native.model import EngineModel, TokenStatistics
from vime.rollout.native.rows import RunningRows
from vime.rollout.native.scheduler import StepPlan
from vime.rollout.native.sequence import TOKEN_RECORD


def sample_tokens(
    model: EngineModel,
    hidden: Any,
    plan: StepPlan,
    inputs: StepInputs,
    rows: RunningRows,
    *,
    seed: int,
    version: int,
    sampled_at: float,
) -> NDArray[np.void]:
    """Records of the sampled sequences, in the order of ``inputs.sampled``.

    ``hidden`` [N, H] has all rows of the batch; a sequence's token is predicted by its last row. A model takes one
    temperature a call, so rows are grouped by it.
    """
    sampled = inputs.sampled
    if len(sampled) != len(inputs.batch.tokens):
        hidden = hidden[inputs.batch.starts[1:][sampled].astype(np.int64) - 1]
    chosen = plan.rows[sampled]
    records = np.empty(len(sampled), TOKEN_RECORD)
    temperatures = rows.temperature[chosen]
    if (temperatures == temperatures[0]).all():
        keys = rows.sampling_keys(chosen, seed)
        _fill(records, slice(None), *model.sample(hidden, keys, float(temperatures[0]), inputs.case))
    else:
        for temperature in np.unique(temperatures):
            group = np.flatnonzero(temperatures == temperature)
            keys = rows.sampling_keys(chosen[group], seed)
            _fill(records, group, *model.sample(hidden[group], keys, float(temperature), inputs.case))
    records["version"] = version
    records["kv_oldest"] = plan.kv_oldest[sampled]
    records["kv_newest"] = plan.kv_newest[sampled]
    records["sampled_at"] = sampled_at
    return records


def _fill(
    records: NDArray[np.void], where: slice | NDArray[np.int64], tokens: NDArray[np.int64], statistics: TokenStatistics
) -> None:
    records["token"][where] = tokens
    records["logprob"][where] = statistics.logprob
    records["entropy"][where] = statistics.entropy
    records["digest"][where] = statistics.digest
