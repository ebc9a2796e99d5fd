"""Tasks for models whose tokens mean nothing: random weights of any size, over the character tokenizer.

Prompts are strings of digits, all of one length. ``low_tokens`` rewards response tokens in the lower half of the
vocabulary, about a half of them before training, so that groups differ and there is something to learn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import InputError
from vime.types import GeneratedSample, Namespace, Prompt

_MOST = 1_000_000


def digit_rows(
    namespace: Namespace, *, length: int = 16, size: int = 4096, held_out: int = 64
) -> Sequence[Mapping[str, Any]]:
    """Distinct strings of ``length`` digits, one token each; no held-out string is a training one.

    Raises:
        InputError: ``length`` is not in 8..4096, or a number of rows is out of range.
    """
    if not 8 <= length <= 4096:
        raise InputError(f"length = {length}: 8 to 4,096 are possible")
    for name, count, least in (("size", size, 1), ("held_out", held_out, 0)):
        if not least <= count <= _MOST:
            raise InputError(f"{name} = {count}: a whole number from {least} to {_MOST:,} is needed")
    # the number itself is in front: no two rows are equal, and training rows come after the held-out ones
    first, count = (0, held_out) if namespace == "eval" else (held_out, size)
    return [{"text": f"{number:07d}{_digits(number, length - 7)}"} for number in range(first, first + count)]


def _digits(number: int, count: int) -> str:
    """The last ``count`` digits of as many hashes as it needs, the first one at the end."""
    found, name = "", f"digit rows/{number}"
    while len(found) < count:
        found = str(int.from_bytes(hashlib.sha512(name.encode()).digest(), "big")) + found
        name += "/"
    return found[-count:]


def low_tokens(prompt: Prompt, sample: GeneratedSample, text: str, *, vocabulary: int, length: int) -> float:
    """Response tokens below ``vocabulary`` / 2, as a share of ``length``: ending early wins nothing."""
    return sum(2 * token < vocabulary for token in sample.token_ids) / length
