"""The log: chain, checksums, damage of both kinds, a disk that refuses."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.timeline.building import history
from vime.errors import InputError, Interrupted, InvariantViolation
from vime.timeline.events import Decision
from vime.timeline.log import LogWriter, encode_line, line_hash, read_log
from vime.timeline.manager import Timeline


@pytest.fixture
def log(tmp_path: Path) -> Path:
    writer = LogWriter.create(tmp_path / "timeline.jsonl")
    for event in history():
        writer.append(event)
    writer.close()
    return tmp_path / "timeline.jsonl"


def lines(log: Path) -> list[bytes]:
    return log.read_bytes().splitlines(keepends=True)


def test_round_trip(log: Path) -> None:
    content = read_log(log)
    assert content.tail is None and content.end == log.stat().st_size
    assert [r.event.logical() for r in content.records] == [e.logical() for e in history()]
    assert [r.seq for r in content.records] == list(range(len(content.records)))
    assert content.records[3].prev == content.records[2].hash == line_hash(lines(log)[2])
    with pytest.raises(InputError, match="exists already"):
        LogWriter.create(log)
    with pytest.raises(InputError, match="cannot be read"):
        read_log(log.with_name("nothing"))


def test_cut_at_every_byte_of_the_last_lines(log: Path) -> None:
    whole = log.read_bytes()
    ends = [r.end for r in read_log(log).records]
    for cut in range(ends[-3], len(whole)):
        log.write_bytes(whole[:cut])
        content = read_log(log)
        survived = sum(end <= cut for end in ends)
        assert len(content.records) == survived
        assert (content.tail is None) == (cut in ends)
        if content.tail is not None:
            assert content.tail.offset == ends[survived - 1] and content.tail.line == survived + 1
            assert content.tail.length == cut - ends[survived - 1]
            assert f"line {survived + 1} of the log (byte {ends[survived - 1]})" in content.tail.sentence()


def test_resume_cuts_a_damaged_tail_and_goes_on(log: Path) -> None:
    whole = log.read_bytes()
    for garbage in (b"\0" * 5000, b'{"seq":3', b"\n", whole[-300:-50] + b"\n" + b"\0\0\n", b'{"seq": 1}\n'):
        log.write_bytes(whole + garbage)
        content = read_log(log)
        assert content.tail is not None and content.tail.length == len(garbage)
        writer = LogWriter.resume(log, content)
        writer.append(Decision(kind="after", key="", value=1))
        writer.close()
        again = read_log(log)
        assert again.tail is None and len(again.records) == len(content.records) + 1


@pytest.mark.parametrize("where", [0, 4, -3, -2])
def test_deleted_event(log: Path, where: int) -> None:
    kept = lines(log)
    del kept[where]
    log.write_bytes(b"".join(kept))
    number = range(len(kept) + 1)[where] + 1
    with pytest.raises(InvariantViolation, match=f"line {number} of the log holds event {number} .*was deleted"):
        read_log(log)


def test_reordered_and_repeated_events(log: Path) -> None:
    kept = lines(log)
    log.write_bytes(b"".join([*kept[:4], kept[5], kept[4], *kept[6:]]))
    with pytest.raises(InvariantViolation, match="line 5 of the log holds event 5"):
        read_log(log)
    log.write_bytes(b"".join([*kept, kept[-1]]))
    with pytest.raises(InvariantViolation, match="repeated or moved"):
        read_log(log)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_in_the_middle_is_found(log: Path, data: st.DataObject) -> None:
    whole = bytearray(log.read_bytes())
    last = read_log(log).records[-2].end
    at = data.draw(st.integers(0, last - 1))
    changed = bytearray(whole)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        log.write_bytes(changed)
        with pytest.raises(InvariantViolation, match=r"line \d+ of the log"):
            read_log(log)
    finally:
        log.write_bytes(whole)


def test_forged_event_breaks_the_chain(log: Path) -> None:
    """An event altered together with its checksum is caught by the hash in the next line."""
    record = read_log(log).records[6]
    kept = lines(log)
    kept[6] = encode_line(record.seq, record.prev, Decision(kind="forged", key="", value=0))
    log.write_bytes(b"".join(kept))
    with pytest.raises(InvariantViolation, match=r"line 8 of the log .*line 7 was altered"):
        read_log(log)


def test_unknown_event_type(log: Path) -> None:
    class Strange(Decision):
        type = "strange"

    content = read_log(log)
    with open(log, "ab") as file:
        strange = Strange(kind="", key="", value=0)
        file.write(encode_line(content.head.seq + 1, content.head.hash, strange))
    with pytest.raises(InvariantViolation, match="event type 'strange' is unknown"):
        read_log(log)


def test_refused_write_leaves_no_partial_line(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.resume(log, read_log(log))
    before, write = log.read_bytes(), os.write
    calls = []

    def full(descriptor: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:40])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Interrupted, match=r"writing event \d+ \(decision\) .* the disk is full"):
        writer.append(Decision(kind="a", key="", value=1))
    assert log.read_bytes() == before
    monkeypatch.undo()
    writer.append(Decision(kind="b", key="", value=1))
    writer.close()
    assert read_log(log).records[-1].event.logical()["kind"] == "b"


def test_an_interrupted_append_is_overwritten_by_the_next(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.resume(log, read_log(log))
    write = os.write

    def interrupted(descriptor: int, data: bytes) -> int:
        write(descriptor, data[:40])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.append(Decision(kind="a", key="", value=1))
    monkeypatch.undo()
    writer.append(Decision(kind="b", key="", value=1))
    writer.close()
    assert read_log(log).tail is None


def test_failed_sync_stops_the_log(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.resume(log, read_log(log))

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(Interrupted, match="Input/output error"):
        writer.append(history()[0])
    monkeypatch.undo()
    with pytest.raises(Interrupted, match="failed before"):
        writer.append(Decision(kind="b", key="", value=1))


def test_barriers_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LogWriter.create(tmp_path / "timeline.jsonl")
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    due = 0
    for event in history():
        writer.append(event)
        due += event.barrier
        assert len(synced) == due
    kinds = {event.type for event in history() if event.barrier}
    assert kinds >= {
        "version_published",
        "sync_committed",
        "batch_assigned",
        "step_trained",
        "checkpoint_written",
        "arrays_written",
        "run_finished",
    }
    assert set(synced) == {str(tmp_path / "timeline.jsonl")}


FILL = """
import resource, signal, sys
from pathlib import Path
from tests.timeline.building import history
from vime.errors import Interrupted
from vime.timeline.events import Decision
from vime.timeline.manager import Timeline
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
timeline = Timeline.create(Path(sys.argv[1]))
timeline.append(history()[0])
for number in range(100):
    try:
        timeline.append(Decision(kind="k", key=str(number), value="x" * 50))
    except Interrupted as error:
        print(number, error)
        sys.exit(error.exit_code)
"""


def test_file_size_limit_in_a_real_process(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    number, sentence = done.stdout.split(" ", 1)
    assert "file-size limit is reached" in sentence and "resume" in sentence
    content = read_log(tmp_path / "timeline.jsonl")
    assert content.tail is None and len(content.records) == int(number) + 1
    timeline = Timeline.open_for_resume(tmp_path)
    assert timeline.resumption is not None and timeline.resumption.to_replay == int(number) + 1
    timeline.close()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 6000


def test_many_events_without_a_checkpoint_are_replayed_from_the_start(tmp_path: Path) -> None:
    writer = LogWriter.create(tmp_path / "timeline.jsonl")
    writer.append(history()[0])
    for number in range(3000):
        writer.append(Decision(kind="k", key=str(number), value=number))
    writer.close()
    timeline = Timeline.open_for_resume(tmp_path)
    assert len(timeline.state.decisions) == 0 and timeline.replaying
    timeline.append(history()[0])
    for number in range(3000):
        assert timeline.decide("k", str(number), pytest.fail) == number
    assert not timeline.replaying
    timeline.close()
