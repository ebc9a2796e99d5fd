"""Weight gradients as continued fp32 chains, cut into the leaves of the contract."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.memory import aligned_zeros

EMBEDDING_PART = "#embedding"


class Gradients:
    """One optimizer update's gradients: fp32 buffers by logical name.

    Kernels continue the chains in the buffers, micro-batch after micro-batch, in sample order. With ``leaves`` = D > 1
    (the claimed dp degree) the caller ends a leaf after each of the D blocks of samples; finished leaves merge in a
    balanced binary tree, lower block on the left. Where the embedding is tied to the head, the embedding's part is a
    buffer of its own (name + ``#embedding``), added once in :meth:`finish`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, tied_embedding: str | None = None, leaves: int = 1):
        if leaves < 1 or leaves & (leaves - 1):
            raise ContractError(f"{leaves} gradient leaves: the claimed dp degree must be a power of two")
        self._shapes = dict(shapes)
        if tied_embedding is not None:
            self._shapes[tied_embedding + EMBEDDING_PART] = self._shapes[tied_embedding]
        self._tied = tied_embedding
        self._leaves = leaves
        self._ended = 0
        self._pending: list[tuple[int, dict[str, NDArray[np.float32]]]] = []
        self._current = self._zeros()

    def _zeros(self) -> dict[str, NDArray[np.float32]]:
        return {name: aligned_zeros(shape) for name, shape in self._shapes.items()}

    def buffer(self, name: str) -> NDArray[np.float32]:
        """The running chain of a logical tensor, to be continued in place."""
        return self._current[name]

    def embedding(self, name: str) -> NDArray[np.float32]:
        """The buffer for the embedding's own gradient."""
        return self._current[name + EMBEDDING_PART if name == self._tied else name]

    def end_leaf(self) -> None:
        """Close the running leaf and merge whole subtrees."""
        self._ended += 1
        if self._ended > self._leaves:
            raise ContractError(f"{self._ended} gradient leaves were ended, the contract has {self._leaves}")
        level, buffers = 0, self._current
        while self._pending and self._pending[-1][0] == level:
            _, left = self._pending.pop()
            for name, value in buffers.items():
                np.add(left[name], value, out=left[name])
            level, buffers = level + 1, left
        self._pending.append((level, buffers))
        if self._ended < self._leaves:
            self._current = self._zeros()

    def finish(self) -> dict[str, NDArray[np.float32]]:
        """The merged gradients by logical name. Raises ContractError if leaves are missing."""
        if self._ended != self._leaves:
            raise ContractError(f"{self._ended} of {self._leaves} gradient leaves were ended")
        ((_, result),) = self._pending
        if self._tied is not None:
            part = result.pop(self._tied + EMBEDDING_PART)
            np.add(result[self._tied], part, out=result[self._tied])
        return result
