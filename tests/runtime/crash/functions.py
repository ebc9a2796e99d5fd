"""Reward and filter of the crash tests: they note every call in ``calls.txt`` of the current directory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from vime.types import GeneratedSample, Prompt

CALLS = "calls.txt"


def _note(line: str) -> None:
    descriptor = os.open(CALLS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def reward(prompt: Prompt, sample: GeneratedSample, text: str) -> float:
    """A number that depends on every generated token."""
    _note(f"reward {sample.sample_id}")
    return float(sum((index + 1) * token for index, token in enumerate(sample.token_ids)) % 11) / 10


def keep(samples: Sequence[GeneratedSample], rewards: Sequence[float]) -> list[bool]:
    """Everything but the worst sample of a group."""
    _note(f"filter {samples[0].sample_id.prompt_index}")
    worst = min(range(len(samples)), key=lambda index: (rewards[index], index))
    return [index != worst for index in range(len(samples))]
