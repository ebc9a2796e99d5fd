"""One model, run in every way that engine and trainer run it: the bits are one function of the visible tokens."""

from __future__ import annotations

import numpy as np
import pytest

from rlkernel.errors import ModelError, NumericsError
from rlkernel.ops.gradients import Gradients
from rlkernel.ops.host import TokenBatch
from tests.ops.helpers import Pages, batch, config, runner, tensors

FAMILIES = {
    "qwen3-tied": {},
    "qwen2-bias": {"family": "qwen2", "qk_norm": False, "qkv_bias": True},
    "llama-untied": {"family": "llama", "qk_norm": False, "tied_embeddings": False},
}
RNG = np.random.default_rng(5)
SEQUENCES = [RNG.integers(0, 300, n) for n in (70, 1, 33, 2, 17)]


def bits(x):
    return np.ascontiguousarray(x).view(np.uint32)


def in_chunks(model_runner, model, sequences, chunk, page_size):
    """Hidden states of sequences fed through paged KV, ``chunk`` tokens a sequence at a time."""
    state = Pages(model, len(sequences), page_size, -(-128 // page_size))
    out = [[] for _ in sequences]
    longest = max(len(s) for s in sequences)
    for first in range(0, longest, chunk):
        parts = [s[first : first + chunk] for s in sequences]
        lengths = [len(p) for p in parts]
        part = TokenBatch(
            np.concatenate(parts).astype(np.int64),
            np.concatenate([np.arange(first, first + n, dtype=np.int32) for n in lengths]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        )
        state.place(part)
        case = "rollout_decode" if chunk == 1 else "rollout_prefill"
        hidden = model_runner.hidden(part, state, case)
        for s in range(len(sequences)):
            out[s].append(hidden[part.starts[s] : part.starts[s + 1]])
    return np.concatenate([np.concatenate(rows) for rows in out])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_decode_chunked_prefill_and_training_forward_give_the_same_bits(family, dtype):
    model = config(**FAMILIES[family])
    r = runner(model, dtype=dtype)
    whole = r.hidden(batch(*SEQUENCES), None, "trainer_score")
    alone = np.concatenate([r.hidden(batch(s), None, "trainer_score") for s in SEQUENCES])
    assert np.isfinite(whole).all() and np.unique(bits(whole)).size > 1000
    assert np.array_equal(bits(whole), bits(alone))
    for chunk, page in ((1, 8), (7, 16), (64, 64)):
        assert np.array_equal(bits(whole), bits(in_chunks(r, model, SEQUENCES, chunk, page))), (chunk, page)
    one_thread = runner(model, dtype=dtype, threads=1).hidden(batch(*SEQUENCES), None, "trainer_score")
    assert np.array_equal(bits(whole), bits(one_thread))
    everything = np.arange(len(whole))
    targets = np.concatenate(SEQUENCES).astype(np.int64)
    tape = r.forward(batch(*SEQUENCES), everything, targets, 0.7)
    scored = r.logprobs(whole, targets, 0.7, "trainer_score")
    assert np.array_equal(bits(tape.statistics.logprob), bits(scored.logprob))
    assert np.array_equal(tape.statistics.digest, scored.digest)


def test_another_token_or_weight_changes_the_bits_that_depend_on_it_and_no_others():
    model = config()
    weights = tensors(model)
    r = runner(model, weights)
    base = r.hidden(batch(*SEQUENCES), None, "trainer_score")
    changed = [s.copy() for s in SEQUENCES]
    changed[0][40] = (changed[0][40] + 1) % 300
    other = r.hidden(batch(*changed), None, "trainer_score")
    same = (bits(base) == bits(other)).all(axis=1)
    assert same[:40].all() and same[70:].all() and not same[40:70].any()
    name = "model.layers.1.mlp.down_proj.weight"
    flipped = dict(weights)
    flipped[name] = weights[name].clone()
    flipped[name].view(-1).view(dtype=__import__("torch").int32)[17] ^= 1
    a, b = r.weights.manifest_digest(), runner(model, flipped).weights.manifest_digest()
    assert a != b


def gradients_of(r, model, sequences, parts, *, dp=1, checkpointing=False, temperature=0.7):
    tied = "model.embed_tokens.weight" if model.tied_embeddings else None
    gradients = Gradients(model.weight_shapes(), tied_embedding=tied, leaves=dp)
    rng = np.random.default_rng(9)
    coefficients = [rng.standard_normal(len(s) - 1).astype(np.float32) for s in sequences]
    for leaf in np.array_split(np.arange(len(sequences)), dp):
        for first in range(0, len(leaf), parts):
            chosen = leaf[first : first + parts]
            chunk = [sequences[i] for i in chosen]
            b = batch(*chunk)
            rows = np.concatenate([np.arange(b.starts[i], b.starts[i + 1] - 1) for i in range(len(chunk))])
            targets = np.concatenate([s[1:] for s in chunk]).astype(np.int64)
            tape = r.forward(b, rows, targets, temperature, checkpointing=checkpointing)
            r.backward(tape, np.concatenate([coefficients[i] for i in chosen]), gradients)
        gradients.end_leaf()
    return gradients.finish()


TRAINED = [s for s in SEQUENCES if len(s) > 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_gradients_do_not_depend_on_micro_batches_threads_or_checkpointing(family, dtype):
    model = config(**FAMILIES[family])
    base = gradients_of(runner(model, dtype=dtype), model, TRAINED, len(TRAINED))
    others = [
        gradients_of(runner(model, dtype=dtype), model, TRAINED, 1),
        gradients_of(runner(model, dtype=dtype, threads=1), model, TRAINED, 2),
        gradients_of(runner(model, dtype=dtype), model, TRAINED, 3, checkpointing=True),
    ]
    for name, value in base.items():
        assert value.any(), name
        for other in others:
            assert np.array_equal(bits(value), bits(other[name])), name
    reversed_order = gradients_of(runner(model, dtype=dtype), model, TRAINED[::-1], 1)
    assert any(not np.array_equal(bits(base[n]), bits(reversed_order[n])) for n in base)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_gradients_agree_with_torch_autograd(family):
    """Accuracy, not bits: the exact arm against torch's kernels and autograd."""
    model = config(**FAMILIES[family])
    exact = gradients_of(runner(model), model, TRAINED, len(TRAINED))
    native = gradients_of(runner(model, numerics="native"), model, TRAINED, len(TRAINED))
    assert set(exact) == set(native) == set(model.weight_shapes())
    for name in exact:
        scale = np.abs(native[name]).max()
        assert np.abs(exact[name] - native[name]).max() <= 2e-5 * scale, name
        assert not np.array_equal(bits(exact[name]), bits(native[name])) or native[name].size < 32


def test_claimed_degrees_are_other_trees_and_keep_their_own_invariance():
    model = config()
    one = runner(model).hidden(batch(*SEQUENCES), None, "trainer_score")
    two = runner(model, tp=2).hidden(batch(*SEQUENCES), None, "trainer_score")
    assert not np.array_equal(bits(one), bits(two))
    assert np.abs(one - two).max() < 1e-4
    r = runner(model, tp=2)
    assert np.array_equal(bits(two), bits(in_chunks(r, model, SEQUENCES, 7, 16)))
    g1 = gradients_of(r, model, TRAINED, 4, dp=2)
    g2 = gradients_of(r, model, TRAINED, 1, dp=2)
    g3 = gradients_of(r, model, TRAINED, 4, dp=1)
    assert all(np.array_equal(bits(g1[n]), bits(g2[n])) for n in g1)
    assert any(not np.array_equal(bits(g1[n]), bits(g3[n])) for n in g1)


def test_a_recomputation_with_other_bits_is_an_error():
    model = config()
    r = runner(model)
    b = batch(SEQUENCES[0])
    rows, targets = np.arange(69), SEQUENCES[0][1:].astype(np.int64)
    tape = r.forward(b, rows, targets, 1.0, checkpointing=True)
    tape.checkpoints[1] = tape.checkpoints[1].copy()
    tape.checkpoints[1].view(np.uint32)[3, 5] ^= 1
    tied = Gradients(model.weight_shapes(), tied_embedding="model.embed_tokens.weight")
    with pytest.raises(NumericsError, match="layer 1: the recomputed output"):
        r.backward(tape, np.ones(69, np.float32), tied)


def test_targets_and_positions_outside_the_model_are_refused():
    model = config()
    r = runner(model)
    hidden = r.hidden(batch(SEQUENCES[3]), None, "trainer_score")
    with pytest.raises(ModelError, match="the vocabulary has 300"):
        r.logprobs(hidden, np.array([1, 300]), 1.0, "trainer_score")
    with pytest.raises(ModelError, match="beyond the 128 positions"):
        r.hidden(batch(np.zeros(129, np.int64)), None, "trainer_score")


def test_evidence_counts_what_ran():
    model = config()
    r = runner(model)
    r.hidden(batch(SEQUENCES[0]), None, "trainer_score")
    counts = {(c["region"], c["case"]): c for c in r.evidence.as_json()["calls"]}
    assert counts[("attention", "trainer_score")]["count"] == 2
    assert counts[("attention", "trainer_score")]["tokens"] == 140
    assert ("attention", "rollout_decode") not in counts
