"""Reverse the digits of a number: ``3816=`` wants ``6183``. Small enough to learn in a minute from random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import InputError
from vime.tasks.permutation import permutation
from vime.types import GeneratedSample, Namespace, Prompt


def rows(namespace: Namespace, *, digits: int = 4, held_out: int = 500) -> Sequence[Mapping[str, Any]]:
    """All 10^digits numbers, leading zeros kept, split once and for all into training and ``held_out`` numbers.

    Raises:
        InputError: ``digits`` is not in 1..6, or ``held_out`` leaves no training rows.
    """
    if not 1 <= digits <= 6:
        raise InputError(f"digits = {digits}: 1 to 6 are possible (10^digits prompts are made)")
    total = 10**digits
    if not 0 <= held_out < total:
        raise InputError(
            f"held_out = {held_out}: {digits} digits make {total} prompts, and some must be left to train on"
        )
    order = permutation(total, "reverse_digits split")
    chosen = order[:held_out] if namespace == "eval" else order[held_out:]
    numbers = (f"{value:0{digits}d}" for value in sorted(chosen))
    return [{"text": f"{number}=", "answer": number[::-1]} for number in numbers]


def reward(prompt: Prompt, sample: GeneratedSample, text: str) -> float:
    """Share of places with the right digit, in [0, 1]; places beyond the answer's end count as wrong."""
    answer = str(prompt.row["answer"])
    right = sum(mine == wanted for mine, wanted in zip(text, answer, strict=False))
    return right / max(len(answer), len(text))
