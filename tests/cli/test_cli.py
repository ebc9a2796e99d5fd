"""Commands: exit codes, sentences instead of tracebacks, JSON lines."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest

from tests.cli.closed_pipe import without_reader
from tests.pipeline.helpers import text
from tests.store.tiny_run import TinyRun
from vime.cli.differences import difference_lines
from vime.cli.exits import CLOSED_PIPE
from vime.cli.main import cli, invoke
from vime.cli.progress import StopSwitch, stop_on_signals
from vime.cli.readable import iso_time, token_text
from vime.cli.run import load_to_resume, set_aside
from vime.doctor import examine
from vime.errors import InputError, Interrupted, InvariantViolation
from vime.pipeline.schema import Pipeline, Rollout, Train
from vime.store.lock import RunLock
from vime.store.run_directory import RunDirectory
from vime.timeline.diff import Difference
from vime.timeline.events import SampleFinished
from vime.timeline.log import read_log

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(text(tmp_path / "run"))
    return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("runs")
    paths = {name: folder / name for name in ("one", "same", "other")}
    TinyRun(paths["one"], order=1).run()
    TinyRun(paths["same"], order=2).run()
    TinyRun(paths["other"], salt=1).run()
    yield paths


def call(*arguments: object) -> int:
    return invoke([str(item) for item in arguments])


def test_check_says_that_all_is_well(pipeline: Path, capsys: Capture) -> None:
    assert call("check", pipeline) == 0
    assert "no problems" in capsys.readouterr().out
    assert call("check", pipeline, "--graph") == 0
    assert "rollout" in capsys.readouterr().out
    assert call("check", pipeline, "--resolved") == 0
    assert "max_num_seqs: 256" in capsys.readouterr().out


def test_check_looks_at_the_run_directory(pipeline: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run").write_text("")
    assert call("check", pipeline) == 2
    assert "is a file" in capsys.readouterr().err
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").write_text("")
    assert call("check", pipeline) == 2
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / "run/timeline.jsonl").write_text("")
    assert call("check", pipeline) == 0  # a finished run does not make its pipeline wrong
    assert "--fresh" in capsys.readouterr().out


def test_check_lists_every_problem(pipeline: Path, capsys: Capture) -> None:
    arguments = ("check", pipeline, "--set", "stepz=1", "--set", "seed=x")
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "stepz" in captured.err and "seed" in captured.err and "2 problems" in captured.err
    assert call(*arguments, "--json") == 2
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["key"] for line in lines} == {"stepz", "seed"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "nowhere.yaml"),
        ("run",),
        ("run", "--no-such-option"),
        ("no-such-command",),
        ("resume", "nowhere"),
        ("report", "nowhere"),
        ("timeline", "nowhere"),
        ("provenance", "nowhere"),
        ("diff", "nowhere", "nowhere"),
        ("model", "fetch", "smollm3"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(arguments: tuple[str, ...], capsys: Capture) -> None:
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err
    assert "Traceback" not in captured.err


def test_nothing_starts_before_the_pipeline_is_clean(pipeline: Path, tmp_path: Path, capsys: Capture) -> None:
    assert call("run", pipeline, "--set", "stages.reward.function=nowhere") == 2
    assert not (tmp_path / "run").exists()
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(("error", "code"), [(Interrupted("disk full"), 3), (InvariantViolation("bits differ"), 1)])
def test_errors_of_a_run_become_codes(
    pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    error: Exception,
    code: int,
    begun: bool,
) -> None:
    import vime.runtime.run_loop

    def fail(*arguments: object, **named: object) -> None:
        if begun:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "timeline.jsonl").touch()
        raise error

    monkeypatch.setattr(vime.runtime.run_loop, "run", fail)
    assert call("run", pipeline) == code
    message = capsys.readouterr().err
    assert str(error) in message
    assert ("vime resume" in message) == (code == 3 and begun)
    assert ("start the run again" in message) == (code == 3 and not begun)


def test_a_run_in_the_way_is_moved_aside_only_when_asked(pipeline: Path, tmp_path: Path, capsys: Capture) -> None:
    TinyRun(tmp_path / "run").run()
    before = (tmp_path / "run/timeline.jsonl").read_bytes()
    assert call("run", pipeline) == 2
    message = capsys.readouterr().err
    assert "--fresh" in message and "is finished. See it: vime report" in message and "resume" not in message
    assert set_aside(tmp_path / "run") == tmp_path / "run.1"
    assert (tmp_path / "run.1/timeline.jsonl").read_bytes() == before
    assert set_aside(tmp_path / "run") is None


def test_a_run_that_is_not_finished_can_be_continued(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "out put" / "it's"
    TinyRun(folder).run()
    content = (folder / "timeline.jsonl").read_bytes()
    (folder / "timeline.jsonl").write_bytes(content[: content.rindex(b"\n", 0, -1) + 1])
    file = tmp_path / "small.yaml"
    file.write_text(text())
    setting = f'run_directory="{folder}"'
    assert call("run", file, "--set", setting) == 2
    message = capsys.readouterr().err
    command = re.search(r"Continue it: (vime resume .*?)\. Keep it", message)
    assert command and shlex.split(command[1]) == ["vime", "resume", str(folder)]
    with pytest.raises(InputError) as caught:
        RunDirectory.create(folder, "")
    command = re.search(r"continue it with: (vime resume .*?), or name another", str(caught.value))
    assert command and shlex.split(command[1]) == ["vime", "resume", str(folder)]
    assert "delete" not in str(caught.value)


def test_a_run_that_is_alive_is_said_to_be(pipeline: Path, tmp_path: Path, capsys: Capture) -> None:
    """Whether it was there when the pipeline was checked, or another start made it since."""
    TinyRun(tmp_path / "run").run()
    lock = RunLock(tmp_path / "run")
    assert call("run", pipeline) == 2
    checked = capsys.readouterr().err
    with pytest.raises(InputError) as caught:
        RunDirectory.create(tmp_path / "run", "")
    for message in (checked, str(caught.value)):
        assert f"alive (process {os.getpid()} on " in message and "wait until it ends" in message
        assert "delete" not in message and "resume" not in message
    lock.close()


def test_a_run_that_is_alive_is_never_moved(pipeline: Path, tmp_path: Path, capsys: Capture) -> None:
    TinyRun(tmp_path / "run").run()
    lock = RunLock(tmp_path / "run")
    before = sorted(tmp_path.iterdir())
    assert call("run", pipeline, "--fresh") == 2
    message = capsys.readouterr().err
    assert f"in use by process {os.getpid()}" in message and "--fresh moves nothing" in message
    assert sorted(tmp_path.iterdir()) == before
    lock.close()  # what a process leaves that died, however it died: the file, without the lock
    assert (tmp_path / "run/.lock").is_file()
    assert set_aside(tmp_path / "run") == tmp_path / "run.1"


def test_a_folder_that_holds_no_run_is_never_moved(pipeline: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.txt").write_text("years of work")
    assert call("run", pipeline, "--fresh") == 2
    assert "holds no run" in capsys.readouterr().err
    assert (tmp_path / "run/thesis.txt").is_file() and not (tmp_path / "run.1").exists()


def test_a_resumed_run_takes_only_what_decides_no_bit(pipeline: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/pipeline.yaml").write_text(pipeline.read_text())
    loaded = load_to_resume(str(tmp_path / "run"), ["threads=1", "stages.rollout.max_num_seqs=3"])
    assert (loaded.pipeline.threads, loaded.pipeline.stages.rollout.max_num_seqs) == (1, 3)
    for override, words in (
        ("stages.reward.on_error=drop", "stages.reward.on_error was 'stop' when this run began"),
        ("steps=3", "steps was 2"),
        ("run_directory=other", "the folder of a resumed run"),
        ("thread=1", "did you mean 'threads'"),
    ):
        assert call("resume", tmp_path / "run", "--set", "threads=1", "--set", override) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "resume"])
def test_json_ends_with_an_object_whatever_happens(
    command: str, pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    import vime.runtime.run_loop

    def last() -> dict[str, object]:
        return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))

    target: Path = pipeline
    if command == "resume":
        target = tmp_path / "run"
        target.mkdir()
        (target / "pipeline.yaml").write_text(pipeline.read_text())
    raised: list[BaseException] = []

    def fail(*arguments: object, **named: object) -> None:
        raise raised[0]

    monkeypatch.setattr(vime.runtime.run_loop, "run", fail)
    for error, code, status in (
        (Interrupted("the reward 'x' failed"), 3, "interrupted"),
        (InvariantViolation("bits differ"), 1, "failed"),
        (InputError("no such file"), 2, "failed"),
        (KeyboardInterrupt(), 3, "interrupted"),
    ):
        raised[:] = [error]
        assert call(command, target, "--json") == code
        end = last()
        assert (end["event"], end["status"], end["exit_code"]) == ("finished", status, code)
        assert str(error) in str(end["message"])
    assert call(command, target, "--json", "--set", "stepz=1") == 2
    end = last()
    assert (end["event"], end["exit_code"]) == ("finished", 2)
    assert "stepz" in json.dumps(end)
    raised[:] = [ZeroDivisionError("a bug")]
    with pytest.raises(ZeroDivisionError):
        call(command, target, "--json")
    assert last()["exit_code"] == 1


def test_the_first_signal_asks_and_the_second_interrupts() -> None:
    previous = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as switch:
        os.kill(os.getpid(), signal.SIGTERM)
        assert switch.set
        with pytest.raises(KeyboardInterrupt):
            switch.handle(signal.SIGINT, None)
    assert signal.getsignal(signal.SIGTERM) is previous
    assert not StopSwitch().set


def test_diff_and_its_codes(runs: dict[str, Path], capsys: Capture) -> None:
    assert call("diff", runs["one"], runs["same"]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert call("diff", runs["one"], runs["other"]) == 1
    assert "step 0" in capsys.readouterr().out
    assert call("diff", runs["one"], runs["other"], "--json") == 1
    assert json.loads(capsys.readouterr().out)["difference"]["step"] == 0


def test_a_difference_is_a_few_short_lines(runs: dict[str, Path], capsys: Capture) -> None:
    assert call("diff", runs["one"], runs["other"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the runs differ first at" and len(lines) > 4
    assert max(map(len, lines)) <= 120
    long = "0" * 300
    inner = Difference("version_published", 3, 7, 8, "digest", "ab" * 32, long, "of version 4 ")
    settings = (("seed", 1, 2), ("stages.train.optimizer.learning_rate", 1e-3, None))
    outer = Difference("run_started", None, 0, None, "run_seed", 1, 2, "", settings=settings, consequence=inner)
    lines = difference_lines(outer)
    assert max(map(len, lines)) <= 120
    assert [line.strip() for line in lines] == [
        "the runs were asked for different things, first at",
        "run_started (events 0 and none)",
        "run_seed  1",
        "2",
        "settings that differ:",
        f"{'seed':<36}  1",
        "2",
        "stages.train.optimizer.learning_rate  0.001",
        "None",
        "what was computed differs first at",
        "step 3, version_published of version 4 (events 7 and 8)",
        f"digest  {'ab' * 32}",
        "0" * 93 + "...",
    ]


def test_timeline_lists_filters_and_verifies(runs: dict[str, Path], capsys: Capture) -> None:
    assert call("timeline", runs["one"], "--type", "batch_assigned", "--json") == 0
    captured = capsys.readouterr()
    assert [json.loads(line)["type"] for line in captured.out.splitlines()] == ["batch_assigned"] * 3
    assert call("timeline", runs["one"], "--type", "reward_given") == 0
    line = capsys.readouterr().out.splitlines()[0]
    reward = re.search(r'"reward":(\S+) \(f64:([0-9a-f]{16})\)', line)
    assert reward and struct.pack(">d", float(reward[1])).hex() == reward[2]
    assert re.match(r" +\d+  \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z  reward_given ", line)
    assert call("timeline", runs["one"], "--type", "batch_asigned") == 2
    assert "batch_assigned" in capsys.readouterr().err


def test_the_verdict_stands_alone(runs: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    assert call("timeline", runs["one"], "--verify") == 0
    captured = capsys.readouterr()
    assert "every invariant holds" in captured.out.splitlines()[0] and captured.err == ""
    assert len(captured.out.splitlines()) <= 3 and "batch_assigned" not in captured.out
    assert call("timeline", runs["one"], "--verify", "--json") == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["ok"] and verdict["problems"] == [] and verdict["events"] > 50
    broken = tmp_path / "broken"
    shutil.copytree(runs["one"], broken)
    (broken / "steps.jsonl").write_text("")
    assert call("timeline", broken, "--verify") == 1
    assert "steps.jsonl" in capsys.readouterr().out
    assert call("timeline", broken, "--verify", "--json") == 1
    verdict = json.loads(capsys.readouterr().out)
    assert not verdict["ok"] and "steps.jsonl" in verdict["problems"][0]
    assert call("timeline", runs["one"], "--verify", "--type", "batch_assigned") == 2
    assert "leave --type out" in capsys.readouterr().err


def test_a_damaged_log_is_named(runs: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    content = (runs["one"] / "timeline.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "timeline.jsonl").write_bytes(b"".join(content[:5] + content[6:]))
    assert call("timeline", tmp_path) == 1
    assert "Traceback" not in capsys.readouterr().err
    (tmp_path / "timeline.jsonl").write_bytes(b"".join(content)[:-9])
    assert call("timeline", tmp_path) == 0
    assert "incomplete" in capsys.readouterr().err


def test_provenance_of_versions_and_of_a_token(runs: dict[str, Path], capsys: Capture) -> None:
    assert call("provenance", runs["one"]) == 0
    assert "published" in capsys.readouterr().out
    events = [record.event for record in read_log(runs["one"] / "timeline.jsonl").records]
    sample = next(e for e in events if isinstance(e, SampleFinished) and str(e.sample_id) == "train/2/0")
    arguments = ("provenance", runs["one"], "--sample", "train/2/0", "--position")
    assert call(*arguments, sample.num_prompt_tokens, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["version"], facts["engine"]) == (1, 1, "engine-0")
    assert facts["published_digest"] == facts["served_digest"]
    assert facts["rollout_logprob_bits"] == facts["trainer_logprob_bits"]
    assert facts["sampled_at"] > 0
    assert call(*arguments, sample.num_prompt_tokens) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    decimal, bits = shown["rollout_logprob_bits"].split()
    assert struct.pack(">f", float(decimal)).hex() == bits.strip("()") == facts["rollout_logprob_bits"]
    assert shown["sampled_at"].startswith(iso_time(facts["sampled_at"])) and "T" in shown["sampled_at"]
    for position in (sample.num_prompt_tokens - 1, sample.num_prompt_tokens + sample.num_tokens):
        assert call(*arguments, position) == 2
    assert call("provenance", runs["one"], "--sample", "train/2/0") == 2
    capsys.readouterr()
    for sample in ("2/0", "foo", "train/a/0", "test/1/0", "train/1/2/3"):
        assert call("provenance", runs["one"], "--sample", sample, "--position", 1) == 2
        message = capsys.readouterr().err
        assert "a sample is NAMESPACE/PROMPT/K, as in train/12/3" in message and "unpack" not in message
    assert call("provenance", runs["one"], "--sample", "train/99/0", "--position", 1) == 2


def test_a_token_has_its_text_where_the_tokenizer_is(pipeline: Path, tmp_path: Path) -> None:
    from vime.pipeline.loading import load_pipeline, resolved_yaml
    from vime.pipeline.model import resolve_model

    loaded = load_pipeline(pipeline)
    (tmp_path / "pipeline.yaml").write_text(resolved_yaml(loaded.pipeline))
    model, _ = resolve_model(loaded)
    assert model is not None
    (token,) = model.tokenizer.encode("7", special=False)
    assert token_text(tmp_path, token) == "7" and token_text(tmp_path, None) is None
    (tmp_path / "pipeline.yaml").write_text("model: {path: gone}")
    assert token_text(tmp_path, token) is None


def test_a_reader_that_leaves_ends_a_command_quietly(runs: dict[str, Path]) -> None:
    assert without_reader("timeline", runs["one"]) == (CLOSED_PIPE, b"")  # tables of rich: test_end_to_end.py


def test_a_run_whose_reader_leaves_says_how_to_go_on(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    import vime.runtime.run_loop

    def fail(*arguments: object, **named: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(vime.runtime.run_loop, "run", fail)
    assert call("run", pipeline, "--json") == CLOSED_PIPE
    captured = capsys.readouterr()
    assert captured.out == "" and "nobody reads the output any more, so the run stopped" in captured.err


def test_doctor(capsys: Capture) -> None:
    assert call("doctor", "--json") == 0
    names = {json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()}
    assert {"fused multiply-add", "subnormal numbers", "torch", "vllm", "hip-python", "kernel cache", "disk"} <= names
    assert call("doctor") == 0
    assert "the portable profile runs here" in capsys.readouterr().out


def test_doctor_offers_only_what_this_version_uses(capsys: Capture) -> None:
    assert call("doctor", "--json") == 0
    found = {item["name"]: item for item in map(json.loads, capsys.readouterr().out.splitlines())}
    for name, key in (("vllm", "engine"), ("megatron-core", "trainer"), ("ray", "placement")):
        section = {"engine": Rollout, "trainer": Train, "placement": Pipeline}[key]
        choices = get_args(section.model_fields[key].annotation)
        usable = name.removesuffix("-core") in choices
        assert found[name]["used"] == usable
        assert ("not yet usable" in found[name]["remedy"]) != usable
        assert ("pip install" in found[name]["remedy"]) == usable
        assert usable or ", ".join(choices) in found[name]["remedy"]
    device = Pipeline.model_fields.get("device")
    devices = get_args(device.annotation) if device is not None else ("cpu",)
    for name, kind in (("CUDA devices", "cuda"), ("ROCm devices", "rocm")):
        assert found[name]["used"] == (kind in devices)
    for name, extra in (("gguf", "gguf"), ("reasoning-gym", "tasks"), ("triton", "triton")):
        assert found[name]["used"] and found[name]["remedy"].endswith(f"pip install -e '.[{extra}]'")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_doctor_is_readable_at_any_width(width: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert call("doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    starts = [line.split() for line in lines if line.startswith(("yes", "no", "NO", "not yet"))]
    assert len(starts) == len(examine())  # one beginning a finding, its name beside it
    assert any(" ".join(words[:3]) == "not yet vllm" for words in starts)


def test_doctor_notices_flushed_subnormals(capsys: Capture) -> None:
    import torch

    torch.set_flush_denormal(True)
    try:
        assert call("doctor") == 2
    finally:
        torch.set_flush_denormal(False)
    assert "cannot run" in capsys.readouterr().out


def test_help_names_every_command(capsys: Capture) -> None:
    assert call("--help") == 0
    out = capsys.readouterr().out
    for name in ("run", "resume", "check", "report", "provenance", "timeline", "diff", "doctor", "model"):
        assert name in out


def test_no_summary_of_a_command_is_cut(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    groups = [name for name, command in cli.commands.items() if isinstance(command, click.Group)]
    assert {"contract", "model", "verify"} <= set(groups)
    for arguments in ([], *([name] for name in groups)):
        assert call(*arguments, "--help") == 0
        summaries = capsys.readouterr().out.partition("Commands:")[2]
        assert summaries and "..." not in summaries
