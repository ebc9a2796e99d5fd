"""A model as data: an ordered list of regions with named ports over flat ``[tokens, ...]`` arrays.

A port holds one array of the running batch; ``tokens`` is the only port that the host provides. Weights are logical
tensors under their Hugging Face names. What else a region needs (positions, KV state, parallel groups) is a
service of its host, so that the same list runs in any engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlkernel.models.config import ModelConfig

RegionKind = Literal[
    "embedding",
    "rms_norm",
    "qkv_proj",
    "qk_norm",
    "rope",
    "attention",
    "o_proj",
    "residual_add",
    "gate_up_proj",
    "swiglu",
    "down_proj",
    "final_norm",
    "logprob",
]
REGION_KINDS: tuple[RegionKind, ...] = (
    "embedding",
    "rms_norm",
    "qkv_proj",
    "qk_norm",
    "rope",
    "attention",
    "o_proj",
    "residual_add",
    "gate_up_proj",
    "swiglu",
    "down_proj",
    "final_norm",
    "logprob",
)


@dataclass(frozen=True)
class Region:
    """One span of arithmetic: its kind, its ports, the logical weights it reads, and its layer (None outside)."""

    name: str
    kind: RegionKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    layer: int | None = None


@dataclass(frozen=True)
class ModelDefinition:
    """Dimensions and the regions in the order of execution. The last region is ``logprob``."""

    config: ModelConfig
    regions: tuple[Region, ...]

    @property
    def body(self) -> tuple[Region, ...]:
        """All regions but the linear log-probability: from tokens to the normed hidden state."""
        return self.regions[:-1]

    @property
    def head(self) -> Region:
        """The linear log-probability."""
        return self.regions[-1]

    def kinds(self) -> tuple[RegionKind, ...]:
        """Region kinds that occur, in the fixed order of ``REGION_KINDS``."""
        present = {region.kind for region in self.regions}
        return tuple(kind for kind in REGION_KINDS if kind in present)


def _layer(config: ModelConfig, index: int) -> list[Region]:
    path, prefix = f"layers.{index}", f"model.layers.{index}."
    attention = f"{prefix}self_attn."
    stream, middle, result = f"stream.{2 * index}", f"stream.{2 * index + 1}", f"stream.{2 * index + 2}"

    def port(name: str) -> str:
        return f"{path}.{name}"

    def region(name: str, kind: RegionKind, inputs: list[str], outputs: list[str], weights: list[str]) -> Region:
        return Region(f"{path}.{name}", kind, tuple(inputs), tuple(outputs), tuple(weights), index)

    qkv = [f"{attention}{x}_proj.weight" for x in "qkv"]
    if config.qkv_bias:
        qkv += [f"{attention}{x}_proj.bias" for x in "qkv"]
    q, k, v = port("q"), port("k"), port("v")
    regions = [
        region("attention_norm", "rms_norm", [stream], [port("attention_in")], [prefix + "input_layernorm.weight"]),
        region("qkv_proj", "qkv_proj", [port("attention_in")], [q, k, v], qkv),
    ]
    if config.qk_norm:
        norms = [f"{attention}q_norm.weight", f"{attention}k_norm.weight"]
        regions.append(region("qk_norm", "qk_norm", [q, k], [port("q_normed"), port("k_normed")], norms))
        q, k = port("q_normed"), port("k_normed")
    gate, up = port("gate"), port("up")
    regions += [
        region("rope", "rope", [q, k], [port("q_rotated"), port("k_rotated")], []),
        region("attention", "attention", [port("q_rotated"), port("k_rotated"), v], [port("attended")], []),
        region("o_proj", "o_proj", [port("attended")], [port("attention_out")], [f"{attention}o_proj.weight"]),
        region("attention_add", "residual_add", [stream, port("attention_out")], [middle], []),
        region("mlp_norm", "rms_norm", [middle], [port("mlp_in")], [prefix + "post_attention_layernorm.weight"]),
        region(
            "gate_up_proj",
            "gate_up_proj",
            [port("mlp_in")],
            [gate, up],
            [prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"],
        ),
        region("swiglu", "swiglu", [gate, up], [port("activated")], []),
        region("down_proj", "down_proj", [port("activated")], [port("mlp_out")], [prefix + "mlp.down_proj.weight"]),
        region("mlp_add", "residual_add", [middle, port("mlp_out")], [result], []),
    ]
    return regions


def define_model(config: ModelConfig) -> ModelDefinition:
    """The regions of a dense Llama, Qwen2 or Qwen3 model, in order."""
    table = "model.embed_tokens.weight"
    regions = [Region("embedding", "embedding", ("tokens",), ("stream.0",), (table,))]
    for index in range(config.num_layers):
        regions += _layer(config, index)
    last = f"stream.{2 * config.num_layers}"
    head = table if config.tied_embeddings else "lm_head.weight"
    regions.append(Region("final_norm", "final_norm", (last,), ("hidden",), ("model.norm.weight",)))
    regions.append(Region("logprob", "logprob", ("hidden",), (), (head,)))
    return ModelDefinition(config, tuple(regions))
