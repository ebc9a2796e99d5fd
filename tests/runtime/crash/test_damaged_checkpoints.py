"""Damaged checkpoints are named and done without."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.crash.cutting import Moment, stop_after
from tests.runtime.crash.scene import (
    OFTEN,
    Whole,
    differences,
)
from vime.store.run_directory import RunView
from vime.timeline.events import RunResumed


def flip(file: Path) -> None:
    """Another bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.unlink()
    file.write_bytes(content)


def shorten(file: Path) -> None:
    """Half of it."""
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[: len(content) // 2])


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": lambda folder: flip(folder / "moment1.safetensors"),
    "shortened": lambda folder: shorten(folder / "master.safetensors"),
    "missing": lambda folder: (folder / "trainer.json").unlink(),
    "manifest": lambda folder: flip(folder / "manifest.json"),
    "gone": shutil.rmtree,
}


@pytest.fixture(scope="module")
def two_checkpoints(base: Path, whole: Whole) -> Moment:
    """A run that was killed in step 2, with the checkpoints of steps 0 and 1."""
    whole(OFTEN)
    return stop_after(OFTEN, base / "checkpoints" / "run", "step_trained", 3)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_falls_back_to_the_one_before(
    whole: Whole, two_checkpoints: Moment, work: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    two_checkpoints.cut(work / "run", two_checkpoints.records[-1].end, lose_unsynced=False)
    DAMAGES[damage](work / "run" / "checkpoints" / "step-000001")
    outcome = OFTEN.finish(work / "run")
    said = capfd.readouterr().err
    assert "the checkpoint of step 1 (" in said and "goes on from the checkpoint of step 0" in said
    resumed = [r.event for r in RunView.open(work / "run").records if isinstance(r.event, RunResumed)]
    assert resumed[0].checkpoint_step == 0 and resumed[0].observed["rejected_checkpoints"]
    assert differences(whole(OFTEN), outcome) == []


def test_no_usable_checkpoint_goes_back_to_the_start(
    whole: Whole, two_checkpoints: Moment, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    two_checkpoints.cut(work / "run", two_checkpoints.records[-1].end - 5, lose_unsynced=False)
    for name in ("step-000000", "step-000001"):
        flip(work / "run" / "checkpoints" / name / "master.safetensors")
    outcome = OFTEN.finish(work / "run")
    said = capfd.readouterr().err
    assert "it was cut off" in said and said.count("master.safetensors has SHA-256") == 2
    assert "goes on from its start" in said
    assert differences(whole(OFTEN), outcome) == []
