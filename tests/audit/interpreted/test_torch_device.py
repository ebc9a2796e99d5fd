"""torch's kernels as they run on a GPU, here on the CPU, against the CPU's own arm of torch's kernels.

Neither keeps a contract: what they compute is the same up to rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkernel.contract.build import build_contract
from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.kernels.torch_native.device import TorchDeviceRunner, TorchDeviceWeights, native_composition
from rlkernel.kernels.torch_native.weights import TorchWeightSet
from rlkernel.models.definition import REGION_KINDS, define_model
from rlkernel.ops.composition import without_certificates
from rlkernel.ops.device.gradients import DeviceGradients
from rlkernel.ops.gradients import Gradients
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import TokenBatch
from rlkernel.ops.runner import ModelRunner
from rlkernel.verify.evidence import Evidence
from tests.audit.interpreted.device_model import PLACE, config, tensors
from vime.rollout.native.device import DevicePagedKV
from vime.rollout.native.model import BatchState, KVShape, PagedKV

MODELS = [
    config(num_layers=2, num_heads=4),
    config(num_layers=2, qkv_bias=True, qk_norm=False, family="qwen2", tied_embeddings=False),
]
LENGTHS = (5, 7, 5)


def runners(model):
    definition, weights, workers = define_model(model), tensors(model), Workers(1)
    plain = TorchWeightSet(definition, weights, dtype="float32", workers=workers)
    own = ModelRunner(
        definition, plain, without_certificates("native"), Evidence("cpu"), dtype="float32", tp=1, workers=workers,
        max_position=32,
    )  # fmt: skip
    there = TorchDeviceRunner(
        definition, TorchDeviceWeights(definition, weights, dtype="float32", device=PLACE),
        native_composition(REGION_KINDS[:-1]), Evidence("device"), build_contract(model), max_position=32,
    )  # fmt: skip
    assert there.weights.manifest_digest() == own.weights.manifest_digest()
    return own, there


def batch(lengths=LENGTHS):
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    tokens = np.random.default_rng(1).integers(0, 40, len(positions))
    return TokenBatch(tokens, positions, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def close(a, b, tolerance=2e-5):
    assert np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max() < tolerance


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("lengths", [LENGTHS, (6, 6)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_forward_and_gradients(model, lengths, checkpointing):
    own, there = runners(model)
    given = batch(lengths)
    rows = np.arange(len(given.tokens))[1::2]
    targets = np.random.default_rng(2).integers(0, 40, len(rows))
    close(there.hidden(given, None, "trainer_score"), own.hidden(given, None, "trainer_score"))
    tapes = [r.forward(given, rows, targets, 0.7, checkpointing=checkpointing) for r in (own, there)]
    for name in ("max", "log_sum", "logprob", "entropy"):
        close(*(getattr(tape.statistics, name) for tape in tapes))
    coefficient = np.random.default_rng(3).standard_normal(len(rows)).astype(np.float32)
    tied = "model.embed_tokens.weight" if model.tied_embeddings else None
    gradients = [Gradients(model.weight_shapes(), tied_embedding=tied)]
    gradients.append(DeviceGradients(model.weight_shapes(), PLACE, tied_embedding=tied))
    for runner, tape, buffers in zip((own, there), tapes, gradients, strict=True):
        runner.backward(tape, coefficient, buffers)
        buffers.end_leaf()
    found = [buffers.finish() for buffers in gradients]
    for name in model.weight_shapes():
        assert np.abs(found[0][name]).max() > 0
        close(found[1][name], found[0][name], 2e-4)
    assert {(c["region"], c["case"], c["tokens"]) for c in there.evidence.as_json()["calls"]} == {
        (c["region"], c["case"], c["tokens"]) for c in own.evidence.as_json()["calls"]
    }


@pytest.mark.parametrize("model", MODELS)
def test_paged_prefill_and_decode(model):
    own, there = runners(model)
    shape = KVShape(model.num_layers, model.num_kv_heads, model.head_dim)
    pages = [PagedKV(shape, 9, 8), DevicePagedKV(shape, 9, 8, dtype=torch.float32, device=PLACE, null=0.0)]
    table = np.array([[1, 4], [2, 0], [3, 0]], np.int32)
    given = batch()
    owner = np.repeat(np.arange(3), LENGTHS)
    slots = table[owner, given.positions // 8].astype(np.int64) * 8 + given.positions % 8
    found = [
        r.hidden(given, BatchState(kv, table[:, :1], slots), "rollout_prefill")
        for r, kv in zip((own, there), pages, strict=True)
    ]
    close(*found)
    for step in range(3):  # the second sequence reaches its second page
        at = np.array(LENGTHS, np.int32) + step
        table[1, 1] = 5
        one = TokenBatch(np.arange(3) + step, at, np.arange(4, dtype=np.int32))
        slots = table[np.arange(3), at // 8].astype(np.int64) * 8 + at % 8
        found = [
            r.hidden(one, BatchState(kv, table, slots), "rollout_decode")
            for r, kv in zip((own, there), pages, strict=True)
        ]
        close(*found)


def test_draws_follow_their_keys_and_the_distribution():
    _, there = runners(MODELS[0])
    rows = there.hidden(batch((1,)), None, "trainer_score").expand(4000, -1).contiguous()
    ones = np.zeros(4000, np.int64)
    keys = SamplingKeys(
        np.full(4000, 3, np.uint64), np.arange(4000), ones, ones, ones, np.zeros(4000, np.bool_), ones, np.ones(4000)
    )
    drawn, found = there.sample(rows, keys, 1.0, "rollout_decode")
    assert (there.sample(rows, keys, 1.0, "rollout_decode")[0] == drawn).all()
    logp = there.logprobs(rows[:40], np.arange(40), 1.0, "rollout_decode").logprob
    close(found.logprob, logp[drawn], 1e-6)
    share = np.bincount(drawn, minlength=40) / 4000
    assert np.abs(share - np.exp(logp)).max() < 0.03
    greedy = SamplingKeys(**{**vars(keys), "greedy": np.ones(4000, np.bool_)})
    assert set(there.sample(rows, greedy, 1.0, "rollout_decode")[0]) == {int(np.argmax(logp))}
    with pytest.raises(NumericsError, match="whole distributions"):
        there.sample(rows, SamplingKeys(**{**vars(keys), "top_k": ones + 5}), 1.0, "rollout_decode")
    there.trace = lambda *_: None
    with pytest.raises(NumericsError, match="no boundary"):
        there.hidden(batch(), None, "trainer_score")
