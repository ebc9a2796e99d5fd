"""Every region of a dense model on a GPU, forward and backward, each by one plain kernel.

Ports are tensors in the contract's dtype: [T, H] streams, [T, heads, D] heads. ``backward`` continues the weight
gradients in the host's float32 buffers. Fused kernels are admitted against these, region by region.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rlkernel.errors import NumericsError
from rlkernel.kernels.triton import launch, launch_attention, launch_heads, launch_rows
from rlkernel.kernels.triton.attention_points import attention_points, backward_points
from rlkernel.models.definition import Region
from rlkernel.ops.device import linear
from rlkernel.ops.device.host import DeviceHost

Tensor = torch.Tensor


def _flat(x: Tensor) -> Tensor:
    """[T, ...] as [T, width]; T may be 0."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def _matrix(x: Tensor) -> Tensor:
    """The same, C-contiguous."""
    return _flat(x).contiguous()


def _side_by_side(left: Tensor, right: Tensor) -> Tensor:
    """[T, 2 W] of two [T, W]: the matrix of which they are halves, where they are, without a copy."""
    rows, width = left.shape
    whole, strides = left.untyped_storage(), (2 * width, 1)
    halves = (
        left.stride() == right.stride() == strides
        and whole.data_ptr() == right.untyped_storage().data_ptr()
        and right.storage_offset() == left.storage_offset() + width
    )
    return left.as_strided((rows, 2 * width), strides) if halves else torch.cat([left, right], dim=1)


class Embedding:
    """Rows of the table; its gradient adds the rows of each id in token order."""

    implementation = "triton.embedding"

    def forward(self, region: Region, inputs: Sequence[Tensor], host: DeviceHost) -> tuple[tuple[Tensor], Any]:
        return (launch_rows.embedding(host.weights.vector(region.weights[0]), inputs[0]),), inputs[0]

    def backward(self, region: Region, saved: Tensor, grads: Sequence[Tensor], host: DeviceHost) -> tuple[()]:
        assert host.gradients is not None
        launch_rows.embedding_gradient(grads[0], saved, host.gradients.embedding(region.weights[0]))
        return ()


class RmsNorm:
    """RMSNorm over the last axis of every input, each with its own weight (qk_norm has two)."""

    implementation = "triton.rms_norm"

    def forward(self, region: Region, inputs: Sequence[Tensor], host: DeviceHost) -> tuple[tuple[Tensor, ...], Any]:
        outputs, saved = [], []
        for x, name in zip(inputs, region.weights, strict=True):
            flat = x.reshape(-1, x.shape[-1]).contiguous()
            y, inverse = launch.rms_norm(flat, host.weights.vector(name), host.config.rms_norm_eps)
            outputs.append(y.reshape(x.shape))
            saved.append((flat, inverse))
        return tuple(outputs), saved

    def backward(self, region: Region, saved: Any, grads: Sequence[Tensor], host: DeviceHost) -> tuple[Tensor, ...]:
        assert host.gradients is not None
        result = []
        for (x, inverse), dy, name in zip(saved, grads, region.weights, strict=True):
            flat, dw = dy.reshape(x.shape).contiguous(), host.gradients.buffer(name)
            result.append(launch_rows.rms_norm_backward(flat, x, host.weights.vector(name), inverse, dw))
        return tuple(dx.reshape(dy.shape) for dx, dy in zip(result, grads, strict=True))


class Linear:
    """A projection, fused or not. ``heads``: the outputs (qkv) or the input (o_proj) are heads [T, heads, D]."""

    implementation = "triton.gemm"

    def forward(self, region: Region, inputs: Sequence[Tensor], host: DeviceHost) -> tuple[tuple[Tensor, ...], Any]:
        x, weights = _matrix(inputs[0]), host.weights
        y = linear.forward(host.points(region.kind), x, weights.matrix(region), weights.bias(region), host.dtype)
        return self._outputs(region, y, host), x

    def _outputs(self, region: Region, y: Tensor, host: DeviceHost) -> tuple[Tensor, ...]:
        config = host.config
        if region.kind == "qkv_proj":
            places = launch_heads.fused_places(config.num_heads, config.num_kv_heads, config.head_dim)
            plain = [y.new_empty((len(y), place.heads, place.depth)) for place in places]
            for heads, place in zip(plain, places, strict=True):
                launch_heads.copy_heads(heads, y, place, gathers=True)
            return tuple(plain)
        if region.kind == "gate_up_proj":
            halves = y.reshape(len(y), host.tp, 2, y.shape[1] // (2 * host.tp)).permute(2, 0, 1, 3)
            gate, up = (half.reshape(len(y), y.shape[1] // 2) for half in halves)  # views of y where tp is 1
            return gate, up
        return (y,)

    def _fused(self, region: Region, grads: Sequence[Tensor], host: DeviceHost) -> Tensor:
        """Gradients of the outputs, joined in the order of the fused matrix."""
        if len(grads) == 1:
            return _matrix(grads[0])
        groups = host.config.num_kv_heads if region.kind == "qkv_proj" else host.tp
        if region.kind == "gate_up_proj" and groups == 1:
            return _side_by_side(grads[0], grads[1])
        flat = [_flat(g) for g in grads]
        return _flat(torch.cat([g.reshape(len(g), groups, g.shape[1] // groups) for g in flat], dim=2))

    def backward(self, region: Region, saved: Tensor, grads: Sequence[Tensor], host: DeviceHost) -> tuple[Tensor]:
        assert host.gradients is not None
        wgrad = host.points(f"{region.kind}.wgrad")
        starts = linear.starts_of(host.batch.lengths)
        x = linear.whole_steps(wgrad, saved, starts)
        matrices = [name for name in region.weights if name.endswith(".weight")]
        biases = [name for name in region.weights if name.endswith(".bias")]
        for name, g in zip(matrices, grads, strict=True):
            dy = linear.whole_steps(wgrad, _flat(g), starts).contiguous()
            linear.weight_gradient(wgrad, dy, x, host.gradients.buffer(name))
        for name, g in zip(biases, grads, strict=bool(biases)):
            launch_rows.bias_gradient(_matrix(g), host.gradients.buffer(name))
        dy = self._fused(region, grads, host)
        dx = linear.dgrad(host.points(region.kind), dy, host.weights.matrix(region))
        heads = (len(dx), host.config.num_heads, host.config.head_dim)
        return (dx.reshape(heads) if region.kind == "o_proj" else dx,)


class Rope:
    """Rotation of pairs; the gradient rotates back."""

    implementation = "triton.rope"

    def forward(self, region: Region, inputs: Sequence[Tensor], host: DeviceHost) -> tuple[tuple[Tensor, ...], Any]:
        rotation = launch_heads.Rotation(host.batch.positions, host.cos, host.sin)
        outputs = []
        for x in inputs:
            rotated, _ = launch_heads.rope(x, launch_heads.plain_place(x.shape[1], x.shape[2]), rotation)
            outputs.append(rotated)
        return tuple(outputs), None

    def backward(self, region: Region, saved: Any, grads: Sequence[Tensor], host: DeviceHost) -> tuple[Tensor, ...]:
        rotation = launch_heads.Rotation(host.batch.positions, host.cos, host.sin)
        result = []
        for dy in grads:
            dx = torch.empty_like(dy)
            place = launch_heads.plain_place(dy.shape[1], dy.shape[2])
            launch_heads.rope_backward(dy.contiguous(), place, rotation, dx)
            result.append(dx)
        return tuple(result)


class Attention:
    """Whole packed sequences for a trainer; paged keys for an engine, one row a sequence or several."""

    implementation = "triton.attention"

    def forward(self, region: Region, inputs: Sequence[Tensor], host: DeviceHost) -> tuple[tuple[Tensor], Any]:
        q, k, v = inputs
        points, batch = attention_points(host.points("attention")), host.batch
        if host.state is None:
            out, lse2 = launch_attention.attention_varlen(q, k, v, batch.starts, batch.longest, points)
            return (out,), (q, k, v, out, lse2)
        assert region.layer is not None
        k_pages, v_pages = host.state.pages(region.layer)
        launch_attention.append_kv(k, v, k_pages, v_pages, host.state.slots)
        paged = (q, k_pages, v_pages, host.state.block_table)
        keys = batch.last_position + 1
        if batch.longest == 1 and min(batch.lengths) == 1:
            out, lse2 = launch_attention.attention_decode(*paged, batch.positions, -(-keys // points.split), points)
        else:
            out, lse2 = launch_attention.attention_paged(
                *paged, batch.starts, batch.positions, batch.longest, keys, points
            )
        return (out,), (q, k, v, out, lse2)

    def backward(self, region: Region, saved: Any, grads: Sequence[Tensor], host: DeviceHost) -> tuple[Tensor, ...]:
        q, k, v, out, lse2 = saved
        if host.state is not None:
            raise NumericsError("attention over paged keys has no backward")
        points, batch = backward_points(host.points("attention")), host.batch
        return launch_attention.attention_backward(
            grads[0].contiguous(), q, k, v, out, lse2, batch.starts, batch.longest, points
        )


class ResidualAdd:
    """Sum of stream and branch."""

    implementation = "triton.residual_add"

    def forward(self, region: Region, inputs: Sequence[Tensor], host: DeviceHost) -> tuple[tuple[Tensor], Any]:
        return (launch_rows.residual_add(inputs[0], inputs[1]),), None

    def backward(self, region: Region, saved: Any, grads: Sequence[Tensor], host: DeviceHost) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


class SwiGlu:
    """SiLU of the gate times up."""

    implementation = "triton.swiglu"

    def forward(self, region: Region, inputs: Sequence[Tensor], host: DeviceHost) -> tuple[tuple[Tensor], Any]:
        fused = _side_by_side(inputs[0], inputs[1])
        return (launch_rows.swiglu(fused),), fused

    def backward(self, region: Region, saved: Tensor, grads: Sequence[Tensor], host: DeviceHost) -> tuple[Tensor, ...]:
        found = launch_rows.swiglu_backward(grads[0].contiguous(), saved)
        width = found.shape[1] // 2
        return found[:, :width], found[:, width:]


def device_ops() -> dict[str, Any]:
    """One plain implementation a region kind of the model's body."""
    norm, projection = RmsNorm(), Linear()
    return {
        "embedding": Embedding(),
        "rms_norm": norm,
        "final_norm": norm,
        "qk_norm": norm,
        "qkv_proj": projection,
        "gate_up_proj": projection,
        "o_proj": projection,
        "down_proj": projection,
        "rope": Rope(),
        "attention": Attention(),
        "residual_add": ResidualAdd(),
        "swiglu": SwiGlu(),
    }
