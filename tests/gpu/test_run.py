"""Whole runs on a GPU: in the portable profile equal to those on a CPU, in its own profile equal on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.runtime.helpers import clean, run
from vime.errors import InvariantViolation
from vime.timeline.diff import diff_runs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SHAPE = ("model.overrides={num_layers: 2, hidden_size: 32, intermediate_size: 48, num_heads: 4, num_kv_heads: 2}",)
HOPPER = ("device=cuda", "contract.profile=hopper", "contract.dtype=bfloat16")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("contract.dtype=bfloat16",),
        ("contract.topology.tp=2", "contract.topology.dp=2", "stages.train.activation_checkpointing=true"),
    ],
)
def test_a_gpu_changes_no_bit_of_a_run(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    for device in ("cpu", "cuda"):
        clean(run(tmp_path / device, *SHAPE, *overrides, f"device={device}"))
    assert diff_runs(tmp_path / "cpu", tmp_path / "cuda") is None


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the GPU is no sm_90"
)
def test_both_sides_of_a_hopper_run_are_equal_and_scheduling_changes_no_bit(tmp_path: Path) -> None:
    clean(run(tmp_path / "a", *SHAPE, *HOPPER))
    clean(run(tmp_path / "b", *SHAPE, *HOPPER, "stages.rollout.max_num_seqs=3", "stages.train.micro_batch_samples=1"))
    assert diff_runs(tmp_path / "a", tmp_path / "b") is None


def test_a_fused_kernel_with_another_bit_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkernel.ops.device import fused

    plain = fused.launch_rows.swiglu

    def other(x, **rest):
        found = plain(x, **rest)
        return torch.nextafter(found, found + 1)

    monkeypatch.setattr(fused.launch_rows, "swiglu", other)
    with pytest.raises(InvariantViolation, match="the fused kernels give hidden states"):
        run(tmp_path / "run", *SHAPE, "device=cuda")


def test_numbers_of_the_gpu_stand_in_the_evidence(tmp_path: Path) -> None:
    run(tmp_path / "run", *SHAPE, "device=cuda")
    facts = json.loads((tmp_path / "run" / "evidence.json").read_text())["native-0"]["facts"]
    assert facts["graphs_captured"] > 0 and facts["graph_replays"] > 0
    assert all(found["differing"] == 0 for found in facts["fused_first_use"].values())
