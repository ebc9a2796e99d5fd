"""Tokenizers: characters, folders, chat templates, and vocabularies that do not fit."""

from __future__ import annotations

import json
import socket
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from rlkernel.errors import ModelError
from rlkernel.models.presets import PRESETS, preset_tokenizer
from rlkernel.models.tokenizer import CHARACTER_ALPHABET, Tokenizer, character_tokenizer, load_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def bytes_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with chat tokens: no merges, 256 bytes and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}, TEMPLATE)


@settings(max_examples=100, deadline=None)
@given(st.text(CHARACTER_ALPHABET, max_size=30))
def test_characters_round_trip(text):
    tokenizer = character_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == [2 + CHARACTER_ALPHABET.index(character) for character in text]
    assert tokenizer.decode(ids) == text


def test_characters():
    tokenizer = character_tokenizer()
    assert tokenizer.vocab_size == len(CHARACTER_ALPHABET) + 2
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ((0,), 1)
    assert tokenizer.decode([2, 3, 0]) == "01"
    assert tokenizer.decode([2, 3, 0], skip_special=False) == "01<eos>"
    with pytest.raises(ModelError, match=r"the text '12a' holds .'a'.; the character tokenizer knows"):
        tokenizer.encode("12a")
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "1"}])
    with pytest.raises(ModelError, match="repeats a character"):
        character_tokenizer("aa")


def test_saved_and_loaded_again(tmp_path, bytes_tokenizer):
    for name, tokenizer in (("characters", character_tokenizer()), ("bytes", bytes_tokenizer)):
        (tmp_path / name).mkdir()
        tokenizer.save(tmp_path / name)
        back = load_tokenizer(tmp_path / name)
        assert back.fingerprint == tokenizer.fingerprint
        assert back.encode("1+2=3") == tokenizer.encode("1+2=3")
        assert back.vocab_size == tokenizer.vocab_size
        assert back.eos_token_ids == tokenizer.eos_token_ids
        assert back.alphabet == tokenizer.alphabet


def test_transformers_agrees(tmp_path, bytes_tokenizer):
    bytes_tokenizer.save(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    messages = [{"role": "user", "content": "Größe  <|im_end|> 12"}, {"role": "assistant", "content": "ok"}]
    ids = bytes_tokenizer.chat(messages)
    assert ids == list(hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    assert bytes_tokenizer.render(messages, generation_prompt=False) == hf.apply_chat_template(messages, tokenize=False)
    assert bytes_tokenizer.decode(ids, skip_special=False) == hf.decode(ids, skip_special_tokens=False)


def test_fingerprint_changes_with_anything(bytes_tokenizer):
    other = tokenizers.Tokenizer.from_str(bytes_tokenizer.backend.to_str())
    other.add_tokens(["x1"])
    changed = [
        replace(bytes_tokenizer, backend=other),
        replace(bytes_tokenizer, chat_template=TEMPLATE + " "),
        replace(bytes_tokenizer, special_tokens={"eos_token": "<|im_end|>"}),
    ]
    assert len({tokenizer.fingerprint for tokenizer in (bytes_tokenizer, *changed)}) == 4
    assert replace(bytes_tokenizer, source="elsewhere").fingerprint == bytes_tokenizer.fingerprint


def test_another_vocabulary_is_an_error(bytes_tokenizer):
    config = PRESETS["tiny-qwen3"]
    preset_tokenizer(config).check_fits(config)
    with pytest.raises(ModelError, match="has 258 tokens, but the model's vocabulary has 24"):
        bytes_tokenizer.check_fits(config)
    with pytest.raises(ModelError, match="has 24 tokens, but the model's vocabulary has 16"):
        preset_tokenizer(replace(config, vocab_size=16))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ strftime_now('%d') }}", "no clock is available"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "fails"),
        ("{{ messages[0].__class__.__mro__ }}", "fails"),
    ],
)
def test_templates_that_fail(bytes_tokenizer, template, message):
    with pytest.raises(ModelError, match=message):
        replace(bytes_tokenizer, chat_template=template).chat([{"role": "user", "content": "1"}])


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="neither a folder"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["x.Y", None]}}))
    with pytest.raises(ModelError, match="code of its own"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_no_network(tmp_path, monkeypatch, bytes_tokenizer):
    def refuse(*_arguments, **_keywords):
        raise AssertionError("a tokenizer opened a socket")

    bytes_tokenizer.save(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_tokenizer(tmp_path).encode("1") == bytes_tokenizer.encode("1")
