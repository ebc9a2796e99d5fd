"""What resume refuses, and what it does with a run that is finished."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from rlkernel.contract.build import Contract
from tests.runtime.crash.cutting import stop_after
from tests.runtime.crash.scene import (
    PLAIN,
    Whole,
    differences,
    vime_in_child,
)
from vime.cli.main import invoke
from vime.errors import InputError
from vime.store.lock import RunLock
from vime.store.run_directory import RunDirectory, RunView
from vime.store.verify import verify_run
from vime.timeline.events import RunFinished
from vime.timeline.manager import LOG_NAME


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


def test_a_report_tells_a_killed_run_from_one_that_runs(
    whole: Whole, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole(PLAIN).run_directory, work / "run")
    last = [record for record in RunView.open(work / "run").records if record.event.type == "step_finished"][-1]
    os.truncate(work / "run" / LOG_NAME, last.end)
    assert invoke(["report", str(work / "run")]) == 0
    assert "the run is stopped: it was killed; continue it with: vime resume" in capfd.readouterr().out
    lock = RunLock(work / "run")
    assert invoke(["report", str(work / "run")]) == 0
    assert f"the run is running: process {os.getpid()} on" in capfd.readouterr().out
    lock.close()


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
    # until a process goes by it, an edited file is not the one that the log announced
    assert any("pipeline.yaml has the SHA-256" in problem for problem in verify_run(moment.path).problems)
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


def test_edited_data_is_refused(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = work / "questions.jsonl"
    work.mkdir(exist_ok=True)
    rows = [json.dumps({"text": f"{n:04d}=", "answer": f"{9999 - n:04d}"}) for n in range(12)]
    data.write_text("\n".join(rows) + "\n")
    text = PLAIN.pipeline(work / "run")
    start, rest = text.index("data:"), text.index("stages:")
    text = text[:start] + f"data: {{source: jsonl, parameters: {{train: {data}}}}}\n" + text[rest:]
    file = work / "own.yaml"
    file.write_text(text)
    override = ("--set", "stages.evaluate.prompts=0", "--set", "stages.evaluate.every=0")
    assert invoke(["run", str(file), *override]) == 0, capfd.readouterr().err
    whole = RunView.open(work / "run").records
    end = next(r.end for r in whole if r.event.type == "sync_committed")
    os.truncate(work / "run" / LOG_NAME, end)
    shutil.rmtree(work / "run" / "checkpoints")
    data.write_text("\n".join([*rows[:-1], rows[-1].replace("answer", "solution")]) + "\n")
    assert invoke(["resume", str(work / "run")]) == 2
    assert "gives other rows than when this run began" in capfd.readouterr().err
    data.write_text("\n".join(rows) + "\n")
    assert invoke(["resume", str(work / "run")]) == 0
    assert [r.event for r in RunView.open(work / "run").records][-1] == whole[-1].event
