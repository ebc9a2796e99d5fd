"""The device's runner in Triton's interpreter against the CPU's: hidden states, gradients, paged decode, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rlkernel.errors import NumericsError
from rlkernel.kernels.triton import launch_rows
from rlkernel.ops.device.gradients import DeviceGradients
from rlkernel.ops.gradients import Gradients
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import TokenBatch
from tests.audit.interpreted.device_model import PLACE, TIED, batch, config, equal, runners
from tests.audit.interpreted.exact_dot import exact_dot
from vime.rollout.native.device import DevicePagedKV
from vime.rollout.native.model import BatchState, KVShape, PagedKV

BIASED = {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "tied_embeddings": False}


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Products of matrices with the contract's bits; infinities in masked scores are no accident."""
    with exact_dot(), np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize(("changes", "tp"), [({}, 2), (BIASED, 1)])
def test_forward_and_backward(changes, tp):
    model = config(**changes)
    cpu, device = runners(model, tp)
    assert device.weights.manifest_digest() == cpu.weights.manifest_digest()
    given, rows, targets = batch(3, 1), np.array([0, 1, 2, 3]), np.array([5, 0, 39, 7])
    coefficient = np.array([0.5, -0.25, 1.0, -0.125], np.float32)
    tied = TIED if model.tied_embeddings else None
    own = Gradients(model.weight_shapes(), tied_embedding=tied)
    theirs = DeviceGradients(model.weight_shapes(), PLACE, tied_embedding=tied)
    expected, found = cpu.forward(given, rows, targets, 0.7), device.forward(given, rows, targets, 0.7)
    for item in fields(expected.statistics):
        assert equal(getattr(found.statistics, item.name), getattr(expected.statistics, item.name)), item.name
    cpu.backward(expected, coefficient, own)
    device.backward(found, coefficient, theirs)
    own.end_leaf()
    theirs.end_leaf()
    finished = theirs.finish()
    for name, value in own.finish().items():
        assert equal(finished[name], value), name
    assert sorted(device.evidence.tokens.items()) == sorted(cpu.evidence.tokens.items())


def test_a_layer_that_is_recomputed_otherwise_is_named():
    _, device = runners(config())
    given, rows, targets = batch(2), np.array([0, 1]), np.array([1, 2])
    gradients = DeviceGradients(device.definition.config.weight_shapes(), PLACE, tied_embedding=TIED)
    coefficient = np.ones(2, np.float32)
    tape = device.forward(given, rows, targets, 1.0, checkpointing=True)
    assert not tape.saved.keys() & {region.name for region in device.definition.body if region.layer is not None}
    device.backward(tape, coefficient, gradients)
    tape = device.forward(given, rows, targets, 1.0, checkpointing=True)
    device.weights.vector("model.layers.0.post_attention_layernorm.weight")[0] += 1.0
    with pytest.raises(NumericsError, match="layer 0: the recomputed output has digest"):
        device.backward(tape, coefficient, gradients)


def keys(count: int, positions: np.ndarray, **changes: object) -> SamplingKeys:
    plain = SamplingKeys(
        np.full(count, 7, np.uint64), np.arange(count), np.zeros(count, np.int64), np.zeros(count, np.int64),
        positions.astype(np.int64) + 1, np.zeros(count, np.bool_), np.zeros(count, np.int64), np.ones(count),
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_paged_prefill_decode_and_sampling():
    model, page = config(), 8
    cpu, device = runners(model)
    shape = KVShape(model.num_layers, model.num_kv_heads, model.head_dim)
    pages = PagedKV(shape, 6, page), DevicePagedKV(shape, 6, page, dtype=torch.float32, device=PLACE)
    table = np.array([[5, 2], [3, 6]], np.int32)
    tokens = np.random.default_rng(1).integers(0, 40, (2, 12))
    for first, last in ((0, 7), (7, 8), (8, 9)):
        positions = np.tile(np.arange(first, last, dtype=np.int32), 2)
        owner = np.repeat(np.arange(2), last - first)
        slots = table[owner, positions // page].astype(np.int64) * page + positions % page
        given = TokenBatch(tokens[:, first:last].reshape(-1), positions, np.array([0, 1, 2], np.int32) * (last - first))
        case = "rollout_decode" if last - first == 1 else "rollout_prefill"
        expected = cpu.hidden(given, BatchState(pages[0], table, slots), case)
        found = device.hidden(given, BatchState(pages[1], table, slots), case)
        assert equal(found, expected), (first, last)
    mixed = {"greedy": np.array([True, False]), "top_k": np.array([0, 3]), "top_p": np.array([1.0, 0.6])}
    for changes in ({}, mixed):
        drawn, statistics = cpu.sample(expected, keys(2, positions, **changes), 0.9, "rollout_decode")
        again, theirs = device.sample(found, keys(2, positions, **changes), 0.9, "rollout_decode")
        assert again.tolist() == drawn.tolist()
        for name in ("logprob", "entropy", "digest"):
            assert equal(getattr(theirs, name), getattr(statistics, name)), name


def test_fused_kernels_that_give_another_bit_are_refused(monkeypatch):
    _, device = runners(config())
    plain = launch_rows.add_rms_norm

    def other(x, branch, w, eps, **tuning):
        stream, y, inverse = plain(x, branch, w, eps, **tuning)
        return stream, torch.nextafter(y, y + 1), inverse

    monkeypatch.setattr(launch_rows, "add_rms_norm", other)
    with pytest.raises(NumericsError, match="trainer_score: the fused kernels give hidden states"):
        device.hidden(batch(2), None, "trainer_score")


def test_fused_kernels_are_compared_again_in_a_larger_pass(monkeypatch):
    _, device = runners(config())
    plain = launch_rows.add_rms_norm

    def wrong_with_many_rows(x, branch, w, eps, **tuning):
        stream, y, inverse = plain(x, branch, w, eps, **tuning)
        return stream, torch.nextafter(y, y + 1) if len(x) > 4 else y, inverse

    monkeypatch.setattr(launch_rows, "add_rms_norm", wrong_with_many_rows)
    device.hidden(batch(2), None, "trainer_score")
    device.hidden(batch(2), None, "trainer_score")
    facts = device.evidence.facts["fused_first_use"]["trainer_score"]
    assert (facts["calls"], facts["rows"], facts["keys"]) == (1, 2, 2)
    device.hidden(batch(4), None, "trainer_score")
    facts = device.evidence.facts["fused_first_use"]["trainer_score"]
    assert (facts["calls"], facts["rows"], facts["keys"], facts["differing"]) == (2, 4, 4, 0)
    with pytest.raises(NumericsError, match="trainer_score: the fused kernels give hidden states"):
        device.hidden(batch(3, 3), None, "trainer_score")


def test_a_trace_sees_every_region():
    cpu, device = runners(config())
    seen: dict[str, list[tuple[str, np.ndarray]]] = {"cpu": [], "device": []}
    for name, runner in (("cpu", cpu), ("device", device)):
        runner.trace = lambda region, port, value, own=seen[name]: own.append((port, np.array(np.asarray(value))))
        runner.hidden(batch(2), None, "trainer_score")
    assert [port for port, _ in seen["device"]] == [port for port, _ in seen["cpu"]]
    assert all(equal(a, b) for (_, a), (_, b) in zip(seen["device"], seen["cpu"], strict=True))
