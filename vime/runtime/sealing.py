"""What was logged of a sample at rollout is what is rewarded, filtered, compared and trained.

A sample is frozen, but Python lets any function that holds an object alter it. So user functions are given copies, and
the samples of the run are compared, before and after every call, with what was logged when they were generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from vime.errors import InvariantViolation
from vime.store.digests import array_digest
from vime.types import GeneratedSample, SampleId

_ARRAYS = ("logprobs", "digests", "entropies", "sampled_at")


def handed_out(sample: GeneratedSample) -> GeneratedSample:
    """A copy for a user function: it shares nothing with the sample that could be altered; its arrays are read-only."""
    arrays = {name: getattr(sample, name).copy() for name in _ARRAYS}
    for array in arrays.values():
        array.flags.writeable = False
    return replace(sample, **arrays, extra=dict(sample.extra))


def _facts(sample: GeneratedSample) -> Mapping[str, Any]:
    """Everything of a sample that is used after its generation; arrays as digests."""
    return {
        "prompt tokens": sample.prompt_token_ids,
        "tokens": sample.token_ids,
        "text": sample.text,
        "finish reason": sample.finish_reason,
        "weight versions": sample.versions,
        "engine": sample.engine_id,
        **{name: array_digest(getattr(sample, name)) for name in _ARRAYS},
    }


class Seals:
    """What the samples of one generation were when they were logged."""

    def __init__(self) -> None:
        self._facts: dict[SampleId, Mapping[str, Any]] = {}

    def put(self, sample: GeneratedSample) -> None:
        """Remember a sample as it is logged."""
        self._facts[sample.sample_id] = _facts(sample)

    def check(self, samples: Iterable[GeneratedSample], who: str) -> None:
        """Raise InvariantViolation, naming ``who`` ran in the meantime, unless every sample is what was logged."""
        for sample in samples:
            logged, found = self._facts.get(sample.sample_id), _facts(sample)
            if logged is None:
                raise InvariantViolation(f"{who} left a sample {sample.sample_id} that was never generated")
            altered = [name for name, value in logged.items() if value != found[name]]
            if altered:
                raise InvariantViolation(
                    f"{who} altered the {altered[0]} of sample {sample.sample_id} after it was logged. Only what the "
                    "engine made is trained: a function may read a sample, and no more"
                )
