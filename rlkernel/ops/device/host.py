"""What a host gives to regions on a GPU: the same services as :mod:`rlkernel.ops.host`, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from rlkernel.contract.build import Contract
from rlkernel.contract.points import SixPoints
from rlkernel.errors import ContractError
from rlkernel.models.config import ModelConfig

if TYPE_CHECKING:
    from rlkernel.ops.device.weights import DeviceWeights


@dataclass(frozen=True)
class DeviceBatch:
    """Flat tokens of S sequences on the device.

    ``tokens`` int64 [N], ``positions`` int32 [N], ``starts`` int32 [S+1]; ``lengths`` are the rows of each sequence on
    the host, and ``last_position`` the largest position (-1 without tokens): bounds for grids.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    lengths: tuple[int, ...]
    last_position: int

    @property
    def longest(self) -> int:
        """Rows of the longest sequence."""
        return max(self.lengths, default=0)


class DeviceKVState(Protocol):
    """Paged keys and values: ``block_table`` int32 [S, B], ``slots`` int64 [N], both on the device."""

    @property
    def page_size(self) -> int:
        """Tokens a page."""

    @property
    def block_table(self) -> torch.Tensor:
        """int32 [S, B]."""

    @property
    def slots(self) -> torch.Tensor:
        """int64 [N]; a negative one is not written."""

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) of a layer, each [P, page, KVH, D] in the activations' dtype."""


class GradientBuffers(Protocol):
    """float32 chains on the device, by logical name; kernels continue them in place."""

    def buffer(self, name: str) -> torch.Tensor:
        """The running chain of a logical tensor."""

    def embedding(self, name: str) -> torch.Tensor:
        """The running chain of the embedding's own gradient."""


@dataclass
class DeviceHost:
    """Services of one pass. ``cos`` and ``sin`` are float32 [positions, head_dim / 2] on the device.

    ``row_starts``: offsets on the host of each sequence's rows among the head's rows; None: one sequence.
    """

    contract: Contract
    config: ModelConfig
    case: str
    batch: DeviceBatch
    weights: DeviceWeights
    cos: torch.Tensor
    sin: torch.Tensor
    state: DeviceKVState | None = None
    gradients: GradientBuffers | None = None
    row_starts: tuple[int, ...] | None = None

    def points(self, region: str) -> SixPoints:
        """The entry of a region in this case. Raises ContractError if the contract has none."""
        found = self.contract.entries.get((self.case, region))
        if found is None:
            raise ContractError(f"the contract has no entry for region {region!r} in case {self.case!r}")
        return found

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and weights."""
        return torch.bfloat16 if self.contract.dtype == "bfloat16" else torch.float32

    @property
    def tp(self) -> int:
        """The claimed tensor-parallel degree: leaves of row-parallel reductions, vocabulary shards."""
        return self.contract.topology.tp
