"""The tokens of a sample meet in the same steps of a matrix unit whatever lies before them in a micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkernel.contract.build import build_contract
from rlkernel.models.presets import PRESETS
from rlkernel.reference.regions import continued, whole_steps

LENGTHS = (5, 16, 23, 1)


def _entry(profile: str):
    contract = build_contract(PRESETS["tiny-qwen3"], profile=profile, dtype="bfloat16")
    return contract.entries[("trainer_backward", "o_proj.wgrad")]


def _rows(width: int, seed: int) -> torch.Tensor:
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal((sum(LENGTHS), width)).astype(np.float32))
    return values.to(torch.bfloat16).float()


def _gradient(points, micro_batches, dy, x, pad=True):
    running, first = torch.zeros(dy.shape[1], x.shape[1]), 0
    for lengths in micro_batches:
        rows = slice(first, first + sum(lengths))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        steps = [whole_steps(points, starts, m[rows]) if pad else m[rows] for m in (dy, x)]
        running = continued(points, *steps, running)
        first = rows.stop
    return running.view(torch.int32)


@pytest.mark.parametrize("profile", ["hopper", "cdna3", "portable"])
def test_micro_batches_do_not_change_a_weight_gradient(profile):
    points, dy, x = _entry(profile), _rows(7, 1), _rows(9, 2)
    whole = _gradient(points, [LENGTHS], dy, x)
    for cut in ([LENGTHS[:1], LENGTHS[1:]], [LENGTHS[:3], LENGTHS[3:]], [(n,) for n in LENGTHS]):
        assert torch.equal(whole, _gradient(points, cut, dy, x))


def test_without_whole_steps_they_would():
    points, dy, x = _entry("hopper"), _rows(7, 1), _rows(9, 2)
    whole = _gradient(points, [LENGTHS], dy, x, pad=False)
    assert not torch.equal(whole, _gradient(points, [(n,) for n in LENGTHS], dy, x, pad=False))


def test_the_entries_say_so():
    assert "whole steps" in _entry("hopper").dependency.domain
    assert "whole steps" not in _entry("portable").dependency.domain
