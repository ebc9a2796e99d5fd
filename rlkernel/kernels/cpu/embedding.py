"""Embedding: rows of a table, and the gradient that adds them back in token order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlkernel.kernels.cpu.convert import Float32, require, require_range
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.threads import Workers

_ELEMENTS = 1 << 14


@kernel
def _embedding_gradient(first, last, dh, ids, grad):
    # columns are cut over threads, tokens never: repeated ids must add in token order
    for i in range(ids.size):
        source = dh[i, first:last]
        target = grad[ids[i], first:last]
        for j in range(source.size):
            target[j] = target[j] + source[j]


def embedding(table: Float32, ids: npt.NDArray[np.int64]) -> Float32:
    """The rows ``table[ids]``, copied: float32 [V, H] and int64 [N] give float32 [N, H].

    Raises:
        ContractError: an array of another dtype, shape or layout, or an id outside the table.
    """
    require("table of embedding", table, np.float32, None, None)
    require("ids of embedding", ids, np.int64, None)
    require_range("ids of embedding", ids, 0, table.shape[0])
    return table[ids]


def embedding_gradient(dh: Float32, ids: npt.NDArray[np.int64], grad: Float32, workers: Workers) -> None:
    """``grad[id] = grad[id] + dh`` for every token in order, in place.

    Args:
        dh: float32 [N, H].
        ids: int64 [N], each below V.
        grad: float32 [V, H], continued in place.

    Raises:
        ContractError: an array of another dtype, shape or layout, or an id outside the table.
    """
    require("grad of embedding_gradient", grad, np.float32, None, None)
    vocabulary, columns = grad.shape
    require("ids of embedding_gradient", ids, np.int64, None)
    require("dh of embedding_gradient", dh, np.float32, ids.size, columns)
    require_range("ids of embedding_gradient", ids, 0, vocabulary)
    # a cache line of columns at least, so that two threads do not write the same one
    grain = max(16, _ELEMENTS // max(1, ids.size))
    workers.run(_embedding_gradient, columns, dh, ids, grad, grain=grain)
