"""What an engine hands over is checked where it arrives, before anything else looks at it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vime.errors import InvariantViolation
from vime.rollout.native.stops import StopStrings
from vime.types import GeneratedSample, RolloutRequest, SampleId

FINISH_REASONS = ("stop", "length", "context")
_ARRAYS = {"logprobs": np.float32, "digests": np.uint64, "entropies": np.float32, "sampled_at": np.float64}


def check_sample(
    sample: GeneratedSample,
    due: Mapping[SampleId, RolloutRequest],
    engine: str,
    *,
    vocab_size: int,
    context: int,
    detokenize: Callable[[Sequence[int]], str],
) -> None:
    """Raise InvariantViolation unless the sample is one that is due and complete; afterwards its arrays are read-only.

    Checked are identity, prompt, engine, token ids, that the response ends where it has to and for the reason that it
    gives, its text, and dtype and length of every array. ``context`` is the longest sequence in tokens.
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
    _check_end(sample, request, context, detokenize, where)
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


def _check_end(
    sample: GeneratedSample,
    request: RolloutRequest,
    context: int,
    detokenize: Callable[[Sequence[int]], str],
    where: str,
) -> None:
    """The response goes on until a stop token or string, its asked length or the context ends it, and no further."""
    params, tokens = request.params, sample.token_ids
    text = detokenize(tokens)
    if sample.text != text:
        raise InvariantViolation(f"{where} came with the text {sample.text[:40]!r}; its tokens are {text[:40]!r}")
    watched = StopStrings(params.stop_strings, detokenize) if params.stop_strings else None
    ends = [
        place
        for place, token in enumerate(tokens)
        if token in params.stop_token_ids or (watched is not None and watched.push(token) is not None)
    ]
    if ends and ends[0] < len(tokens) - 1:
        raise InvariantViolation(f"{where} goes on after its token {ends[0]}, which ends it")
    if ends:
        due = "stop"
    elif len(tokens) == params.max_new_tokens:
        due = "length"
    elif len(request.prompt_token_ids) + len(tokens) == context:
        due = "context"
    else:
        raise InvariantViolation(
            f"{where} ends after {len(tokens)} of {params.max_new_tokens} tokens with {sample.finish_reason!r}: no "
            f"stop token or string ended it, and the context of {context} tokens is not full"
        )
    if sample.finish_reason != due:
        raise InvariantViolation(f"{where} says that it ended with {sample.finish_reason!r}; it ended with {due!r}")
