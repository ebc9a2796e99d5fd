"""Sums of two numbers, asked in a chat: what a small instruction model knows in part, without any other package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import InputError
from vime.tasks.permutation import permutation
from vime.types import Namespace

QUESTION = "What is {a} + {b}? Answer with the number only."


def rows(namespace: Namespace, *, digits: int = 2, held_out: int = 500) -> Sequence[Mapping[str, Any]]:
    """Every pair of numbers from 1 to 10^digits - 1, split once and for all into training and ``held_out`` pairs.

    Raises:
        InputError: ``digits`` is not in 1..3, or ``held_out`` leaves no training rows.
    """
    if not 1 <= digits <= 3:
        raise InputError(f"digits = {digits}: 1 to 3 are possible (all pairs of such numbers are made)")
    most = 10**digits - 1
    if not 0 <= held_out < most * most:
        raise InputError(
            f"held_out = {held_out}: {digits} digits make {most * most} pairs, and some must be left to train on"
        )
    order = permutation(most * most, "sums split")
    chosen = order[:held_out] if namespace == "eval" else order[held_out:]
    pairs = [(1 + value // most, 1 + value % most) for value in sorted(chosen)]
    return [
        {"messages": [{"role": "user", "content": QUESTION.format(a=a, b=b)}], "answer": str(a + b)} for a, b in pairs
    ]
