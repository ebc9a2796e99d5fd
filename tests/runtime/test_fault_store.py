"""A finished run whose log or arrays were tampered with: every reader says so, and `diff` names what differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runtime.helpers import run
from vime.errors import InvariantViolation
from vime.store.run_directory import RunView
from vime.store.verify import verify_run
from vime.timeline.diff import diff_runs
from vime.timeline.event import Scope
from vime.timeline.events import RunFinished
from vime.timeline.invariants import check_all
from vime.timeline.log import LogWriter

LOG = "timeline.jsonl"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run with evaluations and a checkpoint a step."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert run(directory, "stages.evaluate.prompts=2", "stages.evaluate.every=1", "checkpoint.every=1").exit_code == 0
    return directory


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_an_intact_copy_is_equal_and_verified(vime, whole, copy):
    assert vime.call("diff", str(whole), str(copy)) == (0, "the runs are equal, bit for bit\n")
    code, printed = vime.call("timeline", str(copy), "--verify")
    assert code == 0 and "every invariant holds; the arrays of 2 steps and 2 checkpoints are intact" in printed
    assert "pipeline.yaml, contract.json, evidence.json: the bytes that the log announced" in printed
    assert "report.html is a view for people and is not verified" in printed


@pytest.mark.parametrize("line", [0, 1, 9, 25, -2])
def test_a_deleted_event_is_caught_by_every_command(vime, whole, copy, line):
    lines = (copy / LOG).read_bytes().splitlines(keepends=True)
    del lines[line]
    (copy / LOG).write_bytes(b"".join(lines))
    number = range(len(lines) + 1)[line] + 1  # of the line that now stands there
    for arguments in (
        ["diff", str(whole), str(copy)],
        ["report", str(copy)],
        ["timeline", str(copy), "--verify"],
        ["provenance", str(copy)],
        ["resume", str(copy)],
    ):
        code, printed = vime.call(*arguments)
        assert code == 1 and LOG in printed and f"line {number}" in printed, (arguments, printed)


def test_an_edited_event_is_caught(vime, copy):
    content = (copy / LOG).read_bytes()
    assert content.count(b'"reward":"f64:3f') > 0
    (copy / LOG).write_bytes(content.replace(b'"reward":"f64:3f', b'"reward":"f64:40', 1))
    code, printed = vime.call("timeline", str(copy), "--verify")
    assert code == 1 and "line " in printed and LOG in printed


def test_no_event_can_be_left_out_of_a_log_whose_chain_was_forged(whole, copy, tmp_path):
    """Hashes and checksums made anew over all events but one: invariants, checkpoints or the diff notice."""
    events = [record.event for record in RunView.open(whole).records]
    undetected = []
    for left_out, missing in enumerate(events):
        rest = events[:left_out] + events[left_out + 1 :]
        try:
            check_all(rest)
        except InvariantViolation:
            continue
        (copy / LOG).unlink()
        writer = LogWriter.create(copy / LOG)
        for event in rest:
            writer.append(event)
        writer.close()
        found = verify_run(copy)
        unfinished = isinstance(missing, RunFinished)
        if not found.ok or unfinished:
            named = any(word in problem for problem in found.problems for word in ("checkpoint", "has the SHA-256"))
            assert unfinished or named, found.problems
        elif missing.scope is Scope.RUN:
            undetected.append(missing.describe())
        if missing.scope is Scope.RUN and found.ok:
            assert diff_runs(whole, copy) is not None
    assert undetected == []


def test_a_log_cut_at_its_last_event_is_unfinished_and_can_be_resumed(vime, whole, copy):
    lines = (copy / LOG).read_bytes().splitlines(keepends=True)
    (copy / LOG).write_bytes(b"".join(lines[:-1]))
    difference = diff_runs(whole, copy)
    assert difference is not None and (difference.left_seq, difference.right_seq) == (len(lines) - 1, None)
    assert vime.call("resume", str(copy))[0] == 0
    assert diff_runs(whole, copy) is None


def chunks(run: Path, step: int, array: str) -> list[Path]:
    """The chunk files of an array."""
    folder = run / "arrays.zarr" / f"step-{step:06d}" / array
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "zarr.json")


@pytest.mark.parametrize("array", ["tokens", "rollout_logprobs", "trainer_digests", "advantages"])
def test_a_deleted_chunk_is_caught(vime, whole, copy, array):
    # zeros on both sides would compare equal: the same chunk goes in both runs
    other = Path(shutil.copytree(copy, copy.with_name("other")))
    for directory in (copy, other):
        (chunk,) = chunks(directory, 1, array)
        chunk.unlink()
    for arguments in (
        ["diff", str(copy), str(other)],
        ["diff", str(whole), str(copy)],
        ["timeline", str(copy), "--verify"],
        ["provenance", str(copy), "--sample", "train/2/0", "--position", "22"],
    ):
        code, printed = vime.call(*arguments)
        assert code == 1 and array in printed and "step" in printed, (arguments, printed)


def test_a_flipped_bit_of_a_chunk_and_a_deleted_step_are_caught(vime, whole, copy):
    (chunk,) = chunks(copy, 0, "trainer_logprobs")
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    code, printed = vime.call("diff", str(whole), str(copy))
    assert code == 1 and "trainer_logprobs" in printed
    shutil.rmtree(copy / "arrays.zarr" / "step-000000")
    code, printed = vime.call("diff", str(whole), str(copy))
    assert code == 1 and "step 0" in printed


def test_arrays_of_another_step_are_caught_by_every_command(vime, whole, copy):
    shutil.rmtree(copy / "arrays.zarr" / "step-000001" / "sampled_at")
    shutil.copytree(
        copy / "arrays.zarr" / "step-000000" / "sampled_at", copy / "arrays.zarr" / "step-000001" / "sampled_at"
    )
    for arguments in (
        ["diff", str(whole), str(copy)],
        ["timeline", str(copy), "--verify"],
        ["provenance", str(copy), "--sample", "train/2/0", "--position", "22"],
        ["resume", str(copy)],
    ):
        code, printed = vime.call(*arguments)
        assert code == 1 and "step 1, array 'sampled_at': its folder says that it holds" in printed, printed


def test_a_changed_checkpoint_is_caught(vime, copy):
    weights = copy / "checkpoints" / "step-000001"
    file = next(path for path in sorted(weights.rglob("*")) if path.suffix == ".safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, printed = vime.call("timeline", str(copy), "--verify")
    assert code == 1 and file.name in printed


def test_an_additional_file_in_a_checkpoint_is_named(vime, copy):
    lines = (copy / LOG).read_bytes().splitlines(keepends=True)
    (copy / LOG).write_bytes(b"".join(lines[:-1]))  # there is something left to resume
    (copy / "checkpoints" / "step-000001" / "adapter.safetensors").write_bytes(b"x")
    for arguments in (["timeline", str(copy), "--verify"], ["resume", str(copy)]):
        code, printed = vime.call(*arguments)
        assert code == 1 and "holds adapter.safetensors, which nothing announced" in printed, printed


@pytest.mark.parametrize("view", ["steps.jsonl", "provenance.jsonl"])
def test_a_view_that_is_not_what_the_log_says_is_caught(vime, copy, view):
    lines = (copy / view).read_text().splitlines(keepends=True)
    (copy / view).write_text("".join(lines[:-1]))
    code, printed = vime.call("timeline", str(copy), "--verify")
    assert code == 1 and f"{view} has {len(lines) - 1} lines, the event log makes {len(lines)}" in printed


@pytest.mark.parametrize("view", ["steps.jsonl", "provenance.jsonl", "checkpoints/step-000001/manifest.json"])
@pytest.mark.parametrize("change", ["newline", "space", "twice", "end"])
def test_every_byte_of_a_view_and_a_manifest_counts(vime, copy, view, change):
    """Also those that mean the same to a reader of JSON."""
    content = (copy / view).read_bytes()
    at = content.index(b"\n")
    changed = {
        "newline": content[:at] + b"\x0b" + content[at + 1 :],  # one bit; str.splitlines() splits there too
        "space": content.replace(b": ", b":  ", 1),
        "twice": content.replace(b"{", b'{"step": 99, ', 1),
        "end": content[:-1],
    }[change]
    (copy / view).write_bytes(changed)
    code, printed = vime.call("timeline", str(copy), "--verify")
    assert code == 1 and Path(view).name in printed, printed


@pytest.mark.parametrize("file", ["pipeline.yaml", "arrays.zarr/zarr.json", "checkpoints/step-000001/manifest.json"])
def test_damage_of_a_run_that_is_not_finished_is_named(vime, copy, file):
    lines = (copy / LOG).read_bytes().splitlines(keepends=True)
    (copy / LOG).write_bytes(b"".join(lines[:-1]))
    if file == "pipeline.yaml":
        (copy / file).unlink()
    else:
        (copy / file).write_text("[" * 100_000)
    code, printed = vime.call("timeline", str(copy), "--verify")
    assert code == 1 and Path(file).name in printed, printed
    if file == "arrays.zarr/zarr.json":
        assert vime.call("resume", str(copy))[0] == 0
        assert vime.call("timeline", str(copy), "--verify")[0] == 0


ANNOUNCED = ["pipeline.yaml", "contract.json", "evidence.json"]


def nudge(file: Path) -> None:
    """Another bit of a digit, so that the file still parses."""
    content = file.read_bytes()
    at = next(i for i in range(len(content) - 1, 0, -1) if content[i : i + 1].isdigit())
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


@pytest.mark.parametrize("name", ANNOUNCED)
def test_a_file_that_is_not_what_the_log_announced_is_caught(vime, copy, name):
    nudge(copy / name)
    code, printed = vime.call("timeline", str(copy), "--verify")
    assert code == 1 and f"{copy / name} has the SHA-256" in printed and "announced was" in printed
    (copy / name).unlink()
    code, printed = vime.call("timeline", str(copy), "--verify")
    assert code == 1 and f"{copy / name} is gone" in printed


def test_a_file_that_nothing_announced_is_caught(vime, copy):
    lines = (copy / LOG).read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"file":"evidence.json"' not in line]
    assert len(lines) - len(kept) == 2  # of the first step's checkpoint, and of the end
    events = [record.event for record in RunView.open(copy).records]
    (copy / LOG).unlink()
    writer = LogWriter.create(copy / LOG)
    for event in events:
        if getattr(event, "file", "") != "evidence.json":
            writer.append(event)
    writer.close()
    code, printed = vime.call("timeline", str(copy), "--verify")
    assert code == 1 and "nothing in the log announced it" in printed


@pytest.mark.parametrize("content", ["{", "[1]", '{"trainer": 7}', '{"trainer": {"calls": [3]}}', ""])
@pytest.mark.parametrize("name", ["evidence.json", "contract.json"])
def test_garbage_in_a_file_that_the_report_is_made_of_is_a_sentence(vime, copy, name, content):
    (copy / name).write_text(content)
    report = (copy / "report.html").read_bytes()
    code, printed = vime.call("resume", str(copy))
    assert code == 1 and f"{copy / name} has the SHA-256" in printed and "Traceback" not in printed
    assert "put that back, or remove the file" in printed and (copy / "report.html").read_bytes() == report
    (copy / name).unlink()
    code, printed = vime.call("resume", str(copy))
    assert code == 0 and f"{copy / name} is gone: the report is written without it" in printed
    assert "recorded" in (copy / "report.html").read_text()


def test_the_files_of_a_run_that_stopped_are_those_that_were_announced(vime):
    ended = vime.run(f"stages.filter.function={__name__}.failing_filter")
    assert ended.code == 3 and verify_run(ended.directory).problems == ()
    last = ended.events[-1]
    assert last.type == "run_interrupted"  # what else is said of the stop comes before
    for name in ANNOUNCED:
        assert name in verify_run(ended.directory).files
        before = (ended.directory / name).read_bytes()
        nudge(ended.directory / name)
        (problem,) = verify_run(ended.directory).problems
        assert f"{name} has the SHA-256" in problem
        (ended.directory / name).write_bytes(before)


def failing_filter(samples, rewards):
    """Fails."""
    raise RuntimeError("no judge")
