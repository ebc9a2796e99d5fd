"""The interpreter as a composition: every region kind executed from its contract entry, forward and backward.

The classes have the interface of any other implementation, so that a whole model runs through them. Arrays are NumPy
float32 at the ports (bfloat16 values on their grid) and torch tensors on ``device`` inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.build import Contract
from rlkernel.contract.points import SixPoints
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.convert import as_float32
from rlkernel.models.definition import Region
from rlkernel.ops.host import Host
from rlkernel.ops.weights import dgrad_order
from rlkernel.reference.arith import add, cast, div, fma32, mul, sqrt, sub
from rlkernel.reference.attention import attend, attend_backward, bits_constant
from rlkernel.reference.lookup import primitive
from rlkernel.reference.primitives import LOG2E
from rlkernel.reference.reductions import add_chain, chain, matmul, row_sum

Tensor = torch.Tensor
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Interpreter:
    """Entries and the device on which they are executed."""

    contract: Contract
    device: str = "cpu"

    def points(self, case: str, region: str) -> SixPoints:
        """The entry of a region in a case. Raises ContractError if the contract has none."""
        found = self.contract.entries.get((case, region))
        if found is None:
            raise ContractError(f"the contract has no entry for region {region!r} in case {case!r}")
        return found

    def tensor(self, array: Any) -> Tensor:
        """A float32 tensor on the device, a copy."""
        return torch.tensor(np.ascontiguousarray(array), device=self.device)

    def weight(self, host: Host, name: str) -> Tensor:
        """A logical weight as float32."""
        return self.tensor(as_float32(host.weights.tensors[name]))  # type: ignore[attr-defined]


def array(tensor: Tensor) -> Any:
    """NumPy array of a tensor."""
    return tensor.cpu().numpy()


def matrix(x: Array) -> Array:
    """[N, ...] as [N, width]; also where N is 0."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def output(points: SixPoints, value: Tensor) -> Tensor:
    """Narrow to the output's dtype where the entry says so."""
    to = points.rounds("output")
    return value if to is None else cast(value, to)


def whole_steps(points: SixPoints, starts: Any, rows: Tensor) -> Tensor:
    """Rows [T, W] of sequences at ``starts`` [S+1], each filled up with zero rows to whole steps of the entry's chain.

    So a sample's tokens meet in the same steps whatever lies before them: micro-batches cannot change a bit.
    """
    step = points.split.step
    if step == 1:
        return rows
    parts = []
    for first, last in pairwise(int(s) for s in starts):
        parts += [rows[first:last], rows.new_zeros((-(last - first) % step, rows.shape[1]))]
    return torch.cat(parts) if parts else rows


def continued(points: SixPoints, dy: Tensor, x: Tensor, running: Tensor) -> Tensor:
    """The running chain [N, K] of a weight gradient, continued over the tokens of dy [T, N] and x [T, K]."""
    return chain(points, dy.T[:, None, :], x.T[None, :, :], running)


def _sigmoid(points: SixPoints, x: Tensor) -> Tensor:
    one = torch.ones_like(x)
    log2e = torch.full((), LOG2E, device=x.device).expand_as(x)
    return div(one, add(one, primitive(points.primitive("exp2"))(mul(-x, log2e))))


class ReferenceOp:
    """Base: holds the interpreter."""

    implementation = "reference"

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter = interpreter

    def entry(self, host: Host, kind: str) -> SixPoints:
        """The entry that this call executes."""
        return self.interpreter.points(host.case, kind)

    def grad(self, host: Host, name: str) -> Array:
        """The running gradient chain of a logical weight."""
        assert host.gradients is not None
        return host.gradients.buffer(name)


class ReferenceEmbedding(ReferenceOp):
    """Row look-up; its gradient adds the rows of each id in token order."""

    def forward(self, region: Region, inputs: Sequence[Any], host: Host) -> tuple[tuple[Array], Any]:
        self.entry(host, "embedding")
        table = self.interpreter.weight(host, region.weights[0])
        return (array(table[torch.from_numpy(inputs[0]).to(table.device)]),), inputs[0]

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[()]:
        assert host.gradients is not None
        points = self.entry(host, "embedding.wgrad")
        plus = primitive(points.primitive("add"))
        grad = self.interpreter.tensor(host.gradients.embedding(region.weights[0]))
        rows = self.interpreter.tensor(grads[0])
        for token, row in zip(saved.tolist(), rows, strict=True):
            grad[token] = plus(grad[token], row)
        host.gradients.embedding(region.weights[0])[:] = array(grad)
        return ()


class ReferenceNorm(ReferenceOp):
    """RMSNorm over the last axis; ``heads`` for qk_norm, which norms several inputs with a weight each."""

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array, ...], Any]:
        points = self.entry(host, region.kind)
        outputs, saved = [], []
        for x, name in zip(inputs, region.weights, strict=True):
            flat = self.interpreter.tensor(x.reshape(-1, x.shape[-1]))
            y, inverse = self._norm(points, flat, self.interpreter.weight(host, name))
            outputs.append(array(y).reshape(x.shape))
            saved.append((flat, inverse))
        return tuple(outputs), saved

    def _norm(self, points: SixPoints, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        eps = torch.full((), bits_constant(points, "eps"), device=x.device)
        width = torch.full((), float(x.shape[1]), device=x.device)
        mean = div(row_sum(points, x, x), width)
        inverse = div(torch.ones_like(mean), sqrt(add(mean, eps)))
        return output(points, mul(mul(x, inverse[:, None]), weight[None, :])), inverse

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, ...]:
        points, wgrad = self.entry(host, region.kind), self.entry(host, f"{region.kind}.wgrad")
        result = []
        for (x, inverse), dy_array, name in zip(saved, grads, region.weights, strict=True):
            dy = self.interpreter.tensor(dy_array.reshape(x.shape))
            weight = self.interpreter.weight(host, name)
            g = mul(dy, weight[None, :])
            xh = mul(x, inverse[:, None])
            c = div(row_sum(points, g, xh), torch.full((), float(x.shape[1]), device=x.device))
            dx = mul(inverse[:, None].expand_as(x), fma32(-xh, c[:, None].expand_as(x), g))
            running = self.interpreter.tensor(self.grad(host, name))
            self.grad(host, name)[:] = array(self._continued(wgrad, dy, xh, running))
            result.append(array(output(points, dx)).reshape(dy_array.shape))
        return tuple(result)

    def _continued(self, wgrad: SixPoints, dy: Tensor, xh: Tensor, running: Tensor) -> Tensor:
        """The running chain [W] of a weight's gradient over rows [T, W]."""
        fused = primitive(wgrad.primitive("mac"))
        for t in range(len(dy)):
            running = fused(dy[t], xh[t], running)
        return running


class ReferenceLinear(ReferenceOp):
    """Projections, fused or not: ``qkv_proj``, ``gate_up_proj``, ``o_proj``, ``down_proj``."""

    def _matrices(self, region: Region) -> tuple[list[str], list[str]]:
        return (
            [name for name in region.weights if name.endswith(".weight")],
            [name for name in region.weights if name.endswith(".bias")],
        )

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array, ...], Any]:
        points = self.entry(host, region.kind)
        names, biases = self._matrices(region)
        x = self.interpreter.tensor(matrix(inputs[0]))
        outputs = []
        for index, name in enumerate(names):
            bias = self.interpreter.weight(host, biases[index]) if biases else None
            y = array(output(points, matmul(points, x, self.interpreter.weight(host, name), bias=bias)))
            depth = host.config.head_dim
            outputs.append(y.reshape(len(y), y.shape[1] // depth, depth) if region.kind == "qkv_proj" else y)
        return tuple(outputs), x

    def backward(self, region: Region, saved: Tensor, grads: Sequence[Array], host: Host) -> tuple[Array]:
        points, wgrad = self.entry(host, region.kind), self.entry(host, f"{region.kind}.wgrad")
        names, biases = self._matrices(region)
        flat = [self.interpreter.tensor(matrix(g)) for g in grads]
        for name, dy in zip(names, flat, strict=True):
            running = self.interpreter.tensor(self.grad(host, name))
            steps = [whole_steps(wgrad, host.batch.starts, rows) for rows in (dy, saved)]
            self.grad(host, name)[:] = array(continued(wgrad, steps[0], steps[1], running))
        for name, dy in zip(biases, flat, strict=bool(biases)):
            self.entry(host, "qkv_proj.bias")
            start = self.interpreter.tensor(self.grad(host, name))
            self.grad(host, name)[:] = array(add_chain(dy, start))
        weights = torch.cat([self.interpreter.weight(host, name) for name in names])
        fused = torch.cat(flat, dim=1)
        if len(names) > 1:
            shapes = host.config.weight_shapes()
            order = torch.from_numpy(dgrad_order(region, shapes, host.config.num_kv_heads, host.tp))
            weights, fused = weights[order.to(weights.device)], fused[:, order.to(fused.device)]
        dx = array(output(points, matmul(points, fused, weights.T.contiguous())))
        heads = (len(dx), host.config.num_heads, host.config.head_dim)
        return (dx.reshape(heads) if region.kind == "o_proj" else dx,)


class ReferenceRope(ReferenceOp):
    """Rotation of pairs; the gradient rotates back."""

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array, ...], Any]:
        return self._apply(inputs, host, 1.0), None

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, ...]:
        return self._apply(grads, host, -1.0)

    def _apply(self, arrays: Sequence[Array], host: Host, sign: float) -> tuple[Array, ...]:
        points = self.entry(host, "rope")
        cos = self.interpreter.tensor(host.rope.cos[host.batch.positions])[:, None, :]
        sin = self.interpreter.tensor(host.rope.sin[host.batch.positions])[:, None, :] * sign
        result = []
        for x_array in arrays:
            x = self.interpreter.tensor(x_array)
            half = x.shape[-1] // 2
            first, second = x[..., :half], x[..., half:]
            c, s = cos.expand_as(first), sin.expand_as(first)
            rotated = torch.cat([fma32(first, c, -mul(second, s)), fma32(second, c, mul(first, s))], dim=-1)
            result.append(array(output(points, rotated)))
        return tuple(result)


class ReferenceAttention(ReferenceOp):
    """Attention over a sequence's keys, from the engine's pages or from the whole sequence."""

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array], Any]:
        points = self.entry(host, "attention")
        q, k, v = inputs
        group = host.config.num_heads // host.config.num_kv_heads
        out, lse2 = np.zeros_like(q), np.zeros(q.shape[:2], np.float32)
        if host.state is not None:
            self._append(region, k, v, host)
        for s in range(len(host.batch.starts) - 1):
            rows = slice(int(host.batch.starts[s]), int(host.batch.starts[s + 1]))
            read = np.arange(rows.start, rows.stop)
            if host.read_rows is not None:
                read = np.intersect1d(read, host.read_rows)
            if not len(read):
                continue
            keys, values = (k[rows], v[rows]) if host.state is None else self._gather(region, s, rows, host)
            positions = torch.from_numpy(host.batch.positions[read].astype(np.int64)).to(self.interpreter.device)
            for head in range(q.shape[1]):
                kt, vt = (self.interpreter.tensor(x[:, head // group]) for x in (keys, values))
                found, log = attend(points, self.interpreter.tensor(q[read, head]), kt, vt, positions)
                out[read, head], lse2[read, head] = array(found), array(log)
        return (out,), (q, k, v, out, lse2)

    def _append(self, region: Region, k: Array, v: Array, host: Host) -> None:
        assert host.state is not None and region.layer is not None
        k_pages, v_pages = host.state.pages(region.layer)
        page, offset = np.divmod(host.state.slots, host.state.page_size)
        k_pages[page, :, :, offset] = k
        v_pages[page, :, offset, :] = v

    def _gather(self, region: Region, s: int, rows: slice, host: Host) -> tuple[Array, Array]:
        assert host.state is not None and region.layer is not None
        k_pages, v_pages = host.state.pages(region.layer)
        j = np.arange(int(host.batch.positions[rows.stop - 1]) + 1)
        page, offset = host.state.block_table[s][j // host.state.page_size], j % host.state.page_size
        return k_pages[page, :, :, offset], v_pages[page, :, offset, :]

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, ...]:
        points = self.entry(host, "attention")
        q, k, v, out, lse2 = saved
        group = host.config.num_heads // host.config.num_kv_heads
        dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
        for s in range(len(host.batch.starts) - 1):
            rows = slice(int(host.batch.starts[s]), int(host.batch.starts[s + 1]))
            for head in range(k.shape[1]):
                heads = slice(head * group, (head + 1) * group)
                t = self.interpreter.tensor
                found = attend_backward(
                    points, t(grads[0][rows, heads]), t(q[rows, heads]), t(k[rows, head]), t(v[rows, head]),
                    t(out[rows, heads]), t(lse2[rows, heads]),
                )  # fmt: skip
                dq[rows, heads], dk[rows, head], dv[rows, head] = (array(x) for x in found)
        return dq, dk, dv


class ReferenceResidualAdd(ReferenceOp):
    """Sum of stream and branch, rounded to the stream's dtype."""

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array], Any]:
        points = self.entry(host, "residual_add")
        plus = primitive(points.primitive("add"))
        return (array(output(points, plus(*(self.interpreter.tensor(x) for x in inputs)))),), None

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, Array]:
        return grads[0], grads[0]


class ReferenceSwiGlu(ReferenceOp):
    """SiLU of the gate times up."""

    def forward(self, region: Region, inputs: Sequence[Array], host: Host) -> tuple[tuple[Array], Any]:
        points = self.entry(host, "swiglu")
        gate, up = (self.interpreter.tensor(x) for x in inputs)
        sg = _sigmoid(points, gate)
        return (array(output(points, mul(mul(gate, sg), up))),), (gate, up)

    def backward(self, region: Region, saved: Any, grads: Sequence[Array], host: Host) -> tuple[Array, Array]:
        points = self.entry(host, "swiglu")
        gate, up = saved
        ds = self.interpreter.tensor(grads[0])
        sg = _sigmoid(points, gate)
        one = torch.ones_like(gate)
        d_up = mul(ds, mul(gate, sg))
        d_gate = mul(mul(ds, up), mul(sg, fma32(gate, sub(one, sg), one)))
        return array(output(points, d_gate)), array(output(points, d_up))


def reference_ops(interpreter: Interpreter) -> dict[str, Any]:
    """One interpreter of its entry a region kind of the model's body."""
    norm, linear = ReferenceNorm(interpreter), ReferenceLinear(interpreter)
    makers: dict[str, Callable[[Interpreter], Any]] = {
        "embedding": ReferenceEmbedding,
        "rope": ReferenceRope,
        "attention": ReferenceAttention,
        "residual_add": ReferenceResidualAdd,
        "swiglu": ReferenceSwiGlu,
    }
    linears = dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), linear)
    norms = dict.fromkeys(("rms_norm", "final_norm", "qk_norm"), norm)
    return {**{kind: make(interpreter) for kind, make in makers.items()}, **linears, **norms}
