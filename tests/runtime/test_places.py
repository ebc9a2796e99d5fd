"""Where sides compute: memory of an engine's weights, and the CPU's place."""

from __future__ import annotations

import pytest
import torch

from vime.rollout.native.model import PagedKV
from vime.runtime.places import CpuPlace, WeightMemory, place_of
from vime.train.native.optimizer import OPTIMIZER_IMPLEMENTATIONS


class Copy:
    def __init__(self, tensors):
        self.values = dict(tensors)

    def update(self, tensors):
        self.values = dict(tensors)


def test_two_sets_of_weights_take_turns_and_the_served_one_is_never_written():
    memory = WeightMemory(Copy, reuses=True)
    used = []
    for version in range(5):
        weights = memory.copy({"w": version})
        assert all(old.values["w"] != version or old is weights for old in used)
        if used:
            assert used[-1].values["w"] == version - 1, "the served weights were overwritten"
            assert weights is not used[-1]
        memory.serve(weights)
        used.append(weights)
    assert len({id(weights) for weights in used}) == 2


def test_weights_that_were_rolled_back_are_written_again():
    memory = WeightMemory(Copy, reuses=True)
    served = memory.copy({"w": 0})
    memory.serve(served)
    staged = memory.copy({"w": 1})
    assert memory.copy({"w": 2}) is staged
    assert (served.values, staged.values) == ({"w": 0}, {"w": 2})


def test_a_place_that_does_not_reuse_makes_new_ones():
    memory = CpuPlace().slots(Copy)
    first = memory.copy({"w": 0})
    assert memory.copy({"w": 1}) is not first
    assert first.values == {"w": 0}


def test_the_cpu_is_the_place_of_cpu():
    place = place_of("cpu")
    assert place.step == OPTIMIZER_IMPLEMENTATIONS
    assert place.pages("bfloat16") is PagedKV
    assert place.deployment("exact", {})["device"]["kind"] == "cpu"
    assert place.implementations("exact") != place.implementations("native")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_computes_nothing():
    with pytest.raises((RuntimeError, ModuleNotFoundError, AssertionError)):
        place_of("cuda").deployment("exact", {})
