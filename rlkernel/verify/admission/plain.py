"""A plain kernel: the fp32 FMA chain as three loops. The middle link between the slow interpreter and a fast kernel.

Compiled by Numba without tiles, panels, blocks or vectors across the chain: what a reader can check at a glance.
Admission compares it with the interpreter like any candidate; what it confirms then counts as far as that went.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import float32 as f32
from numpy.typing import NDArray

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.convert import as_float32, narrow, require, widen
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.primitives import fma
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.definition import Region
from rlkernel.ops.host import Host

Array = NDArray[np.float32]


@kernel
def _chains(first, last, a, b, leaves, parts, out):  # type: ignore[no-untyped-def]
    depth = a.shape[1] // leaves
    for m in range(first, last):
        for n in range(b.shape[0]):
            for leaf in range(leaves):
                total = f32(0.0)
                for k in range(leaf * depth, (leaf + 1) * depth):
                    total = fma(a[m, k], b[n, k], total)
                parts[m, leaf] = total
            width = leaves
            while width > 1:
                width //= 2
                for j in range(width):
                    parts[m, j] = parts[m, 2 * j] + parts[m, 2 * j + 1]
            out[m, n] = parts[m, 0]


@kernel
def _continued(first, last, dy, x, grad):  # type: ignore[no-untyped-def]
    for n in range(first, last):
        for k in range(x.shape[1]):
            total = grad[n, k]
            for t in range(dy.shape[0]):
                total = fma(dy[t, n], x[t, k], total)
            grad[n, k] = total


@kernel
def _side_by_side(first, last, a, b, total):  # type: ignore[no-untyped-def]
    for t in range(a.shape[0]):
        for n in range(first, last):
            total[n] = fma(a[t, n], b[t, n], total[n])


def side_by_side(a: Array, b: Array, start: Array, workers: Workers) -> Array:
    """``total[n]`` continued over rows: ``fma(a[t, n], b[t, n], total[n])``, a and b [T, N] -> a new [N]."""
    require("a of the plain chains", a, np.float32, None, None)
    require("b of the plain chains", b, np.float32, len(a), a.shape[1])
    require("start of the plain chains", start, np.float32, a.shape[1])
    result = start.copy()
    workers.run(_side_by_side, a.shape[1], a, b, result)
    return result


def chains(a: Array, b: Array, leaves: int, workers: Workers) -> Array:
    """``out[m, n]``: leaves of the depth, each a chain of fma from +0, merged as a tree; a [M, K], b [N, K].

    Raises ContractError for arrays that do not fit, or leaves that do not divide the depth.
    """
    require("a of the plain chains", a, np.float32, None, None)
    require("b of the plain chains", b, np.float32, None, a.shape[1])
    if leaves < 1 or leaves & (leaves - 1) or a.shape[1] % leaves:
        raise ContractError(f"a depth of {a.shape[1]} cannot be cut into {leaves} equal leaves of a balanced tree")
    out = np.empty((len(a), len(b)), np.float32)
    workers.run(_chains, len(a), a, b, leaves, np.empty((len(a), leaves), np.float32), out)
    return out


def continued(dy: Array, x: Array, grad: Array, workers: Workers) -> Array:
    """``grad[n, k]`` continued over tokens: dy [T, N], x [T, K] -> a new [N, K]."""
    require("dy of the plain chains", dy, np.float32, None, None)
    require("x of the plain chains", x, np.float32, len(dy), None)
    result = np.ascontiguousarray(grad).copy()
    workers.run(_continued, len(result), dy, x, result)
    return result


class PlainLinear:
    """``qkv_proj``, ``gate_up_proj``, ``o_proj`` and ``down_proj`` from plain chains over unpacked weights."""

    implementation = "plain.fma_chain"

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array, ...], Any]:
        """Outputs as the region's implementations give them."""
        x = _matrix(inputs[0])
        leaves = host.tp if region.kind in ROW_PARALLEL else 1
        biases = [name for name in region.weights if name.endswith(".bias")]
        outputs = []
        for i, name in enumerate(name for name in region.weights if name.endswith(".weight")):
            y = chains(x, _weight(host, name), leaves, host.workers)
            if biases:
                y = np.add(y, _weight(host, biases[i]))
            y = widen(narrow(y)) if host.bf16 else y
            depth = host.config.head_dim
            outputs.append(y.reshape(len(y), y.shape[1] // depth, depth) if region.kind == "qkv_proj" else y)
        return tuple(outputs), x

    def backward(self, region: Region, saved: Array, grads: Sequence[Array], host: Host) -> tuple[Array]:
        """Gradient of the input; continues those of weights and biases, token by token."""
        assert host.gradients is not None
        flat = [_matrix(g) for g in grads]
        matrices = [name for name in region.weights if name.endswith(".weight")]
        for name, dy in zip(matrices, flat, strict=True):
            buffer = host.gradients.buffer(name)
            buffer[:] = continued(dy, saved, buffer, host.workers)
        biases = [name for name in region.weights if name.endswith(".bias")]
        for name, dy in zip(biases, flat, strict=bool(biases)):
            buffer = host.gradients.buffer(name)
            for row in dy:
                buffer[:] = buffer + row
        fused = np.concatenate(flat, axis=1)
        weight = np.concatenate([_weight(host, name) for name in matrices])
        leaves = 1
        if region.kind not in ROW_PARALLEL:
            order = host.weights.dgrad_rows(region)
            fused, weight, leaves = np.ascontiguousarray(fused[:, order]), weight[order], host.tp
        dx = chains(fused, np.ascontiguousarray(weight.T), leaves, host.workers)
        dx = widen(narrow(dx)) if host.bf16 else dx
        return (dx.reshape(len(dx), host.config.num_heads, host.config.head_dim) if region.kind == "o_proj" else dx,)


ROW_PARALLEL = ("o_proj", "down_proj")
"""Projections whose depth is cut into tp leaves; the others have tp leaves in the gradient of their input."""


def _matrix(x: Array) -> Array:
    return np.ascontiguousarray(x.reshape(len(x), int(np.prod(x.shape[1:]))))


def _weight(host: Host, name: str) -> Array:
    return as_float32(host.weights.tensors[name])  # type: ignore[attr-defined,no-any-return]
