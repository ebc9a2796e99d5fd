"""The commands on a real run: small, but with the real engine and trainer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.closed_pipe import without_reader
from tests.pipeline.helpers import text
from vime.cli.exits import CLOSED_PIPE
from vime.cli.main import invoke
from vime.store.run_view import RunView

Capture = pytest.CaptureFixture[str]


def call(*arguments: object) -> int:
    return invoke([str(item) for item in arguments])


def test_run_report_diff_resume(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(text(tmp_path / "a"))
    assert call("run", file, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    last = lines[-1]
    assert (last["event"], last["status"], last["steps_done"]) == ("finished", "completed", 2)
    assert last["mismatch_count"] == last["distribution_mismatch_count"] == 0
    assert last["compared_tokens"] == last["num_tokens"] > 0

    # keys that may not change a bit, all at once
    knobs = {"stages.rollout.max_num_seqs": 3, "stages.rollout.max_batched_tokens": 5, "stages.rollout.block_size": 8,
             "stages.rollout.prefix_caching": "false", "stages.train.micro_batch_samples": 3, "threads": 1,
             "run_directory": tmp_path / "b", "name": "other"}  # fmt: skip
    assert call("run", file, *(f"--set={key}={value}" for key, value in knobs.items())) == 0
    assert "0" in capsys.readouterr().out
    assert call("diff", tmp_path / "a", tmp_path / "b") == 0, capsys.readouterr().out

    # a key that does
    assert call("run", file, "--set", "seed=8", "--set", f"run_directory={tmp_path}/c") == 0
    assert call("diff", tmp_path / "a", tmp_path / "c") == 1
    capsys.readouterr()

    assert call("report", tmp_path / "a") == 0
    assert "0 differing" in capsys.readouterr().out
    assert without_reader("report", tmp_path / "a") == (CLOSED_PIPE, b"")
    assert call("report", tmp_path / "a", "--json") == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if '"event": "step"' in line]) == 2
    before = (tmp_path / "a/timeline.jsonl").read_bytes()
    assert call("resume", tmp_path / "a") == 0
    assert "2 of 2" in capsys.readouterr().out
    assert (tmp_path / "a/timeline.jsonl").read_bytes().startswith(before)


def test_a_run_is_resumed_from_another_folder(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data, its reward, and a file that the reward opens, are all named by relative paths."""
    begun, elsewhere = tmp_path / "begun", tmp_path / "elsewhere"
    begun.mkdir()
    elsewhere.mkdir()
    (begun / "mine.py").write_text(
        "def score(prompt, sample, text):\n"
        "    factor = float(open('factor.txt').read())\n"
        "    if prompt.prompt_index == 5 and factor < 2: raise ValueError('broken on purpose')\n"
        "    return factor * len(text)\n"
    )
    (begun / "factor.txt").write_text("1.0")
    rows = [{"text": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (begun / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (begun / "small.yaml").write_text(text("runs/a"))
    data = "data={source: jsonl, parameters: {train: rows.jsonl}}"
    monkeypatch.chdir(begun)
    settings = ("--set", data, "--set", "stages.reward.function=mine.py:score", "--set", "stages.evaluate.prompts=0")
    assert call("run", "small.yaml", *settings) == 3
    message = capsys.readouterr().err
    assert "broken on purpose" in message and "continue it with: vime resume runs/a" in message

    monkeypatch.chdir(elsewhere)
    assert call("resume", "../begun/runs/a") == 3  # it goes on, and comes to the same place
    message = capsys.readouterr().err
    assert "broken on purpose" in message and "continue it with: vime resume ../begun/runs/a" in message
    assert Path.cwd() == elsewhere and list(elsewhere.iterdir()) == []
    (begun / "factor.txt").write_text("2.0")

    moved = tmp_path / "moved"  # with the folder gone the paths begin where the command is called
    begun.rename(moved)
    assert call("resume", "../moved/runs/a") == 2
    message = capsys.readouterr().err
    assert f"the run was started in {begun}, which is gone: relative paths begin in {elsewhere}" in message
    assert f"there is no data file {elsewhere / 'rows.jsonl'}" in message
    monkeypatch.chdir(moved)
    assert call("resume", "runs/a") == 0, capsys.readouterr().err
    assert "2 of 2" in capsys.readouterr().out


def test_weights_that_cannot_be_loaded_leave_no_run_behind(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(text(tmp_path / "a"))
    assert call("run", file, "--set", "steps=1", "--set", "checkpoint.every=1") == 0
    model = next((tmp_path / "a/checkpoints").iterdir())
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    capsys.readouterr()
    settings = ("--set", f"model={{path: {model}}}", "--set", f"run_directory={tmp_path}/b")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert call("run", file, *settings) == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_failing_reward_stops_resumable_and_resume_goes_on(tmp_path: Path, capsys: Capture) -> None:
    reward = tmp_path / "mine.py"
    body = "def score(prompt, sample, text):\n    {}\n    return float(len(text))\n"
    reward.write_text(body.format("if prompt.prompt_index == 5: raise ValueError('broken on purpose')"))
    file = tmp_path / "small.yaml"
    file.write_text(text(tmp_path / "a"))
    mine = f"stages.reward.function={reward}:score"
    assert call("run", file, "--set", mine) == 3
    message = capsys.readouterr().err
    assert "broken on purpose" in message and "vime resume" in message and "Traceback" not in message
    reward.write_text(body.format("pass"))
    assert call("resume", tmp_path / "a") == 0, capsys.readouterr().err
    assert "2 of 2" in capsys.readouterr().out


def test_a_native_run_says_that_it_proves_nothing(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(text(tmp_path / "a"))
    native = ("numerics.trainer=native", "on_mismatch=continue")
    assert call("run", file, *(f"--set={item}" for item in native), "--json") == 1
    captured = capsys.readouterr()
    last = json.loads(captured.out.splitlines()[-1])
    counts = f"{last['mismatch_count']:,} log-probabilities and {last['distribution_mismatch_count']:,} whole"
    assert last["mismatch_count"] and last["distribution_mismatch_count"] != last["mismatch_count"]
    assert f"{counts} distributions of {last['compared_tokens']:,} compared tokens differ" in captured.err
    assert last["message"] in captured.err
    assert call("report", tmp_path / "a") == 1
    assert "the trainer ran native kernels" in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "a/report.html").read_text()
    assert "finished, native kernels" in page and "the trainer ran native kernels" in page
    assert "The first two have to be equal" not in page
    evidence = page[page.index("<h2>Evidence") :]
    assert "{" not in evidence and "&#x27;" not in evidence


def test_a_held_out_sample_is_asked_for_by_version(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(text(tmp_path / "run"))
    assert call("run", file) == 0
    capsys.readouterr()
    log = RunView.open(tmp_path / "run").records
    finished = [r.event for r in log if r.event.type == "sample_finished" and str(r.event.sample_id) == "eval/0/0"]
    begun = [event.versions[0].version for event in finished]
    assert len(set(begun)) > 1
    for version, event in zip(begun, finished, strict=True):
        arguments = ("provenance", tmp_path / "run", "--sample", "eval/0/0", "--position", event.num_prompt_tokens)
        assert call(*arguments, "--version", version, "--json") == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["version"], facts["evaluated"]) == (version, begun)
    assert call(*arguments, "--version", 77) == 2
    assert "was begun with version" in capsys.readouterr().err


@pytest.mark.parametrize("gap", [0.05, 0.4])
def test_a_second_signal_changes_no_exit_code(tmp_path: Path, gap: float) -> None:
    """Whether it comes before the run has stopped, or while the process ends."""
    file = tmp_path / "p.yaml"
    file.write_text(text(tmp_path / "run"))
    command = [sys.executable, "-m", "vime", "run", str(file), "--set", "steps=500", "--set", "data.repeat=true"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "step 0" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    while process.poll() is None:
        time.sleep(gap)
        process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 3 and "Traceback" not in said, said


def test_a_reason_that_is_no_text_is_still_told(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "r.py").write_text("def score(prompt, sample, text): raise ValueError('half \\ud800 of a pair')\n")
    file = tmp_path / "p.yaml"
    file.write_text(text(tmp_path / "run"))
    assert call("run", file, "--set", f"stages.reward.function={tmp_path}/r.py:score") == 3
    assert "half \\ud800 of a pair" in capsys.readouterr().err
    assert "half \\ud800 of a pair" in (tmp_path / "run" / "report.html").read_text()
