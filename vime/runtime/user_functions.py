"""Calls a user's reward and filter: exceptions, deadlines and unusable values become one error each."""

from __future__ import annotations

import math
import reprlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vime.errors import Interrupted, VimeError
from vime.runtime.sealing import handed_out
from vime.types import GeneratedSample, Prompt


class RewardFailure(VimeError):
    """A reward function raised, ran out of time, or returned something that is no finite number."""


def call_reward(
    function: Callable[..., Any], prompt: Prompt, sample: GeneratedSample, timeout_s: float | None
) -> float:
    """Call a user's reward with a copy of the sample. Raises RewardFailure with the reason."""
    outcome: list[Any] = []
    given = handed_out(sample)

    def call(caught: tuple[type[BaseException], ...]) -> None:
        try:
            outcome.append(function(replace(prompt), given, sample.text))
        except caught as error:  # a user's function may raise anything, and may not end the run
            outcome.append(error)

    if timeout_s is None:
        call((Exception, SystemExit))  # a KeyboardInterrupt here is the user's own Ctrl-C
    else:
        # whatever ends this thread is an answer: without it the call would look like one that ran out of time
        thread = threading.Thread(target=call, args=((BaseException,),), daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not outcome:
            raise RewardFailure(f"no answer within {timeout_s} s")
    value = outcome[0]
    if isinstance(value, BaseException):
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
    """Call a user's filter for one group, with copies; one answer a sample. Raises Interrupted: mend it and resume."""
    what, where = f"the filter {name!r}", f"prompt {prompt_index}"
    try:
        returned = function([handed_out(sample) for sample in samples], list(rewards))
        answers = list(returned) if isinstance(returned, Iterable) else None
    except (Exception, SystemExit) as error:  # a user's function may raise anything, and may not end the run
        raise Interrupted(f"{what} raised {type(error).__name__} for {where}: {error}; mend it and resume") from error
    if answers is None:
        raise Interrupted(
            f"{what} returned {reprlib.repr(returned)} for {where}; True or False for every sample is needed. Mend "
            "it and resume"
        )
    if len(answers) != len(samples):
        raise Interrupted(
            f"{what} gave {len(answers)} answers for {len(samples)} samples of {where}; one a sample is needed. Mend "
            "it and resume"
        )
    for sample, answer in zip(samples, answers, strict=True):
        if not isinstance(answer, (bool, np.bool_)):
            raise Interrupted(
                f"{what} answered {reprlib.repr(answer)} for sample {sample.sample_id}; True or False is needed. Mend "
                "it and resume"
            )
    return [bool(answer) for answer in answers]
