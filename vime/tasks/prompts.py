"""Rows of a data source as prompts: which row a ``prompt_index`` is, and its tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from rlkernel.errors import RlkernelError
from vime.errors import InputError
from vime.tasks.permutation import permutation
from vime.timeline.event import encode_value
from vime.types import Namespace, Prompt

T = TypeVar("T")


class PromptTokenizer(Protocol):
    """What rendering a prompt needs of a tokenizer (``rlkernel.models.tokenizer.Tokenizer`` has it)."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; ``special`` adds what the tokenizer puts around a text (often nothing, or BOS)."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Text of a chat, up to where the assistant's answer begins. Raises ModelError if there is no template."""


class PromptSet:
    """The prompts of one namespace, in the order in which they are drawn.

    ``prompt_index`` is a position in the seeded permutation: index i is row ``permutation(epoch i // n)[i % n]`` of
    n rows. Every epoch has a permutation of its own. Prompts are tokenized when they are first asked for.
    """

    def __init__(
        self,
        namespace: Namespace,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PromptTokenizer,
        seed: int,
        *,
        repeat: bool = False,
    ) -> None:
        if not rows:
            raise InputError(f"the data source has no {namespace} rows: at least one is needed")
        self.namespace = namespace
        self.rows = rows
        self.repeat = repeat
        self._tokenizer = tokenizer
        self._seed = seed
        self._orders: dict[int, tuple[int, ...]] = {}
        self._digest = ""
        self._rendered: dict[int, tuple[str, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        """Number of distinct rows."""
        return len(self.rows)

    def digest(self) -> str:
        """SHA-256 over all rows: keys, texts, numbers, lists and mappings; of other objects the type alone counts."""
        if not self._digest:
            found = hashlib.sha256()
            for number in range(len(self.rows)):
                found.update(json.dumps(_plain(self.rows[number]), sort_keys=True).encode() + b"\n")
            self._digest = found.hexdigest()
        return self._digest

    def row_number(self, prompt_index: int) -> int:
        """Row of a prompt. Raises InputError beyond the last row unless rows repeat."""
        epoch, place = divmod(prompt_index, len(self.rows))
        if prompt_index < 0 or (epoch and not self.repeat):
            raise InputError(
                f"{self.namespace} prompt {prompt_index} does not exist: there are {len(self.rows)} rows; "
                "data.repeat: true draws them again"
            )
        if epoch not in self._orders:
            label = f"vime prompts/{self._seed}/{self.namespace}/{epoch}"
            self._orders[epoch] = permutation(len(self.rows), label)
        return self._orders[epoch][place]

    def prompt(self, prompt_index: int) -> Prompt:
        """One prompt. Raises InputError for a row that cannot be rendered."""
        number = self.row_number(prompt_index)
        if number not in self._rendered:
            try:
                self._rendered[number] = render(self.rows[number], self._tokenizer)
            except InputError as error:
                raise InputError(f"{name_row(self.rows, self.namespace, number)}: {error}") from error
        text, token_ids = self._rendered[number]
        return Prompt(self.namespace, prompt_index, token_ids, text, self.rows[number])

    def take(self, first: int, count: int) -> tuple[Prompt, ...]:
        """``count`` prompts from the cursor position ``first`` on."""
        return tuple(self.prompt(first + i) for i in range(count))


def _plain(value: Any) -> Any:
    """A row's content as JSON; floats by their bits. A row is a user's, so that it may hold what no event can."""
    if isinstance(value, Mapping):
        return {f"{type(key).__name__}:{key}": _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), _plain(value.tolist())]
    try:
        return encode_value(value)
    except TypeError:
        return f"<{type(value).__module__}.{type(value).__qualname__}>"


def name_row(rows: Sequence[Mapping[str, Any]], namespace: Namespace, number: int) -> str:
    """A row as people find it: by ``rows.place(number)`` where the source has that (file and line), else by number."""
    place = getattr(rows, "place", None)
    return str(place(number)) if callable(place) else f"{namespace} row {number} (counted from 0)"


def prompt_content(row: Any) -> str | tuple[tuple[str, str], ...]:
    """What a row asks, before any tokenizer: its text, or (role, content) of its messages.

    Raises:
        InputError: the row has neither or both, or a value of another type.
    """
    if not isinstance(row, Mapping):
        raise InputError(f"a row is a mapping with 'text' or 'messages', not {_cut(row)}")
    present = [name for name in ("text", "messages") if name in row]
    if len(present) != 1:
        has = "both" if present else "neither"
        raise InputError(
            f"a row has 'text' or 'messages', and this one has {has} (its keys: {', '.join(map(str, row))})"
        )
    if present[0] == "text":
        text = row["text"]
        if not isinstance(text, str):
            raise InputError(f"'text' is a string, not {_cut(text)}")
        return text
    messages = row["messages"]
    good = isinstance(messages, list | tuple) and messages
    if not good or not all(
        isinstance(item, Mapping) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)
        for item in messages
    ):
        raise InputError(f"'messages' is a list of {{role, content}}, not {_cut(messages)}")
    return tuple((item["role"], item["content"]) for item in messages)


def render(row: Mapping[str, Any], tokenizer: PromptTokenizer) -> tuple[str, tuple[int, ...]]:
    """Text and token ids of a row: ``text`` as it is, or ``messages`` through the tokenizer's chat template.

    Raises:
        InputError: the row has neither or both, a value of another type, or encodes to no token.
    """
    content = prompt_content(row)
    plain = isinstance(content, str)
    text = content if isinstance(content, str) else _guarded(lambda: tokenizer.render(row["messages"]))
    token_ids = tuple(_guarded(lambda: tokenizer.encode(text, special=plain)))
    if not token_ids:
        raise InputError(f"{text!r} encodes to no token: a prompt has at least one")
    return text, token_ids


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _guarded(call: Callable[[], T]) -> T:
    """Errors of the tokenizer are errors of the input here."""
    try:
        return call()
    except RlkernelError as error:
        raise InputError(str(error)) from error
