"""What is read from a run: provenance of a token, reports, verification, differences between runs."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.store.tiny_run import TinyRun
from vime.errors import InputError, InvariantViolation
from vime.store.layout import Layout
from vime.store.lookup import token_provenance
from vime.store.provenance import rebuild_provenance
from vime.store.run_directory import RunView
from vime.store.steps import REPORT_FIELDS, read_steps, rebuild_steps
from vime.store.verify import verify_run
from vime.timeline.diff import diff_runs, first_array_difference
from vime.timeline.event import Event
from vime.timeline.events import Decision, RunStarted, SampleFinished, StepTrained
from vime.timeline.log import LogWriter, read_log
from vime.types import SampleId


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "run"
    TinyRun(path, steps=2, engines=("engine-0", "engine-1")).run()
    return path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def test_provenance_of_a_token(run: Path) -> None:
    view = RunView.open(run)
    arrays = view.step_arrays(1)
    layout = Layout.of(arrays)
    assert layout is not None
    sample_id = layout.samples[1]
    found = token_provenance(run, str(sample_id), 3)
    row = layout.response_offsets[1]
    assert (found["version"], found["kv_oldest"], found["kv_newest"], found["step"]) == (1, 1, 1, 1)
    assert found["engine"] == "engine-1" and found["token"] == arrays["tokens"][row]
    assert found["sampled_at"] == arrays["sampled_at"][row]
    assert found["rollout_logprob_bits"] == f"{arrays['rollout_logprobs'][row : row + 1].view(np.uint32)[0]:08x}"
    published = [r.event for r in view.records if r.event.type == "version_published"]
    assert found["digest"] == published[1].logical()["digest"]
    evaluated = token_provenance(run, SampleId("eval", 0, 0), 3)
    assert evaluated["version"] == 2 and evaluated["token"] is None and evaluated["step"] is None


@pytest.mark.parametrize(
    ("sample", "position", "words"),
    [
        ("train/0/0", 1, "position 1 of sample train/0/0 is a token of the prompt"),
        ("train/0/0", 99, "is no token of the sample; generated were 3 to"),
        ("train/0/0", -1, "is no token of the sample"),
        ("train/99/0", 3, "train/99/0 was not finished"),
        ("nonsense", 3, "'nonsense' is not a sample"),
        ("test/1/2", 3, "is not a sample"),
    ],
)
def test_unknown_tokens(run: Path, sample: str, position: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        token_provenance(run, sample, position)


def test_views_are_rebuilt_byte_for_byte(run: Path, tmp_path: Path) -> None:
    records = RunView.open(run).records
    rebuild_steps(records, tmp_path / "steps.jsonl")
    rebuild_provenance(records, tmp_path / "provenance.jsonl")
    for name in ("steps.jsonl", "provenance.jsonl"):
        assert (tmp_path / name).read_bytes() == (run / name).read_bytes()
    reports = read_steps(run / "steps.jsonl")
    assert [r["step"] for r in reports] == [0, 1] and reports[0]["k1"] is None and reports[0]["time_s"]["total"] >= 0
    assert [n for n in reports[0] if n in REPORT_FIELDS] == [n for n in REPORT_FIELDS if n in reports[0]]
    lines = [json.loads(line) for line in (run / "provenance.jsonl").read_text().splitlines()]
    assert [(x["event"], x["version"], x["engine"]) for x in lines[:3]] == [
        ("weight_version", 0, None),
        ("sync", 0, "engine-0"),
        ("sync", 0, "engine-1"),
    ]
    assert lines[1]["seconds"] == 0.5 and lines[1]["outcome"] == "committed" and len(lines) == 9


def test_verification_names_what_is_wrong(run: Path, copy: Path) -> None:
    assert verify_run(run).ok
    (copy / "arrays.zarr" / "step-000001" / "tokens" / "c" / "0").unlink()
    os.truncate(copy / "checkpoints" / "step-000001" / "weights.npy", 3)
    shutil.copytree(copy / "arrays.zarr" / "step-000000", copy / "arrays.zarr" / "step-000009")
    (copy / "steps.jsonl").write_text("{}\n")
    with open(copy / "timeline.jsonl", "ab") as file:
        file.write(b"{")
    problems = "\n".join(verify_run(copy).problems)
    for words in (
        "incomplete or garbled",
        "step 1, array 'tokens': chunk c/0 is missing",
        "weights.npy has 3 bytes",
        "step 9: arrays are stored that no event announced",
        "line 1 of steps.jsonl is not what the event log says",
        "steps.jsonl has 1 lines, the event log makes 2",
    ):
        assert words in problems
    lines = (copy / "timeline.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "timeline.jsonl").write_bytes(b"".join(lines[:9] + lines[10:]))
    found = verify_run(copy)
    assert "was deleted" in found.problems[0] and found.run_digest is None
    with pytest.raises(InputError, match="holds no run"):
        verify_run(copy / "checkpoints")


def test_equal_runs(run: Path, tmp_path: Path) -> None:
    """Another schedule, other engines, another place, another time: no difference, and the same digest."""
    other = TinyRun(tmp_path / "other", steps=2, order=5)
    digest = other.run()
    assert diff_runs(run, other.path) is None
    assert digest == verify_run(run).run_digest
    texts = [(path / "timeline.jsonl").read_text() for path in (run, other.path)]
    assert texts[0] != texts[1]


def test_first_differing_token(run: Path, tmp_path: Path) -> None:
    TinyRun(tmp_path / "other", steps=2, salt=1).run()
    found = diff_runs(run, tmp_path / "other")
    assert found is not None and found.step == 0 and found.event == "sample_finished"
    assert found.element is not None and found.element.sample == SampleId("train", 0, 0)
    assert found.element.array == "tokens" and found.element.position == 3 and found.element.bit is not None
    assert "sample train/0/0, position 3" in found.sentence()


def rewritten(path: Path, change: dict[int, Event]) -> None:
    """Write a run's log anew with some events changed: what a run that computed something else would log."""
    records = read_log(path / "timeline.jsonl").records
    (path / "timeline.jsonl").unlink()
    writer = LogWriter.create(path / "timeline.jsonl")
    for record in records:
        writer.append(change.get(record.seq, record.event))
    writer.close()


def test_differing_reward_and_weights(run: Path, copy: Path) -> None:
    records = RunView.open(run).records
    trained = next(r for r in records if isinstance(r.event, StepTrained))
    assert isinstance(trained.event, StepTrained)
    rewritten(copy, {trained.seq: replace(trained.event, loss=float(np.nextafter(trained.event.loss, 1)))})
    found = diff_runs(run, copy)
    assert found is not None and (found.event, found.field, found.left_seq) == ("step_trained", "loss", trained.seq)


def test_deployment_and_observations_never_differ(run: Path, copy: Path) -> None:
    first = RunView.open(run).records[0]
    assert isinstance(first.event, RunStarted)
    elsewhere = replace(first.event, resolved_digest="x", placement={"x": 1}, observed={"host": "h"})
    rewritten(copy, {0: elsewhere})
    assert diff_runs(run, copy) is None
    rewritten(copy, {0: replace(first.event, run_seed=8)})
    found = diff_runs(run, copy)
    assert found is not None and found.field == "run_seed" and (found.left, found.right) == (7, 8)


def test_shorter_run_and_additional_event(run: Path, copy: Path) -> None:
    records = RunView.open(run).records
    os.truncate(copy / "timeline.jsonl", records[-2].end)
    found = diff_runs(run, copy)
    assert found is not None and found.event == "run_finished" and found.right == "the run's end"
    assert found.right_seq is None
    rewritten(copy, {len(records) - 2: Decision(kind="k", key="1", value=1)})
    found = diff_runs(run, copy)
    assert found is not None and found.field == "event"


def test_diff_reads_the_arrays(run: Path, copy: Path) -> None:
    """Equal logs are not enough: a deleted chunk would read as zeros."""
    (copy / "arrays.zarr" / "step-000000" / "tokens" / "c" / "0").unlink()
    with pytest.raises(InvariantViolation, match="step 0, array 'tokens': chunk c/0 is missing"):
        diff_runs(run, copy)


def test_every_flipped_bit_is_located(run: Path) -> None:
    arrays = RunView.open(run).step_arrays(0)
    layout = Layout.of(arrays)
    assert layout is not None
    assert first_array_difference(arrays, {k: v.copy() for k, v in arrays.items()}) is None
    row = layout.response_offsets[2] + 0
    for name, bit in (("rollout_logprobs", 0), ("trainer_logprobs", 31), ("tokens", 5)):
        changed = {k: v.copy() for k, v in arrays.items()}
        view = changed[name].view(f"u{changed[name].dtype.itemsize}")
        view[row] ^= view.dtype.type(1 << bit)
        found = first_array_difference(arrays, changed)
        assert found is not None and (found.array, found.bit, found.index) == (name, bit, (row,))
        assert found.sample == layout.samples[2] and found.position == 3
    rewards = {**arrays, "rewards": arrays["rewards"] + np.asarray([0, 0, 0, 1.0])}
    found = first_array_difference(arrays, rewards)
    assert found is not None and found.array == "rewards" and found.sample == layout.samples[3]
    assert found.position is None and "sample" in found.sentence()
    less = {k: v for k, v in arrays.items() if k != "rewards"}
    found = first_array_difference(arrays, less)
    assert found is not None and (found.array, found.left, found.right) == ("rewards", "stored", "missing")
    times = {**arrays, "sampled_at": arrays["sampled_at"] + 1}
    assert first_array_difference(arrays, times) is None


def test_sample_events_of_the_run(run: Path) -> None:
    finished = [r.event for r in RunView.open(run).records if isinstance(r.event, SampleFinished)]
    assert len(finished) == 2 * 4 + 2 * 2 and all("preemptions" in e.observed for e in finished)
