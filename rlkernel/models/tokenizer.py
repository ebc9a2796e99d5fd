"""Tokenizers: text to token ids and back, with the chat template, from a folder, a GGUF file or an alphabet.

One class over a ``tokenizers`` backend. No hub is ever contacted. The chat template is rendered without a clock
(``strftime_now`` is not defined), so that a prompt's tokens do not depend on the day of the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rlkernel.errors import ModelError
from rlkernel.models.config import ModelConfig

#: Two special tokens, the digits and what simple arithmetic or string tasks need: 24 entries.
CHARACTER_ALPHABET = "0123456789=+-*/<>?:,. "
CHARACTER_EOS, CHARACTER_BOS = "<eos>", "<bos>"


def _no_template(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    ``special_tokens`` maps roles (``bos_token``, ``eos_token``, ``pad_token``, ``unk_token``) to token texts.
    ``alphabet`` is set for a character tokenizer: any other character is an error, never dropped.
    """

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    source: str = ""
    alphabet: str | None = None

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence token. A model's configuration may list more."""
        return self._ids("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-sequence token, if there is one."""
        ids = self._ids("bos_token")
        return ids[0] if ids else None

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over vocabulary, merges, all processing steps, special tokens and chat template."""
        backend = json.loads(self.backend.to_str())
        processor = backend["post_processor"] or {}
        if processor.get("type") == "TemplateProcessing" and not processor["special_tokens"]:
            backend["post_processor"] = None  # transformers adds one that does nothing
        value = {
            "backend": backend,
            "special_tokens": dict(self.special_tokens),
            "chat_template": self.chat_template,
        }
        return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _ids(self, role: str) -> tuple[int, ...]:
        text = self.special_tokens.get(role)
        found = None if text is None else self.backend.token_to_id(text)
        return () if found is None else (found,)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; ``special`` adds what the tokenizer puts around a text (for many: nothing, or BOS).

        Raises ModelError for a character outside a character tokenizer's alphabet.
        """
        if self.alphabet is not None:
            outside = sorted(set(text) - set(self.alphabet))
            if outside:
                raise ModelError(
                    f"the text {text[:60]!r} holds {outside}; the character tokenizer knows {self.alphabet!r}"
                )
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; special tokens are left out unless ``skip_special`` is false."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def render(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True) -> str:
        """The chat template's text for messages ``{"role": ..., "content": ...}``. Raises ModelError."""
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self.chat_template is None:
            raise ModelError(f"the tokenizer {self.source or '(built in)'} has no chat template: give prompts as text")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _no_template
        try:
            return environment.from_string(self.chat_template).render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=generation_prompt,
                **self.special_tokens,
            )
        except TemplateError as error:
            raise ModelError(
                f"the chat template of {self.source or 'this tokenizer'} fails: {error} "
                "(no clock is available to it; messages need 'role' and 'content')"
            ) from error

    def chat(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer unless ``generation_prompt`` is false."""
        return self.encode(self.render(messages, generation_prompt=generation_prompt), special=False)

    def check_fits(self, config: ModelConfig) -> None:
        """Raise ModelError if some token id lies outside the model's vocabulary."""
        if self.vocab_size > config.vocab_size:
            raise ModelError(
                f"the tokenizer {self.source or '(built in)'} has {self.vocab_size} tokens, but the model's vocabulary "
                f"has {config.vocab_size}: they do not belong together"
            )

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into an existing folder."""
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        if self.alphabet is not None:
            settings["alphabet"] = self.alphabet
        text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def character_tokenizer(alphabet: str = CHARACTER_ALPHABET) -> Tokenizer:
    """One token a character; ids 0 and 1 are end and beginning of sequence, then the alphabet in its order."""
    if len(set(alphabet)) != len(alphabet) or not alphabet:
        raise ModelError(f"the alphabet {alphabet!r} is empty or repeats a character")
    names = [CHARACTER_EOS, CHARACTER_BOS, *alphabet]
    backend = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.add_special_tokens([CHARACTER_EOS, CHARACTER_BOS])
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    roles = {"eos_token": CHARACTER_EOS, "bos_token": CHARACTER_BOS, "pad_token": CHARACTER_EOS}
    return Tokenizer(backend, roles, source="characters", alphabet=alphabet)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file.

    Raises:
        ModelError: no tokenizer there, one without a fast (``tokenizers``) form, or one that needs its own code.
    """
    if path.is_file() and path.suffix == ".gguf":
        from rlkernel.models.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    if not path.is_dir():
        raise ModelError(f"{path} is neither a folder with a tokenizer nor a GGUF file")
    settings_path = path / "tokenizer_config.json"
    settings: dict[str, Any] = {}
    if settings_path.exists():
        from rlkernel.models.loading import read_json

        settings = read_json(settings_path)
    elif not (path / "tokenizer.json").exists():
        raise ModelError(f"{path} holds no tokenizer: tokenizer.json and tokenizer_config.json are needed")
    if settings.get("auto_map"):
        raise ModelError(f"{settings_path} asks for code of its own (auto_map), which is never run")
    # imported here: it takes seconds, and built-in tokenizers do not need it
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        raise ModelError(f"the tokenizer of {path} cannot be loaded: {error}") from error
    if not getattr(loaded, "is_fast", False):
        raise ModelError(
            f"the tokenizer of {path} ({type(loaded).__name__}) has no fast form: tokenizer.json is needed"
        )
    backend = tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    template = loaded.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    roles = ("bos_token", "eos_token", "pad_token", "unk_token")
    named = {role: str(getattr(loaded, role)) for role in roles if getattr(loaded, role, None) is not None}
    return Tokenizer(backend, named, template, str(path), settings.get("alphabet"))
