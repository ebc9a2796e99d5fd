"""The pipelines that are shipped: every file is checked for an H200, and the large ones run in miniature on a CPU."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlkernel.verify.vectors import gpu
from vime.pipeline import machine
from vime.pipeline.loading import load_pipeline
from vime.pipeline.prepare import prepare
from vime.runtime.run_loop import run

FOLDER = Path(__file__).parents[2] / "pipelines"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
LARGE = [name for name in FILES if "shape" in name]
H200 = SimpleNamespace(name="sm_90", device="NVIDIA H200", profiles=gpu.PROFILES["sm_90"])
MINIATURE = (
    "device=cpu", "contract.profile=portable", "contract.dtype=float32", "threads=1",
    "model.overrides={vocab_size: 64}", "stages.train.moments=device", "stages.rollout.prompts_per_step=2",
    "stages.rollout.samples_per_prompt=2",
    "stages.rollout.sampling.max_new_tokens=6", "stages.reward.parameters={vocabulary: 64, length: 6}",
    "stages.evaluate.prompts=2", "steps=2",
)  # fmt: skip


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H200 and disk enough for its checkpoints, whatever this one has."""
    monkeypatch.setattr(gpu, "gpu_backend", lambda: H200)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))


@pytest.mark.parametrize("name", [name for name in FILES if "smollm2" not in name])
def test_a_shipped_pipeline_is_one_for_an_h200(name: str, tmp_path: Path, host: None) -> None:
    prepared = prepare(load_pipeline(FOLDER / name, [f"run_directory={tmp_path / 'run'}"]))
    rollout = prepared.pipeline.stages.rollout
    assert rollout.max_num_seqs >= rollout.prompts_per_step * rollout.samples_per_prompt


def test_shapes_are_those_of_the_models(host: None, tmp_path: Path) -> None:
    sizes = {}
    for name in LARGE:
        config = prepare(load_pipeline(FOLDER / name, [f"run_directory={tmp_path / 'run'}"])).config
        sizes[name] = sum(math.prod(shape) for shape in config.weight_shapes().values())
    assert sizes == {"qwen3-1.7b-shape-h200.yaml": 1_720_574_976, "qwen3-8b-shape-h200.yaml": 8_190_735_360}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_pipeline_runs_in_miniature_without_a_checkpoint(name: str, tmp_path: Path) -> None:
    given = [*MINIATURE, "checkpoint.every=0", f"run_directory={tmp_path / 'run'}"]
    outcome = run(prepare(load_pipeline(FOLDER / name, given)))
    assert outcome.status == "completed" and outcome.steps == 2
    assert [(report["compared_tokens"], report["mismatch_count"]) for report in outcome.reports] == [(24, 0), (24, 0)]
    assert all(0 < report["reward_mean"] < 1 for report in outcome.reports)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
