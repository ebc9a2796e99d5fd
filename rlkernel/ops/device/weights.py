"""A model's weights on a GPU, fused as its kernels read them: features of qkv by KV group, of gate_up by leaf.

The features of a fused projection lie in the order in which its dgrad reduces them (:func:`dgrad_order`), so that one
matrix serves forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlkernel.contract.identity import TensorEntry, manifest_digest
from rlkernel.kernels.triton.launch_digest import Part, TensorDigests, tensor_digest
from rlkernel.models.definition import ModelDefinition, Region
from rlkernel.ops.weights import DTYPES, LINEAR_KINDS, check_tensors, dgrad_order


class DeviceWeights:
    """Fused weights on a device; a copy, never a view of what was given.

    Args:
        tensors: logical tensors in the contract's dtype, on any device.
        tp: the claimed degree.

    Raises:
        ModelError: tensors are missing, extra, or of another shape or dtype.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: str,
        tp: int,
        device: torch.device,
    ) -> None:
        self.definition, self.dtype, self.tp, self.device = definition, dtype, tp, device
        self._shapes = definition.config.weight_shapes()
        self.tensors: dict[str, torch.Tensor] = {}
        self._fused: dict[str, torch.Tensor] = {}
        self._biases: dict[str, torch.Tensor] = {}
        self._orders: dict[str, torch.Tensor] = {}
        self._digests: tuple[tuple[str, ...], TensorDigests] | None = None
        check_tensors(definition, tensors, dtype)
        kind = DTYPES[dtype]
        for region in definition.regions:
            matrices, biases = _names(region)
            if not self._is_fused(region):
                for name in region.weights:
                    self.tensors.setdefault(name, torch.empty(self._shapes[name], dtype=kind, device=device))
                continue
            order = torch.from_numpy(dgrad_order(region, self._shapes, definition.config.num_kv_heads, tp))
            self._orders[region.name] = order.to(device)
            columns = self._shapes[matrices[0]][1]
            self._fused[region.name] = torch.empty((len(order), columns), dtype=kind, device=device)
            if biases:
                self._biases[region.name] = torch.empty(len(order), dtype=kind, device=device)
        self.update(tensors)

    def _is_fused(self, region: Region) -> bool:
        return region.kind in LINEAR_KINDS and len(_names(region)[0]) > 1

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take other values for all tensors, into the same memory. Raises as the constructor."""
        check_tensors(self.definition, tensors, self.dtype)
        for name, own in self.tensors.items():
            own.copy_(tensors[name])
        for region in self.definition.regions:
            if not self._is_fused(region):
                continue
            matrices, biases = _names(region)
            order = self._orders[region.name]
            for names, fused in ((matrices, self._fused[region.name]), (biases, self._biases.get(region.name))):
                if fused is not None:
                    rows = torch.cat([tensors[name].to(self.device) for name in names])
                    torch.index_select(rows, 0, order, out=fused)

    def matrix(self, region: Region) -> torch.Tensor:
        """[N, K] of a linear region, fused where it has several weights."""
        found = self._fused.get(region.name)
        return self.tensors[region.weights[0]] if found is None else found

    def bias(self, region: Region) -> torch.Tensor | None:
        """[N] in the order of :meth:`matrix`, or None."""
        return self._biases.get(region.name)

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight or the embedding table."""
        return self.tensors[name]

    def order(self, region: Region) -> torch.Tensor:
        """Of a fused region: the row of the plain concatenation at each row of :meth:`matrix`, int64 [N]."""
        return self._orders[region.name]

    def manifest(self) -> list[TensorEntry]:
        """Every logical tensor with the digest of the bytes that the kernels read."""
        if self._digests is None:  # the memory stays, and so do its addresses
            parts = self._parts()
            self._digests = tuple(parts), TensorDigests(list(parts.values()))
        names, digests = self._digests
        lanes = digests()
        if not self._biases:
            order = sorted(range(len(names)), key=names.__getitem__)
            return _entries([names[i] for i in order], lanes[order], self._shapes, self.dtype)
        found = dict(zip(names, lanes.unbind(), strict=True))
        for region in self.definition.regions:
            fused = self._biases.get(region.name)
            if fused is not None:
                biases = _names(region)[1]
                for name, rows in zip(biases, self._rows(region, biases), strict=True):
                    found[name] = tensor_digest(fused[torch.from_numpy(rows).to(self.device)])
        return entries(found, self._shapes, self.dtype)

    def _parts(self) -> dict[str, Part]:
        """Where every logical tensor lies, but the biases of fused projections."""
        found = {name: Part(tensor) for name, tensor in self.tensors.items()}
        for region in self.definition.regions:
            if self._is_fused(region):
                names, fused = _names(region)[0], self._fused[region.name]
                for name, rows in zip(names, self._rows(region, names), strict=True):
                    found[name] = Part(fused, rows)
        return found

    def _rows(self, region: Region, names: list[str]) -> list[np.ndarray]:
        """Of each tensor of a fused projection: the fused row at which each of its rows lies."""
        places = np.argsort(self._orders[region.name].cpu().numpy())
        return np.split(places, np.cumsum([self._shapes[name][0] for name in names])[:-1])

    def manifest_digest(self) -> str:
        """SHA-256 of the manifest, recomputed on the device from the bytes that the kernels read."""
        return manifest_digest(self.manifest())


def _names(region: Region) -> tuple[list[str], list[str]]:
    return (
        [name for name in region.weights if name.endswith(".weight")],
        [name for name in region.weights if name.endswith(".bias")],
    )


def entries(
    digests: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> list[TensorEntry]:
    """Manifest entries, by name, of digests int64 [2] that still lie on the device: one transfer for all."""
    names = sorted(digests)
    return _entries(names, torch.stack([digests[name] for name in names]), shapes, dtype)


def _entries(
    names: Sequence[str], lanes: torch.Tensor, shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> list[TensorEntry]:
    """Manifest entries of digests int64 [names, 2]."""
    home = lanes.cpu().numpy().view(np.uint64)
    return [
        TensorEntry(name, tuple(shapes[name]), dtype, (int(one), int(other)))
        for name, (one, other) in zip(names, home, strict=True)
    ]


def device_manifest(tensors: Mapping[str, torch.Tensor], dtype: str) -> list[TensorEntry]:
    """Manifest of plain tensors on a device."""
    names = sorted(tensors)
    lanes = TensorDigests([Part(tensors[name].contiguous()) for name in names])()
    return _entries(names, lanes, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, dtype)
