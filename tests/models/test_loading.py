"""Hugging Face folders: what transformers writes is read, everything unfit is refused by name and all at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlkernel.errors import ModelError
from rlkernel.models.dtypes import bfloat16_bits, convert
from rlkernel.models.hf_config import parse_config
from rlkernel.models.loading import load_hf, load_model

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e4},
    "linear": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "truncate": False,
    },
}


def hf_model(family: str, **changes):
    config_class, model_class = FAMILIES[family]
    extra = {"head_dim": 8} if family == "qwen3" else {}
    torch.manual_seed(0)
    return model_class(config_class(**{**SIZES, **extra, **changes}))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A Llama folder as transformers writes it."""
    folder = tmp_path_factory.mktemp("written") / "llama"
    hf_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(written, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written, tmp_path / "model"))


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_hf(folder, "float32")
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ROPES)
def test_families_and_ropes(tmp_path, family, rope):
    model = hf_model(family, rope_parameters=dict(ROPES[rope]), tie_word_embeddings=family == "qwen3")
    model.save_pretrained(tmp_path / "m")
    loaded = load_hf(tmp_path / "m", "float32")
    config = loaded.config
    assert (config.family, config.qkv_bias, config.qk_norm) == (family, family == "qwen2", family == "qwen3")
    assert (config.rope.kind, config.rope.theta) == (rope, 5e4)
    wanted = {key: float(value) for key, value in ROPES[rope].items() if key not in ("rope_type", "rope_theta")}
    assert dict(config.rope.parameters) == wanted
    assert (config.head_dim, config.num_kv_heads, config.eos_token_ids) == (8, 2, (2, 3))
    assert config.tied_embeddings is (family == "qwen3")
    state = model.state_dict()
    assert list(loaded.tensors) == list(config.weight_shapes())
    for name, tensor in loaded.tensors.items():
        assert torch.equal(tensor.view(torch.int32), state[name].view(torch.int32)), name
    assert not loaded.converted
    assert set(loaded.files) == {"config.json", "generation_config.json", "model.safetensors"}


def test_old_and_new_styles_are_one(written):
    raw = json.loads((written / "config.json").read_text())
    base = {k: v for k, v in raw.items() if k not in ("rope_parameters", "rope_theta", "rope_scaling")}
    yarn = {k: v for k, v in ROPES["yarn"].items() if k not in ("rope_type", "rope_theta")}
    new = parse_config({**base, "rope_parameters": ROPES["yarn"]}, "new")
    old = parse_config({**base, "rope_theta": 5e4, "rope_scaling": {"type": "yarn", **yarn}}, "old")
    assert new == old
    plain = parse_config({**base, "rope_theta": 5e4, "rope_scaling": None, "head_dim": None, "eos_token_id": 3}, "x")
    assert (plain.rope.kind, plain.rope.theta, plain.head_dim, plain.eos_token_ids) == ("default", 5e4, 8, (3,))
    assert parse_config(base, "x", {"eos_token_id": [5, 2]}).eos_token_ids == (5, 2)
    # YaRN without a factor: the ratio of the contexts, as transformers computes it
    unfactored = {k: v for k, v in ROPES["yarn"].items() if k != "factor"}
    assert parse_config({**base, "rope_parameters": unfactored}, "x").rope.parameter("factor") == 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias = True is not implemented"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented: only 'silu'"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"sliding_window": 16}, "sliding_window = 16 is in use"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has ['sliding_attention']"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not implemented; accepted"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not implemented"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks high_freq_factor, low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "unknown parameters ['beta']"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, "factor = -2.0"),
        ({"rope_parameters": None, "rope_theta": "big"}, "rope_theta = 'big'"),
        ({"architectures": ["MistralForCausalLM"]}, "['MistralForCausalLM'] is not implemented; accepted are Llama"),
        ({"architectures": None, "model_type": "gpt2"}, "'gpt2' is not implemented"),
        ({"model_type": "qwen2"}, "do not belong together"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"num_key_value_heads": 3}, "num_heads = 4 is not a multiple of num_kv_heads = 3"),
        ({"bos_token_id": 40}, "bos_token_id = 40: token ids from 0 to 39"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(written, changes, message):
    raw = json.loads((written / "config.json").read_text())
    with pytest.raises(ModelError) as caught:
        parse_config({**raw, **changes}, "config.json")
    assert message in str(caught.value)


def test_windows_that_are_not_in_use(written):
    raw = json.loads((written / "config.json").read_text())
    raw |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "sliding_window": 4, "layer_types": None}
    assert parse_config({**raw, "use_sliding_window": False}, "x").family == "qwen3"
    assert parse_config({**raw, "use_sliding_window": True, "max_window_layers": 2}, "x").family == "qwen3"
    with pytest.raises(ModelError, match="sliding_window = 4 is in use"):
        parse_config({**raw, "use_sliding_window": True, "max_window_layers": 1}, "x")


def test_every_problem_of_a_configuration_at_once(folder):
    edit(folder, mlp_bias=True, hidden_act="relu", vocab_size=0)
    message = refusal(folder)
    assert all(part in message for part in ("mlp_bias", "hidden_act", "vocab_size", "config.json"))


def test_every_problem_of_the_tensors_at_once(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = torch.zeros(41, 32)
    tensors["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(32)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, 32, dtype=torch.float64)
    save_file(tensors, folder / "model.safetensors")
    message = refusal(folder)
    assert "model.norm.weight is missing: shape [32]" in message
    assert "lm_head.weight has shape [41, 32]; the configuration needs [40, 32]" in message
    assert "model.layers.1.self_attn.o_proj.bias is unexpected" in message
    assert "model.layers.0.mlp.up_proj.weight has type F64; accepted are F32, BF16, F16" in message


def test_harmless_extra_tensors(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    edit(folder, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_hf(folder, "float32").tensors
    tensors["lm_head.weight"][3, 5] += 1e-6
    save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(folder)


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_truncated_files(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    message = refusal(folder)
    assert "model.safetensors" in message
    assert "truncated" in message


def test_longer_and_damaged_files(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0")
    assert "longer than its header says" in refusal(folder)
    path.write_bytes(whole[:8] + b"x" + whole[9:])
    assert "not a readable safetensors file" in refusal(folder)


def test_missing_files(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "it holds ['pytorch_model.bin'], which cannot be read" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json does not exist" in refusal(folder)
    with pytest.raises(ModelError, match="does not exist: a Hugging Face folder or a GGUF file"):
        load_model(tmp_path / "nothing", "float32")


def test_shards(tmp_path):
    model = hf_model("qwen2")
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    shards = sorted((tmp_path / "m").glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = load_hf(tmp_path / "m", "float32")
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.tensors.items())
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-4])
    message = refusal(tmp_path / "m")
    assert f"{shards[0].name} does not exist" in message
    assert f"{shards[1].name} is truncated" in message


def test_index_that_disagrees_with_its_shards(tmp_path):
    hf_model("llama").save_pretrained(tmp_path / "m", max_shard_size="20KB")
    index = tmp_path / "m" / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"].pop("model.norm.weight")
    value["weight_map"]["model.extra"] = next(iter(value["weight_map"].values()))
    index.write_text(json.dumps(value))
    message = refusal(tmp_path / "m")
    assert "model.norm.weight is in" in message
    assert "model.extra is not in" in message


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conversion_is_declared(folder, stored, dtype):
    tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    loaded = load_hf(folder, dtype)
    wanted = getattr(torch, dtype)
    assert loaded.converted is (stored != wanted)
    for name, tensor in loaded.tensors.items():
        assert tensor.dtype == wanted
        assert torch.equal(tensor, tensors[name].to(wanted)), name


def test_every_float16_widens_exactly():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    half = bits.view(torch.float16)
    wide = convert(half, "float32")
    same = wide.view(torch.int32) == half.float().view(torch.int32)
    assert bool((same | half.isnan()).all())
    assert bool(wide[half.isnan()].isnan().all())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_narrowing_is_nearest_even_and_keeps_nan(bits):
    value = np.array([bits], dtype=np.uint32).view(np.float32)
    narrow = int(bfloat16_bits(value)[0])
    if np.isnan(value[0]):
        assert narrow & 0x7FFF > 0x7F80
        assert narrow >> 15 == bits >> 31
        return
    low, rest = bits >> 16, bits & 0xFFFF
    up = rest > 0x8000 or (rest == 0x8000 and low & 1)
    assert narrow == low + (1 if up else 0)
    assert convert(torch.from_numpy(value), "bfloat16").view(torch.int16).item() & 0xFFFF == narrow


def test_other_types_are_refused():
    with pytest.raises(ModelError, match=r"torch\.float64 cannot be converted"):
        convert(torch.zeros(2, dtype=torch.float64), "float32")
    with pytest.raises(ModelError, match="dtype 'float16' is not one of the contract's: float32, bfloat16"):
        load_hf(Path("."), "float16")
