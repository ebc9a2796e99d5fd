"""What is repeated after a kill: nothing that users wrote, everything else, compared with the log."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vime.timeline.replay
from tests.runtime.crash import functions
from tests.runtime.crash.cutting import stop_after
from tests.runtime.crash.scene import (
    DROPPING,
    OFTEN,
    USER,
    Scene,
    StageKiller,
    Whole,
    differences,
    in_child,
    logged_calls,
    other_digests,
    was_killed,
)
from vime.errors import InvariantViolation
from vime.train.native.trainer import NativeTrainer
from vime.types import GeneratedSample, Prompt


@pytest.mark.parametrize("scene", [USER, DROPPING])
def test_logged_rewards_and_filters_are_not_called_again(whole: Whole, work: Path, scene: Scene) -> None:
    total = logged_calls(whole(scene).run_directory)
    draw = random.Random(5)
    for trial in range(3):
        path = work / f"trial-{trial}" / "run"
        killer = StageKiller(*draw.choice([("stage filter", 2), ("stage train", 1), ("stage evaluate", 2)]))
        assert was_killed(in_child(lambda path=path, killer=killer: scene.finish(path, killer), work / "said"))  # type: ignore[misc]
        logged = logged_calls(path)
        Path(functions.CALLS).unlink()
        outcome = scene.finish(path)
        assert logged and len(Path(functions.CALLS).read_text().splitlines()) == total - logged
        assert differences(whole(scene), outcome) == []


def changed_reward(prompt: Prompt, sample: GeneratedSample, text: str) -> float:
    return 1.0 + sample.sample_id.k


def test_a_changed_reward_is_noticed_exactly_where_it_is_called(
    whole: Whole, base: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(USER)
    unrewarded = stop_after(USER, base / "unrewarded" / "run", "sample_finished", 16)
    rewarded = stop_after(USER, base / "rewarded" / "run", "", 0)
    monkeypatch.setattr(functions, "reward", changed_reward)
    assert "run digest" in other_digests(whole(USER), USER.finish(unrewarded.path))[0]
    # without its end and its checkpoints the run is repeated from the start: every reward comes from the log
    rewarded.cut(work / "run", rewarded.records[-2].end, lose_unsynced=False)
    shutil.rmtree(work / "run" / "checkpoints")
    assert differences(whole(USER), USER.finish(work / "run")) == []


def test_a_replay_that_computes_something_else_is_noticed(
    whole: Whole, base: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(OFTEN)
    moment = stop_after(OFTEN, base / "replayed" / "run", "sync_committed", 3)
    train = NativeTrainer.train

    def nudged(self: NativeTrainer, step: int, batch: Any) -> Any:
        return train(self, step, [dataclasses.replace(s, advantage=s.advantage + 0.5 * (step == 1)) for s in batch])

    monkeypatch.setattr(NativeTrainer, "train", nudged)
    for name, found in (
        ("compared", r"differs from its log at event \d+ \(step_trained, step 1\)"),
        ("blind", "digest"),
    ):
        moment.cut(work / name / "run", moment.records[-1].end, lose_unsynced=False)
        with pytest.raises(InvariantViolation, match=found):
            OFTEN.finish(work / name / "run")
        # once more without the comparison: the invariants still know which weights were published
        monkeypatch.setattr(vime.timeline.replay, "_require_equal", lambda record, event: None)


def test_a_checkpoint_that_forgets_is_noticed_by_the_digest(
    whole: Whole, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing after the checkpoint is logged, so no replay can object: the digest of the run has to differ."""
    whole(OFTEN)
    moment = stop_after(OFTEN, base / "forgetful" / "run", "checkpoint_written", 2)
    load = NativeTrainer.load

    def forgetful(self: NativeTrainer, folder: Path) -> None:
        load(self, folder)
        state = self._optimizer.state()
        still = {name: np.zeros_like(values) for name, values in state.moment1.items()}
        self._optimizer.restore(dataclasses.replace(state, moment1=still))

    monkeypatch.setattr(NativeTrainer, "load", forgetful)
    found = differences(whole(OFTEN), OFTEN.finish(moment.path))
    assert len(found) >= 3 and "step 2" in found[2]
