"""Tokenizers embedded in GGUF files: byte-level BPE rebuilt from the metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from rlkernel.errors import ModelError
from rlkernel.models.gguf import open_gguf
from rlkernel.models.tokenizer import Tokenizer

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: tokenizer.ggml.pre -> regular expression of the words (None: GPT-2's own), digits one by one, NFC first
_KINDS: dict[str, tuple[str | None, bool, bool]] = {
    "gpt-2": (None, False, False),
    "smollm": (None, True, False),
    "qwen2": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", False, True),
    "llama-bpe": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", False, False),
}
_CONTROL, _USER_DEFINED = 3, 4


def _pre_tokenizer(kind: str) -> Any:
    words, digits, _ = _KINDS[kind]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if words is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(words), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _merges(raw: list[str], where: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(raw):
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelError(f"{where}: merge {number} is {line!r}; two symbols with one space between are needed")
        pairs.append((left, right))
    return pairs


def build_tokenizer(fields: Mapping[str, Any], where: str) -> Tokenizer:
    """A tokenizer from GGUF metadata (keys ``tokenizer.*``). Raises ModelError for kinds that are not implemented."""
    model, kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or kind not in _KINDS:
        raise ModelError(
            f"{where} has a tokenizer of model {model!r}, pre-tokenizer {kind!r}; implemented are model 'gpt2' with "
            f"{', '.join(_KINDS)}: give a folder with tokenizer.json instead"
        )
    tokens, types = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    if not tokens or not types or len(tokens) != len(types) or len(set(tokens)) != len(tokens):
        raise ModelError(f"{where}: tokenizer.ggml.tokens and token_type are missing, repeat, or differ in length")
    if fields.get("tokenizer.ggml.add_space_prefix"):
        raise ModelError(f"{where}: tokenizer.ggml.add_space_prefix = true is not implemented for byte-level BPE")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges(fields.get("tokenizer.ggml.merges") or [], where),
            ignore_merges=kind == "llama-bpe",
        )
    )
    if _KINDS[kind][2]:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=types[i] == _CONTROL, normalized=False)
        for i, token in enumerate(tokens)
        if types[i] in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    backend.add_special_tokens([token for token in added if token.special])
    roles: dict[str, str] = {}
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    for role, name in names.items():
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            if not 0 <= index < len(tokens):
                raise ModelError(f"{where}: tokenizer.ggml.{name}_token_id = {index}, of {len(tokens)} tokens")
            roles[role] = tokens[index]
    if fields.get("tokenizer.ggml.add_bos_token"):
        if "bos_token" not in roles:
            raise ModelError(f"{where}: tokenizer.ggml.add_bos_token is true, but there is no bos_token_id")
        bos = roles["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, tokens.index(bos))]
        )
    if fields.get("tokenizer.ggml.add_eos_token"):
        raise ModelError(
            f"{where}: tokenizer.ggml.add_eos_token = true is not implemented: prompts would end themselves"
        )
    return Tokenizer(backend, roles, fields.get("tokenizer.chat_template"), where)


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer embedded in a GGUF file. Raises ModelError."""
    fields, _ = open_gguf(path)
    return build_tokenizer(fields, str(path))
