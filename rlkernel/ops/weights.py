"""The weights that a side computes with, packed for its kernels, with a digest read off the packed bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.entries import VOCABULARY_LEAF
from rlkernel.contract.identity import TensorEntry, manifest_digest
from rlkernel.errors import ModelError, NumericsError
from rlkernel.kernels.cpu.convert import as_float32
from rlkernel.kernels.cpu.digest import panels_digest, tensor_digest
from rlkernel.kernels.cpu.panels import Panels, pack_columns, pack_rows, unpack_row
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.definition import ModelDefinition, Region

LINEAR_KINDS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "logprob")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_tensors(definition: ModelDefinition, tensors: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Raise ModelError that lists every missing, extra or unfitting tensor."""
    expected = definition.config.weight_shapes()
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is not a tensor of this model" for name in tensors if name not in expected]
    for name, shape in expected.items():
        if name not in tensors:
            continue
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            problems.append(f"{name} has shape {tuple(tensor.shape)}, the model needs {shape}")
        if tensor.dtype != DTYPES[dtype]:
            problems.append(f"{name} is {tensor.dtype}, the contract says {dtype}")
    if problems:
        raise ModelError(f"{len(problems)} tensors do not fit the model: " + "; ".join(problems))


@dataclass(frozen=True)
class _Part:
    """A logical tensor inside a region's packed rows."""

    name: str
    first_row: int
    rows: int


def dgrad_order(region: Region, shapes: Mapping[str, tuple[int, ...]], kv_heads: int, tp: int) -> NDArray[np.int64]:
    """Order in which a fused projection's output features enter the dgrad's reduction.

    qkv: KV groups ascending, each [its q heads, k head, v head]; gate_up: tp leaves, each [gate slice, up slice].
    Returns int64 [N]: the fused row (q|k|v or gate|up) at each place of the reduction.
    """
    if region.kind == "qkv_proj":
        q_rows, k_rows = shapes[region.weights[0]][0], shapes[region.weights[1]][0]
        group, head = q_rows // kv_heads, k_rows // kv_heads
        parts = []
        for g in range(kv_heads):
            parts.append(np.arange(g * group, (g + 1) * group))
            parts.append(q_rows + np.arange(g * head, (g + 1) * head))
            parts.append(q_rows + k_rows + np.arange(g * head, (g + 1) * head))
        return np.concatenate(parts)
    rows = shapes[region.weights[0]][0]
    width = rows // tp
    parts = []
    for leaf in range(tp):
        parts.append(np.arange(leaf * width, (leaf + 1) * width))
        parts.append(rows + np.arange(leaf * width, (leaf + 1) * width))
    return np.concatenate(parts)


class WeightSet:
    """A model's weights in the form that the CPU kernels read; a copy, never a view of what was given.

    Args:
        tensors: logical tensors in the contract's dtype.
        training: also pack what the backward needs.

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
        workers: Workers,
        training: bool = False,
    ) -> None:
        self.definition, self.dtype, self.tp = definition, dtype, tp
        self._workers, self._training = workers, training
        self._shapes = definition.config.weight_shapes()
        self._rows: dict[str, Panels] = {}
        self._columns: dict[str, Panels] = {}
        self._column_digests: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, list[_Part]] = {}
        self.vectors: dict[str, NDArray[np.float32]] = {}
        self.biases: dict[str, NDArray[np.float32]] = {}
        self._table: NDArray[np.float32] | None = None
        self._dgrad_rows: dict[str, NDArray[np.int64]] = {}
        self.update(tensors)

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take other values for all tensors, into the same memory."""
        check_tensors(self.definition, tensors, self.dtype)
        for region in self.definition.regions:
            if region.kind in LINEAR_KINDS:
                self._pack(region, tensors)
            elif region.kind == "embedding":
                if not self.definition.config.tied_embeddings:
                    self._table = as_float32(tensors[region.weights[0]]).copy()
            else:
                for name in region.weights:
                    self.vectors[name] = as_float32(tensors[name]).copy()

    def _pack(self, region: Region, tensors: Mapping[str, torch.Tensor]) -> None:
        matrices = [name for name in region.weights if name.endswith(".weight")]
        biases = [name for name in region.weights if name.endswith(".bias")]
        arrays = [as_float32(tensors[name]) for name in matrices]
        fused = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        old = self._rows.get(region.name)
        self._rows[region.name] = pack_rows(fused, self._workers, out=old)
        first, parts = 0, []
        for name, array in zip(matrices, arrays, strict=True):
            parts.append(_Part(name, first, array.shape[0]))
            first += array.shape[0]
        self._parts[region.name] = parts
        if biases:
            for name in biases:
                self.vectors[name] = as_float32(tensors[name]).copy()
            self.biases[region.name] = np.concatenate([self.vectors[name] for name in biases])
        if self._training:
            if len(matrices) > 1:
                order = dgrad_order(region, self._shapes, self.definition.config.num_kv_heads, self.tp)
                self._dgrad_rows[region.name] = order
                fused = fused[order]
            elif region.kind == "logprob" and self.tp > 1:
                # the dgrad's leaves are the vocabulary's shards, counted in the padded vocabulary
                fused = np.pad(fused, ((0, -len(fused) % (VOCABULARY_LEAF * self.tp)), (0, 0)))
            columns = pack_columns(fused, self._workers, out=self._columns.get(region.name))
            self._columns[region.name] = columns
            self._column_digests[region.name] = tensor_digest(columns.data, self._workers)

    def rows(self, region: Region) -> Panels:
        """Packed rows of a linear region: y = x @ rows.T."""
        return self._rows[region.name]

    def columns(self, region: Region) -> Panels:
        """Packed columns of a linear region (training only), rows in the order of :func:`dgrad_order`."""
        return self._columns[region.name]

    def dgrad_rows(self, region: Region) -> NDArray[np.int64]:
        """Order of a fused projection's outputs in its dgrad, int64 [N] (training only)."""
        return self._dgrad_rows[region.name]

    def embed(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of the embedding table, float32 [N, H]."""
        if self._table is not None:
            return self._table[ids]
        return unpack_row(self._rows[self.definition.head.name], ids)

    def manifest(self) -> list[TensorEntry]:
        """Every logical tensor with the digest of the bytes that the kernels read."""
        bf16 = self.dtype == "bfloat16"
        entries: dict[str, tuple[int, int]] = {}
        for region in self.definition.regions:
            for part in self._parts.get(region.name, []):
                panels = self._rows[region.name]
                entries[part.name] = panels_digest(panels, part.first_row, part.rows, self._workers, bf16)
        if self._table is not None:
            entries["model.embed_tokens.weight"] = self._array_digest(self._table, bf16)
        for region in self.definition.regions:
            fused, offset = self.biases.get(region.name), 0
            for name in region.weights:
                if name.endswith(".bias") and fused is not None:
                    size = self.vectors[name].size
                    entries[name] = self._array_digest(fused[offset : offset + size], bf16)
                    offset += size
        for name, vector in self.vectors.items():
            entries.setdefault(name, self._array_digest(vector, bf16))
        missing = set(self._shapes) - set(entries)
        if missing:
            raise ModelError(f"these tensors have no packed form and so no digest: {sorted(missing)}")
        return [TensorEntry(name, self._shapes[name], self.dtype, entries[name]) for name in sorted(entries)]

    def _array_digest(self, array: NDArray[np.float32], bf16: bool) -> tuple[int, int]:
        if bf16:
            return tensor_digest((array.view(np.uint32) >> np.uint32(16)).astype(np.uint16), self._workers)
        return tensor_digest(array, self._workers)

    def manifest_digest(self) -> str:
        """SHA-256 of the manifest, recomputed from the packed bytes.

        Raises NumericsError if the second copy that the backward reads is no longer what was packed.
        """
        for name, columns in self._columns.items():
            if tensor_digest(columns.data, self._workers) != self._column_digests[name]:
                raise NumericsError(
                    f"the packed columns of {name}, which the backward reads, changed since the packing"
                )
        return manifest_digest(self.manifest())


def plain_manifest(tensors: Mapping[str, torch.Tensor], dtype: str, workers: Workers) -> list[TensorEntry]:
    """Manifest of plain logical tensors; equal to that of a WeightSet with the same values."""
    entries = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        raw = tensor.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else tensor.numpy()
        entries.append(TensorEntry(name, tuple(tensor.shape), dtype, tensor_digest(raw, workers)))
    return entries


def tensors_manifest_digest(tensors: Mapping[str, torch.Tensor], dtype: str, workers: Workers) -> str:
    """Manifest digest of plain logical tensors."""
    return manifest_digest(plain_manifest(tensors, dtype, workers))
