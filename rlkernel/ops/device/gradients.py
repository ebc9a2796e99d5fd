"""Weight gradients on a GPU: the leaves of the contract as :class:`rlkernel.ops.gradients.Gradients` has them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlkernel.errors import ContractError
from rlkernel.kernels.triton.launch_rows import residual_add
from rlkernel.ops.gradients import EMBEDDING_PART

Buffers = dict[str, torch.Tensor]


class DeviceGradients:
    """One optimizer update's gradients: float32 buffers on the device by logical name.

    Args:
        shapes: of all logical tensors.
        tied_embedding: name of a table that is also the head; the embedding's part is a buffer of its own, added once.
        leaves: D, the claimed dp degree; the caller ends a leaf after each of the D blocks of samples.

    Raises:
        ContractError: D is not a power of two.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
        *,
        tied_embedding: str | None = None,
        leaves: int = 1,
    ) -> None:
        if leaves < 1 or leaves & (leaves - 1):
            raise ContractError(f"{leaves} gradient leaves: the claimed dp degree must be a power of two")
        self._shapes = dict(shapes)
        if tied_embedding is not None:
            self._shapes[tied_embedding + EMBEDDING_PART] = self._shapes[tied_embedding]
        self._tied, self._leaves, self._device = tied_embedding, leaves, device
        self._ended = 0
        self._pending: list[tuple[int, Buffers]] = []
        self._current = self._zeros()

    def _zeros(self) -> Buffers:
        return {
            name: torch.zeros(shape, dtype=torch.float32, device=self._device) for name, shape in self._shapes.items()
        }

    def buffer(self, name: str) -> torch.Tensor:
        """The running chain of a logical tensor, to be continued in place."""
        return self._current[name]

    def embedding(self, name: str) -> torch.Tensor:
        """The running chain of the embedding's own gradient."""
        return self._current[name + EMBEDDING_PART if name == self._tied else name]

    def end_leaf(self) -> None:
        """Close the running leaf and merge whole subtrees, the lower block on the left."""
        self._ended += 1
        if self._ended > self._leaves:
            raise ContractError(f"{self._ended} gradient leaves were ended, the contract has {self._leaves}")
        level, buffers = 0, self._current
        while self._pending and self._pending[-1][0] == level:
            _, left = self._pending.pop()
            for name, value in buffers.items():
                residual_add(left[name], value, out=left[name])
            level, buffers = level + 1, left
        self._pending.append((level, buffers))
        if self._ended < self._leaves:
            self._current = self._zeros()

    def finish(self) -> Buffers:
        """The merged gradients by logical name. Raises ContractError if leaves are missing."""
        if self._ended != self._leaves:
            raise ContractError(f"{self._ended} of {self._leaves} gradient leaves were ended")
        ((_, result),) = self._pending
        if self._tied is not None:
            part = result.pop(self._tied + EMBEDDING_PART)
            residual_add(result[self._tied], part, out=result[self._tied])
        return result
