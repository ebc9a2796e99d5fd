"""Syncs driven over channels to engines of this process."""

from __future__ import annotations

import hashlib
import random
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread

import pytest

from tests.sync.virtual import HeldEngine, Journal, Store, digest_of, entries_of, weights_of
from vime.errors import InvariantViolation
from vime.sync.coordinator import Coordinator, Deadlines, Publication
from vime.sync.drive import ChannelClosed, LocalChannel, drive
from vime.sync.messages import Committed, FrameError, Refused, RolledBack, Staged, decode, encode
from vime.sync.participant import Participant


class Closed:
    """A way to an engine that is gone."""

    connection = None

    def send(self, frame: bytes) -> None:
        raise ChannelClosed("process 7 ended with exit code -9")

    def receive(self) -> bytes | None:
        return None


def published(store: Store, version: int) -> Publication:
    entries = entries_of(weights_of(version))
    return Publication(version, digest_of(entries), store.send(version), lambda: entries)


@pytest.mark.parametrize("count", [1, 3])
def test_engines_of_this_process_follow_every_version(count: int) -> None:
    store = Store(random.Random(0), damage=0.0)
    engines = {f"e{n}": HeldEngine(f"e{n}") for n in range(count)}
    channels = {name: LocalChannel(Participant(engine, store)) for name, engine in engines.items()}
    coordinator = Coordinator(list(engines), Journal(), Deadlines(stage=5.0, end=5.0, repeat=1.0))
    for version in range(3):
        publication = published(store, version)
        coordinator.publish(0.0, publication)
        outcome = drive(coordinator, channels, clock=lambda: 0.0)
        assert outcome.committed == tuple(engines)
        assert {engine.token() for engine in engines.values()} == {(version, publication.digest)}


def test_a_catching_up_of_nobody_ends_at_once() -> None:
    store = Store(random.Random(0), damage=0.0)
    coordinator = Coordinator(["e0"], Journal())
    coordinator.catch_up(0.0, [], published(store, 0))
    assert not coordinator.busy and coordinator.outcome.committed == ()


def test_an_engine_that_is_gone_rolls_the_others_back() -> None:
    store = Store(random.Random(0), damage=0.0)
    engine = HeldEngine("e0")
    whole = {"e0": LocalChannel(Participant(engine, store))}
    coordinator = Coordinator(["e0", "e1"], Journal(), Deadlines(stage=5.0, end=5.0, repeat=1.0))
    coordinator.publish(0.0, published(store, 0))
    outcome = drive(coordinator, {**whole, "e1": Closed()}, clock=lambda: 0.0)
    assert outcome.rolled_back
    assert (outcome.lost, outcome.error) == (("e1",), "Interrupted")
    assert outcome.reason == "engine e1 was lost: process 7 ended with exit code -9"
    assert engine.token() is None


def test_no_memory_is_a_reason_to_resume_after() -> None:
    store = Store(random.Random(0), damage=0.0)
    engine = HeldEngine("e0")
    engine.fails.append(MemoryError())
    coordinator = Coordinator(["e0"], Journal())
    coordinator.publish(0.0, published(store, 0))
    outcome = drive(coordinator, {"e0": LocalChannel(Participant(engine, store))}, clock=lambda: 0.0)
    assert (outcome.rolled_back, outcome.error) == (True, "Interrupted")
    assert outcome.reason == "engine e0 has no room for version 0: MemoryError"


class Piped:
    """The way to an engine behind a pipe, which a thread serves until the pipe is closed."""

    def __init__(self, participant: Participant, answers: int | None = None) -> None:
        self.connection, other = Pipe()
        Thread(target=self._serve, args=(other, participant, answers), daemon=True).start()

    @staticmethod
    def _serve(connection: Connection, participant: Participant, answers: int | None) -> None:
        with suppress(EOFError, OSError):
            while answers is None or answers > 0:
                answer = participant.answer(decode(connection.recv_bytes()))
                if answer is not None:
                    connection.send_bytes(encode(answer))
                answers = None if answers is None else answers - 1
        connection.close()

    def send(self, frame: bytes) -> None:
        try:
            self.connection.send_bytes(frame)
        except OSError as error:
            raise ChannelClosed("the pipe is closed") from error

    def receive(self) -> bytes | None:
        try:
            return self.connection.recv_bytes() if self.connection.poll() else None
        except (EOFError, OSError) as error:  # reset, if it closed with a frame unread
            raise ChannelClosed("the pipe is closed") from error


def test_engines_behind_connections_and_here_follow_together() -> None:
    store = Store(random.Random(0), damage=0.0)
    engines = {name: HeldEngine(name) for name in ("here", "there")}
    channels = {
        "here": LocalChannel(Participant(engines["here"], store)),
        "there": Piped(Participant(engines["there"], store)),
    }
    coordinator = Coordinator(list(engines), Journal())
    for version in range(3):
        publication = published(store, version)
        coordinator.publish(time.monotonic(), publication)
        assert set(drive(coordinator, channels).committed) == set(engines)
        assert {engine.token() for engine in engines.values()} == {(version, publication.digest)}


def test_a_connection_that_ends_after_the_decision_loses_its_engine_alone() -> None:
    store = Store(random.Random(0), damage=0.0)
    engines = {name: HeldEngine(name) for name in ("here", "there")}
    channels = {
        "here": LocalChannel(Participant(engines["here"], store)),
        "there": Piped(Participant(engines["there"], store), answers=1),
    }
    coordinator = Coordinator(list(engines), Journal())
    publication = published(store, 0)
    coordinator.publish(time.monotonic(), publication)
    outcome = drive(coordinator, channels)
    assert (outcome.committed, outcome.lost, outcome.rolled_back) == (("here",), ("there",), False)
    assert coordinator.live == ("here",)
    assert engines["here"].token() == (0, publication.digest)


def test_an_engine_that_goes_after_it_rolled_back_gets_no_requests() -> None:
    store = Store(random.Random(0), damage=0.0)
    journal = Journal()
    coordinator = Coordinator(["e0", "e1"], journal)
    coordinator.publish(0.0, published(store, 0))
    coordinator.lose(0.0, "e1", "gone")
    coordinator.receive(0.0, "e0", RolledBack(0, 0, None, ""))
    assert not coordinator.busy
    assert coordinator.live == ("e0",)

    coordinator = Coordinator(["e0", "e1"], journal)
    coordinator.publish(0.0, published(store, 0))
    coordinator.receive(0.0, "e1", Refused(0, 0, "stage", "Interrupted", "has no room"))
    coordinator.receive(0.0, "e0", RolledBack(0, 0, None, ""))
    coordinator.lose(0.0, "e0", "gone")
    coordinator.receive(0.0, "e1", RolledBack(0, 0, None, ""))
    assert coordinator.live == ("e1",)
    assert coordinator.outcome.lost == ("e0",)


def test_a_commit_before_the_decision_rolls_back() -> None:
    """Of an engine that has verified already: the others are not brought to what was never decided."""
    store, journal = Store(random.Random(0), damage=0.0), Journal()
    coordinator = Coordinator(["e0", "e1"], journal)
    publication = published(store, 0)
    coordinator.publish(0.0, publication)
    staged = Staged(0, 0, publication.digest, tuple(publication.manifest()))
    coordinator.receive(0.0, "e0", staged)
    coordinator.receive(0.0, "e0", Committed(0, 0, publication.digest))
    coordinator.receive(0.0, "e1", staged)
    coordinator.receive(0.0, "e1", RolledBack(0, 0, None, ""))
    coordinator.receive(0.0, "e0", RolledBack(0, 0, 0, publication.digest))
    assert journal.last is None and not [event for event in journal.events if event[0] == "committed"]
    outcome = coordinator.outcome
    assert outcome.rolled_back and outcome.committed == () and outcome.lost == ("e0",)
    assert outcome.reason == "engine e0 serves version 0 already, before it was decided"


@pytest.mark.parametrize("call", ["stage_weights", "staged_manifest", "commit_weights", "committed"])
@pytest.mark.parametrize("error", [ValueError("odd"), InvariantViolation("odd"), RuntimeError("can't allocate memory")])
def test_whatever_an_engine_raises_is_a_refusal(call: str, error: Exception) -> None:
    store, engine = Store(random.Random(0), damage=0.0), HeldEngine("e0")

    def raises(*arguments: object) -> None:
        raise error

    setattr(engine, call, raises)
    deadlines = Deadlines(stage=0.2, end=0.2, repeat=0.05)
    coordinator = Coordinator(["e0", "e1"], Journal(), deadlines)
    other = HeldEngine("e1")
    coordinator.publish(time.monotonic(), published(store, 0))
    channels = {name: LocalChannel(Participant(e, store)) for name, e in (("e0", engine), ("e1", other))}
    outcome = drive(coordinator, channels)
    assert (outcome.rolled_back or outcome.lost == ("e0",)) and "e0" not in outcome.committed
    if call in ("stage_weights", "staged_manifest"):
        room = "has no room for version 0" if isinstance(error, RuntimeError) else "refuses version 0: "
        assert room in outcome.reason and str(error) in outcome.reason
    if outcome.rolled_back:
        assert other.token() is None


@pytest.mark.parametrize(
    "body", ["3", "null", '"x"', "[]", "[" * 100_000, "{}", '{"kind": "stage"}',
             '{"kind": "stage", "version": "0", "attempt": 0, "handle": {}}',
             '{"kind": "stage", "version": 0, "attempt": null, "handle": {}}',
             '{"kind": "stage", "version": 0, "attempt": true, "handle": {}}'],
)  # fmt: skip
def test_a_frame_with_a_right_checksum_and_a_wrong_content(body: str) -> None:
    content = body.encode()
    with pytest.raises(FrameError):
        decode(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def test_a_closed_channel_is_not_looked_at_again() -> None:
    """It would be readable for ever, and the wait for the others a loop without a pause."""
    store = Store(random.Random(0), damage=0.0)
    looked = []

    class Gone(Closed):
        def receive(self) -> bytes | None:
            looked.append(1)
            raise ChannelClosed("process 7 ended with exit code -9")

        def send(self, frame: bytes) -> None:
            """It is taken."""

    class Slow(Closed):
        def send(self, frame: bytes) -> None:
            """And never answered."""

    coordinator = Coordinator(["e0", "e1"], Journal(), Deadlines(stage=0.2, end=0.2, repeat=0.05))
    coordinator.publish(time.monotonic(), published(store, 0))
    outcome = drive(coordinator, {"e0": Gone(), "e1": Slow()})
    assert set(outcome.lost) == {"e0", "e1"} and len(looked) == 1
