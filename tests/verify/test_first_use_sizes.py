"""What goes wrong only beyond the sizes that were confirmed is found when a run reaches them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlkernel.contract.build import build_contract
from rlkernel.errors import NumericsError
from rlkernel.ops.gradients import Gradients
from rlkernel.verify.admission.first_use import joined, larger, with_first_use_checks
from tests.ops.helpers import batch, config, runner

MODEL = config(hidden_size=32, intermediate_size=48, num_layers=1, head_dim=8, vocab_size=150, max_position=1024)
CONTRACT = build_contract(MODEL, temperature=0.7)
RNG = np.random.default_rng(4)


def tokens(n: int) -> Any:
    return RNG.integers(0, 150, n)


def flipped(x: Any, row: int) -> Any:
    """A copy with one bit of a row's last element changed."""
    copy = np.ascontiguousarray(x).copy()
    copy[row].reshape(-1).view(np.uint32)[-1] ^= 1
    return copy


class WrongFrom:
    """Flips a bit of the last row in calls of at least so many rows; in attention, of the row with the most keys."""

    def __init__(self, op: Any, rows: int = 0, keys: int = 0, backward: bool = False) -> None:
        self._op, self._rows, self._keys, self._backward = op, rows, keys, backward
        self.implementation = op.implementation

    def _row(self, host: Any) -> int | None:
        positions = host.batch.positions
        if len(positions) < self._rows or positions.max() + 1 < self._keys:
            return None
        return int(np.argmax(positions)) if self._keys else len(positions) - 1

    def forward(self, region: Any, inputs: Any, host: Any) -> Any:
        outputs, saved = self._op.forward(region, inputs, host)
        row = self._row(host)
        if row is None or self._backward:
            return outputs, saved
        return (flipped(outputs[0], row), *outputs[1:]), saved

    def backward(self, region: Any, saved: Any, grads: Any, host: Any) -> Any:
        found = self._op.backward(region, saved, grads, host)
        row = self._row(host)
        return found if row is None or not self._backward else (flipped(found[0], row), *found[1:])


def checked(kind: str, **wrong: Any) -> Any:
    found = runner(MODEL)
    ops = found.composition.ops
    composition = replace(found.composition, ops={**ops, kind: WrongFrom(ops[kind], **wrong)})
    found.composition = with_first_use_checks(composition, CONTRACT, found.evidence)
    return found


def train(r: Any, n: int) -> None:
    sequence = tokens(n)
    tape = r.forward(batch(sequence), np.arange(n - 1), sequence[1:].astype(np.int64), 0.7)
    r.backward(tape, np.ones(n - 1, np.float32), Gradients(MODEL.weight_shapes()))


@pytest.mark.parametrize("kind", ["rms_norm", "qkv_proj", "rope", "swiglu", "residual_add", "embedding"])
def test_more_rows_are_confirmed_when_they_come(kind: str) -> None:
    r = checked(kind, rows=100)
    r.hidden(batch(tokens(20)), None, "trainer_score")
    r.hidden(batch(tokens(66)), None, "trainer_score")
    with pytest.raises(NumericsError, match=rf"{kind}.*trainer_score\): row 129 of .* on live operands"):
        r.hidden(batch(tokens(130)), None, "trainer_score")


def test_longer_sequences_are_confirmed_when_they_come() -> None:
    r = checked("attention", keys=100)
    r.hidden(batch(*(tokens(40) for _ in range(8))), None, "trainer_score")  # as many rows, with few keys each
    with pytest.raises(NumericsError, match=r"\(attention, trainer_score\): row 139 of attended"):
        r.hidden(batch(tokens(3), tokens(137), tokens(5)), None, "trainer_score")


@pytest.mark.parametrize(("before", "after"), [(40, 200), (300, 600)])  # the second is beyond what is done as a whole
def test_gradients_of_longer_sequences_are_confirmed_when_they_come(before: int, after: int) -> None:
    r = checked("attention", keys=before + 1, backward=True)
    train(r, before)
    with pytest.raises(NumericsError, match=rf"attention, trainer_backward\): row {after - 1} of gradient of the que"):
        train(r, after)


def test_a_call_that_is_hardly_larger_is_not_confirmed_again() -> None:
    r = checked("rms_norm", rows=10_000)
    facts = r.evidence.facts["first_use"]
    r.hidden(batch(tokens(100)), None, "trainer_score")
    first = copy.deepcopy(facts)
    r.hidden(batch(tokens(125)), None, "trainer_score")
    assert {k: v for k, v in facts.items() if "embedding" not in k} == {
        k: v for k, v in first.items() if "embedding" not in k
    }  # another id may be the largest
    r.hidden(batch(tokens(126)), None, "trainer_score")
    after = facts["trainer_score/rms_norm"]
    assert (after["calls"], after["largest"]) == (2, [126])
    assert after["outputs"] == 2 * first["trainer_score/rms_norm"]["outputs"]
    assert facts["trainer_score/attention"]["largest"] == [126, 126, 126, 1]


def test_extents() -> None:
    assert not larger((5,), (4,)) and larger((6,), (4,)) and larger((1,), None)
    assert larger((4, 100), (400, 50)) and joined((4, 100), (400, 50)) == (400, 100)
