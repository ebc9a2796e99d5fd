"""Calls a user's reward and filter: exceptions, deadlines and unusable values become one error each."""

from __future__ import annotations

import copy
import math
import os
import reprlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vime.errors import Interrupted, VimeError
from vime.pipeline.functions import raised_in
from vime.runtime.sealing import handed_out
from vime.types import GeneratedSample, Prompt


class RewardFailure(VimeError):
    """A reward function raised, ran out of time, or returned something that is no finite number."""


_LARGEST_REWARD = 1e100  # the square of a larger one is near the end of float64, and no advantage could be made of it


def _end_of_a_fork(process: int, what: str) -> None:
    """A function that forked returns twice; the copy of this process may touch neither log nor lock, and ends here."""
    if os.getpid() != process:
        sys.stderr.write(f"vime: {what} forked and went on in the copy of this process, which ends here\n")
        sys.stderr.flush()
        os._exit(70)


def call_reward(
    function: Callable[..., Any], prompt: Prompt, sample: GeneratedSample, timeout_s: float | None
) -> float:
    """Call a user's reward with a copy of the sample. Raises RewardFailure with the reason."""
    outcome: list[Any] = []
    given, process = handed_out(sample), os.getpid()
    try:
        row = copy.deepcopy(prompt.row)
    except Exception as error:  # rows of a user's own class may do anything
        raise RewardFailure(f"the prompt's row cannot be copied for it: {type(error).__name__}: {error}") from error

    def call(in_thread: bool) -> None:
        try:
            outcome.append(function(replace(prompt, row=row), given, sample.text))
        except KeyboardInterrupt as error:
            if not in_thread:
                raise  # the user's own Ctrl-C
            outcome.append(error)
        except BaseException as error:  # a user's function may raise anything, and may not end the run
            outcome.append(error)
        finally:
            _end_of_a_fork(process, "the reward function")

    if timeout_s is None:
        call(False)
    else:
        # whatever ends this thread is an answer: without it the call would look like one that ran out of time
        thread = threading.Thread(target=call, args=(True,), daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not outcome:
            raise RewardFailure(f"no answer within {timeout_s} s")
    value = outcome[0]
    if isinstance(value, BaseException):
        raise RewardFailure(f"it raised {type(value).__name__}: {value}{raised_in(value, function)}") from value
    try:
        if isinstance(value, (bool, int, float, np.floating, np.integer)) and math.isfinite(float(value)):
            if abs(float(value)) > _LARGEST_REWARD:
                raise RewardFailure(f"it returned {value!r}; rewards beyond ±{_LARGEST_REWARD:g} have no advantages")
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
    what, where, process = f"the filter {name!r}", f"prompt {prompt_index}", os.getpid()
    try:
        returned = function([handed_out(sample) for sample in samples], list(rewards))
        answers = list(returned) if isinstance(returned, Iterable) else None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's function may raise anything, and may not end the run
        said = f"{what} raised {type(error).__name__} for {where}: {error}{raised_in(error, function)}"
        raise Interrupted(f"{said}; mend it and resume") from error
    finally:
        _end_of_a_fork(process, what)
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
