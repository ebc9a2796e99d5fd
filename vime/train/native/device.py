"""The trainer's tensors, gradients and optimizer on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from rlkernel.contract.identity import manifest_digest
from rlkernel.contract.schedules import BetaPowers
from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.optimizer import AdamWScalars
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.kernels.triton import launch_optimizer
from rlkernel.ops.device.gradients import DeviceGradients
from rlkernel.ops.device.step import step_ops
from rlkernel.ops.device.weights import device_manifest
from rlkernel.verify.evidence import Evidence
from vime.train.native.backend import Dtype, Tensors
from vime.train.native.model import GradientShape
from vime.train.native.moments import DeviceMoments, HostMoments, Moments, home
from vime.train.native.optimizer import (
    OPTIMIZER_IMPLEMENTATIONS,
    TORCH_DTYPES,
    AdamW,
    AdamWState,
    OptimizerConfig,
    blame,
)

DEVICE_IMPLEMENTATIONS = {
    **{kind: str(op.implementation) for kind, op in step_ops().items()},
    "loss": OPTIMIZER_IMPLEMENTATIONS["loss"],
}
"""The policy loss of some thousand tokens stays on the host: its inputs come from there, its checks stop the run."""
MomentsPlace = Literal["device", "host"]
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class DeviceAdamW(AdamW):
    """AdamW whose master is float32 tensors of a device, changed in place; its moments are there too, or on the host.

    :meth:`update` returns the same weight tensors every time, with other values.
    """

    implementations: Mapping[str, str] = DEVICE_IMPLEMENTATIONS

    def __init__(
        self,
        config: OptimizerConfig,
        tensors: Tensors,
        dtype: Dtype,
        device: torch.device,
        evidence: Evidence,
        moments: MomentsPlace = "device",
    ) -> None:
        self.config, self._evidence, self._device, self._where = config, evidence, device, moments
        self._dtype = TORCH_DTYPES[dtype]
        self._powers = BetaPowers(config.beta1, config.beta2)
        self._start(tensors)

    def _start(self, tensors: Tensors) -> None:
        names = sorted(tensors)
        self._masters = {name: tensors[name].to(self._device, torch.float32, copy=True) for name in names}
        self._moments: Moments = (DeviceMoments if self._where == "device" else HostMoments)(self._masters)
        self._weights = {name: torch.empty_like(value, dtype=self._dtype) for name, value in self._masters.items()}
        self._master = self._masters  # type: ignore[assignment]  # names, for the base

    def _norm(self, gradients: Mapping[str, Any]) -> tuple[np.float32, np.float32]:
        found = launch_optimizer.gradient_norm(gradients, self.config.max_grad_norm)
        norm, clip = torch.cat(found).cpu().numpy()
        return norm, clip

    def _apply(self, gradients: Mapping[str, Any], scalars: AdamWScalars) -> dict[str, torch.Tensor]:
        given = launch_optimizer.scalars_on_device(scalars, self._device)
        clip = torch.tensor([float(scalars.clip)], dtype=torch.float32, device=self._device)
        for part in self._moments.parts():
            master, gradient, weight = (
                tensors[part.name].view(-1)[part.first : part.last]
                for tensors in (self._masters, gradients, self._weights)
            )
            launch_optimizer.adamw(master, part.first_moment, part.second_moment, gradient, weight, given, clip)
        return dict(self._weights)

    def _elements(self, name: str, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # moments on the host are copied beside the current stream
        parts = (self._masters[name], *self._moments.of(name))
        master, first, second = (part.detach().reshape(-1)[index.to(part.device)].cpu() for part in parts)
        return master, first, second

    def _blame(self, gradients: Mapping[str, Any]) -> str:
        return blame({name: value.cpu().numpy() for name, value in gradients.items()})

    def check_master(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise NumericsError unless the model's weights are the masters, rounded: bits of either changed otherwise."""
        kind = _INTEGERS[self._dtype]
        wrong = {
            name: (master.to(self._dtype).view(kind) != tensors[name].view(kind)).reshape(-1)
            for name, master in self._masters.items()
        }
        flags = torch.stack([differs.any() for differs in wrong.values()]).tolist()
        for (name, differs), bad in zip(wrong.items(), flags, strict=True):
            if bad:
                raise NumericsError(
                    f"element {int(differs.nonzero()[0])} of {name} is not its float32 master rounded to the model's "
                    "dtype: a bit of one of them changed since the last update"
                )

    def state(self) -> AdamWState:
        """The state as it is now, as NumPy arrays of their own."""
        return AdamWState(home(self._masters), *self._moments.state(), self._powers)

    def _take(self, state: AdamWState) -> None:
        for name, tensor in self._masters.items():
            tensor.copy_(torch.from_numpy(state.master[name]))
        self._moments.take(state.moment1, state.moment2)


class DeviceBackend:
    """Everything but the policy loss on a device.

    Args:
        workers: the host's threads, in which the loss runs.
        moments: where the optimizer's moments are kept: ``device`` or ``host``. It changes no bit.
    """

    implementations: Mapping[str, str] = DEVICE_IMPLEMENTATIONS

    def __init__(self, device: torch.device, workers: Workers, moments: MomentsPlace = "device") -> None:
        self._device, self._workers, self._moments = device, workers, moments

    def copies(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """On the device."""
        return {name: tensor.detach().to(self._device, copy=True) for name, tensor in tensors.items()}

    def optimizer(self, config: OptimizerConfig, tensors: Tensors, dtype: Dtype, evidence: Evidence) -> AdamW:
        """AdamW on the device."""
        return DeviceAdamW(config, tensors, dtype, self._device, evidence, self._moments)

    def gradients(self, shape: GradientShape) -> DeviceGradients:
        """Buffers on the device."""
        return DeviceGradients(shape.shapes, self._device, tied_embedding=shape.tied_embedding, leaves=shape.leaves)

    def manifest_digest(self, tensors: Tensors, dtype: Dtype) -> str:
        """By the device's tensor digest."""
        return manifest_digest(device_manifest(tensors, dtype))

    def gradient_digest(self, gradients: Mapping[str, Any]) -> str:
        """By the device's tensor digest."""
        return manifest_digest(device_manifest(gradients, "float32"))

    def probe(self) -> None:
        """Looks for flushed subnormals in the host's threads."""
        self._workers.probe()
