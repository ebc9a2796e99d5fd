"""Weights for torch's own kernels: the logical tensors themselves, copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlkernel.contract.identity import TensorEntry, manifest_digest
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.definition import ModelDefinition
from rlkernel.ops.weights import check_tensors, plain_manifest


class TorchWeightSet:
    """Logical tensors under their Hugging Face names; same interface as :class:`rlkernel.ops.weights.WeightSet`."""

    def __init__(
        self,
        definition: ModelDefinition,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: str,
        workers: Workers,
    ) -> None:
        self.definition, self.dtype, self._workers = definition, dtype, workers
        self.tensors: dict[str, torch.Tensor] = {}
        self.update(tensors)

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take other values for all tensors."""
        check_tensors(self.definition, tensors, self.dtype)
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def manifest(self) -> list[TensorEntry]:
        """Every logical tensor with the digest of its bytes."""
        return plain_manifest(self.tensors, self.dtype, self._workers)

    def manifest_digest(self) -> str:
        """SHA-256 of the manifest, recomputed from the bytes."""
        return manifest_digest(self.manifest())
