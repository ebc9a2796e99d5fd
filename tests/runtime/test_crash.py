"""Runs that are killed anywhere, lose what was not synced, find a full disk or a signal: resumed, they end the same."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vime.timeline.replay
from rlkernel.contract.build import Contract
from tests.runtime import crash_functions
from tests.runtime.crash_tools import (
    FileOperations,
    Moment,
    Scene,
    StageKiller,
    differences,
    in_child,
    kill_at,
    kill_self,
    logged_calls,
    operations,
    other_digests,
    stop_after,
    was_killed,
)
from vime.cli.main import invoke
from vime.errors import InputError, InvariantViolation
from vime.pipeline.loading import load_pipeline
from vime.pipeline.prepare import Prepared, prepare
from vime.runtime.assembly import Sides, assemble
from vime.runtime.observer import RunOutcome
from vime.runtime.process import ProcessEngine
from vime.runtime.run_loop import run
from vime.store.run_directory import RunDirectory, RunView
from vime.timeline.event import Event
from vime.timeline.events import RunFinished, RunInterrupted, RunResumed
from vime.timeline.log import LogWriter, Record, read_log
from vime.timeline.manager import LOG_NAME
from vime.train.native.trainer import NativeTrainer
from vime.types import GeneratedSample, Prompt

PLAIN = Scene(steps=2, every=1, keep_checkpoints=1)
USER = Scene(user=True)
DROPPING = Scene(user=True, on_error="drop", steps=2, every=1)
OFTEN = Scene(every=1)
STAGES = ("rollout", "reward", "filter", "advantage", "score", "compare", "train", "sync", "evaluate", "checkpoint")

Whole = Callable[[Scene], RunOutcome]


@pytest.fixture(scope="module", autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of this module's own, and the current one: calls of user functions are noted there."""
    folder = tmp_path_factory.mktemp("crash")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def whole(base: Path) -> Whole:
    """The uninterrupted run of a scene."""
    made = 0

    @cache
    def of(scene: Scene) -> RunOutcome:
        nonlocal made
        made += 1
        return scene.start(base / f"whole-{made}" / "run")

    return of


@pytest.fixture(scope="module")
def listed(base: Path, whole: Whole) -> list[str]:
    """The operations on files of the plain run."""
    whole(PLAIN)  # compiles; a child would do it again
    return operations(PLAIN, base / "operations")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


# ------------------------------------------------------------------------------------------------------ kills


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
    before = set(os.listdir("/dev/shm"))

    def sides(prepared: Prepared, path: Path) -> Sides:
        made = assemble(prepared, path)
        assert isinstance(made.engine, ProcessEngine)
        print(f"engine {made.engine.pid}", flush=True)
        send = made.transport.send

        def sent(tensors: Any) -> Any:
            handle = send(tensors)
            if made.engine.committed() is not None:
                kill_self()  # weights are in shared memory, and nobody has let go of them
            return handle

        made.transport.send = sent  # type: ignore[method-assign]
        return made

    said = work.parent / "said"
    status = in_child(lambda: run(prepare(load_pipeline(split.file(work / "run"))), sides=sides), said)
    assert was_killed(status), said.read_text()
    found = re.search(r"engine (\d+)", said.read_text())
    assert found is not None
    engine = int(found[1])
    for _ in range(500):
        if not Path(f"/proc/{engine}").exists() and set(os.listdir("/dev/shm")) <= before:
            break
        time.sleep(0.02)  # an end by events of other processes: nothing to wait on
    assert not Path(f"/proc/{engine}").exists()
    assert set(os.listdir("/dev/shm")) <= before
    assert "Traceback" not in said.read_text()
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []


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


# ------------------------------------------------------------------------------------------------ the log, cut


def cuts(moment: Moment) -> list[int]:
    """Of each of the last three records: one byte, all but the newline, all."""
    found: set[int] = set()
    for before, record in zip(moment.records[-4:-1], moment.records[-3:], strict=True):
        found |= {before.end + 1, record.end - 1, record.end}
    return sorted(found)


@pytest.mark.parametrize(("event", "count"), [("checkpoint_written", 1), ("sync_committed", 3), ("", 0)])
def test_log_cut_and_unsynced_files_gone(whole: Whole, base: Path, work: Path, event: str, count: int) -> None:
    whole(PLAIN)
    moment = stop_after(PLAIN, base / f"moment-{event}" / "run", event, count)
    for number, length in enumerate(cuts(moment)):
        path = work / f"cut-{length}" / "run"
        moment.cut(path, length, lose_unsynced=number % 4 != 1)
        compare = differences if number % 3 == 1 else other_digests
        assert compare(whole(PLAIN), PLAIN.finish(path)) == [], length


def test_log_cut_at_every_byte_keeps_whole_records(whole: Whole, tmp_path: Path) -> None:
    content = (whole(PLAIN).run_directory / LOG_NAME).read_bytes()
    records = read_log(whole(PLAIN).run_directory / LOG_NAME).records
    for length in range(records[-4].end, len(content) + 1, 7):
        (tmp_path / LOG_NAME).write_bytes(content[:length])
        found = read_log(tmp_path / LOG_NAME)
        assert found.end == max(record.end for record in records if record.end <= length)
        assert (found.tail is None) == (found.end == length)


# ------------------------------------------------------------------------------------------- user functions


@pytest.mark.parametrize("scene", [USER, DROPPING])
def test_logged_rewards_and_filters_are_not_called_again(whole: Whole, work: Path, scene: Scene) -> None:
    total = logged_calls(whole(scene).run_directory)
    draw = random.Random(5)
    for trial in range(3):
        path = work / f"trial-{trial}" / "run"
        killer = StageKiller(*draw.choice([("stage filter", 2), ("stage train", 1), ("stage evaluate", 2)]))
        assert was_killed(in_child(lambda path=path, killer=killer: scene.finish(path, killer), work / "said"))  # type: ignore[misc]
        logged = logged_calls(path)
        Path(crash_functions.CALLS).unlink()
        outcome = scene.finish(path)
        assert logged and len(Path(crash_functions.CALLS).read_text().splitlines()) == total - logged
        assert differences(whole(scene), outcome) == []


def changed_reward(prompt: Prompt, sample: GeneratedSample, text: str) -> float:
    return 1.0 + sample.sample_id.k


def test_a_changed_reward_is_noticed_exactly_where_it_is_called(
    whole: Whole, base: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(USER)
    unrewarded = stop_after(USER, base / "unrewarded" / "run", "sample_finished", 16)
    rewarded = stop_after(USER, base / "rewarded" / "run", "", 0)
    monkeypatch.setattr(crash_functions, "reward", changed_reward)
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


# ----------------------------------------------------------------------------------------- damaged checkpoints


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


# ------------------------------------------------------------------------------------------- disks and signals


def vime_in_child(arguments: list[str], said: Path, before: Callable[[], None] = lambda: None) -> int:
    """The exit code of a command in a child."""

    def work() -> int:
        before()
        return invoke(arguments)

    status = in_child(work, said)
    assert os.WIFEXITED(status), said.read_text()
    return os.WEXITSTATUS(status)


@pytest.mark.parametrize(
    ("place", "count", "sentence"),
    [
        (r"write run/timeline.jsonl", 60, r"event \d+ \(\w+\) to .*timeline.jsonl failed: the disk is full"),
        (r"write run/.staging/arrays-step-000001/tokens", 1, "the arrays of step 1 to .* failed: the disk is full"),
        (r"save run/.staging/checkpoint-000001/master", 1, "master.safetensors cannot be written"),
        (
            r"write run/.staging/checkpoint-000001/manifest",
            1,
            "the checkpoint of step 1 to .* failed: the disk is full",
        ),
        (r"write run/steps.jsonl", 2, "steps.jsonl failed: the disk is full"),
        (r"open run/provenance.jsonl", 3, "provenance.jsonl failed: the disk is full"),
        (r"write run/.report.html.tmp", 1, "report.html failed: the disk is full"),
    ],
)
def test_full_disk_stops_resumably(whole: Whole, work: Path, place: str, count: int, sentence: str) -> None:
    whole(PLAIN)
    work.mkdir()
    arguments = ["run", str(PLAIN.file(work / "run"))]
    said = work.parent / "said"
    assert vime_in_child(arguments, said, FileOperations(work, count, place, full=True).install) == 3
    assert re.search(rf"{sentence}.*vime resume {work / 'run'}", said.read_text()), said.read_text()
    assert "Traceback" not in said.read_text()
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []


def test_file_size_limit_at_a_checkpoint(whole: Whole, work: Path) -> None:
    """The system's own refusal, met by the library that writes the weights."""
    whole(PLAIN)
    write = RunDirectory.write_checkpoint

    def limited(*arguments: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return write(*arguments)

    def before() -> None:
        RunDirectory.write_checkpoint = limited  # type: ignore[method-assign]

    said = work.parent / "said"
    assert vime_in_child(["run", str(PLAIN.file(work / "run"))], said, before) == 3
    assert "File too large" in said.read_text() and "could not be noted in the log" in said.read_text()
    assert "Traceback" not in said.read_text()
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []


@pytest.mark.parametrize(
    ("event", "count", "signals"),
    [
        ("sample_finished", 13, [signal.SIGINT]),
        ("step_trained", 2, [signal.SIGTERM]),
        ("arrays_written", 2, [signal.SIGINT, signal.SIGTERM]),
    ],
)
def test_signals_stop_resumably(
    whole: Whole, work: Path, event: str, count: int, signals: list[signal.Signals]
) -> None:
    whole(PLAIN)
    append, seen = LogWriter.append, [0]

    def signalled(writer: LogWriter, happened: Event) -> Record:
        record = append(writer, happened)
        seen[0] += happened.type == event
        if happened.type == event and seen[0] == count:
            for number in signals:
                os.kill(os.getpid(), number)
        return record

    def before() -> None:
        LogWriter.append = signalled  # type: ignore[method-assign]

    said = work.parent / "said"
    assert vime_in_child(["run", str(PLAIN.file(work / "run"))], said, before) == 3
    assert f"continue it with: vime resume {work / 'run'}" in said.read_text()
    last = RunView.open(work / "run").records[-1].event
    assert isinstance(last, RunInterrupted) and ("stopped on request" in last.reason) == (len(signals) == 1)
    assert "stopped" in (work / "run" / "report.html").read_text()
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []


# ---------------------------------------------------------------------------------------- what resume refuses


def test_two_processes_on_one_run(whole: Whole, base: Path, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole(PLAIN)
    moment = stop_after(PLAIN, base / "shared" / "run", "batch_assigned", 2)
    with RunDirectory.open_for_resume(moment.path):
        assert vime_in_child(["resume", str(moment.path)], work.parent / "said") == 2
        assert f"in use by process {os.getpid()}" in (work.parent / "said").read_text()
    assert differences(whole(PLAIN), PLAIN.finish(moment.path)) == []


def test_finished_run_is_reported_again(whole: Whole, work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole(PLAIN).run_directory, work / "run")
    report = (work / "run" / "report.html").read_text()
    log = (work / "run" / LOG_NAME).read_bytes()
    for name in ("report.html", "steps.jsonl", "provenance.jsonl"):
        (work / "run" / name).unlink()  # as if the last process had died before it wrote them
    assert invoke(["resume", str(work / "run"), "--json"]) == 0
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert last["event"] == "finished" and last["steps"] == 2
    # the same page but for the order of the contract's entries, which are now read from a file
    again = (work / "run" / "report.html").read_text()
    assert sorted(again) == sorted(report) and str(whole(PLAIN).extra["run_digest"]) in again
    assert (work / "run" / LOG_NAME).read_bytes() == log
    assert isinstance(RunView.open(work / "run").records[-1].event, RunFinished)
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []


@pytest.mark.parametrize("event", ["sync_committed", "run_finished", "contract_fixed"])
def test_changed_pipeline_is_refused(whole: Whole, work: Path, event: str, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(whole(PLAIN).run_directory, work / "run")
    last = [r for r in RunView.open(work / "run").records if r.event.type == event][-1]
    os.truncate(work / "run" / LOG_NAME, last.end)
    for key, old, new, named in (
        ("temperature", "1.0", "1.5", "stages.rollout.sampling.temperature was 1.0 and is 1.5"),
        ("learning_rate", "0.003", "0.004", "stages.train.optimizer.learning_rate was 0.003 and is 0.004"),
        ("steps", "2", "3", "steps was 2 and is 3"),
    ):
        change(work / "run" / "pipeline.yaml", key, old, new)
        assert invoke(["resume", str(work / "run")]) == 2
        assert f"is not the pipeline that this run began with: {named}" in capfd.readouterr().err
        change(work / "run" / "pipeline.yaml", key, new, old)
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []


def change(file: Path, key: str, old: str, new: str) -> None:
    """Another value of a key of a YAML file."""
    text = file.read_text()
    changed = re.sub(rf"(?m)^( *{key}: ){re.escape(old)}$", rf"\g<1>{new}", text)
    assert changed != text, text
    file.write_text(changed)


def test_settings_that_decide_no_bits_may_change(whole: Whole, base: Path) -> None:
    whole(PLAIN)
    moment = stop_after(PLAIN, base / "retuned" / "run", "step_compared", 2)
    for key, old, new in (("max_num_seqs", "4", "7"), ("block_size", "16", "8"), ("micro_batch_samples", "64", "2")):
        change(moment.path / "pipeline.yaml", key, old, new)
    assert differences(whole(PLAIN), PLAIN.finish(moment.path)) == []


def test_another_identity_is_refused(whole: Whole, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(PLAIN)
    moment = stop_after(PLAIN, base / "identity" / "run", "checkpoint_written", 1)

    policy = Contract.numerical_policy
    with monkeypatch.context() as later:  # a later version of vime, say, that sums in another order
        later.setattr(Contract, "numerical_policy", lambda self: {**policy(self), "order": "another"})
        with pytest.raises(InputError, match=r"with the numerical_policy identity .* of the trainer; this process has"):
            PLAIN.finish(moment.path)
    assert differences(whole(PLAIN), PLAIN.finish(moment.path)) == []
