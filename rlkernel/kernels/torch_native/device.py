"""A dense model from torch's own kernels on a GPU: the production arm that the exact one is compared with.

Nothing here keeps the contract. Products are cuBLAS's, attention is ``scaled_dot_product_attention`` (padded where
sequences have other lengths, over gathered pages where there is a cache), norms and log-softmax are torch's, gradients
autograd's. Decode steps are CUDA graphs in the same buckets as the exact arm's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint

from rlkernel.contract.identity import TensorEntry, manifest_digest
from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.logprob import RowStatistics
from rlkernel.kernels.triton.launch_digest import Part, TensorDigests
from rlkernel.kernels.triton.launch_logprob import DeviceRowStatistics
from rlkernel.models.definition import ModelDefinition, Region
from rlkernel.ops.composition import Composition
from rlkernel.ops.device.graphs import DecodeGraph, bucket_of
from rlkernel.ops.device.host import DeviceBatch, DeviceHost
from rlkernel.ops.device.runner import DeviceRunner, drawn_on_host, on_host
from rlkernel.ops.device.weights import entries
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import TokenBatch
from rlkernel.ops.runner import Tape
from rlkernel.ops.weights import DTYPES, LINEAR_KINDS, check_tensors

Tensor = torch.Tensor
_ROWS = 1024  # of logits that exist at a time


class TorchDeviceWeights:
    """Logical tensors on a GPU, those of one projection side by side in one matrix; a copy.

    Args:
        tensors: logical tensors in the contract's dtype, on any device.

    Raises:
        ModelError: tensors are missing, extra, or of another shape or dtype.
    """

    def __init__(
        self, definition: ModelDefinition, tensors: Mapping[str, Tensor], *, dtype: str, device: torch.device
    ) -> None:
        check_tensors(definition, tensors, dtype)
        self.definition, self.dtype, self.device = definition, dtype, device
        self._shapes = definition.config.weight_shapes()
        self.tensors: dict[str, Tensor] = {}
        self.fused: dict[str, dict[str, Tensor]] = {}
        kind = DTYPES[dtype]
        for region in definition.regions:
            for ending in ("weight", "bias"):
                names = [name for name in region.weights if name.endswith(f".{ending}")]
                if region.kind not in LINEAR_KINDS or len(names) < 2:
                    for name in names:
                        if name not in self.tensors:
                            self.tensors[name] = torch.empty(self._shapes[name], dtype=kind, device=device)
                    continue
                rows = [self._shapes[name][0] for name in names]
                whole = torch.empty((sum(rows), *self._shapes[names[0]][1:]), dtype=kind, device=device)
                self.fused.setdefault(region.name, {})[ending] = whole
                self.tensors.update(zip(names, whole.split(rows), strict=True))
        self._names = sorted(self.tensors)
        self._digests = TensorDigests([Part(self.tensors[name]) for name in self._names])
        self.update(tensors)

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Take other values for all tensors, into the same memory. Raises as the constructor."""
        check_tensors(self.definition, tensors, self.dtype)
        for name, own in self.tensors.items():
            own.copy_(tensors[name])

    def matrix(self, region: Region) -> Tensor:
        """[N, K] of a linear region."""
        found = self.fused.get(region.name)
        return self.tensors[region.weights[0]] if found is None else found["weight"]

    def bias(self, region: Region) -> Tensor | None:
        """[N], or None."""
        return self.fused.get(region.name, {}).get("bias")

    def vector(self, name: str) -> Tensor:
        """A norm's weight or the embedding table."""
        return self.tensors[name]

    def manifest(self) -> list[TensorEntry]:
        """Every logical tensor with the digest of its bytes."""
        return entries(dict(zip(self._names, self._digests().unbind(), strict=True)), self._shapes, self.dtype)

    def manifest_digest(self) -> str:
        """SHA-256 of the manifest, recomputed on the device."""
        return manifest_digest(self.manifest())


@lru_cache(maxsize=64)
def _padded(lengths: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Where each row goes among sequences padded to the longest, int64 [N]; None where all have one length."""
    if len(set(lengths)) == 1:
        return None
    longest = max(lengths)
    places = [np.arange(length) + s * longest for s, length in enumerate(lengths)]
    return torch.from_numpy(np.concatenate(places)).to(device)


def _spread(x: Tensor, batch: DeviceBatch) -> Tensor:
    """Rows [N, ...] as [S, longest, ...], zeros behind shorter sequences."""
    count, longest = len(batch.lengths), batch.longest
    places = _padded(batch.lengths, x.device)
    if places is not None:
        x = x.new_zeros((count * longest, *x.shape[1:])).index_copy(0, places, x)
    return x.reshape(count, longest, *x.shape[1:])


def _gather(x: Tensor, batch: DeviceBatch) -> Tensor:
    """Inverse of :func:`_spread`."""
    places = _padded(batch.lengths, x.device)
    rows = x.reshape(-1, *x.shape[2:])
    return rows if places is None else rows[places]


def whole_sequences(q: Tensor, k: Tensor, v: Tensor, batch: DeviceBatch) -> Tensor:
    """Causal attention of sequences from position 0: q [N, QH, D], k and v [N, KVH, D] -> [N, QH, D]."""
    q, k, v = (_spread(x, batch).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return _gather(out.transpose(1, 2), batch)


def paged(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, layer: int, host: DeviceHost) -> Tensor:
    """The same over a cache, to which k and v are appended first. The heads of a group are queries of one head."""
    state = host.state
    assert state is not None
    k_pages, v_pages = state.pages(layer)
    slots = state.slots.clamp(min=0)  # rows that take no part write into the null page
    for pages, x in ((k_pages, k), (v_pages, v)):
        pages.view(-1, *x.shape[1:]).index_copy_(0, slots, x)
    table = state.block_table.long()
    keys, values = (pages[table].flatten(1, 2).transpose(1, 2) for pages in (k_pages, v_pages))  # [S, KVH, L, D]
    count, heads, length, depth = keys.shape
    q, at = _spread(q, host.batch), _spread(positions, host.batch)
    new, group = q.shape[1], q.shape[2] // heads
    q = q.view(count, new, heads, group, depth).permute(0, 2, 3, 1, 4).reshape(count, heads, group * new, depth)
    mask = torch.arange(length, device=q.device) <= at[:, None, :, None]  # [S, 1, T, L]
    mask = mask.expand(count, group, new, length).reshape(count, 1, group * new, length)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.expand(-1, heads, -1, -1))
    out = out.view(count, heads, group, new, depth).permute(0, 3, 1, 2, 4).reshape(count, new, heads * group, depth)
    return _gather(out, host.batch)


class TorchBody:
    """From token ids to the normed hidden state [N, H]; ``weights`` of :meth:`__call__` may be leaves of autograd."""

    def __init__(self, definition: ModelDefinition) -> None:
        self.layers: list[dict[str, Region]] = [{} for _ in range(definition.config.num_layers)]
        for region in definition.body:
            if region.layer is not None:
                self.layers[region.layer][region.name.rpartition(".")[2]] = region
        self.embedding, self.final = definition.body[0], definition.body[-1]
        self._config = definition.config

    def __call__(
        self,
        host: DeviceHost,
        rotated: Tensor | None = None,
        weights: Mapping[str, Tensor] | None = None,
        checkpointing: bool = False,
    ) -> Tensor:
        """Run a batch.

        Args:
            rotated: positions int32 [N] where those of the batch are negative for rows that take no part.
            weights: region name (with ``.bias`` for a bias), or name of a vector -> tensor; the host's without it.
            checkpointing: keep only the input of each layer for the backward.
        """
        found = weights if weights is not None else self.parameters(host.weights)
        positions = (host.batch.positions if rotated is None else rotated).long()
        tables = tuple(table[positions][:, None, :].to(host.dtype) for table in (host.cos, host.sin))
        stream = F.embedding(host.batch.tokens, found[self.embedding.weights[0]])
        for index, layer in enumerate(self.layers):
            given = (layer, stream, positions, tables, found, host, index)
            if checkpointing:
                stream = checkpoint(self._layer, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                stream = self._layer(*given)
        return self._norm(stream, found[self.final.weights[0]])

    def parameters(self, weights: Any) -> dict[str, Tensor]:
        """Everything that a pass reads, by the names that :meth:`__call__` takes."""
        found = {self.embedding.weights[0]: weights.vector(self.embedding.weights[0])}
        for layer in self.layers:
            for region in layer.values():
                if region.kind in LINEAR_KINDS:
                    found[region.name] = weights.matrix(region)
                    bias = weights.bias(region)
                    if bias is not None:
                        found[f"{region.name}.bias"] = bias
                else:
                    found.update((name, weights.vector(name)) for name in region.weights)
        found[self.final.weights[0]] = weights.vector(self.final.weights[0])
        return found

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._config.rms_norm_eps)

    def _layer(
        self,
        layer: dict[str, Region],
        stream: Tensor,
        positions: Tensor,
        tables: tuple[Tensor, ...],
        found: Mapping[str, Tensor],
        host: DeviceHost,
        index: int,
    ) -> Tensor:
        config = self._config
        y = self._norm(stream, found[layer["attention_norm"].weights[0]])
        name = layer["qkv_proj"].name
        fused = F.linear(y, found[name], found.get(f"{name}.bias"))
        fused = fused.view(len(fused), -1, config.head_dim)
        q, k, v = fused.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if config.qk_norm:
            q, k = (self._norm(x, found[w]) for x, w in zip((q, k), layer["qk_norm"].weights, strict=True))
        q, k = (_rotate(x, *tables) for x in (q, k))
        whole = host.state is None
        out = whole_sequences(q, k, v, host.batch) if whole else paged(q, k, v, positions, index, host)
        stream = stream + F.linear(out.reshape(len(out), -1), found[layer["o_proj"].name])
        y = self._norm(stream, found[layer["mlp_norm"].weights[0]])
        gate, up = F.linear(y, found[layer["gate_up_proj"].name]).chunk(2, dim=-1)
        return stream + F.linear(F.silu(gate) * up, found[layer["down_proj"].name])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def row_statistics(z: Tensor, logp: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [4, R] (max, log-sum, log-probability, entropy) and int64 [R, 2] from z and its log-softmax, [R, V].

    The digest is not over every logit, which costs the production arm nothing: it holds the bits of the row's
    log-sum-exp and entropy.
    """
    chosen = logp.gather(1, targets[:, None])[:, 0]
    top = logp.amax(dim=-1)
    total = z.gather(1, targets[:, None])[:, 0] - chosen
    entropy = -(logp.exp() * logp).sum(dim=-1)
    bits = torch.stack([total, entropy], dim=1).view(torch.int32).to(torch.int64)
    return torch.stack([total + top, -top, chosen, entropy]), bits


class _Named:
    """Stands for torch's kernels of a region in a composition."""

    def __init__(self, kind: str) -> None:
        self.implementation = f"torch.{kind}"


def native_composition(kinds: tuple[str, ...]) -> Composition:
    """torch's kernels for these region kinds and the head: names alone, the runner has the code."""
    ops: dict[str, Any] = {kind: _Named(kind) for kind in kinds}
    return Composition("native", ops, _Named("linear_logprob"))


class TorchDeviceRunner(DeviceRunner):
    """One side's model by torch's kernels, with the interface of :class:`rlkernel.ops.device.runner.DeviceRunner`."""

    weights: TorchDeviceWeights  # type: ignore[assignment]

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._body = TorchBody(self.definition)

    def hidden(self, batch: TokenBatch, state: Any, case: str) -> Tensor:
        """Normed hidden states [N, H]. Raises NumericsError for a trace: there are no boundaries to see."""
        if self.trace is not None:
            raise NumericsError("torch's kernels on a GPU run whole layers: no boundary of a region can be seen")
        count = len(batch.tokens)
        bucket = bucket_of(count) if self._device.type == "cuda" and case == "rollout_decode" else None
        with torch.no_grad():
            if bucket is not None and state is not None:
                found = self._from_graph(batch, state, case, bucket)
            else:
                found = self._body(self._host(batch, case, state))
        self._count(case, count)
        return found

    def _from_graph(self, batch: TokenBatch, state: Any, case: str, bucket: int) -> Tensor:
        key = (id(self.weights), id(state.kv), bucket)
        graph = self._graphs.get(key)
        if graph is None:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            width = -(-self._max_position // state.page_size)
            host = self._host(batch, case, state)
            graph = DecodeGraph(host, bucket, width, self._max_position - 1, self._body, self._pool)
            graph.fill(batch.tokens, batch.positions, state.slots, state.block_table)
            graph.capture()
            self._graphs[key] = graph
            self._fact("graphs_captured")
        else:
            graph.fill(batch.tokens, batch.positions, state.slots, state.block_table)
            self._fact("graph_replays")
        return graph.replay()[: len(batch.tokens)]

    def _logits(self, rows: Tensor, temperature: float) -> Tensor:
        z = F.linear(rows, self.weights.matrix(self.definition.head)).float()
        return z if temperature == 1 else z / temperature

    def _statistics(self, hidden: Tensor, targets: Tensor, temperature: float) -> RowStatistics:
        parts = []
        for first in range(0, max(1, len(hidden)), _ROWS):
            z = self._logits(hidden[first : first + _ROWS], temperature)
            parts.append(row_statistics(z, torch.log_softmax(z, dim=-1), targets[first : first + _ROWS]))
        floats, bits = (
            torch.cat(values, dim=dim) for values, dim in zip(zip(*parts, strict=True), (1, 0), strict=True)
        )
        return on_host(_on_device(floats, bits))

    def logprobs(self, hidden_rows: Tensor, targets: NDArray[np.int64], temperature: float, case: str) -> RowStatistics:
        """Log-probabilities, entropies and fingerprints of rows [R, H] for target ids [R]."""
        self._check_targets(targets)
        self.evidence.ran("logprob", case, self.composition.head.implementation, len(targets))
        with torch.no_grad():
            return self._statistics(hidden_rows, self._placed(targets), temperature)

    def sample(
        self, hidden_rows: Tensor, keys: SamplingKeys, temperature: float, case: str
    ) -> tuple[NDArray[np.int64], RowStatistics]:
        """Draw one token a row of [R, H], by torch's generator, from whole distributions."""
        if (keys.top_k > 0).any() or (keys.top_p < 1).any():
            raise NumericsError("torch's kernels on a GPU draw from whole distributions: top_k 0 and top_p 1")
        self.evidence.ran("logprob", case, self.composition.head.implementation, len(keys.k))
        generator = torch.Generator(self._device).manual_seed(_seed(keys))
        with torch.no_grad():
            z = self._logits(hidden_rows, temperature)
            logp = torch.log_softmax(z, dim=-1)
            noise = torch.empty_like(logp).exponential_(generator=generator)
            drawn = (logp - noise.log()).argmax(dim=-1)
            if keys.greedy.any():
                drawn = torch.where(self._placed(keys.greedy), z.argmax(dim=-1), drawn)
            return drawn_on_host(drawn, _on_device(*row_statistics(z, logp, drawn)))

    def forward(
        self,
        batch: TokenBatch,
        rows: NDArray[np.int64],
        targets: NDArray[np.int64],
        temperature: float,
        *,
        checkpointing: bool = False,
    ) -> Tape:
        """Training forward over whole sequences, recorded by autograd."""
        self._check_targets(targets)
        host = self._host(batch, "trainer_forward", None)
        leaves = {name: x.detach().requires_grad_() for name, x in self._body.parameters(self.weights).items()}
        with torch.enable_grad():
            hidden = self._body(host, None, leaves, checkpointing)[self._placed(rows)]
        self._count("trainer_forward", len(batch.tokens))
        self.evidence.ran("logprob", "trainer_forward", self.composition.head.implementation, len(targets))
        with torch.no_grad():
            statistics = self._statistics(hidden, self._placed(targets), temperature)
        saved = {"hidden": hidden, "leaves": leaves, "checkpointing": checkpointing}
        return Tape(batch, rows, targets, temperature, hidden.detach(), statistics, saved)

    def backward(self, tape: Tape, coefficient: NDArray[np.float32], gradients: Any) -> None:
        """Add this tape's gradients to the float32 buffers; ``coefficient`` [R] = d loss / d logprob."""
        count, head = len(tape.batch.tokens), self.definition.head
        if tape.saved["checkpointing"]:
            for region in self.definition.body:
                if region.layer is not None:
                    name = self.composition.op(region.kind).implementation
                    self.evidence.ran(region.kind, "trainer_recompute", name, count)
        d_rows = self._head_gradient(tape, coefficient, gradients.buffer(head.weights[0]))
        leaves: dict[str, Tensor] = tape.saved["leaves"]
        found = torch.autograd.grad(tape.saved["hidden"], list(leaves.values()), d_rows)
        for name, gradient in zip(leaves, found, strict=True):
            self._add(name, gradient, gradients)
        self._count("trainer_backward", count)
        self.evidence.ran("logprob", "trainer_backward", self.composition.head.implementation, len(tape.targets))

    def _head_gradient(self, tape: Tape, coefficient: NDArray[np.float32], buffer: Tensor) -> Tensor:
        w = self.weights.matrix(self.definition.head)
        targets, scale = self._placed(tape.targets), self._placed(coefficient) / tape.temperature
        parts = []
        with torch.no_grad():
            for first in range(0, len(tape.hidden), _ROWS):
                part = slice(first, first + _ROWS)
                rows, c = tape.hidden[part], scale[part, None]
                dz = torch.softmax(self._logits(rows, tape.temperature), dim=-1).mul_(-c)
                dz = dz.scatter_add_(1, targets[part, None], c).to(rows.dtype)
                buffer += (dz.T @ rows).float()
                parts.append(dz @ w)
        return torch.cat(parts)

    def _add(self, name: str, gradient: Tensor, gradients: Any) -> None:
        """Add the gradient of a parameter of the body to the buffers of its logical tensors."""
        if name == self._body.embedding.weights[0]:
            gradients.embedding(name).add_(gradient)
            return
        plain, bias = (name.removesuffix(".bias"), True) if name.endswith(".bias") else (name, False)
        region = next((r for r in self.definition.body if r.name == plain), None)
        if region is None:
            gradients.buffer(name).add_(gradient)
            return
        names = [w for w in region.weights if w.endswith(".bias") == bias]
        rows = [len(self.weights.tensors[w]) for w in names]
        for own, part in zip(names, gradient.split(rows), strict=True):
            gradients.buffer(own).add_(part)


def _on_device(floats: Tensor, bits: Tensor) -> DeviceRowStatistics:
    return DeviceRowStatistics(floats[0], floats[1], floats[2], floats[3], bits)


def _seed(keys: SamplingKeys) -> int:
    """A seed for one call: of the run, and of which tokens are drawn."""
    words = np.stack([keys.prompt_index, keys.k, keys.namespace, keys.position]).tobytes()
    digest = hashlib.sha256(keys.seeds.tobytes() + words).digest()
    return int.from_bytes(digest[:7], "little")
