"""Arithmetic problems from reasoning-gym (optional: ``pip install -e '.[tasks]'``), as chats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vime.errors import InputError
from vime.types import GeneratedSample, Namespace, Prompt

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_EVAL_SEED_OFFSET = 1_000_003
_MOST = 1_000_000


def rows(
    namespace: Namespace,
    *,
    dataset: str = "chain_sum",
    size: int = 1000,
    held_out: int = 100,
    seed: int = 0,
    instruction: str = "Think step by step, then give the answer as a number on the last line.",
    options: Mapping[str, Any] | None = None,
) -> Sequence[Mapping[str, Any]]:
    """Distinct problems of one reasoning-gym data set; the held-out ones never occur among the training ones.

    ``options`` are the data set's own settings (``max_terms``, ``max_digits``, ...).

    Raises:
        InputError: reasoning-gym is not installed, knows no such data set or option, or makes too few problems.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise InputError("the task 'arithmetic' needs reasoning-gym: pip install -e '.[tasks]'") from None
    for name, count, least in (("size", size, 1), ("held_out", held_out, 0)):
        if not isinstance(count, int) or not least <= count <= _MOST:
            raise InputError(f"{name} = {count!r}: a whole number from {least} to {_MOST:,} is needed")
    if not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise InputError(f"seed = {seed!r}: a whole number from 0 to 2^31 - 1 is needed")
    wanted = held_out if namespace == "eval" else size
    try:
        held = _distinct(reasoning_gym, dataset, held_out, seed + _EVAL_SEED_OFFSET, options or {}, frozenset())
        taken = frozenset(question for question, _ in held)
        pairs = held if namespace == "eval" else _distinct(reasoning_gym, dataset, wanted, seed, options or {}, taken)
    except (TypeError, ValueError, AssertionError) as error:
        raise InputError(
            f"reasoning-gym refuses {dataset!r} with the options {dict(options or {})}: {error}"
        ) from error
    if len(pairs) < wanted:
        raise InputError(f"{dataset!r} made {len(pairs)} distinct problems; {wanted} are asked for: widen its options")
    return [
        {
            "messages": [{"role": "user", "content": f"{question}\n{instruction}" if instruction else question}],
            "answer": answer,
        }
        for question, answer in pairs
    ]


def _distinct(
    gym: Any, dataset: str, count: int, seed: int, options: Mapping[str, Any], taken: frozenset[str]
) -> list[tuple[str, str]]:
    """The first ``count`` distinct problems that are not ``taken``, out of at most 8 times as many drawn."""
    found: dict[str, str] = {}
    if count:
        for entry in gym.create_dataset(dataset, size=8 * count + 64, seed=seed, **options):
            if entry["question"] not in taken:
                found.setdefault(entry["question"], str(entry["answer"]))
            if len(found) == count:
                break
    return list(found.items())


def reward(prompt: Prompt, sample: GeneratedSample, text: str, *, format_reward: float = 0.1) -> float:
    """1 if the last number of the response equals the answer, ``format_reward`` if there is a number, else 0."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return 0.0
    return 1.0 if _plain(numbers[-1]) == _plain(str(prompt.row["answer"])) else format_reward


def _plain(number: str) -> str:
    """Canonical spelling: no separators, no trailing zeros after the point, no plus sign, no negative zero."""
    text = number.replace(",", "").strip()
    sign, text = ("-", text[1:]) if text.startswith("-") else ("", text)
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    text = text.lstrip("0") or "0"
    if text.startswith("."):
        text = "0" + text
    return text if text == "0" else sign + text
