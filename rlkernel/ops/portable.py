"""The regions of a dense model in the portable profile on a CPU: forward and backward from the kernels.

Arrays are NumPy float32; in bfloat16 they hold values of the bfloat16 grid. Each class is one region kind.
``forward`` returns the outputs and what the backward needs; ``backward`` takes the gradients of the outputs, continues
the weight gradients in the host's buffers, and returns the gradients of the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlkernel.contract.hostscalars import attention_scales
from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu import (
    activation,
    attention,
    attention_backward,
    embedding,
    gemm,
    gemm_gradient,
    norm,
    panels,
    rope,
)
from rlkernel.models.definition import Region
from rlkernel.ops.host import Host

Array = NDArray[np.float32]


def _matrix(x: Array) -> Array:
    """[N, ...] as [N, width]; also where N is 0."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


class RegionOp(Protocol):
    """What an implementation of a region kind provides."""

    implementation: str

    def forward(self, region: Region, inputs: Sequence[Any], host: Host) -> tuple[tuple[Any, ...], Any]: ...

    def backward(self, region: Region, saved: Any, grads: Sequence[Any], host: Host) -> tuple[Any, ...]: ...


class Embedding:
    implementation = "cpu.embedding"

    def forward(self, region: Region, inputs: Sequence[Any], host: Host) -> tuple[tuple[Array], Any]:
        return (host.weights.embed(inputs[0]),), inputs[0]

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[()]:
        assert host.gradients is not None
        embedding.embedding_gradient(grads[0], saved, host.gradients.embedding(region.weights[0]), host.workers)
        return ()


class RmsNorm:
    implementation = "cpu.rms_norm"

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array], Any]:
        (x,) = inputs
        weight = host.weights.vectors[region.weights[0]]
        y, inv_rms = norm.rms_norm(x, weight, np.float32(host.config.rms_norm_eps), host.workers, host.bf16)
        return (y,), (x, inv_rms)

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array]:
        assert host.gradients is not None
        x, inv_rms = saved
        name = region.weights[0]
        dw = host.gradients.buffer(name)
        return (norm.rms_norm_backward(grads[0], x, host.weights.vectors[name], inv_rms, dw, host.workers, host.bf16),)


class QkNorm:
    implementation = "cpu.qk_norm"

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array, ...], Any]:
        outputs, saved = [], []
        for x, name in zip(inputs, region.weights, strict=True):
            flat = x.reshape(-1, host.config.head_dim)
            eps = np.float32(host.config.rms_norm_eps)
            y, inv_rms = norm.rms_norm(flat, host.weights.vectors[name], eps, host.workers, host.bf16)
            outputs.append(y.reshape(x.shape))
            saved.append((flat, inv_rms))
        return tuple(outputs), saved

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, ...]:
        assert host.gradients is not None
        result = []
        for (flat, inv_rms), dy, name in zip(saved, grads, region.weights, strict=True):
            dw, weight = host.gradients.buffer(name), host.weights.vectors[name]
            dy_flat = dy.reshape(flat.shape)
            dx = norm.rms_norm_backward(dy_flat, flat, weight, inv_rms, dw, host.workers, host.bf16)
            result.append(dx.reshape(dy.shape))
        return tuple(result)


class ColumnParallel:
    """qkv and gate_up: one fused chain a output feature; the outputs are split by logical tensor."""

    implementation = "cpu.gemm_chain"

    def __init__(self, heads: bool) -> None:
        self._heads = heads

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array, ...], Any]:
        (x,) = inputs
        bias = host.weights.biases.get(region.name)
        parts = gemm.matmul_parts(
            x, host.weights.rows(region), self._widths(region, host), host.workers, bias=bias, bf16=host.bf16
        )
        return self._shaped(parts, host), x

    def _widths(self, region: Region, host: Host) -> list[int]:
        config = host.config
        if self._heads:
            return [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
        return [config.intermediate_size] * 2

    def _shaped(self, parts: Sequence[Array], host: Host) -> tuple[Array, ...]:
        if not self._heads:
            return tuple(parts)
        depth = host.config.head_dim
        return tuple(part.reshape(len(part), part.shape[1] // depth, depth) for part in parts)

    def backward(self, region: Region, saved: Array, grads: Sequence[Array], host: Host) -> tuple[Array]:
        assert host.gradients is not None
        flat = [np.ascontiguousarray(_matrix(g)) for g in grads]
        matrices = [name for name in region.weights if name.endswith(".weight")]
        biases = [name for name in region.weights if name.endswith(".bias")]
        for name, dy in zip(matrices, flat, strict=True):
            gemm_gradient.weight_gradient(dy, saved, host.gradients.buffer(name), host.workers)
        for name, dy in zip(biases, flat, strict=bool(biases)):
            gemm_gradient.bias_gradient(dy, host.gradients.buffer(name), host.workers)
        fused = panels.join_columns(flat, host.weights.dgrad_rows(region), host.workers)
        return (gemm.matmul(fused, host.weights.columns(region), host.workers, leaves=host.tp, bf16=host.bf16),)


class RowParallel:
    """o_proj and down_proj: tp leaves of the depth, each its own chain, merged as a tree."""

    implementation = "cpu.gemm_leaves"

    def __init__(self, heads: bool) -> None:
        self._heads = heads

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array], Any]:
        x = _matrix(inputs[0])
        y = gemm.matmul(x, host.weights.rows(region), host.workers, leaves=host.tp, bf16=host.bf16)
        return (y,), x

    def backward(self, region: Region, saved: Array, grads: Sequence[Array], host: Host) -> tuple[Array]:
        assert host.gradients is not None
        (dy,) = grads
        gemm_gradient.weight_gradient(dy, saved, host.gradients.buffer(region.weights[0]), host.workers)
        dx = gemm.matmul(dy, host.weights.columns(region), host.workers, bf16=host.bf16)
        return (dx.reshape(len(dx), host.config.num_heads, host.config.head_dim) if self._heads else dx,)


class Rope:
    implementation = "cpu.rope"

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array, ...], Any]:
        return self._apply(inputs, host, inverse=False), None

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, ...]:
        return self._apply(grads, host, inverse=True)

    def _apply(self, arrays: Sequence[Array], host: Host, *, inverse: bool) -> tuple[Array, ...]:
        tables, positions = host.rope, host.batch.positions
        return tuple(
            rope.rope(x, positions, tables.cos, tables.sin, host.workers, host.bf16, inverse=inverse) for x in arrays
        )


class Attention:
    """Paged attention. Engines append to and read their pages; a trainer's whole sequences get pages of their own."""

    implementation = "cpu.attention"

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array], Any]:
        q, k, v = inputs
        _, scale2 = attention_scales(host.config.head_dim)
        starts, positions = host.batch.starts, host.batch.positions
        assert region.layer is not None
        if host.state is not None:
            k_pages, v_pages = host.state.pages(region.layer)
            attention.append_kv(k, v, k_pages, v_pages, host.state.slots, host.workers)
            table = host.state.block_table
        else:
            if positions[starts[:-1][starts[1:] > starts[:-1]]].any():  # an empty sequence has no first row
                raise NumericsError("a batch without KV state must hold whole sequences, from position 0")
            k_pages, v_pages, table = attention.pages_from_sequences(k, v, starts)
        out, lse2 = attention.attention(q, k_pages, v_pages, table, starts, positions, scale2, host.workers, host.bf16)
        return (out,), (q, k, v, out, lse2)

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, ...]:
        q, k, v, out, lse2 = saved
        scale, scale2 = attention_scales(host.config.head_dim)
        dq, dk, dv = attention_backward.attention_backward(
            grads[0], q, k, v, out, lse2, host.batch.starts, scale, scale2, host.workers, host.bf16
        )
        return dq, dk, dv


class ResidualAdd:
    implementation = "cpu.residual_add"

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array], Any]:
        return (norm.residual_add(inputs[0], inputs[1], host.workers, host.bf16),), None

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, Array]:
        return grads[0], grads[0]


class SwiGlu:
    implementation = "cpu.swiglu"

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array], Any]:
        gate, up = inputs
        return (activation.swiglu(gate, up, host.workers, host.bf16),), (gate, up)

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, ...]:
        gate, up = saved
        return activation.swiglu_backward(grads[0], gate, up, host.workers, host.bf16)


def portable_ops() -> dict[str, RegionOp]:
    """One implementation a region kind of the model's body (the head is :mod:`rlkernel.ops.head`)."""
    rms_norm = RmsNorm()
    return {
        "embedding": Embedding(),
        "rms_norm": rms_norm,
        "final_norm": rms_norm,
        "qkv_proj": ColumnParallel(heads=True),
        "gate_up_proj": ColumnParallel(heads=False),
        "qk_norm": QkNorm(),
        "rope": Rope(),
        "attention": Attention(),
        "o_proj": RowParallel(heads=True),
        "down_proj": RowParallel(heads=False),
        "residual_add": ResidualAdd(),
        "swiglu": SwiGlu(),
    }
