"""Calls a user's reward and filter: exceptions, deadlines and unusable values become one error each."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vime.errors import Interrupted, VimeError
from vime.types import GeneratedSample, Prompt


class RewardFailure(VimeError):
    """A reward function raised, ran out of time, or returned something that is no finite number."""


def call_reward(
    function: Callable[..., Any], prompt: Prompt, sample: GeneratedSample, timeout_s: float | None
) -> float:
    """Call a user's reward. Raises RewardFailure with the reason."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(function(prompt, sample, sample.text))
        except (Exception, SystemExit) as error:  # a user's function may raise anything, and may not end the run
            outcome.append(error)

    if timeout_s is None:
        call()
    else:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not outcome:
            raise RewardFailure(f"no answer within {timeout_s} s")
    value = outcome[0]
    if isinstance(value, (Exception, SystemExit)):
        raise RewardFailure(f"it raised {type(value).__name__}: {value}") from value
    try:
        if isinstance(value, (bool, int, float, np.floating, np.integer)) and math.isfinite(float(value)):
            return float(value)
    except OverflowError:
        raise RewardFailure("it returned an integer beyond the range of a float; a finite number is needed") from None
    raise RewardFailure(f"it returned {value!r}; a finite number is needed")


def attempt(call: Callable[[], float]) -> dict[str, Any]:
    """A reward, or the reason why there is none, as plain data."""
    try:
        return {"reward": call(), "reason": ""}
    except RewardFailure as failure:
        return {"reward": 0.0, "reason": str(failure)}


def call_filter(
    name: str,
    function: Callable[..., Any],
    prompt_index: int,
    samples: Sequence[GeneratedSample],
    rewards: Sequence[float],
) -> list[bool]:
    """Call a user's filter for one group; one answer a sample. Raises Interrupted: mend it and resume."""
    try:
        answers = [bool(answer) for answer in function(samples, rewards)]
    except Exception as error:  # a user's function may raise anything
        raise Interrupted(
            f"the filter {name!r} raised {type(error).__name__} for prompt {prompt_index}: {error}; mend it and resume"
        ) from error
    if len(answers) != len(samples):
        raise Interrupted(
            f"the filter {name!r} gave {len(answers)} answers for {len(samples)} samples of prompt {prompt_index}; "
            "one a sample is needed. Mend it and resume"
        )
    return answers
