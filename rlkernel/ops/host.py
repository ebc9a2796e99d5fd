"""What a host gives to regions while they run: batch, KV state, weights, tables, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.config import ModelConfig

if TYPE_CHECKING:
    from rlkernel.ops.gradients import Gradients
    from rlkernel.ops.weights import WeightSet

CASES = (
    "rollout_prefill",
    "rollout_decode",
    "trainer_score",
    "trainer_forward",
    "trainer_recompute",
    "trainer_backward",
    "optimizer_step",
)


@dataclass(frozen=True)
class TokenBatch:
    """Flat tokens of several sequences: ids int64 [N], absolute positions int32 [N], row offsets int32 [S+1]."""

    tokens: NDArray[np.int64]
    positions: NDArray[np.int32]
    starts: NDArray[np.int32]


class KVState(Protocol):
    """Paged keys and values. ``slots[n]`` = page * page_size + offset of the batch's n-th token."""

    page_size: int
    block_table: NDArray[np.int32]
    slots: NDArray[np.int64]

    def pages(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(k [P, KVH, D, page], v [P, KVH, page, D]) of a layer."""


@dataclass(frozen=True)
class RopeTables:
    """cos and sin, float32 [positions, head_dim/2]."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]


@dataclass
class Host:
    """Services for one pass over one batch. ``state`` is None where whole sequences are attended (trainer).

    ``row_starts`` int32 [S+1]: offsets of each sequence's rows among the rows of the head; None: one sequence.
    ``read_rows``: rows of the outputs that the caller reads; the interpreter of attention leaves the others +0.
    """

    config: ModelConfig
    bf16: bool
    tp: int
    case: str
    batch: TokenBatch
    weights: WeightSet
    rope: RopeTables
    workers: Workers
    state: KVState | None = None
    gradients: Gradients | None = None
    row_starts: NDArray[np.int32] | None = None
    read_rows: NDArray[np.int64] | None = None
