"""What is written is read back bit for bit, by vime and by transformers, and appears whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlkernel.errors import ModelError
from rlkernel.models import saving
from rlkernel.models.config import RopeConfig
from rlkernel.models.loading import load_hf
from rlkernel.models.presets import PRESETS, preset, preset_tokenizer
from rlkernel.models.saving import plan_shards, save_model

LLAMA3 = (
    ("factor", 8.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 64.0),
)
YARN = (("beta_fast", 16.0), ("factor", 4.0), ("original_max_position_embeddings", 128.0), ("truncate", 0.0))
ROPES = {
    "default": RopeConfig(theta=5e4),
    "linear": RopeConfig(5e4, "linear", (("factor", 2.0),)),
    "llama3": RopeConfig(5e4, "llama3", LLAMA3),
    "yarn": RopeConfig(5e4, "yarn", YARN),
}


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path, name, rope, dtype):
    model = preset(name, 3, dtype, rope=ROPES[rope], eos_token_ids=(0, 1))
    save_model(tmp_path / "m", model.config, model.tensors, preset_tokenizer(model.config))
    back = load_hf(tmp_path / "m", dtype)
    assert back.config == model.config
    assert not back.converted
    assert all(torch.equal(bits(back.tensors[n]), bits(t)) for n, t in model.tensors.items())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("shard_bytes", [2**30, 40_000])
def test_transformers_loads_it(tmp_path, name, shard_bytes):
    model = preset(name, 3, "bfloat16", rope=ROPES["yarn"])
    save_model(tmp_path / "m", model.config, model.tensors, shard_bytes=shard_bytes)
    assert (tmp_path / "m" / "model.safetensors.index.json").exists() is (shard_bytes == 40_000)
    hf, report = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True, local_files_only=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = hf.state_dict()
    assert hf.dtype == torch.bfloat16
    assert all(torch.equal(bits(state[n]), bits(t)) for n, t in model.tensors.items())
    assert hf.config.rope_parameters["rope_type"] == "yarn"
    assert hf.config.rope_parameters["rope_theta"] == 5e4
    assert hf.config.rope_parameters["truncate"] is False
    assert hf.generation_config.eos_token_id == 0
    again = load_hf(tmp_path / "m", "bfloat16")
    assert again.config == model.config
    assert all(torch.equal(bits(again.tensors[n]), bits(t)) for n, t in model.tensors.items())


def test_same_weights_same_bytes(tmp_path):
    model = preset("tiny-qwen3", 3, "float32")
    for folder in ("a", "b"):
        save_model(tmp_path / folder, model.config, model.tensors)
    assert load_hf(tmp_path / "a", "float32").files == load_hf(tmp_path / "b", "float32").files


def test_nothing_is_overwritten(tmp_path):
    model = preset("tiny-qwen3", 3, "float32")
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelError, match="exists already"):
        save_model(tmp_path / "m", model.config, model.tensors)
    assert list((tmp_path / "m").iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    model = preset("tiny-qwen3", 3, "float32")

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(tmp_path / "m", model.config, model.tensors)
    assert list(tmp_path.iterdir()) == []


def test_unfit_weights_are_refused(tmp_path):
    model = preset("tiny-qwen3", 3, "float32")
    tensors = dict(model.tensors)
    tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].bfloat16()
    tensors["extra"] = torch.zeros(1)
    with pytest.raises(ModelError) as caught:
        save_model(tmp_path / "m", model.config, tensors)
    for part in ("model.norm.weight is missing", "lm_head.weight has shape", "extra is unexpected", "several types"):
        assert part in str(caught.value)
    tied = replace(model.config, tied_embeddings=True)
    with pytest.raises(ModelError, match=r"lm_head\.weight is unexpected"):
        save_model(tmp_path / "m", tied, model.tensors)


def test_shard_plan():
    assert plan_shards({"a": 5, "b": 5, "c": 1, "d": 20, "e": 1}, 10) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_written_configuration_is_plain_json(tmp_path):
    model = preset("tiny-llama", 3, "float32", rope=ROPES["llama3"])
    save_model(tmp_path / "m", model.config, model.tensors)
    value = json.loads((tmp_path / "m" / "config.json").read_text())
    assert value["rope_scaling"]["original_max_position_embeddings"] == 64
    assert value["architectures"] == ["LlamaForCausalLM"]
