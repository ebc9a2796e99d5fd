"""GGUF files written here with the gguf package: weights, names, permutation, quantisation, tokenizer, refusals."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from rlkernel.errors import ModelError
from rlkernel.models.config import RopeConfig
from rlkernel.models.gguf import hf_name, load_gguf, undo_rotary_permutation
from rlkernel.models.loading import load_hf, load_model
from rlkernel.models.presets import preset
from rlkernel.models.saving import save_model
from rlkernel.models.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

VOCABULARY = 262
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def interleave(weight, heads):
    """Rows of each head as the pairs (0, D/2), (1, D/2 + 1), ...: written out as a loop, on purpose."""
    size = weight.shape[0] // heads
    order = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def tokens() -> tuple[list[str], list[int]]:
    names = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "he",
        "12",
        "Ġh",
    ]
    return names, [3, 3, 3] + [1] * (len(names) - 3)


def write(path, model, *, fields=(), drop=(), extra=None, quantise=None, pre="smollm", add_bos=False):
    config = model.config
    arch = config.family
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "block_count": config.num_layers,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "vocab_size": config.vocab_size,
        **dict(fields),
    }
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope.theta)
    names, types = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types(types)
    writer.add_token_merges(["h e", "1 2", "Ġ h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for name, tensor in {**model.tensors, **(extra or {})}.items():
        if name in drop:
            continue
        array = tensor.float().numpy()
        if arch == "llama" and name.endswith("q_proj.weight"):
            array = interleave(array, config.num_heads)
        if arch == "llama" and name.endswith("k_proj.weight"):
            array = interleave(array, config.num_kv_heads)
        if quantise is not None and array.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quantize(array, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model(name="tiny-llama", **overrides):
    return preset(name, 5, "float32", vocab_size=VOCABULARY, bos_token_id=1, eos_token_ids=(2,), **overrides)


def equal(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_families(tmp_path, name):
    original = model(name)
    loaded = load_model(write(tmp_path / "m.gguf", original), "float32")
    assert loaded.config == original.config
    assert list(loaded.tensors) == list(original.tensors)
    assert all(equal(loaded.tensors[n], t) for n, t in original.tensors.items())
    assert not loaded.converted
    save_model(tmp_path / "hf", loaded.config, loaded.tensors, load_tokenizer(tmp_path / "m.gguf"))
    assert load_hf(tmp_path / "hf", "float32").config == original.config


def test_permutation_is_noticed(tmp_path, monkeypatch):
    """Without undoing the permutation the test above would fail, for q and k and nothing else."""
    monkeypatch.setattr("rlkernel.models.gguf.undo_rotary_permutation", lambda weight, heads: weight)
    original = model()
    loaded = load_gguf(write(tmp_path / "m.gguf", original), "float32")
    different = {n.split(".")[-2] for n, t in original.tensors.items() if not equal(loaded.tensors[n], t)}
    assert different == {"q_proj", "k_proj"}


def test_permutation_of_bias_like_rows():
    rows = np.arange(24, dtype=np.float32)
    assert (undo_rotary_permutation(interleave(rows, 3), 3) == rows).all()


@pytest.mark.parametrize("rope", [RopeConfig(1e5, "linear", (("factor", 2.0),)), RopeConfig(1e6)])
def test_rope(tmp_path, rope):
    fields = {} if rope.kind == "default" else {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    original = model(rope=rope)
    assert load_gguf(write(tmp_path / "m.gguf", original, fields=fields), "float32").config == original.config


def test_quantised_weights_are_scale_times_integer(tmp_path):
    original = model()
    loaded = load_gguf(write(tmp_path / "m.gguf", original, quantise=gguf.GGMLQuantizationType.Q8_0), "float32")
    assert loaded.converted
    assert loaded.stored_dtypes == ("F32", "Q8_0")
    name = "model.layers.0.mlp.up_proj.weight"
    blocks = original.tensors[name].numpy().reshape(-1, 32)
    packed = gguf.quantize(blocks.reshape(128, 64), gguf.GGMLQuantizationType.Q8_0).reshape(-1, 34)
    scale = packed[:, :2].copy().view(np.float16).astype(np.float32)
    expected = scale * packed[:, 2:].copy().view(np.int8).astype(np.float32)
    assert (loaded.tensors[name].numpy().view(np.uint32) == expected.reshape(128, 64).view(np.uint32)).all()
    narrow = load_gguf(tmp_path / "m.gguf", "bfloat16")
    assert torch.equal(narrow.tensors[name], loaded.tensors[name].bfloat16())


def test_tokenizer(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", model()))
    names, _ = tokens()
    assert tokenizer.vocab_size == VOCABULARY
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("he he") == [names.index("he"), names.index("Ġ"), names.index("he")]
    # digits stand alone (smollm), although a merge "1 2" exists
    assert tokenizer.encode("12") == [names.index("1"), names.index("2")]
    assert tokenizer.chat([{"content": "e"}]) == [1, names.index("e"), 2]
    text = "Grüße, 12 <|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert tokenizer.decode([1, names.index("e"), 2]) == "e"


def test_pre_tokenizers_differ(tmp_path):
    names, _ = tokens()
    gpt2 = load_tokenizer(write(tmp_path / "a.gguf", model(), pre="gpt-2"))
    assert gpt2.encode("12") == [names.index("12")]
    llama = load_tokenizer(write(tmp_path / "b.gguf", model(), pre="llama-bpe", add_bos=True))
    assert llama.encode("12") == [1, names.index("12")]
    assert llama.encode("12", special=False) == [names.index("12")]
    (tmp_path / "folder").mkdir()
    llama.save(tmp_path / "folder")
    back = load_tokenizer(tmp_path / "folder")
    assert back.encode("12") == [1, names.index("12")]
    assert back.fingerprint == llama.fingerprint
    assert gpt2.fingerprint != llama.fingerprint
    with pytest.raises(ModelError, match="pre-tokenizer 'tekken'; implemented are model 'gpt2' with gpt-2, smollm"):
        load_tokenizer(write(tmp_path / "c.gguf", model(), pre="tekken"))


def refusal(path) -> str:
    with pytest.raises(ModelError) as caught:
        load_gguf(path, "float32")
    return str(caught.value)


def test_every_problem_at_once(tmp_path):
    fields = {
        "attention.sliding_window": 8,
        "expert_count": 2,
        "rope.scaling.type": "longrope",
        "rope.dimension_count": 8,
    }
    extra = {"rope_freqs.weight": torch.ones(8)}
    message = refusal(write(tmp_path / "m.gguf", model(), fields=fields, extra=extra))
    for part in ("sliding_window = 8", "expert_count = 2", "'longrope'", "rope.dimension_count = 8", "rope_freqs"):
        assert part in message
    drop = ("model.norm.weight",)
    extra = {"blk.0.attn_q.bias": torch.ones(64), "blk.0.attn_rot": torch.ones(4)}
    message = refusal(write(tmp_path / "n.gguf", model(), drop=drop, extra=extra))
    for part in ("model.norm.weight is missing", "self_attn.q_proj.bias is unexpected", "blk.0.attn_rot is unexpected"):
        assert part in message


def test_vocabulary_that_differs(tmp_path):
    assert "vocab_size = 30" in refusal(write(tmp_path / "m.gguf", model(), fields={"vocab_size": 30}))


def test_other_files(tmp_path):
    path = write(tmp_path / "m.gguf", model())
    whole = path.read_bytes()
    for kept in (0, 3, 100, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:kept])
        assert "GGUF file" in refusal(path) or "truncated" in refusal(path)
    assert "does not exist" in refusal(tmp_path / "nothing.gguf")
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "architecture 'gemma'; implemented are llama, qwen2, qwen3" in refusal(tmp_path / "g.gguf")


def test_without_the_package(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", model())
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install -e '.[gguf]'" in refusal(path)


def test_names():
    assert hf_name("blk.11.ffn_down.weight") == "model.layers.11.mlp.down_proj.weight"
    assert hf_name("blk.x.ffn_down.weight") == "blk.x.ffn_down.weight"
