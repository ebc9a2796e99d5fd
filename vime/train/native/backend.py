"""Where a trainer's tensors live, and what computes its optimizer step there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch

from rlkernel.contract.identity import TensorEntry, manifest_digest
from rlkernel.kernels.cpu.digest import tensor_digest
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.ops.weights import tensors_manifest_digest
from rlkernel.verify.evidence import Evidence
from vime.train.native.model import GradientShape
from vime.train.native.optimizer import OPTIMIZER_IMPLEMENTATIONS, AdamW, OptimizerConfig

Tensors = Mapping[str, torch.Tensor]
Dtype = Literal["float32", "bfloat16"]


class TrainerBackend(Protocol):
    """``implementations``: regions of case ``optimizer_step`` and what computes them."""

    implementations: Mapping[str, str]

    def copies(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors where the model lives, in memory of their own."""

    def optimizer(self, config: OptimizerConfig, tensors: Tensors, dtype: Dtype, evidence: Evidence) -> AdamW:
        """AdamW whose master starts as the exact float32 of ``tensors``."""

    def gradients(self, shape: GradientShape) -> Any:
        """Buffers of +0 for one update."""

    def manifest_digest(self, tensors: Tensors, dtype: Dtype) -> str:
        """SHA-256 of the manifest of logical tensors that lie there."""

    def gradient_digest(self, gradients: Mapping[str, Any]) -> str:
        """The same of finished gradients."""

    def probe(self) -> None:
        """Raises NumericsError if this process no longer computes as it has to."""


class CpuBackend:
    """Everything in main memory, by the CPU kernels."""

    implementations: Mapping[str, str] = OPTIMIZER_IMPLEMENTATIONS

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def copies(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Clones."""
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def optimizer(self, config: OptimizerConfig, tensors: Tensors, dtype: Dtype, evidence: Evidence) -> AdamW:
        """AdamW on NumPy arrays."""
        return AdamW(config, tensors, dtype, self._workers, evidence)

    def gradients(self, shape: GradientShape) -> Any:
        """NumPy buffers."""
        return shape.zeros()

    def manifest_digest(self, tensors: Tensors, dtype: Dtype) -> str:
        """By the CPU's tensor digest."""
        return tensors_manifest_digest(tensors, dtype, self._workers)

    def gradient_digest(self, gradients: Mapping[str, Any]) -> str:
        """By the CPU's tensor digest."""
        return manifest_digest(
            TensorEntry(name, tuple(value.shape), "float32", tensor_digest(value, self._workers))
            for name, value in gradients.items()
        )

    def probe(self) -> None:
        """Looks for flushed subnormals in every thread."""
        self._workers.probe()
