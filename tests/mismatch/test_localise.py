"""The first differing boundary of two traces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.train.helpers import runner, samples, tensors
from vime.mismatch.localise import TraceRecorder, first_divergence, localise
from vime.train.batching import flatten
from vime.train.native.model import token_batch

REGIONS = ("embedding", "layers.0.attention_norm", "layers.1.attention", "final_norm")


def run(recorder, change=None, skip=None, shape=(3, 2, 4)):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for region in REGIONS:
        if region == skip:
            continue
        values = values + np.float32(1)
        if change is not None and region == change[0]:
            values = values.copy()
            values.view(np.uint32)[change[1]] ^= np.uint32(1)
        recorder(region, "out", values)


def test_equal_traces_have_no_divergence():
    assert localise(run, run) is None


def test_the_first_differing_bit_is_named():
    found = localise(run, lambda r: run(r, ("layers.1.attention", (2, 1, 3))))
    assert (found.kind, found.index, found.region, found.layer) == ("values", 2, "layers.1.attention", 1)
    assert (found.token, found.element, found.differing, found.total) == (2, 7, 1, 24)
    assert int(found.left, 16) ^ int(found.right, 16) == 1
    assert "token 2, element 7" in found.sentence()


def test_other_structure_shape_and_length_are_divergences():
    found = localise(run, lambda r: run(r, skip="layers.0.attention_norm"))
    assert (found.kind, found.index) == ("structure", 1)
    found = localise(run, lambda r: run(r, shape=(3, 8)))
    assert (found.kind, found.index) == ("shape", 0)
    found = localise(run, lambda r: run(r, skip="final_norm"))
    assert (found.kind, found.index, found.region) == ("length", 3, "final_norm")
    assert "final_norm" in found.sentence()


def test_signed_zeros_differ_and_nan_patterns_do_not():
    def side(bits):
        def run_side(recorder):
            recorder("embedding", "out", np.array([[bits]], np.uint32).view(np.float32))

        return run_side

    assert localise(side(0), side(0x80000000)).left == "00000000"
    assert localise(side(0x7FC00000), side(0xFFFFFFFF)) is None


def test_two_empty_traces_are_no_comparison():
    with pytest.raises(ValueError, match="nothing was compared"):
        first_divergence([], [])


def test_the_recorder_keeps_copies_and_takes_tensors():
    recorder = TraceRecorder()
    array = np.zeros((1, 2), np.float32)
    recorder("a", "out", array)
    array[:] = 1
    recorder("b", "out", torch.ones(1, 2, dtype=torch.bfloat16))
    assert recorder.boundaries[0].values.tolist() == [[0, 0]]
    assert recorder.boundaries[1].values.dtype == np.float32


def real_side(change=None):
    """A side of the real model, with one bit of one weight flipped where ``change`` names it."""
    weights = tensors()
    if change is not None:
        name, element, bit = change
        weights[name].view(torch.int32).view(-1)[element] ^= 1 << bit
    model = runner(weights, training=False)
    flat = flatten(samples(1, 1))

    def run_side(recorder):
        model.trace = recorder
        model.hidden(token_batch(flat), None, "trainer_score")
        model.trace = None

    return run_side


def test_a_flipped_weight_is_located_in_the_real_model():
    assert localise(real_side(), real_side()) is None
    for name, region in (
        ("model.layers.1.self_attn.o_proj.weight", "layers.1.o_proj"),
        ("model.layers.0.self_attn.k_norm.weight", "layers.0.qk_norm"),
        ("model.layers.1.mlp.up_proj.weight", "layers.1.gate_up_proj"),
        ("model.norm.weight", "final_norm"),
    ):
        found = localise(real_side(), real_side((name, 3, 20)))
        assert (found.kind, found.region) == ("values", region)
