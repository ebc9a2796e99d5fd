"""A whole model through the interpreter of its contract equals the CPU kernels, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.kernels.torch_native.weights import TorchWeightSet
from rlkernel.models.definition import define_model
from rlkernel.ops.composition import Composition
from rlkernel.ops.gradients import Gradients
from rlkernel.ops.runner import ModelRunner
from rlkernel.reference.head import ReferenceLinearLogprob
from rlkernel.reference.regions import Interpreter, reference_ops
from rlkernel.verify.evidence import Evidence
from tests.ops.helpers import batch, config, runner, tensors
from tests.ops.test_runner import in_chunks

FAMILIES = {
    "qwen3-tied": {},
    "qwen2-bias": {"family": "qwen2", "qk_norm": False, "qkv_bias": True},
    "llama-untied": {"family": "llama", "qk_norm": False, "tied_embeddings": False},
}
RNG = np.random.default_rng(11)


def small(**changes):
    values = {"hidden_size": 32, "intermediate_size": 40, "num_layers": 1, "head_dim": 8, "vocab_size": 270}
    return config(**{**values, **changes})


def interpreted(model, dtype, topology=None, profile="portable"):
    contract = build_contract(model, dtype=dtype, topology=topology, profile=profile)
    interpreter = Interpreter(contract)
    definition, workers = define_model(model), Workers(2)
    composition = Composition("exact", reference_ops(interpreter), ReferenceLinearLogprob(interpreter))
    weights = TorchWeightSet(definition, tensors(model, dtype), dtype=dtype, workers=workers)
    tp = topology.tp if topology else 1
    return ModelRunner(
        definition, weights, composition, Evidence("reference"), dtype=dtype, tp=tp, workers=workers,
        max_position=model.max_position,
    )  # fmt: skip


def bits(x):
    x = np.ascontiguousarray(x)
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))


def same(a, b, what):
    differ = bits(a) != bits(b)
    assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.size} differ, first at {np.argwhere(differ)[0]}"


def train(r, model, sequences, dp=1):
    tied = "model.embed_tokens.weight" if model.tied_embeddings else None
    gradients = Gradients(model.weight_shapes(), tied_embedding=tied, leaves=dp)
    outputs = []
    for chunk in np.array_split(np.arange(len(sequences)), dp):
        b = batch(*[sequences[i] for i in chunk])
        rows = np.concatenate([np.arange(b.starts[i], b.starts[i + 1] - 1) for i in range(len(chunk))])
        targets = np.concatenate([sequences[i][1:] for i in chunk]).astype(np.int64)
        tape = r.forward(b, rows, targets, 0.7)
        coefficient = np.random.default_rng(int(chunk[0])).standard_normal(len(rows)).astype(np.float32)
        r.backward(tape, coefficient, gradients)
        outputs.append(tape.statistics)
        gradients.end_leaf()
    return outputs, gradients.finish()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_forward_and_backward_of_the_interpreter_equal_the_cpu_kernels(family, dtype):
    model = small(**FAMILIES[family])
    sequences = [RNG.integers(0, 270, n) for n in (70, 3, 17)]
    expected, grads = train(runner(model, dtype=dtype), model, sequences)
    found, reference = train(interpreted(model, dtype), model, sequences)
    for a, b in zip(expected, found, strict=True):
        for name in ("max", "log_sum", "logprob", "entropy"):
            same(getattr(a, name), getattr(b, name), name)
        assert np.array_equal(a.digest, b.digest)
    for name in grads:
        same(grads[name], reference[name], name)


def test_claimed_degrees_are_interpreted_too():
    model = small()
    sequences = [RNG.integers(0, 270, n) for n in (9, 3, 17, 5)]
    expected, grads = train(runner(model, tp=2), model, sequences, dp=2)
    found, reference = train(interpreted(model, "float32", Topology(tp=2, dp=2)), model, sequences, dp=2)
    for a, b in zip(expected, found, strict=True):
        same(a.logprob, b.logprob, "logprob")
    for name in grads:
        same(grads[name], reference[name], name)
    plain, _ = train(runner(model), model, sequences, dp=1)
    assert not np.array_equal(bits(plain[0].logprob)[:8], bits(expected[0].logprob)[:8])


def test_decode_through_pages_is_interpreted():
    model = small()
    sequences = [RNG.integers(0, 270, n) for n in (9, 21)]
    expected = runner(model).hidden(batch(*sequences), None, "trainer_score")
    same(expected, in_chunks(interpreted(model, "float32"), model, sequences, 1, 8), "decode")


@pytest.mark.parametrize("profile", ["hopper", "cdna3"])
def test_the_profiles_of_matrix_units_are_interpreted_whole_and_differ(profile):
    """Forward and backward of a bfloat16 model under a GPU's profile: other bits than portable, near its values."""
    model = small(hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1)
    sequences = [RNG.integers(0, 270, n) for n in (19, 3)]
    portable, plain = train(interpreted(model, "bfloat16"), model, sequences)
    found, grads = train(interpreted(model, "bfloat16", profile=profile), model, sequences)
    assert not np.array_equal(portable[0].digest, found[0].digest)
    assert np.abs(portable[0].logprob - found[0].logprob).max() < 0.1
    for name in grads:
        assert np.isfinite(grads[name]).all() and grads[name].any(), name
        assert np.abs(grads[name] - plain[name]).max() <= 0.1 * np.abs(plain[name]).max() + 1e-3, name
