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


class WrongFrom:
    """An operation that is right below a size; from there on the last bit of its last row is another one."""

    def __init__(self, op, size, backward=False, extent=lambda host: len(host.batch.tokens)):
        self._op, self._size, self._backward, self._extent = op, size, backward, extent
        self.implementation, self.calls = op.implementation, 0

    def _last(self, results, wrong):
        if not wrong:
            return results
        changed = np.ascontiguousarray(results[-1]).copy()
        changed.reshape(-1).view(np.uint32)[-1] ^= 1
        return (*results[:-1], changed)

    def forward(self, region, inputs, host):
        outputs, saved = self._op.forward(region, inputs, host)
        wrong = self._extent(host) >= self._size and not self._backward
        return self._last(outputs, wrong), saved

    def backward(self, region, saved, grads, host):
        found = self._op.backward(region, saved, grads, host)
        return self._last(found, self._backward and self._extent(host) >= self._size)


def swapped(kind, make):
    return lambda composition: replace(composition, ops={**composition.ops, kind: make(composition.ops[kind])})


def sequence(length):
    return np.random.default_rng(length).integers(0, 150, length)


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_that_is_wrong_from_some_size_on_is_found_when_the_size_is_reached(kind):
    r = checked(swapped(kind, lambda op: WrongFrom(op, 32)))
    for length in (3, 31, 17):
        r.hidden(batch(sequence(length)), None, "trainer_score")
    with pytest.raises(NumericsError, match=rf"\({kind}, trainer_score\): .* of the first use of this size \(40"):
        r.hidden(batch(sequence(40)), None, "trainer_score")


def test_the_row_with_the_most_keys_is_among_those_that_are_checked():
    def most_keys(host):
        return int(host.batch.positions.max()) + 1

    r = checked(swapped("attention", lambda op: WrongFrom(op, 64, extent=most_keys)))
    r.hidden(batch(sequence(40), sequence(60), sequence(7)), None, "trainer_score")
    with pytest.raises(NumericsError, match=r"\(attention, trainer_score\)"):
        r.hidden(batch(sequence(2), sequence(80)), None, "trainer_score")


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_gradient_of_attention_that_is_wrong_from_some_key_on_is_found(part):
    class FromKey(WrongFrom):
        def backward(self, region, saved, grads, host):
            found = [x.copy() for x in self._op.backward(region, saved, grads, host)]
            found[part][self._size :, -1].view(np.uint32)[...] ^= 1
            return tuple(found)

    r = checked(swapped("attention", lambda op: FromKey(op, 90, backward=True)))
    one_update(r, 60)
    with pytest.raises(NumericsError, match=r"\(attention, trainer_backward\)"):
        one_update(r, 110)


def one_update(r, length, model=MODEL):
    ids = sequence(length)
    tape = r.forward(batch(ids), np.arange(length - 1), ids[1:].astype(np.int64), 0.7, checkpointing=False)
    tied = "model.embed_tokens.weight" if model.tied_embeddings else None
    r.backward(tape, np.ones(length - 1, np.float32), Gradients(model.weight_shapes(), tied_embedding=tied))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("embedding", "residual_add")])
def test_a_gradient_that_is_wrong_from_some_size_on_is_found_when_the_size_is_reached(kind):
    r = checked(swapped(kind, lambda op: WrongFrom(op, 32, backward=True)))
    one_update(r, 31)
    with pytest.raises(NumericsError, match=rf"\({kind}, trainer_backward\)"):
        one_update(r, 40)


@pytest.mark.parametrize("backward", [False, True])
def test_a_head_that_is_wrong_from_some_row_on_is_found_when_the_row_is_reached(backward):
    class HeadFrom(FlippedHead):
        def forward(self, *arguments):
            found = self._head.forward(*arguments)
            wrong = not self._backward and len(found.logprob) >= 32
            return replace(found, logprob=WrongFrom._last(self, (found.logprob,), True)[0]) if wrong else found

        def backward(self, *arguments):
            found = self._head.backward(*arguments)
            found[32:].view(np.uint32)[...] ^= self._backward
            return found

    r = checked(lambda composition: replace(composition, head=HeadFrom(composition.head, backward)))
    one_update(r, 20)
    with pytest.raises(NumericsError, match=r"\(logprob, trainer_(forward|backward)\)"):
        one_update(r, 65)


@pytest.mark.parametrize("name", ["k_proj.weight", "v_proj.bias"])
def test_every_weight_and_bias_of_a_projection_is_checked(name):
    model = replace(MODEL, family="qwen2", qk_norm=False, qkv_bias=True)

    class LastElement(WrongFrom):
        def backward(self, region, saved, grads, host):
            found = self._op.backward(region, saved, grads, host)
            (tensor,) = [weight for weight in region.weights if weight.endswith(name)]
            host.gradients.buffer(tensor).reshape(-1).view(np.uint32)[-1] ^= 1
            return found

    r = checked(
        swapped("qkv_proj", lambda op: LastElement(op, 0, backward=True)), model, build_contract(model, temperature=0.7)
    )
    with pytest.raises(NumericsError, match=r"\(qkv_proj, trainer_backward\)"):
        one_update(r, 20, model)


@pytest.mark.parametrize("backward", [False, True])
def test_the_largest_id_of_a_batch_is_checked(backward):
    class LargeIds(WrongFrom):
        def forward(self, region, inputs, host):
            (rows,), saved = self._op.forward(region, inputs, host)
            rows[inputs[0] >= 130] += np.float32(0 if self._backward else 1)
            return (rows,), saved

        def backward(self, region, saved, grads, host):
            found = self._op.backward(region, saved, grads, host)
            host.gradients.embedding(region.weights[0])[130:] += np.float32(self._backward)
            return found

    r = checked(swapped("embedding", lambda op: LargeIds(op, 0, backward)))
    r.hidden(batch(np.array([5, 129, 7])), None, "trainer_score")
    ids = np.array([4, 9, 140, 3, 8, 8, 1, 2, 5, 6])
    with pytest.raises(NumericsError, match=r"\(embedding, trainer_(score|backward)\)"):
        if not backward:
            r.hidden(batch(ids), None, "trainer_score")
        tape = r.forward(batch(ids), np.arange(9), ids[1:], 0.7, checkpointing=False)
        r.backward(
            tape,
            np.ones(9, np.float32),
            Gradients(
                MODEL.weight_shapes(), tied_embedding="model.embed_tokens.weight" if MODEL.tied_embeddings else None
            ),
        )


def test_checks_change_no_bit_and_are_few():
    plain, subject = runner(MODEL), checked()
    for length in (1, 5, 9, 8, 40, 63, 64, 64, 50):
        given = batch(sequence(length), sequence(3))
        found, expected = (r.hidden(given, None, "trainer_score") for r in (subject, plain))
        assert (found.view(np.uint32) == expected.view(np.uint32)).all()
    facts = subject.evidence.as_json()["facts"]["first_use"]
    # of 4, 8, 12, 11, 43, 66, 67, 67 and 53 rows: 4, 8, 12, 43 and 66 are larger by a quarter than all before
    assert facts["trainer_score/rms_norm"]["calls"] == 5
