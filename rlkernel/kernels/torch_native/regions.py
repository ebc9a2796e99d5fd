"""The same regions from torch's own kernels: the production arm that the exact one is compared with.

Nothing here keeps the contract; reductions run in whatever order the library picks. Each region's forward is plain
torch, its backward is autograd over that region alone. Arrays are tensors of the activations' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu import sampling
from rlkernel.kernels.cpu.digest import float32_rows_digest
from rlkernel.kernels.cpu.logprob import RowStatistics
from rlkernel.models.definition import Region
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import Host

Tensors = tuple[torch.Tensor, ...]
Forward = Callable[[Region, Tensors, Tensors, Host], Tensors]
_ROWS_PER_CHUNK = 256


def _weights(region: Region, host: Host) -> Tensors:
    return tuple(host.weights.tensors[name] for name in region.weights)  # type: ignore[attr-defined]


class TorchRegion:
    """A region whose forward is a function of (inputs, weights) and whose backward is autograd."""

    def __init__(self, name: str, function: Forward) -> None:
        self.implementation = f"torch.{name}"
        self._function = function

    def forward(self, region: Region, inputs: Sequence[torch.Tensor], host: Host) -> tuple[Tensors, Any]:
        if host.case not in ("trainer_forward", "trainer_recompute"):
            with torch.no_grad():
                return self._function(region, tuple(inputs), _weights(region, host), host), None
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        weights = tuple(w.detach().requires_grad_() for w in _weights(region, host))
        with torch.enable_grad():
            outputs = self._function(region, leaves, weights, host)
        return tuple(y.detach() for y in outputs), (leaves, weights, outputs)

    def backward(self, region: Region, saved: Any, grads: Sequence[torch.Tensor], host: Host) -> Tensors:
        leaves, weights, outputs = saved
        result: Tensors = torch.autograd.grad(outputs, leaves + weights, grads)
        assert host.gradients is not None
        for name, gradient in zip(region.weights, result[len(leaves) :], strict=True):
            host.gradients.buffer(name).__iadd__(gradient.float().numpy())
        return result[: len(leaves)]


class TorchEmbedding:
    """Table look-up; the gradient is torch's index_add."""

    implementation = "torch.embedding"

    def forward(self, region: Region, inputs: Sequence[Any], host: Host) -> tuple[Tensors, Any]:
        (table,) = _weights(region, host)
        ids = torch.from_numpy(np.ascontiguousarray(inputs[0]))
        return (F.embedding(ids, table),), ids

    def backward(self, region: Region, saved: Any, grads: Sequence[torch.Tensor], host: Host) -> tuple[()]:
        assert host.gradients is not None
        buffer = torch.from_numpy(host.gradients.embedding(region.weights[0]))
        buffer.index_add_(0, saved, grads[0].float())
        return ()


def _rms_norm(region: Region, inputs: Tensors, weights: Tensors, host: Host) -> Tensors:
    return (F.rms_norm(inputs[0], (inputs[0].shape[-1],), weights[0], host.config.rms_norm_eps),)


def _qk_norm(region: Region, inputs: Tensors, weights: Tensors, host: Host) -> Tensors:
    eps = host.config.rms_norm_eps
    return tuple(F.rms_norm(x, (x.shape[-1],), w, eps) for x, w in zip(inputs, weights, strict=True))


def _qkv(region: Region, inputs: Tensors, weights: Tensors, host: Host) -> Tensors:
    biases = weights[3:] or (None, None, None)
    shape = (len(inputs[0]), -1, host.config.head_dim)
    return tuple(F.linear(inputs[0], w, b).reshape(shape) for w, b in zip(weights[:3], biases, strict=True))


def _gate_up(region: Region, inputs: Tensors, weights: Tensors, host: Host) -> Tensors:
    return tuple(F.linear(inputs[0], w) for w in weights)


def _row_parallel(region: Region, inputs: Tensors, weights: Tensors, host: Host) -> Tensors:
    return (F.linear(inputs[0].reshape(len(inputs[0]), -1), weights[0]),)


def _rope(region: Region, inputs: Tensors, weights: Tensors, host: Host) -> Tensors:
    positions = torch.from_numpy(host.batch.positions.astype(np.int64))
    cos = torch.from_numpy(host.rope.cos)[positions][:, None, :].repeat(1, 1, 2)
    sin = torch.from_numpy(host.rope.sin)[positions][:, None, :].repeat(1, 1, 2)
    result = []
    for x in inputs:
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        result.append((x * cos + rotated * sin).to(x.dtype))
    return tuple(result)


def _residual_add(region: Region, inputs: Tensors, weights: Tensors, host: Host) -> Tensors:
    return (inputs[0] + inputs[1],)


def _swiglu(region: Region, inputs: Tensors, weights: Tensors, host: Host) -> Tensors:
    return (F.silu(inputs[0]) * inputs[1],)


def _append(k: torch.Tensor, v: torch.Tensor, pages: tuple[Any, Any], slots: NDArray[np.int64], page: int) -> None:
    k_pages, v_pages = (torch.from_numpy(x) for x in pages)
    where, offset = torch.from_numpy(slots // page), torch.from_numpy(slots % page)
    k_pages[where, :, :, offset] = k.detach().float()
    v_pages[where, :, offset, :] = v.detach().float()


def _attention(region: Region, inputs: Tensors, weights: Tensors, host: Host) -> Tensors:
    q, k, v = inputs
    starts = host.batch.starts
    if host.state is not None:
        assert region.layer is not None
        pages = host.state.pages(region.layer)
        _append(k, v, pages, host.state.slots, host.state.page_size)
        k_pages, v_pages = (torch.from_numpy(x) for x in pages)
    elif host.batch.positions[starts[:-1]].any():
        raise NumericsError("a batch without KV state must hold whole sequences, from position 0")
    outputs = []
    for s in range(len(starts) - 1):
        first, last = int(starts[s]), int(starts[s + 1])
        if first == last:
            continue
        length = int(host.batch.positions[last - 1]) + 1
        if host.state is None:
            keys, values = k[first:last], v[first:last]
        else:
            table = torch.from_numpy(host.state.block_table[s].astype(np.int64))
            used = table[: -(-length // host.state.page_size)]
            heads, dim = k_pages.shape[1], k_pages.shape[2]
            keys = k_pages[used].permute(0, 3, 1, 2).reshape(-1, heads, dim)[:length].to(k.dtype)
            values = v_pages[used].permute(0, 2, 1, 3).reshape(-1, heads, dim)[:length].to(v.dtype)
        new = last - first
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        out = F.scaled_dot_product_attention(
            q[first:last].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=None if new == length else mask,
            is_causal=new == length,
            enable_gqa=True,
        )
        outputs.append(out[0].transpose(0, 1))
    return (torch.cat(outputs),)


class TorchLinearLogprob:
    """LM head, log_softmax and gather as torch computes them (logits rounded to the activations' dtype by the GEMM)."""

    implementation = "torch.linear_logprob"

    def _logits(self, region: Region, x: torch.Tensor, temperature: float, host: Host) -> torch.Tensor:
        return F.linear(x, _weights(region, host)[0]).float() / temperature

    def _statistics(self, z: torch.Tensor, targets: NDArray[np.int64]) -> RowStatistics:
        ids = torch.from_numpy(targets)
        logp = torch.log_softmax(z, dim=-1)
        largest = z.max(dim=-1).values
        return RowStatistics(
            max=largest.numpy(),
            log_sum=(torch.logsumexp(z, dim=-1) - largest).numpy(),
            logprob=logp.gather(1, ids[:, None])[:, 0].numpy(),
            entropy=torch.special.entr(logp.exp()).sum(dim=-1).numpy(),
            digest=float32_rows_digest(z.numpy()),
        )

    def forward(
        self, region: Region, x: torch.Tensor, targets: NDArray[np.int64], temperature: float, host: Host
    ) -> RowStatistics:
        with torch.no_grad():
            parts = [
                self._statistics(
                    self._logits(region, x[i : i + _ROWS_PER_CHUNK], temperature, host),
                    targets[i : i + _ROWS_PER_CHUNK],
                )
                for i in range(0, max(1, len(x)), _ROWS_PER_CHUNK)
            ]
        return RowStatistics(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in vars(parts[0])})

    def sample(
        self, region: Region, x: torch.Tensor, keys: SamplingKeys, temperature: float, host: Host
    ) -> tuple[NDArray[np.int64], RowStatistics]:
        with torch.no_grad():
            z = self._logits(region, x, temperature, host)
        drawn = sampling.sample(z.numpy(), z.max(dim=-1).values.numpy(), **vars(keys), workers=host.workers)
        return drawn, self._statistics(z, drawn)

    def backward(
        self,
        region: Region,
        x: torch.Tensor,
        targets: NDArray[np.int64],
        temperature: float,
        coefficient: NDArray[np.float32],
        host: Host,
    ) -> torch.Tensor:
        assert host.gradients is not None
        buffer = torch.from_numpy(host.gradients.buffer(region.weights[0]))
        parts = []
        for i in range(0, len(x), _ROWS_PER_CHUNK):
            rows = x[i : i + _ROWS_PER_CHUNK].detach().requires_grad_()
            weight = _weights(region, host)[0].detach().requires_grad_()
            ids = torch.from_numpy(targets[i : i + _ROWS_PER_CHUNK])
            g = torch.from_numpy(coefficient[i : i + _ROWS_PER_CHUNK])
            with torch.enable_grad():
                logp = torch.log_softmax(F.linear(rows, weight).float() / temperature, dim=-1)
                chosen = logp.gather(1, ids[:, None])[:, 0]
            d_rows, d_weight = torch.autograd.grad(chosen, (rows, weight), g)
            buffer += d_weight.float()
            parts.append(d_rows)
        return torch.cat(parts)


def torch_ops() -> dict[str, Any]:
    """One torch implementation a region kind of the model's body."""
    norm = TorchRegion("rms_norm", _rms_norm)
    functions: dict[str, Forward] = {
        "qkv_proj": _qkv,
        "gate_up_proj": _gate_up,
        "qk_norm": _qk_norm,
        "rope": _rope,
        "attention": _attention,
        "o_proj": _row_parallel,
        "down_proj": _row_parallel,
        "residual_add": _residual_add,
        "swiglu": _swiglu,
    }
    ops: dict[str, Any] = {kind: TorchRegion(kind, function) for kind, function in functions.items()}
    return {"embedding": TorchEmbedding(), "rms_norm": norm, "final_norm": norm, **ops}
