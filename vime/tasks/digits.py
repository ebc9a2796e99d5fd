"""Digit strings: small tasks that a model learns from random weights within a minute.

``complement_digits`` wants every digit d replaced by 9 - d (``3816=`` gives ``6183``). ``reverse_digits`` wants the
digits in reverse order, which is harder for rotary positions: the distance to look back changes with every digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import InputError
from vime.tasks.permutation import permutation
from vime.types import GeneratedSample, Namespace, Prompt


def complement_rows(namespace: Namespace, *, digits: int = 4, held_out: int = 500) -> Sequence[Mapping[str, Any]]:
    """Rows of ``complement_digits``: see :func:`split_numbers`."""
    numbers = split_numbers(namespace, digits, held_out)
    return [{"text": f"{n}=", "answer": "".join(str(9 - int(d)) for d in n)} for n in numbers]


def reverse_rows(namespace: Namespace, *, digits: int = 4, held_out: int = 500) -> Sequence[Mapping[str, Any]]:
    """Rows of ``reverse_digits``: see :func:`split_numbers`."""
    return [{"text": f"{n}=", "answer": n[::-1]} for n in split_numbers(namespace, digits, held_out)]


def split_numbers(namespace: Namespace, digits: int, held_out: int) -> list[str]:
    """All 10^digits numbers, leading zeros kept, split once and for all into training and ``held_out`` numbers.

    Raises:
        InputError: ``digits`` is not in 1..6, or ``held_out`` leaves no training rows.
    """
    if not 1 <= digits <= 6:
        raise InputError(f"digits = {digits}: 1 to 6 are possible (10^digits prompts are made)")
    total = 10**digits
    if not 0 <= held_out < total:
        raise InputError(
            f"held_out = {held_out}: 0 to {total - 1} are possible ({digits} digits make {total} prompts, and one at "
            "least is left to train on)"
        )
    order = permutation(total, "digits split")
    chosen = order[:held_out] if namespace == "eval" else order[held_out:]
    return [f"{value:0{digits}d}" for value in sorted(chosen)]


def reward(prompt: Prompt, sample: GeneratedSample, text: str) -> float:
    """Share of places with the right digit, in [0, 1]; places beyond the answer's end count as wrong."""
    answer = str(prompt.row["answer"])
    right = sum(mine == wanted for mine, wanted in zip(text, answer, strict=False))
    return right / max(len(answer), len(text))
