"""What an engine hands over is checked where it arrives, before anything else looks at it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vime.errors import InvariantViolation
from vime.types import GeneratedSample, RolloutRequest, SampleId

FINISH_REASONS = ("stop", "length", "context")
_ARRAYS = {"logprobs": np.float32, "digests": np.uint64, "entropies": np.float32, "sampled_at": np.float64}


def check_sample(sample: GeneratedSample, due: Mapping[SampleId, RolloutRequest], engine: str, vocab_size: int) -> None:
    """Raise InvariantViolation unless the sample is one that is due and complete; afterwards its arrays are read-only.

    Checked are identity, prompt, engine, token ids, the number of tokens, and dtype and length of every array.
    """
    request = due.get(sample.sample_id)
    if request is None:
        raise InvariantViolation(f"engine {engine} returned sample {sample.sample_id}, which is not due")
    where = f"engine {engine}: sample {sample.sample_id}"
    if sample.prompt_token_ids != request.prompt_token_ids:
        raise InvariantViolation(f"{where} came back with another prompt than it was asked for")
    if sample.engine_id != engine:
        raise InvariantViolation(f"{where} says that engine {sample.engine_id!r} made it")
    if sample.finish_reason not in FINISH_REASONS:
        raise InvariantViolation(f"{where} ended with {sample.finish_reason!r}; due is one of {FINISH_REASONS}")
    count, most = len(sample.token_ids), request.params.max_new_tokens
    if not 1 <= count <= most:
        raise InvariantViolation(f"{where} has {count} tokens; 1 to {most} were asked for")
    wrong = [token for token in sample.token_ids if not 0 <= token < vocab_size]
    if wrong:
        raise InvariantViolation(f"{where} holds the token id {wrong[0]}; the vocabulary has {vocab_size}")
    for name, dtype in _ARRAYS.items():
        array = getattr(sample, name)
        shape = (count, 2) if name == "digests" else (count,)
        if array.dtype != dtype or array.shape != shape:
            raise InvariantViolation(
                f"{where} has {count} tokens, but its {name} are {array.dtype.name} of shape {list(array.shape)}; "
                f"due is {np.dtype(dtype).name} of shape {list(shape)}"
            )
        # rewards and filters are given the sample: nothing of it can be altered before it is compared
        array.flags.writeable = False
    counted = sum(run.count for run in sample.versions)
    if counted != count:
        raise InvariantViolation(f"{where} has {count} tokens, but weight versions of {counted}")
