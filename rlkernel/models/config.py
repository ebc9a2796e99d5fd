"""Dimensions of a dense decoder-only model. Families are data: what differs between them is a field here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlkernel.errors import ModelError

Family = Literal["llama", "qwen2", "qwen3"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    ``parameters`` are the scaling variant's own, under Hugging Face's names (``factor``, ``low_freq_factor``,
    ``high_freq_factor``, ``original_max_position_embeddings``, ``beta_fast``, ``beta_slow``, ``attention_factor``,
    ``mscale``, ``mscale_all_dim``, ``truncate``), as sorted pairs.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    parameters: tuple[tuple[str, float], ...] = ()

    def parameter(self, name: str, default: float | None = None) -> float:
        """A scaling parameter. Raises ModelError if it is absent and has no default."""
        value = dict(self.parameters).get(name, default)
        if value is None:
            raise ModelError(f"rope scaling {self.kind!r} needs the parameter {name!r}; it has {dict(self.parameters)}")
        return value


@dataclass(frozen=True)
class ModelConfig:
    """What a dense Llama, Qwen2 or Qwen3 model is made of."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        for name in (*sizes, "max_position"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} = {getattr(self, name)}: at least 1 is needed")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}: "
                "each KV head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim = {self.head_dim} is odd: rotary embedding needs two halves")

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical tensors under their Hugging Face names, unsharded and unfused, with their shapes."""
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, h)}
        for i in range(self.num_layers):
            p = f"model.layers.{i}."
            shapes[p + "input_layernorm.weight"] = (h,)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[p + f"self_attn.{name}_proj.weight"] = (rows, h)
                if self.qkv_bias:
                    shapes[p + f"self_attn.{name}_proj.bias"] = (rows,)
            if self.qk_norm:
                shapes[p + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[p + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[p + "self_attn.o_proj.weight"] = (h, q)
            shapes[p + "post_attention_layernorm.weight"] = (h,)
            shapes[p + "mlp.gate_proj.weight"] = (self.intermediate_size, h)
            shapes[p + "mlp.up_proj.weight"] = (self.intermediate_size, h)
            shapes[p + "mlp.down_proj.weight"] = (h, self.intermediate_size)
        shapes["model.norm.weight"] = (h,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, h)
        return shapes
