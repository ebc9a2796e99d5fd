"""Full disks and signals stop a run so that it can be resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import multiprocessing
import os
import re
import resource
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.runtime.crash.disk import FileOperations
from tests.runtime.crash.scene import (
    PLAIN,
    Whole,
    differences,
    vime_in_child,
)
from vime.errors import Interrupted
from vime.runtime.process import ProcessEngine, _answer
from vime.runtime.reader import Reader
from vime.store.run_directory import RunDirectory, RunView
from vime.sync.participant import Participant
from vime.sync.transports import make_transport
from vime.timeline.event import Event
from vime.timeline.events import RunInterrupted
from vime.timeline.log import LogWriter, Record
from vime.types import GeneratedSample, SampleId, VersionRun


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
        (r"open run/provenance.jsonl", 4, "provenance.jsonl failed: the disk is full"),  # the engine has committed
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
        RunDirectory.write_checkpoint = limited  # type: ignore[method-assign, assignment]

    said = work.parent / "said"
    assert vime_in_child(["run", str(PLAIN.file(work / "run"))], said, before) == 3
    assert "File too large" in said.read_text() and "could not be noted in the log" in said.read_text()
    assert "Traceback" not in said.read_text()
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []


def test_full_shared_memory_stops_resumably(whole: Whole, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = dataclasses.replace(PLAIN, transport="shm")
    before = set(os.listdir("/dev/shm"))
    reserve, calls = os.posix_fallocate, [0]

    def full(descriptor: int, offset: int, length: int) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Interrupted, match=r"shared memory for the weights cannot be had .*make room in /dev/shm"):
        scene.start(work / "run")
    assert differences(whole(PLAIN), scene.finish(work / "run")) == []
    assert set(os.listdir("/dev/shm")) <= before


@dataclass
class Endless:
    """An engine that always has one more sample to return, until it ``dies`` at one."""

    dies: int = -1

    def generate(self, requests: Any) -> Iterator[GeneratedSample]:
        for k in range(100):
            if k == self.dies:
                raise EOFError
            zeros = np.zeros(1, np.float32)
            yield GeneratedSample(
                sample_id=SampleId("train", 0, k),
                prompt_token_ids=(1,),
                token_ids=(2,),
                logprobs=zeros,
                digests=np.zeros((1, 2), np.uint64),
                entropies=zeros,
                sampled_at=np.zeros(1),
                versions=(VersionRun(1, 0, 0, 0),),
                finish_reason="stop",
                engine_id="endless",
                preemptions=0,
            )

    def evidence(self) -> dict[str, Any]:
        return {"owner": "endless"}


@pytest.fixture
def threaded() -> Iterator[tuple[ProcessEngine, Endless]]:
    """What starting an engine process sets up, with a thread in the process's place; and the engine that it serves."""
    engine, native = object.__new__(ProcessEngine), Endless()
    engine._connection, served = multiprocessing.Pipe()
    engine._reader = Reader(engine._connection)
    engine._process = SimpleNamespace(join=lambda timeout: None, pid=7, exitcode=-9)  # type: ignore[assignment]
    engine._id, engine._deadline, engine._busy, engine._gone = "endless", 5.0, False, False
    engine._frames, engine._sending = deque(), None

    participant = Participant(native, make_transport("memory", Path("unused")))  # type: ignore[arg-type]

    def serve() -> None:
        with contextlib.suppress(EOFError, ConnectionError), served:
            while _answer(served, native, participant):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    yield engine, native
    with socket.socket(fileno=os.dup(engine._connection.fileno())) as ends:
        ends.shutdown(socket.SHUT_RDWR)  # both sides read the end of it
    engine._reader.close(timeout=10)
    engine._connection.close()
    thread.join()


Threaded = tuple[ProcessEngine, Endless]


def test_a_generation_that_is_given_up_leaves_no_answers_for_others(threaded: Threaded) -> None:
    """Ctrl-C between two samples: what the engine still sends must not be taken for the answer to something else."""
    engine, _ = threaded
    assert len(list(engine.generate([]))) == 100
    assert engine.evidence() == {"owner": "endless"}
    given_up = iter(engine.generate([]))
    assert next(given_up).sample_id == SampleId("train", 0, 0)
    with pytest.raises(Interrupted, match="engine endless is still at work on what was given up; resume the run"):
        engine.evidence()


def test_an_engine_that_dies_stops_the_run_resumably(threaded: Threaded) -> None:
    engine, native = threaded
    native.dies = 3
    with pytest.raises(Interrupted, match=r"engine endless \(process 7\) ended with exit code -9; resume the run"):
        list(engine.generate([]))
    with pytest.raises(Interrupted, match="engine endless is gone; resume the run"):
        engine.evidence()


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
        LogWriter.append = signalled  # type: ignore[method-assign, assignment]

    said = work.parent / "said"
    assert vime_in_child(["run", str(PLAIN.file(work / "run"))], said, before) == 3
    assert f"continue it with: vime resume {work / 'run'}" in said.read_text()
    last = RunView.open(work / "run").records[-1].event
    assert isinstance(last, RunInterrupted) and ("stopped on request" in last.reason) == (len(signals) == 1)
    assert "stopped" in (work / "run" / "report.html").read_text()
    assert differences(whole(PLAIN), PLAIN.finish(work / "run")) == []
