"""Sums that sort their inputs first: no tree over places describes them, but what they do can be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlkernel.verify.discovery.formats import Array, bits_of, number_format
from rlkernel.verify.discovery.inputs import draw
from rlkernel.verify.discovery.targets import Target

_VECTORS = 64

_KEYS: tuple[tuple[str, Callable[[Array], Array]], ...] = (
    ("by absolute value, ascending", np.abs),
    ("by absolute value, descending", lambda x: -np.abs(x)),
    ("by value, ascending", lambda x: x),
    ("by value, descending", lambda x: -x),
)


def sorted_sum(target: Target, rng: np.random.Generator) -> str | None:
    """What a target sorts its inputs by before it adds them one by one, in words; None where it does not.

    That its bits stay the same when inputs are exchanged is not enough: so do those of an exact sum, and of a maximum.
    """
    if target.operands != 1 or target.positive or target.n < 3:
        return None
    calls = max(1, _VECTORS // (target.rows * target.columns))
    trials = [target.trial(lambda count: draw(target, count, rng)) for _ in range(calls)]
    outputs = [target.outputs(trial) for trial in trials]
    for trial, before in zip(trials, outputs, strict=True):
        exchanged = target.trial(lambda count, a=trial.a: rng.permuted(a, axis=1))  # type: ignore[misc]
        if not np.array_equal(bits_of(target.outputs(exchanged)), bits_of(before)):
            return None
    form = number_format(target.output)
    for dtype in (np.float32, np.float64):
        found = []
        for words, key in _KEYS:
            sums = [form.round(_chain(trial.a, key, dtype).astype(np.float64)) for trial in trials]
            pairs = zip(sums, outputs, strict=True)
            if all(np.array_equal(bits_of(own), bits_of(given[:, 0])) for own, given in pairs):
                found.append(words)
        if len(found) == 1:  # where several orders give them, the sums are exact, and no order is seen
            return f"its bits are those of a chain over its inputs sorted {found[0]}"
    return None


def _chain(x: Array, key: Callable[[Array], Array], dtype: type[np.floating[Any]]) -> Array:
    ordered = np.take_along_axis(x, np.argsort(key(x), axis=1, kind="stable"), axis=1).astype(dtype)
    total = np.zeros(x.shape[0], dtype=dtype)
    for k in range(x.shape[1]):
        total = total + ordered[:, k]
    return total
