"""A device's implementations with NumPy at their ports, so that admission compares them as it does any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.build import Contract
from rlkernel.kernels.cpu.convert import as_float32, from_float32
from rlkernel.kernels.cpu.logprob import RowStatistics
from rlkernel.models.definition import Region, define_model
from rlkernel.ops.device.head import LinearLogprob
from rlkernel.ops.device.host import DeviceBatch, DeviceHost
from rlkernel.ops.device.regions import device_ops
from rlkernel.ops.device.runner import on_host
from rlkernel.ops.device.step import step_ops
from rlkernel.ops.device.weights import DeviceWeights
from rlkernel.ops.host import Host, TokenBatch
from rlkernel.ops.weights import DTYPES
from rlkernel.verify.admission.bits import Results
from rlkernel.verify.admission.sources import device_target, torch_toolchain

SOURCES = (
    "rlkernel.kernels.triton",
    "rlkernel.kernels.products",
    "rlkernel.kernels.vendor",
    "rlkernel.ops.device",
    "rlkernel.contract.constants",
)
Array = NDArray[np.float32]


def device_batch(batch: TokenBatch, device: torch.device) -> DeviceBatch:
    """A batch of the host on the device."""
    return DeviceBatch(
        tokens=torch.from_numpy(batch.tokens).to(device),
        positions=torch.from_numpy(batch.positions).to(device),
        starts=torch.from_numpy(batch.starts).to(device),
        lengths=tuple(np.diff(batch.starts).tolist()),
        last_position=int(batch.positions.max(initial=-1)),
    )


class _Pages:
    """The pages of a host's KV state on the device, in the kernels' layout [P, page, KVH, D]."""

    def __init__(self, state: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = state.page_size
        self.block_table = torch.from_numpy(np.ascontiguousarray(state.block_table)).to(device)
        self.slots = torch.from_numpy(state.slots).to(device)
        self._state, self._dtype, self._device = state, dtype, device

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v), a copy."""
        k, v = self._state.pages(layer)
        k, v = np.ascontiguousarray(k.transpose(0, 3, 1, 2)), np.ascontiguousarray(v.transpose(0, 2, 1, 3))
        return from_float32(k, self._dtype).to(self._device), from_float32(v, self._dtype).to(self._device)


class _Buffers:
    """Chains of a host on the device; :meth:`write_back` brings them home."""

    def __init__(self, gradients: Any, device: torch.device) -> None:
        self._gradients, self._device = gradients, device
        self._taken: list[tuple[Array, torch.Tensor]] = []

    def _take(self, own: Array) -> torch.Tensor:
        tensor = torch.from_numpy(own).clone().to(self._device)
        self._taken.append((own, tensor))
        return tensor

    def buffer(self, name: str) -> torch.Tensor:
        """The chain of a logical tensor."""
        return self._take(self._gradients.buffer(name))

    def embedding(self, name: str) -> torch.Tensor:
        """The chain of the table's own gradient."""
        return self._take(self._gradients.embedding(name))

    def write_back(self) -> None:
        """Chains as the kernels left them, into the host's buffers."""
        for own, tensor in self._taken:
            own[...] = tensor.cpu().numpy()


class HostFaced:
    """An implementation of a region of the body: NumPy float32 in and out, tensors of the device inside.

    Args:
        op: an implementation of :mod:`rlkernel.ops.device`.
        contract: whose entries it executes.
        device: where; :attr:`target` follows from it.
    """

    sources = SOURCES

    def __init__(self, op: Any, contract: Contract, device: torch.device) -> None:
        self.op, self.contract, self._place = op, contract, device
        self.implementation: str = op.implementation
        self.device = str(device)
        self.target = device_target(self.device)
        self.toolchain = (*torch_toolchain(self.device), ("target", self.target))
        self._weights: tuple[Any, DeviceWeights] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and weights."""
        return DTYPES[self.contract.dtype]

    def placed(self, array: Any) -> torch.Tensor:
        """float32 in the contract's dtype, integers as they are."""
        if array.dtype != np.float32:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self._place)
        return from_float32(np.ascontiguousarray(array), self.dtype).to(self._place)

    def host(self, host: Host, buffers: _Buffers | None = None) -> DeviceHost:
        """The device's services for those of a CPU pass whose weights have their logical ``tensors``."""
        tensors: Mapping[str, torch.Tensor] = host.weights.tensors  # type: ignore[attr-defined]
        if self._weights is None or self._weights[0] is not tensors:
            weights = DeviceWeights(
                define_model(host.config), tensors, dtype=self.contract.dtype, tp=host.tp, device=self._place
            )
            self._weights = (tensors, weights)
        rows = host.row_starts
        return DeviceHost(
            contract=self.contract,
            config=host.config,
            case=host.case,
            batch=device_batch(host.batch, self._place),
            weights=self._weights[1],
            cos=torch.from_numpy(host.rope.cos).to(self._place),
            sin=torch.from_numpy(host.rope.sin).to(self._place),
            state=None if host.state is None else _Pages(host.state, self.dtype, self._place),
            gradients=buffers,
            row_starts=None if rows is None else tuple(rows.tolist()),
        )

    def forward(self, region: Region, inputs: Sequence[Any], host: Host) -> tuple[tuple[Array, ...], Any]:
        """Outputs as NumPy float32, and what the backward needs, on the device."""
        outputs, saved = self.op.forward(region, [self.placed(x) for x in inputs], self.host(host))
        return tuple(as_float32(x.cpu()) for x in outputs), saved

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, ...]:
        """Gradients of the inputs; continues the host's chains."""
        buffers = _Buffers(host.gradients, self._place)
        found = self.op.backward(region, saved, [self.placed(x) for x in grads], self.host(host, buffers))
        buffers.write_back()
        return tuple(as_float32(x.cpu()) for x in found)


class HostFacedHead(HostFaced):
    """The head, likewise."""

    def forward(  # type: ignore[override]
        self, region: Region, x: Array, targets: NDArray[np.int64], temperature: float, host: Host
    ) -> RowStatistics:
        """Statistics of rows."""
        found = self.op.forward(region, self.placed(x), self.placed(targets), temperature, self.host(host))
        return on_host(found)

    def backward(  # type: ignore[override]
        self, region: Region, x: Array, targets: NDArray[np.int64], temperature: float, coefficient: Array, host: Host
    ) -> Array:
        """Gradient of the rows; continues the host's chain."""
        buffers = _Buffers(host.gradients, self._place)
        dx = self.op.backward(
            region, self.placed(x), self.placed(targets), temperature,
            torch.from_numpy(coefficient).to(self._place), self.host(host, buffers),
        )  # fmt: skip
        buffers.write_back()
        return as_float32(dx.cpu())


class HostFacedStep(HostFaced):
    """A computation of the optimizer step, likewise."""

    def run(self, arguments: Mapping[str, Any], workers: Any, bf16: bool) -> Results:
        """Named results of a problem's arguments."""
        found: Results = self.op.run(arguments, self._place, bf16)
        return found


def device_candidates(contract: Contract, device: torch.device) -> tuple[tuple[str, Any], ...]:
    """Pairs (region, implementation with NumPy ports) of a device: body, head and optimizer step."""
    body = tuple((kind, HostFaced(op, contract, device)) for kind, op in device_ops().items())
    step = tuple((kind, HostFacedStep(op, contract, device)) for kind, op in step_ops().items())
    return (*body, ("logprob", HostFacedHead(LinearLogprob(), contract, device)), *step)
