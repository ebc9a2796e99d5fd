"""GGUF files of Llama, Qwen2 and Qwen3: dequantised to the contract's dtype, under Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.errors import ModelError
from rlkernel.models.config import Family, ModelConfig, RopeConfig
from rlkernel.models.dtypes import Dtype, check_dtype, convert
from rlkernel.models.hf_config import token_ids
from rlkernel.models.loading import LoadedModel, check_tensors, file_sha256

FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
}


def open_gguf(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Metadata and tensor descriptions of a GGUF file.

    Raises:
        ModelError: the ``gguf`` package is missing, or the file is missing, truncated or damaged.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError("reading GGUF files needs the package 'gguf': pip install -e '.[gguf]'") from error
    if not path.is_file():
        raise ModelError(f"{path} does not exist")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = list(reader.tensors)
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
        raise ModelError(f"{path} is not a whole GGUF file: {error}") from error
    end = max((int(t.data_offset) + int(t.n_bytes) for t in tensors), default=0)
    if path.stat().st_size < end:
        raise ModelError(f"{path} is truncated: {path.stat().st_size} bytes, and its header describes {end}")
    return fields, tensors


def _shortest(value: float) -> float:
    """The shortest decimal of a float32 stored in the file: 1e-05, not 9.999999747378752e-06. Same float32."""
    return float(str(np.float32(value)))


def _rope(fields: Mapping[str, Any], arch: str, problems: list[str]) -> RopeConfig:
    theta = _shortest(fields.get(f"{arch}.rope.freq_base", 10000.0))
    kind = fields.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "yarn"):
        problems.append(f"{arch}.rope.scaling.type = {kind!r} is not implemented; accepted are none, linear, yarn")
        return RopeConfig(theta=theta)
    parameters: dict[str, float] = {}
    names = {"factor": "factor"}
    if kind == "yarn":
        names["original_max_position_embeddings"] = "original_context_length"
    for name, key in names.items():
        value = fields.get(f"{arch}.rope.scaling.{key}")
        if value is None:
            problems.append(f"{arch}.rope.scaling.{key} is missing: type {kind!r} needs it")
        else:
            parameters[name] = _shortest(value)
    return RopeConfig(theta=theta, kind=kind, parameters=tuple(sorted(parameters.items())))


def parse_fields(fields: Mapping[str, Any], tensor_names: set[str], where: str) -> ModelConfig:
    """Dimensions from GGUF metadata. Raises ModelError naming every problem at once."""
    arch = fields.get("general.architecture")
    if arch not in FAMILIES:
        raise ModelError(f"{where} has architecture {arch!r}; implemented are {', '.join(FAMILIES)}")
    problems: list[str] = []
    unknown = sorted(
        key for key in fields if key.startswith(f"{arch}.") and key.removeprefix(f"{arch}.") not in _KNOWN_KEYS
    )
    problems += [f"{key} = {fields[key]!r} is not implemented: it must be absent" for key in unknown]
    if "rope_freqs.weight" in tensor_names:
        problems.append("rope_freqs.weight (llama3 rope scaling as a table) is not implemented: use a folder instead")

    def integer(key: str, default: int | None = None) -> int:
        value = fields.get(f"{arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{arch}.{key} = {value!r}: an integer of at least 1 is needed")
            return 2
        return value

    hidden, heads = integer("embedding_length"), integer("attention.head_count")
    head_dim = integer("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if integer(key, head_dim) != head_dim:
            problems.append(f"{arch}.{key} = {fields[f'{arch}.{key}']}: it must be the head size, {head_dim}")
    vocab = len(fields.get("tokenizer.ggml.tokens") or ()) or integer("vocab_size")
    if integer("vocab_size", vocab) != vocab:
        problems.append(f"{arch}.vocab_size = {fields[f'{arch}.vocab_size']}, but the tokenizer has {vocab} tokens")
    values: dict[str, Any] = {
        "num_layers": integer("block_count"),
        "intermediate_size": integer("feed_forward_length"),
        "num_kv_heads": integer("attention.head_count_kv", heads),
        "max_position": integer("context_length"),
    }
    epsilon = fields.get(f"{arch}.attention.layer_norm_rms_epsilon")
    if not isinstance(epsilon, float) or epsilon <= 0:
        problems.append(f"{arch}.attention.layer_norm_rms_epsilon = {epsilon!r}: a number above 0 is needed")
        epsilon = 1e-6
    rope = _rope(fields, arch, problems)
    bos = token_ids(fields.get("tokenizer.ggml.bos_token_id"), "tokenizer.ggml.bos_token_id", vocab, problems)
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    eos = token_ids([i for i in ends if i is not None], "tokenizer.ggml.eos_token_id", vocab, problems)
    if problems:
        raise ModelError(f"{where} cannot be used:\n  " + "\n  ".join(problems))
    return ModelConfig(
        family=arch,
        vocab_size=vocab,
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        rms_norm_eps=_shortest(epsilon),
        rope=rope,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        tied_embeddings="output.weight" not in tensor_names,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        **values,
    )


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown one keeps its name (and is then reported as unexpected)."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _LAYER:
        return f"model.layers.{int(parts[1])}.{_LAYER[parts[2]]}.{parts[3]}"
    return name


def undo_rotary_permutation(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a Llama q or k projection in halves order again.

    GGUF stores each head's rows as interleaved pairs (0, D/2, 1, D/2 + 1, ...) because llama.cpp rotates
    neighbours; the rotation of docs/numerics.md takes the two halves of a head.
    """
    rows, rest = weight.shape[0], weight.shape[1:]
    return weight.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def load_gguf(path: Path, dtype: Dtype) -> LoadedModel:
    """Load a GGUF file in the contract's dtype: dequantised in float32 (scale * q + minimum), then rounded once.

    Raises:
        ModelError: ``gguf`` is not installed, or one message with everything that is wrong with the file.
    """
    check_dtype(dtype)
    fields, stored = open_gguf(path)
    config = parse_fields(fields, {tensor.name for tensor in stored}, str(path))
    from gguf import GGMLQuantizationType, dequantize

    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in stored:
        described[hf_name(tensor.name)] = (tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape)))
    accepted = tuple(kind.name for kind in GGMLQuantizationType if kind.name not in ("I8", "I16", "I32", "I64", "F64"))
    problems = check_tensors(described, config, accepted)
    if problems:
        raise ModelError(f"{path} cannot be used:\n  " + "\n  ".join(problems))
    tensors: dict[str, torch.Tensor] = {}
    for tensor in stored:
        name = hf_name(tensor.name)
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{path}: {tensor.name} is {tensor.tensor_type.name}, which gguf cannot dequantise"
            ) from error
        values = np.ascontiguousarray(values, dtype=np.float32).reshape(described[name][1])
        if config.family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_heads if name.endswith("q_proj.weight") else config.num_kv_heads
            values = np.ascontiguousarray(undo_rotary_permutation(values, heads))
        tensors[name] = convert(torch.from_numpy(values.copy()), dtype)
    kinds = {kind for kind, _ in described.values()}
    return LoadedModel(
        config=config,
        tensors={name: tensors[name] for name in config.weight_shapes()},
        dtype=dtype,
        source=str(path),
        converted=kinds != {"F32" if dtype == "float32" else "BF16"},
        stored_dtypes=tuple(sorted(kinds)),
        files={path.name: file_sha256(path)},
    )
