"""``config.json`` of Hugging Face folders: read strictly into a :class:`ModelConfig`, and written back.

The reference for what a key means is the transformers class of the family. Whatever changes arithmetic and is
not implemented here is refused by name; keys that the family's class does not read are ignored, unless their
name is one by which other families change arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlkernel.errors import ModelError
from rlkernel.models.config import Family, ModelConfig, RopeConfig

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {  # kind -> (required, optional) parameters
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
}
# Keys by which some family changes arithmetic, with the values that leave it as it is here (absent and null do too).
_INERT: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "norm_bias": (False,),
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "attention_dropout": (0, 0.0),
    "hidden_dropout": (0, 0.0),
    "embd_pdrop": (0, 0.0),
    "resid_pdrop": (0, 0.0),
    "partial_rotary_factor": (1, 1.0),
    "rope_interleaved": (False,),
    "quantization_config": (),
    "auto_map": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "scale_emb": (1, 1.0),
    "scale_depth": (),
    "dim_model_base": (),
    "clip_qkv": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
    "no_rope_layers": (),
    "no_rope_layer_interval": (0,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}


class _Reader:
    """Reads keys of one mapping and collects every problem, so that all are reported at once."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.problems: list[str] = []

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            self.problems.append(f"{key} is missing: an integer of at least 1 is needed")
            return 2
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problems.append(f"{key} = {value!r}: an integer of at least 1 is needed")
            return 2
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            self.problems.append(f"{key} = {value!r}: a number above 0 is needed")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.problems.append(f"{key} = {value!r}: true or false is needed")
            return default
        return value


def token_ids(value: Any, key: str, vocab_size: int, problems: list[str]) -> tuple[int, ...]:
    """Token ids given as null, an integer or a list; ids outside the vocabulary are problems."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
            problems.append(f"{key} = {value!r}: token ids from 0 to {vocab_size - 1} are needed")
            return ()
    return tuple(dict.fromkeys(values))


def _family(reader: _Reader) -> Family:
    architectures = reader.raw.get("architectures") or []
    model_type = reader.raw.get("model_type")
    accepted = f"accepted are {', '.join(ARCHITECTURES)} (model_type {', '.join(ARCHITECTURES.values())})"
    unknown = [name for name in architectures if name not in ARCHITECTURES]
    if unknown or (not architectures and model_type not in ARCHITECTURES.values()):
        raise ModelError(f"{reader.where}: architecture {unknown or model_type!r} is not implemented; {accepted}")
    families = {ARCHITECTURES[name] for name in architectures}
    if model_type is not None:
        families.add(model_type)
    if len(families) != 1:
        raise ModelError(
            f"{reader.where}: architectures {architectures} and model_type {model_type!r} do not belong together; "
            f"{accepted}"
        )
    return families.pop()


def _rope(reader: _Reader, max_position: int) -> RopeConfig:
    raw = reader.raw
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if raw.get("rope_parameters") and raw.get("rope_scaling") and raw["rope_parameters"] != raw["rope_scaling"]:
        reader.problems.append("rope_parameters and rope_scaling are both given and differ: keep one of them")
    if not isinstance(given, Mapping):
        reader.problems.append(f"{name} = {given!r}: a mapping is needed")
        return RopeConfig()
    values = {key: value for key, value in given.items() if value is not None}
    kind: Any = values.pop("rope_type", None) or values.get("type") or "default"
    values.pop("type", None)
    theta = values.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    if values.pop("partial_rotary_factor", 1) != 1:
        reader.problems.append(f"{name}.partial_rotary_factor is not 1: partly rotated heads are not implemented")
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 1 < theta < float("inf"):
        reader.problems.append(f"rope_theta = {theta!r}: a number above 1 is needed")
        theta = 10000.0
    if kind not in ROPE_KEYS:
        reader.problems.append(f"{name} of type {kind!r} is not implemented; accepted are {', '.join(ROPE_KEYS)}")
        return RopeConfig()
    if kind in ("llama3", "yarn"):
        # transformers gives a value outside the mapping priority, and falls back to the trained context
        outside = raw.get("original_max_position_embeddings")
        inside = values.get("original_max_position_embeddings", max_position)
        values["original_max_position_embeddings"] = outside if outside is not None else inside
    if kind == "yarn" and "factor" not in values:
        original = values["original_max_position_embeddings"]
        if isinstance(original, (int, float)) and original > 0:
            values["factor"] = max_position / original
    required, optional = ROPE_KEYS[kind]
    missing = sorted(required - values.keys())
    unknown = sorted(values.keys() - required - optional)
    if missing:
        reader.problems.append(f"{name} of type {kind!r} lacks {', '.join(missing)}")
    if unknown:
        accepted = ", ".join(sorted(required | optional)) or "none"
        reader.problems.append(f"{name} of type {kind!r} has unknown parameters {unknown}; accepted: {accepted}")
    parameters: dict[str, float] = {}
    for key, value in values.items():
        is_flag = key == "truncate" and isinstance(value, bool)
        if not is_flag and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**40):
            reader.problems.append(
                f"{name}.{key} = {value!r}: {'true or false' if key == 'truncate' else 'a number above 0'} is needed"
            )
            continue
        parameters[key] = float(value)
    return RopeConfig(theta=float(theta), kind=kind, parameters=tuple(sorted(parameters.items())))


def _refusals(reader: _Reader, family: Family, num_layers: int) -> None:
    raw = reader.raw
    for key, inert in _INERT.items():
        value = raw.get(key)
        if value is not None and value not in inert:
            accepted = f"only {' or '.join(map(repr, inert))} is" if inert else "it must be absent"
            reader.problems.append(f"{key} = {value!r} is not implemented: {accepted}")
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        other = sorted({str(kind) for kind in layer_types if kind != "full_attention"})
        if other:
            reader.problems.append(f"layer_types has {other}: only 'full_attention' is implemented")
        return
    window = raw.get("sliding_window")
    if family == "llama":
        in_use = window is not None
    else:
        in_use = bool(raw.get("use_sliding_window")) and window is not None
        in_use = in_use and num_layers > (raw["max_window_layers"] if raw.get("max_window_layers") is not None else 28)
    if in_use:
        reader.problems.append(f"sliding_window = {window!r} is in use: only full attention is implemented")


def parse_config(raw: Mapping[str, Any], where: str, generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Dimensions from the contents of ``config.json``, old style (``rope_scaling``) or new (``rope_parameters``).

    ``generation`` is the contents of ``generation_config.json``: its end-of-sequence ids take priority, as they
    do in transformers. Raises ModelError naming every problem at once.
    """
    reader = _Reader(raw, where)
    family = _family(reader)
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    layers, vocab = reader.integer("num_hidden_layers"), reader.integer("vocab_size")
    max_position = reader.integer("max_position_embeddings")
    if family == "qwen3":
        head_dim = reader.integer("head_dim", 128)
    else:
        head_dim = reader.integer("head_dim", max(1, hidden // heads))
        if raw.get("head_dim") is None and hidden % heads:
            reader.problems.append(f"hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}")
    # Llama checkpoints older than grouped queries lack the key; for the others a guess would be wrong
    kv_heads = reader.integer("num_key_value_heads", heads if family == "llama" else None)
    _refusals(reader, family, layers)
    eos_value, eos_key = raw.get("eos_token_id"), "eos_token_id"
    if generation is not None and generation.get("eos_token_id") is not None:
        eos_value, eos_key = generation["eos_token_id"], "eos_token_id of generation_config.json"
    bos = token_ids(raw.get("bos_token_id"), "bos_token_id", vocab, reader.problems)
    eos = token_ids(eos_value, eos_key, vocab, reader.problems)
    values: dict[str, Any] = {
        "intermediate_size": reader.integer("intermediate_size"),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "rope": _rope(reader, max_position),
        "tied_embeddings": reader.flag("tie_word_embeddings", False),
    }
    if not reader.problems:
        try:
            return ModelConfig(
                family=family,
                vocab_size=vocab,
                hidden_size=hidden,
                num_layers=layers,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                max_position=max_position,
                qkv_bias=family == "qwen2",
                qk_norm=family == "qwen3",
                bos_token_id=bos[0] if bos else None,
                eos_token_ids=eos,
                **values,
            )
        except ModelError as error:
            reader.problems.append(str(error))
    raise ModelError(f"{where} cannot be used:\n  " + "\n  ".join(reader.problems))


def config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Contents of a ``config.json`` that transformers 4.51 and later read (rope in the old style, read by both)."""
    architecture = next(name for name, family in ARCHITECTURES.items() if family == config.family)
    result: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": config.family,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _eos_json(config),
        "use_cache": True,
    }
    if config.rope.kind != "default":
        scaling: dict[str, Any] = {"rope_type": config.rope.kind}
        for key, value in config.rope.parameters:
            if key == "truncate":
                scaling[key] = bool(value)
            elif key == "original_max_position_embeddings" and value == int(value):
                scaling[key] = int(value)
            else:
                scaling[key] = value
        result["rope_scaling"] = scaling
    if config.family == "llama":
        result.update(attention_bias=False, mlp_bias=False, pretraining_tp=1)
    elif config.family == "qwen2":
        result.update(use_sliding_window=False)
    else:
        result.update(attention_bias=False, use_sliding_window=False)
    return result


def generation_json(config: ModelConfig) -> dict[str, Any]:
    """Contents of ``generation_config.json``: only the token ids, no sampling defaults."""
    return {"bos_token_id": config.bos_token_id, "eos_token_id": _eos_json(config)}


def _eos_json(config: ModelConfig) -> int | list[int] | None:
    if len(config.eos_token_ids) > 1:
        return list(config.eos_token_ids)
    return config.eos_token_ids[0] if config.eos_token_ids else None
