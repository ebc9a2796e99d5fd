"""The lock, the order of writes, and full disks."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.tiny_run import TinyRun
from vime.errors import InputError, Interrupted, InvariantViolation, VimeError
from vime.store.files import write_file
from vime.store.lock import RunLock
from vime.store.run_directory import RunDirectory, RunView
from vime.timeline.events import RunStarted

HOLD = """
import sys
from pathlib import Path
from vime.store.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_second_process_is_refused_by_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunDirectory.create(run, "").close()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=rf"in use by process {holder.pid} on "):
            RunDirectory.open_for_resume(run)
        RunView.open(run)  # readers need no lock
        holder.kill()
    with RunDirectory.open_for_resume(run), pytest.raises(InputError, match=rf"process {os.getpid()} on"):
        RunDirectory.open_for_resume(run)


def test_lock_without_a_readable_holder(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    (tmp_path / ".lock").write_text("garbage")
    with pytest.raises(InputError, match="in use by another process"):
        RunLock(tmp_path)
    lock.close()
    RunLock(tmp_path).close()


def test_files_are_durable_before_the_event_that_announces_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything under a group or checkpoint is synced, then renamed, then its parent synced, then the event is."""
    done: list[tuple[str, str]] = []
    replace = os.replace

    def fsync(descriptor: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def rename(source: str, target: str) -> None:
        done.append(("rename", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    run = tmp_path / "run"
    TinyRun(run, steps=2).run()
    log = str(run / "timeline.jsonl")
    for folder, staged in (
        ("arrays.zarr/step-000001", "arrays-step-000001"),
        ("checkpoints/step-000001", "checkpoint-"),
    ):
        moved = done.index(("rename", str(run / folder)))
        synced = {path for what, path in done[:moved] if what == "sync" and staged in path}
        inside = [p for p in (run / folder).rglob("*")]
        for path in inside:
            relative = str(path.relative_to(run / folder))
            assert any(s.endswith("/" + relative) for s in synced), relative
        assert done[moved + 1] == ("sync", str((run / folder).parent))
        assert done[moved + 2] == ("sync", log)


def test_write_file_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evidence.json"
    write_file(path, b"old")

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(Exception, match=r"evidence.json failed: Input/output error"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["evidence.json"]


def test_small_files(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", "seed: 1\n") as directory:
        with pytest.raises(InvariantViolation, match="the first event of a run is run_started"):
            directory.write_contract({"b": 1, "a": [2]})
        assert not (tmp_path / "run" / "contract.json").exists()
        directory.timeline.append(RunStarted(run_seed=1, pipeline_digest="p", steps=1, engines=("e",)))
        directory.write_contract({"b": 1, "a": [2]})
        directory.write_evidence({"owner": "x"})
        directory.write_evidence({"owner": "x"})  # what is announced already is not announced again
        kinds = [record.event.type for record in RunView.open(tmp_path / "run").records]
        assert kinds == ["run_started", "file_announced", "file_announced"]
        directory.write_report("<p>")
        assert directory.pipeline == "seed: 1\n"
        with pytest.raises(InputError, match="step 3 has no arrays"):
            directory.step_arrays(3)
    assert json.loads((tmp_path / "run" / "contract.json").read_text()) == {"a": [2], "b": 1}
    assert (tmp_path / "run" / "report.html").read_text() == "<p>"


def test_full_disk_stops_the_run_resumable(tmp_path: Path) -> None:
    expected = TinyRun(tmp_path / "whole", steps=2).run()
    run, said = tmp_path / "run", tmp_path / "said"
    child = os.fork()
    if child == 0:  # a process of its own, because the limit stays
        resource.setrlimit(resource.RLIMIT_FSIZE, (14000, 14000))
        code = 0
        try:
            TinyRun(run, steps=2).run()
        except VimeError as error:
            said.write_text(str(error))
            code = error.exit_code
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == Interrupted.exit_code
    assert "the file-size limit is reached" in said.read_text() and "resume" in said.read_text()
    assert TinyRun(run, steps=2).run() == expected
