"""The first call of every region and case is confirmed on live operands; a planted bit is found and named."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from rlkernel.contract.build import build_contract
from rlkernel.errors import NumericsError
from rlkernel.ops.gradients import Gradients
from rlkernel.verify.admission.first_use import with_first_use_checks
from tests.ops.helpers import batch, config, runner
from tests.ops.test_runner import in_chunks

MODEL = config(hidden_size=32, intermediate_size=48, num_layers=1, head_dim=8, vocab_size=150)
CONTRACT = build_contract(MODEL, temperature=0.7)
RNG = np.random.default_rng(3)
SEQUENCES = [RNG.integers(0, 150, n) for n in (66, 3, 1)]


def checked(change=None, model=MODEL, contract=CONTRACT, dtype="float32"):
    """A runner whose composition is checked; ``change`` wraps its operations first."""
    found = runner(model, dtype=dtype)
    if change is not None:
        found.composition = change(found.composition)
    found.composition = with_first_use_checks(found.composition, contract, found.evidence)
    return found


def train(r, model=MODEL, checkpointing=False):
    kept = [s for s in SEQUENCES if len(s) > 1]
    b = batch(*kept)
    rows = np.concatenate([np.arange(b.starts[i], b.starts[i + 1] - 1) for i in range(len(kept))])
    targets = np.concatenate([s[1:] for s in kept]).astype(np.int64)
    tape = r.forward(b, rows, targets, 0.7, checkpointing=checkpointing)
    tied = "model.embed_tokens.weight" if model.tied_embeddings else None
    gradients = Gradients(model.weight_shapes(), tied_embedding=tied)
    r.backward(tape, np.ones(len(rows), np.float32), gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", [{}, {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "tied_embeddings": False}]
)
def test_every_region_and_case_is_confirmed_once(family, dtype):
    model = replace(MODEL, **family)
    contract = build_contract(model, dtype=dtype, temperature=0.7)
    r = checked(model=model, contract=contract, dtype=dtype)
    r.hidden(batch(*SEQUENCES), None, "trainer_score")
    in_chunks(r, model, SEQUENCES, 7, 8)
    in_chunks(r, model, SEQUENCES[1:], 1, 8)
    hidden = r.hidden(batch(SEQUENCES[0]), None, "trainer_score")
    r.logprobs(hidden, SEQUENCES[0].astype(np.int64), 0.7, "trainer_score")
    train(r, model, checkpointing=True)
    facts = r.evidence.as_json()["facts"]["first_use"]
    ran = {f"{c['case']}/{c['region']}" for c in r.evidence.as_json()["calls"]}
    assert set(facts) == ran
    assert all(value["outputs"] > 0 and value["differing"] == 0 for value in facts.values())
    before = dict(facts)
    r.hidden(batch(*SEQUENCES), None, "trainer_score")
    assert facts == before


def flip(results):
    """One bit of the first element of the first array."""
    first = np.ascontiguousarray(results[0]).copy()
    first.reshape(-1).view(np.uint32)[0] ^= 1
    return (first, *results[1:])


class Flipped:
    """An operation with one bit changed, forward or backward."""

    def __init__(self, op, backward):
        self._op, self._backward, self.implementation = op, backward, op.implementation

    def forward(self, region, inputs, host):
        outputs, saved = self._op.forward(region, inputs, host)
        return (outputs if self._backward else flip(outputs)), saved

    def backward(self, region, saved, grads, host):
        found = self._op.backward(region, saved, grads, host)
        if self._backward and region.kind == "embedding":
            host.gradients.embedding(region.weights[0]).view(np.uint32)[:, 0] ^= 1
            return found
        return flip(found) if self._backward else found


KINDS = (
    "embedding", "rms_norm", "final_norm", "qkv_proj", "qk_norm", "rope", "attention", "o_proj", "residual_add",
    "gate_up_proj", "swiglu", "down_proj",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["trainer_forward", "trainer_backward"])
def test_a_flipped_bit_is_found_at_the_first_call(kind, case):
    def change(composition):
        return replace(
            composition, ops={**composition.ops, kind: Flipped(composition.ops[kind], case == "trainer_backward")}
        )

    if kind == "residual_add" and case == "trainer_backward":
        pytest.skip("its gradient is the stream's, handed on: where two meet, a forward addition is checked")
    r = checked(change)
    with pytest.raises(NumericsError) as caught:
        train(r)
    sentence = str(caught.value)
    assert f"({kind}, {case})" in sentence and "on live operands" in sentence
    assert len(re.findall(r"0x[0-9A-F]{8}", sentence)) == 2
    assert r.evidence.as_json()["refused"] == [sentence]


class Writing:
    """An operation that gives the right bits and writes to what it was given, where no checked row lies."""

    def __init__(self, op, backward):
        self._op, self._backward, self.implementation = op, backward, op.implementation

    def forward(self, region, inputs, host):
        outputs, saved = self._op.forward(region, inputs, host)
        if not self._backward:
            inputs[0][1, ...] = 0
        return outputs, saved

    def backward(self, region, saved, grads, host):
        found = self._op.backward(region, saved, grads, host)
        if self._backward:
            grads[0][1, ...] = 0
        return found


@pytest.mark.parametrize("kind", ["rms_norm", "o_proj", "swiglu", "attention"])
@pytest.mark.parametrize("case", ["trainer_forward", "trainer_backward"])
def test_an_operation_that_writes_to_its_inputs_is_found_at_the_first_call(kind, case):
    def change(composition):
        return replace(
            composition, ops={**composition.ops, kind: Writing(composition.ops[kind], case == "trainer_backward")}
        )

    with pytest.raises(NumericsError, match=rf"\({kind}, {case}\): it writes to .*, which its caller needs"):
        train(checked(change))


class FlippedHead:
    """The head with one bit changed."""

    def __init__(self, head, backward):
        self._head, self._backward, self.implementation = head, backward, head.implementation

    def forward(self, *arguments):
        found = self._head.forward(*arguments)
        return found if self._backward else replace(found, logprob=flip((found.logprob,))[0])

    def backward(self, *arguments):
        found = self._head.backward(*arguments)
        found[-1].view(np.uint32)[0] ^= 1
        return found


@pytest.mark.parametrize("case", ["trainer_forward", "trainer_backward"])
def test_a_flipped_bit_of_the_head_is_found(case):
    backward = case == "trainer_backward"
    r = checked(lambda composition: replace(composition, head=FlippedHead(composition.head, backward)))
    with pytest.raises(NumericsError, match=rf"\(logprob, {case}\)"):
        train(r)
