"""The forward of a whole model by fused kernels, for passes that keep nothing for a backward.

The same bits as the regions one after the other: every value that one region hands to the next is rounded where they
round it. Residual add and norm are one kernel, so are head norm and rotation; projections stay in the layout of their
fused matrix.
"""

from __future__ import annotations

import torch

from rlkernel.kernels.triton import launch, launch_attention, launch_decode, launch_heads, launch_rows
from rlkernel.kernels.triton.attention_points import attention_points
from rlkernel.models.definition import ModelDefinition, Region
from rlkernel.ops.device import linear
from rlkernel.ops.device.host import DeviceHost

Tensor = torch.Tensor
_FEW = 1024  # rows below which a row's latency counts, and not how many run at a time
_OVERLAPPING = 256  # rows up to which kernels are so short that the next one is started early
_FEW_ROWS = launch_rows.RowTuning(num_warps=4, holds=True)


class FusedBody:
    """From token ids to the normed hidden state [N, H].

    Args:
        definition: a dense model's.
    """

    def __init__(self, definition: ModelDefinition) -> None:
        self._layers: list[dict[str, Region]] = [{} for _ in range(definition.config.num_layers)]
        for region in definition.body:
            if region.layer is not None:
                self._layers[region.layer][region.name.rpartition(".")[2]] = region
        self._embedding, self._final = definition.body[0], definition.body[-1]
        config = definition.config
        self._places = launch_heads.fused_places(config.num_heads, config.num_kv_heads, config.head_dim)
        depth = config.head_dim
        self._joins_norm = config.qk_norm and depth & (depth - 1) == 0

    def __call__(self, host: DeviceHost, rotated: Tensor | None = None) -> Tensor:
        """Run a batch.

        Args:
            host: its KV state, or None where whole sequences are attended.
            rotated: positions int32 [N] for the rotary tables, where the batch's own are negative for rows that take
                no part; the batch's without it.
        """
        eps, weights = host.config.rms_norm_eps, host.weights
        tuning = _FEW_ROWS if len(host.batch.tokens) <= _FEW else None
        rotation = launch_heads.Rotation(host.batch.positions if rotated is None else rotated, host.cos, host.sin)
        overlaps = self._overlaps(host)
        stream = launch_rows.embedding(weights.vector(self._embedding.weights[0]), host.batch.tokens)
        y, _ = launch.rms_norm(stream, weights.vector(self._layers[0]["attention_norm"].weights[0]), eps)
        for index, layer in enumerate(self._layers):
            attended = self._attention(layer, y, rotation, host, overlaps)
            branch = self._linear(layer["o_proj"], attended.view(len(attended), -1), host, overlaps)
            norm = weights.vector(layer["mlp_norm"].weights[0])
            stream, y, _ = launch_rows.add_rms_norm(stream, branch, norm, eps, tuning=tuning, overlaps=overlaps)
            branch = self._linear(
                layer["down_proj"], self._gated(layer["gate_up_proj"], y, host, overlaps), host, overlaps
            )
            last = index + 1 == len(self._layers)
            following = self._final if last else self._layers[index + 1]["attention_norm"]
            norm = weights.vector(following.weights[0])
            stream, y, _ = launch_rows.add_rms_norm(stream, branch, norm, eps, tuning=tuning, overlaps=overlaps)
        return y

    def admit(self, host: DeviceHost, rows: int) -> None:
        """Let the vendor's library run where it gives the contract's bits with so many rows. It waits for the host."""
        for kind in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            region = self._layers[0][kind]
            if host.weights.bias(region) is None:
                linear.admit(host.points(kind), rows, host.weights.matrix(region), host.dtype)

    @staticmethod
    def _overlaps(host: DeviceHost) -> bool:
        """Whether a kernel may start while the one before runs: with few rows, on sm_90."""
        device = host.batch.tokens.device
        if device.type != "cuda" or torch.version.hip or host.state is None or host.batch.longest != 1:
            return False
        return len(host.batch.tokens) <= _OVERLAPPING and torch.cuda.get_device_capability(device)[0] == 9

    def _linear(self, region: Region, x: Tensor, host: DeviceHost, overlaps: bool) -> Tensor:
        w, bias = host.weights.matrix(region), host.weights.bias(region)
        return linear.forward(host.points(region.kind), x, w, bias, host.dtype, overlaps=overlaps)

    def _gated(self, region: Region, y: Tensor, host: DeviceHost, overlaps: bool) -> Tensor:
        """SwiGLU of the gate and up projections, [N, I]."""
        if host.weights.bias(region) is not None:
            return launch_rows.swiglu(self._linear(region, y, host, overlaps), leaves=host.tp)
        return linear.swiglu(host.points(region.kind), y, host.weights.matrix(region), host.tp, overlaps=overlaps)

    def _attention(
        self, layer: dict[str, Region], y: Tensor, rotation: launch_heads.Rotation, host: DeviceHost, overlaps: bool
    ) -> Tensor:
        fused = self._linear(layer["qkv_proj"], y, host, overlaps)
        state, batch = host.state, host.batch
        if state is not None and batch.longest == 1 and min(batch.lengths) == 1 and self._joins(layer):
            return self._decode_attention(layer, fused, rotation, host, overlaps)
        q, k = (self._rotated(layer, fused, which, rotation, host) for which in (0, 1))
        v = torch.empty_like(k)
        launch_heads.copy_heads(v, fused, self._places[2], gathers=True)
        points = attention_points(host.points("attention"))
        if state is None:
            return launch_attention.attention_varlen(q, k, v, batch.starts, batch.longest, points)[0]
        index = layer["attention"].layer
        assert index is not None
        k_pages, v_pages = state.pages(index)
        launch_attention.append_kv(k, v, k_pages, v_pages, state.slots)
        keys = batch.last_position + 1
        paged = (q, k_pages, v_pages, state.block_table)
        if batch.longest == 1 and min(batch.lengths) == 1:
            return launch_attention.attention_decode(*paged, batch.positions, -(-keys // points.split), points)[0]
        return launch_attention.attention_paged(*paged, batch.starts, batch.positions, batch.longest, keys, points)[0]

    def _joins(self, layer: dict[str, Region]) -> bool:
        """Whether norm and rotation of the heads are one kernel."""
        return "qk_norm" not in layer or self._joins_norm

    def _decode_attention(
        self, layer: dict[str, Region], fused: Tensor, rotation: launch_heads.Rotation, host: DeviceHost, overlaps: bool
    ) -> Tensor:
        """One row a sequence: its heads go to the cache without being stored between."""
        points, batch, state = attention_points(host.points("attention")), host.batch, host.state
        index = layer["attention"].layer
        assert index is not None and state is not None
        k_pages, v_pages = state.pages(index)
        w = None
        if "qk_norm" in layer:
            names = layer["qk_norm"].weights
            w = (host.weights.vector(names[0]), host.weights.vector(names[1]))
        q = launch_heads.decode_heads(
            fused, rotation, state.slots, k_pages, v_pages, host.config.num_heads,
            w=w, eps=host.config.rms_norm_eps, overlaps=overlaps,
        )  # fmt: skip
        splits = -(-(batch.last_position + 1) // points.split)
        return launch_decode.decode_attention(
            q, k_pages, v_pages, state.block_table, batch.positions, splits, points, overlaps=overlaps
        )

    def _rotated(
        self, layer: dict[str, Region], fused: Tensor, which: int, rotation: launch_heads.Rotation, host: DeviceHost
    ) -> Tensor:
        """Query (0) or key (1) heads [N, heads, D], normed if the model says so, and rotated."""
        place, eps = self._places[which], host.config.rms_norm_eps
        if "qk_norm" not in layer:
            return launch_heads.rope(fused, place, rotation)[0]
        w = host.weights.vector(layer["qk_norm"].weights[which])
        if self._joins_norm:
            return launch_heads.rope(fused, place, rotation, w=w, eps=eps)[0]
        heads = fused.new_empty((len(fused), place.heads, place.depth))
        launch_heads.copy_heads(heads, fused, place, gathers=True)
        normed, _ = launch.rms_norm(heads.view(-1, place.depth), w, eps)
        plain = launch_heads.plain_place(place.heads, place.depth)
        return launch_heads.rope(normed.view(heads.shape), plain, rotation)[0]
