"""A run that is killed anywhere, with or without the power, ends as if nothing had happened."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.crash.cutting import stop_after
from tests.runtime.crash.disk import kill_at
from tests.runtime.crash.scene import (
    PLAIN,
    StageKiller,
    Whole,
    differences,
    in_child,
    other_digests,
    was_killed,
)
from vime.errors import InvariantViolation
from vime.store.run_directory import RunView

STAGES = ("rollout", "reward", "filter", "advantage", "score", "compare", "train", "sync", "evaluate", "checkpoint")


@pytest.mark.parametrize("what", ["started", *(f"stage {name}" for name in STAGES), "sample 3 of 6", "finished"])
def test_killed_in_every_stage(whole: Whole, work: Path, what: str) -> None:
    whole(PLAIN)
    count = 1 if what in ("started", "finished") else 3 if what == "stage evaluate" else 2
    killer = StageKiller(what, count)
    status = in_child(lambda: PLAIN.finish(work / "run", killer), work.parent / "said")
    assert was_killed(status), (work.parent / "said").read_text()
    assert other_digests(whole(PLAIN), PLAIN.finish(work / "run")) == []


PLACES = (
    (r"mkdir .*\.new-\d+/checkpoints", 1),
    (r"rename .*\.new", 1),
    (r"write run/timeline.jsonl", 60),
    (r"fsync run/timeline.jsonl", 14),
    (r"write run/.*step-000001/tokens/c", 1),
    (r"replace run/.staging/arrays-step-000001$", 1),
    (r"fsync run/arrays.zarr$", 2),
    (r"write run/provenance.jsonl", 4),
    (r"write run/steps.jsonl", 1),
    (r"save run/.staging/checkpoint-000001/moment2", 1),
    (r"write run/.staging/checkpoint-000001/manifest.json", 1),
    (r"replace run/.staging/checkpoint-000001$", 1),
    (r"fsync run/checkpoints$", 2),
    (r"replace run/checkpoints/step-000000$", 1),
    (r"unlink run/.staging/retired-", 2),
    (r"replace run/.report.html.tmp", 1),
)


@pytest.mark.parametrize(("place", "count"), PLACES)
def test_killed_inside_a_write_with_the_power_gone(whole: Whole, work: Path, place: str, count: int) -> None:
    whole(PLAIN)
    assert kill_at(PLAIN, work, count, place, power_loss=True)
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []


@pytest.mark.parametrize("seed", range(2))
def test_killed_again_and_again(whole: Whole, listed: list[str], work: Path, seed: int) -> None:
    draw = random.Random(seed)
    kills = 0
    for _ in range(3):
        kills += bool(kill_at(PLAIN, work, draw.randrange(1, len(listed)), power_loss=draw.random() < 0.5))
    assert kills
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []


def test_killed_beside_an_engine_in_another_process(whole: Whole, work: Path) -> None:
    """The engine's process ends with its parent, shared memory goes with it, and the run goes on in one process."""
    split = dataclasses.replace(PLAIN, placement="split", transport="shm")
    command = [sys.executable, "-m", "tests.runtime.crash.split_run", str(split.file(work / "run"))]
    path = work.parent / "said"
    with path.open("w") as said:
        ended = subprocess.run(command, stdout=said, stderr=said, cwd=Path(__file__).parents[3], check=False)
    assert ended.returncode == -signal.SIGKILL, path.read_text()
    found = re.search(r"engine (\d+)", path.read_text())
    assert found is not None
    engine = int(found[1])
    # its own segments alone: other tests that run beside this one have some too
    segments = set(re.findall(r"segment (\S+)", path.read_text()))
    assert len(segments) == 2  # those of the first weights, and those of the update
    for _ in range(500):
        if not Path(f"/proc/{engine}").exists() and not segments & set(os.listdir("/dev/shm")):
            break
        time.sleep(0.02)  # an end by events of other processes: nothing to wait on
    assert not Path(f"/proc/{engine}").exists()
    assert not segments & set(os.listdir("/dev/shm"))
    assert "Traceback" not in path.read_text()
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []


def test_weights_on_disk_left_by_a_killed_process_are_removed(whole: Whole, base: Path) -> None:
    scene = dataclasses.replace(PLAIN, transport="disk")
    whole(PLAIN)
    moment = stop_after(scene, base / "published" / "run", "sync_staged", 3)
    assert len(list((moment.path / "weights").iterdir())) == 1
    assert differences(whole(PLAIN), scene.finish(moment.path)) == []
    assert list((moment.path / "weights").iterdir()) == []


def test_without_syncs_a_power_failure_is_noticed(whole: Whole, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative of the above: arrays that are announced without being synced are gone, and that is found."""
    whole(PLAIN)
    monkeypatch.setattr("vime.store.files.fsync_tree", lambda folder: None)
    assert kill_at(PLAIN, work, 1, "write run/steps.jsonl", power_loss=True)
    problem = damage(work / "run")
    assert problem is not None and "step 0" in problem


def damage(path: Path) -> str | None:
    """What is wrong with the announced arrays of a run."""
    view = RunView.open(path)
    try:
        for step in view.announced_arrays():
            view.step_arrays(step)
    except InvariantViolation as error:
        return str(error)
    return None
