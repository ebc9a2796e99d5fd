"""A run that is killed anywhere ends with the digest of an uninterrupted one."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.tiny_run import TinyRun
from vime.errors import InputError, InvariantViolation
from vime.store.run_directory import RunDirectory, RunView
from vime.store.verify import verify_run
from vime.timeline.diff import diff_runs
from vime.timeline.events import ArraysRestored, ArraysWritten, CheckpointWritten, RunFinished, RunResumed


class Killed(BaseException):
    """Stands for the death of the process."""


@pytest.fixture(autouse=True, scope="module")
def without_syncs() -> Iterator[None]:
    """A killed process loses no page cache: syncs would only cost time here (test_files looks at their order)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("whole") / "run"
    return path, TinyRun(path).run()


def count_hooks(path: Path) -> int:
    calls: list[str] = []
    TinyRun(path, hook=calls.append).run()
    return len(calls)


def test_uninterrupted_run_verifies(whole: tuple[Path, str]) -> None:
    found = verify_run(whole[0])
    assert found.ok, found.problems
    assert found.finished and found.steps == 3 and found.checkpoints == 1 and found.run_digest == whole[1]


def test_killed_by_an_exception_at_sampled_moments(whole: tuple[Path, str], tmp_path: Path) -> None:
    total = count_hooks(tmp_path / "count")
    for moment in range(1, total, 19):
        path = tmp_path / f"run-{moment}"
        left = [moment]

        def hook(where: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed(where)

        with pytest.raises(Killed):
            TinyRun(path, hook=hook).run()
        assert TinyRun(path).run() == whole[1]
    assert diff_runs(whole[0], path) is None
    found = verify_run(path)
    assert found.ok, found.problems


def test_sigkill_of_a_real_process(whole: tuple[Path, str], tmp_path: Path) -> None:
    for moment in (40, 61, 75, 110):
        path = tmp_path / f"run-{moment}"
        left = [moment]

        def hook(where: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if child == 0:
            TinyRun(path, hook=hook).run()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert TinyRun(path).run() == whole[1]
    assert verify_run(path).ok


def test_killed_twice_in_the_same_step(whole: tuple[Path, str], tmp_path: Path) -> None:
    path = tmp_path / "run"
    for moment in (30, 35, 70, 20, 20, 90):
        left = [moment]

        def hook(where: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Killed(where)

        try:
            TinyRun(path, hook=hook).run()
        except Killed:
            continue
    assert TinyRun(path).run() == whole[1]
    found = verify_run(path)
    assert found.ok, found.problems


def test_log_cut_at_every_byte_of_its_last_three_records(whole: tuple[Path, str], tmp_path: Path) -> None:
    records = RunView.open(whole[0]).records
    content = (whole[0] / "timeline.jsonl").read_bytes()
    start = records[-4].end
    cuts = [*range(start, len(content), 301), *(r.end for r in records[-3:]), *(r.end - 1 for r in records[-2:])]
    for cut in cuts:
        path = tmp_path / f"cut-{cut}"
        shutil.copytree(whole[0], path)
        os.truncate(path / "timeline.jsonl", cut)
        for name in ("steps.jsonl", "provenance.jsonl", ".lock"):
            (path / name).unlink()
        assert TinyRun(path).run() == whole[1]
    assert verify_run(path).ok


def test_log_cut_anywhere_else(whole: tuple[Path, str], tmp_path: Path) -> None:
    records = RunView.open(whole[0]).records
    for seq in range(1, len(records), 17):
        path = tmp_path / f"cut-{seq}"
        shutil.copytree(whole[0], path)
        os.truncate(path / "timeline.jsonl", records[seq].end - 3)
        assert TinyRun(path).run() == whole[1]
    assert diff_runs(whole[0], path) is None


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a run but its lock."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("left", [0, 40])
@pytest.mark.parametrize("only", ["", "arrays.zarr", "checkpoints", "steps.jsonl", "provenance.jsonl"])
def test_an_emptied_log_beside_a_run_is_refused_and_nothing_deleted(
    whole: tuple[Path, str], tmp_path: Path, left: int, only: str
) -> None:
    shutil.copytree(whole[0], path := tmp_path / "run")
    for name in ("arrays.zarr", "checkpoints", "steps.jsonl", "provenance.jsonl"):
        if only and name != only:
            remove = shutil.rmtree if (path / name).is_dir() else os.unlink
            remove(path / name)
    os.truncate(path / "timeline.jsonl", left)
    before = contents(path)
    with pytest.raises(
        InvariantViolation, match=r"holds no event, but .* are there: .* Nothing was changed"
    ) as refused:
        TinyRun(path).run()
    assert only not in ("arrays.zarr", "") or "the arrays of steps 0, 1, 2" in str(refused.value)
    assert contents(path) == before
    assert any("holds no event" in problem for problem in verify_run(path).problems)


def test_an_empty_log_with_nothing_beside_it_is_a_run_that_never_began(whole: tuple[Path, str], tmp_path: Path) -> None:
    RunDirectory.create(path := tmp_path / "run", "name: tiny\n").close()
    assert (path / "timeline.jsonl").stat().st_size == 0 and verify_run(path).ok
    (path / "report.html").write_text("stopped before it began")
    assert TinyRun(path).run() == whole[1]


def test_what_no_crash_leaves_behind_a_cut_log_is_kept_and_named(whole: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(whole[0], path := tmp_path / "run")
    os.truncate(path / "timeline.jsonl", RunView.open(path).records[1].end)
    odd = "the arrays of steps 0, 1, 2, the checkpoint of step 1 are stored, but the log ends before these steps"
    assert any(problem.startswith(odd) for problem in verify_run(path).problems)
    before = contents(path)
    with RunDirectory.open_for_resume(path) as directory:
        (said,) = directory.found
    assert said.startswith(odd) and str(path / "set-aside" / "1") in said
    kept = contents(path / "set-aside" / "1")
    assert kept == {name: before[name] for name in before if name.startswith(("arrays.zarr/step-", "checkpoints/"))}
    assert TinyRun(path).run() == whole[1] and verify_run(path).ok


def test_what_a_crash_can_leave_is_no_sign_of_a_cut_log(whole: tuple[Path, str], tmp_path: Path) -> None:
    records = RunView.open(whole[0]).records
    for kind in (ArraysWritten, CheckpointWritten):
        path = tmp_path / kind.type
        shutil.copytree(whole[0], path)
        step = [r for r in records if isinstance(r.event, kind)][-1]
        os.truncate(path / "timeline.jsonl", step.end - 5)  # stored, and the announcement lost
        later = [n for n in (0, 1, 2) if n > step.event.step]  # type: ignore[attr-defined]
        for number in later:
            shutil.rmtree(path / "arrays.zarr" / f"step-{number:06d}")
        problems = verify_run(path).problems
        assert len(problems) == 1 and "incomplete or garbled" in problems[0]
        with RunDirectory.open_for_resume(path) as directory:
            assert directory.found == ()


def test_folders_of_other_names_are_left_alone_and_named(whole: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(whole[0], path := tmp_path / "run")
    cut_after(path, ArraysWritten)
    odd = ["step-x", "step-1", "step-\u0663\u0663\u0663\u0663\u0663\u0663", "notes"]
    for name in odd:
        (path / "arrays.zarr" / name).mkdir()
        (path / "checkpoints" / name).mkdir()
    assert TinyRun(path).run() == whole[1]
    problems = "\n".join(verify_run(path).problems)
    shutil.rmtree(path / "checkpoints")
    assert any("manifest.json cannot be read" in problem for problem in verify_run(path).problems)
    for name in odd:
        assert f"{name} in {path / 'arrays.zarr'} is no step's" in problems
        assert f"{name} in {path / 'checkpoints'} is no step's" in problems


def test_a_checkpoint_that_was_deleted_and_is_back_is_named(tmp_path: Path) -> None:
    TinyRun(path := tmp_path / "run", steps=6, keep=1).run()
    written = [r.event.step for r in RunView.open(path).records if isinstance(r.event, CheckpointWritten)]
    deleted = [step for step in written if not (path / "checkpoints" / f"step-{step:06d}").exists()]
    assert deleted and verify_run(path).ok
    (path / "checkpoints" / f"step-{deleted[0]:06d}").mkdir()
    due = f"step {deleted[0]}: a checkpoint is stored that was deleted when later ones were written"
    assert verify_run(path).problems == (due,)


def cut_after(path: Path, kind: type) -> None:
    last = [r for r in RunView.open(path).records if isinstance(r.event, kind)][-1]
    os.truncate(path / "timeline.jsonl", last.end)


def test_damaged_checkpoint_falls_back_and_says_so(whole: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(whole[0], path := tmp_path / "run")
    cut_after(path, CheckpointWritten)
    os.truncate(path / "checkpoints" / "step-000001" / "weights.npy", 100)
    with RunDirectory.open_for_resume(path) as directory:
        assert directory.resumption.checkpoint_step is None and directory.resume_checkpoint() is None
        (said,) = directory.resumption.rejected
        assert "weights.npy has 100 bytes, expected 160" in said
    assert TinyRun(path).run() == whole[1]
    resumed = [r.event for r in RunView.open(path).records if isinstance(r.event, RunResumed)]
    assert resumed[0].observed["rejected_checkpoints"] == [said]
    assert verify_run(path).ok


def test_an_additional_file_in_a_checkpoint_is_named_and_costs_nothing(whole: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(whole[0], path := tmp_path / "run")
    cut_after(path, ArraysWritten)
    extra = path / "checkpoints" / "step-000001" / "weights.npy.orig"
    extra.write_bytes(b"x")
    named = "the checkpoint of step 1 .*holds weights.npy.orig, which nothing announced"
    assert re.search(named, "\n".join(verify_run(path).problems))
    with pytest.raises(InvariantViolation, match=named):  # not a reason to go back to the checkpoint before
        TinyRun(path).run()
    extra.unlink()
    with RunDirectory.open_for_resume(path) as directory:
        assert directory.resumption.checkpoint_step == 1 and directory.resumption.rejected == ()
    assert TinyRun(path).run() == whole[1] and verify_run(path).ok


def test_fall_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    digest = TinyRun(tmp_path / "whole", steps=5).run()
    shutil.copytree(tmp_path / "whole", path := tmp_path / "run")
    cut_after(path, ArraysWritten)
    (path / "checkpoints" / "step-000003" / "weights.npy").unlink()
    with RunDirectory.open_for_resume(path) as directory:
        assert directory.resumption.checkpoint_step == 1
    assert TinyRun(path, steps=5).run() == digest
    assert verify_run(path).ok and diff_runs(tmp_path / "whole", path) is None


def test_orphans_are_removed_and_announced_arrays_kept(whole: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(whole[0], path := tmp_path / "run")
    last = [r for r in RunView.open(path).records if isinstance(r.event, ArraysWritten)][-1]
    os.truncate(path / "timeline.jsonl", last.end - 5)
    with RunDirectory.open_for_resume(path) as directory:
        assert directory.arrays.steps() == [0, 1]
    shutil.copytree(whole[0], again := tmp_path / "again")
    os.truncate(again / "timeline.jsonl", last.end)
    before = (again / "arrays.zarr" / "step-000002").stat().st_ino
    assert TinyRun(again).run() == whole[1]
    assert (again / "arrays.zarr" / "step-000002").stat().st_ino == before


def test_arrays_lost_after_their_announcement_are_made_again(whole: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(whole[0], path := tmp_path / "run")
    cut_after(path, ArraysWritten)
    shutil.rmtree(path / "arrays.zarr" / "step-000002")
    assert TinyRun(path).run() == whole[1]
    assert verify_run(path).ok

    again = [r.event for r in RunView.open(path).records if isinstance(r.event, ArraysRestored)]
    assert [event.step for event in again] == [2]
    # the log was told what the clock showed this time: the first announcement's wall times are another run's now
    view = RunView.open(path)
    first = next(r.event for r in view.records if isinstance(r.event, ArraysWritten) and r.event.step == 2)
    assert "array 'sampled_at'" in str(view.arrays.foreign(2, first.stored))
    assert view.step_arrays(2)["sampled_at"].shape == view.step_arrays(2)["tokens"].shape


@pytest.mark.parametrize("event", [RunFinished, ArraysWritten])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("origin", ["another run", "another step", "another run's wall times"])
def test_foreign_arrays_are_refused_by_resume_and_verify(
    whole: tuple[Path, str], tmp_path: Path, event: type, step: int, origin: str
) -> None:
    """Whether the step is done, or is about to be made again after the checkpoint of step 1."""
    TinyRun(other := tmp_path / "other", salt=origin == "another run").run()
    shutil.copytree(whole[0], path := tmp_path / "run")
    cut_after(path, event)
    folder = f"arrays.zarr/step-{step:06d}"
    if origin == "another run's wall times":
        folder += "/sampled_at"
    source = other / folder if origin != "another step" else path / "arrays.zarr" / "step-000001"
    shutil.rmtree(path / folder)
    shutil.copytree(source, path / folder)
    assert any(f"step {step}" in problem for problem in verify_run(path).problems)
    if origin == "another run's wall times" and event is ArraysWritten and step == 2:
        assert TinyRun(path).run() == whole[1]  # a crash may leave this: written again, and announced
        assert verify_run(path).ok
        return
    before = contents(path / "arrays.zarr")
    with pytest.raises(InvariantViolation, match=rf"step {step}.*(another step or run|of step 1)\. Nothing was comp"):
        TinyRun(path).run()
    assert contents(path / "arrays.zarr") == before
    shutil.rmtree(path / "arrays.zarr" / f"step-{step:06d}")
    with RunDirectory.open_for_resume(path) as directory:
        gone = [f"step {step}: its arrays were announced"] * (event is RunFinished or step == 0)
        assert [said[: len(due)] for said, due in zip(directory.found, gone, strict=True)] == gone
    assert TinyRun(path).run() == whole[1]


def test_replay_that_computes_something_else_is_refused(whole: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(whole[0], path := tmp_path / "run")
    cut_after(path, ArraysWritten)
    size = (path / "timeline.jsonl").stat().st_size
    with pytest.raises(InvariantViolation, match=r"differs from its log at event \d+ \(sample_finished"):
        TinyRun(path, salt=1).run()
    verified = verify_run(path).problems  # nothing of the wrong execution was written, its arrays included
    assert verified == (), verified
    assert TinyRun(path).run() == whole[1]
    assert (path / "timeline.jsonl").stat().st_size > size


def test_rewards_and_decisions_are_replayed_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    left = [150]

    def hook(where: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed(where)

    first = TinyRun(path, with_clock=True, hook=hook)
    with pytest.raises(Killed):
        first.run()
    # A reward that would now be another one is not asked for where the log has it.
    second = TinyRun(path, with_clock=True)
    second.run()
    again = first.clock_calls + second.clock_calls
    train = [call for call in again if call.startswith("train")]
    assert len(train) == len(set(train)) == 12
    decided = [r for r in RunView.open(path).records if r.event.type == "decision"]
    assert len(decided) == 12 + 3 * 2


def test_resume_of_a_finished_run_changes_nothing(whole: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(whole[0], path := tmp_path / "run")
    before = (path / "timeline.jsonl").read_bytes()
    with RunDirectory.open_for_resume(path) as directory:
        assert directory.resumption.finished and directory.timeline.run_digest() == whole[1]
    assert (path / "timeline.jsonl").read_bytes() == before


def test_killed_right_after_creation_and_with_bare_folders_gone(whole: tuple[Path, str], tmp_path: Path) -> None:
    RunDirectory.create(path := tmp_path / "run", "name: tiny\n").close()
    shutil.rmtree(path / ".staging")
    (path / "checkpoints").rmdir()
    shutil.rmtree(path / "arrays.zarr")
    assert TinyRun(path).run() == whole[1]
    (path / "arrays.zarr" / "zarr.json").unlink()
    cut_after(path, ArraysWritten)
    assert TinyRun(path).run() == whole[1]
    assert (path / "arrays.zarr" / "zarr.json").is_file() and verify_run(path).ok


def test_resume_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no run"):
        RunDirectory.open_for_resume(tmp_path / "nothing")


def test_create_refuses_an_existing_run(whole: tuple[Path, str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="vime resume"):
        RunDirectory.create(whole[0], "")
    (tmp_path / "x").write_text("")
    with pytest.raises(InputError, match="not empty"):
        RunDirectory.create(tmp_path, "")
    RunDirectory.create(tmp_path / "a" / "b", "name: x\n").close()
    assert (tmp_path / "a" / "b" / "pipeline.yaml").read_text() == "name: x\n"


def test_abandoned_creation_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / ".run.new-1").mkdir()
    RunDirectory.create(tmp_path / "run", "").close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]
