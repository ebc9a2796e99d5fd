"""Turns a step's plan into what a model reads: flat tokens, positions, block tables and slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkernel.ops.host import TokenBatch
from vime.rollout.native.model import BatchState, KVPages
from vime.rollout.native.rows import RunningRows
from vime.rollout.native.scheduler import StepPlan


@dataclass(frozen=True)
class StepInputs:
    """One forward pass. ``sampled`` are the sequences (indices into the plan) whose last known token is computed."""

    batch: TokenBatch
    state: BatchState
    case: str
    sampled: NDArray[np.int64]


def build_inputs(plan: StepPlan, rows: RunningRows, kv: KVPages) -> StepInputs:
    """Arrays of a step; the case is ``rollout_decode`` where every sequence has one new token."""
    takes, chosen = plan.takes, plan.rows
    computed = rows.computed[chosen]
    starts = np.zeros(len(takes) + 1, np.int32)
    np.cumsum(takes, out=starts[1:])
    decode = int(starts[-1]) == len(takes)
    ends = computed + takes
    caught_up = ends == rows.total[chosen]
    if decode:
        positions, owner = computed, chosen
    else:
        owner = np.repeat(chosen, takes)
        positions = np.arange(int(starts[-1])) + np.repeat(computed - starts[:-1], takes)
    if decode and caught_up.all():
        tokens = rows.last_token[chosen]
    else:
        # a sequence's newest token is in the rows alone
        newest = (takes == 1) & caught_up
        tokens = np.concatenate(
            [
                rows.last_token[row : row + 1] if last else s.tokens[first:end]
                for s, row, last, first, end in zip(
                    plan.sequences, chosen.tolist(), newest.tolist(), computed.tolist(), ends.tolist(), strict=True
                )
            ]
        )
    width = int((ends.max() - 1) // kv.page_size) + 1
    slots = rows.table[owner, positions // kv.page_size].astype(np.int64) * kv.page_size + positions % kv.page_size
    return StepInputs(
        batch=TokenBatch(tokens, positions.astype(np.int32), starts),
        state=BatchState(kv, np.ascontiguousarray(rows.table[chosen, :width]), slots),
        case="rollout_decode" if decode else "rollout_prefill",
        sampled=np.flatnonzero(caught_up),
    )
