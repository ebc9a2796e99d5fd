"""Syncs with engines in other processes that die, hang, stop, lose and damage what they are sent: schedules drawn from
seeds. No schedule runs past its deadlines, no engine that is counted on serves anything but what was decided, and what
was lost catches up."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest

from tests.sync.processes import (
    COMMIT_FAULTS,
    STAGE_FAULTS,
    LossyChannel,
    half_answering_engine,
    planned_engine,
    write_plan,
)
from tests.sync.virtual import Journal, digest_of, entries_of, weights_of
from vime.errors import Interrupted
from vime.runtime.process import ProcessEngine
from vime.sync.coordinator import Coordinator, Deadlines, Outcome, Publication
from vime.sync.drive import Channel, drive
from vime.sync.transport import Transport
from vime.sync.transports import make_transport

SCHEDULES = 50
NAMES = ("e0", "e1", "e2")
DEADLINES = Deadlines(stage=0.6, end=0.6, repeat=0.1)
CALM = Deadlines(stage=60.0, end=60.0, repeat=0.5)
SLACK_S = 5.0  # of a busy machine: a sync that hangs would take as long as the engines' own deadline of 600 s


def runs(engine: ProcessEngine) -> bool:
    """Whether an engine's process is neither dead nor stopped."""
    try:
        state = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "TZX"


def tell(engine: ProcessEngine, number: signal.Signals) -> None:
    """Send a signal to an engine's process, if it has one still."""
    assert engine.pid
    with suppress(ProcessLookupError):
        os.kill(engine.pid, number)


class Cluster:
    """Engine processes, and what was decided for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.transport: Transport = make_transport("shm", folder)
        self.engines = {name: self._start(name) for name in NAMES}
        self.journal = Journal()
        self.version = -1
        self.attempts = 0
        self.seen: Counter[str] = Counter()
        self.schedules = 0

    def _start(self, name: str) -> ProcessEngine:
        specification = {"engine_id": name, "transport": "shm", "transport_folder": str(self.folder)}
        return ProcessEngine(planned_engine, specification, start_method="forkserver")

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def coordinator(self, deadlines: Deadlines) -> Coordinator:
        """One that goes on where the one before ended."""
        self.attempts += 1000
        return Coordinator(NAMES, self.journal, deadlines, first_attempt=self.attempts, committed=self.journal.last)

    def publication(self, version: int) -> Publication:
        entries = entries_of(weights_of(version))
        return Publication(version, digest_of(entries), self.transport.send(weights_of(version)), lambda: entries)

    def damage(self, publication: Publication, draw: random.Random) -> None:
        """One bit of the weights under way."""
        segment = shared_memory.SharedMemory(name=publication.handle["segment"])
        assert segment.buf is not None
        segment.buf[draw.randrange(64)] ^= 1 << draw.randrange(8)
        segment.close()

    def catch_up(self, names: list[str], draw: random.Random) -> None:
        """Engines that were lost, some of them started anew, serve the committed version again."""
        for name in NAMES:
            write_plan(self.folder / f"plan-{name}.json", {})
        for name in names:
            tell(self.engines[name], signal.SIGCONT)
            if runs(self.engines[name]) and draw.random() < 0.5:
                continue  # it was slow, and has answers left to give
            tell(self.engines[name], signal.SIGKILL)
            self.engines[name].close()
            self.engines[name] = self._start(name)
            self.seen["started anew"] += 1
        coordinator = self.coordinator(CALM)
        if self.journal.last is None:
            return
        publication = self.publication(self.journal.last[0])
        coordinator.catch_up(time.monotonic(), names, publication)
        outcome = drive(coordinator, {name: self.engines[name].channel() for name in NAMES})
        self.transport.release(publication.handle)  # type: ignore[arg-type]
        assert set(outcome.committed) == set(names), outcome

    def served(self, name: str) -> tuple[int, str] | None:
        """What an engine says of the bytes that it serves, asked now."""
        found = self.engines[name].committed()
        return None if found is None else (found.version, found.digest)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    multiprocessing.set_forkserver_preload(["tests.sync.processes"])
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


def schedule(cluster: Cluster, seed: int) -> Outcome:
    """One publication under faults."""
    draw = random.Random(seed)
    cluster.schedules += 1
    for name in NAMES:
        plan: dict[str, Any] = {}
        if draw.random() < 0.2:
            plan["stage"] = draw.choice(STAGE_FAULTS)
        if draw.random() < 0.1:
            plan["commit"] = draw.choice(COMMIT_FAULTS)
        cluster.seen.update(f"{fault} at {call}" for call, fault in plan.items())
        write_plan(cluster.folder / f"plan-{name}.json", plan)
    each = draw.choice((0.0, 0.2))
    channels: dict[str, Channel] = {
        name: LossyChannel(engine.channel(), draw, each) for name, engine in cluster.engines.items()
    }
    coordinator = cluster.coordinator(DEADLINES)
    cluster.version = cluster.journal.last[0] + 1 if cluster.journal.last is not None else 0
    publication = cluster.publication(cluster.version)
    if draw.random() < 0.1:
        cluster.damage(publication, draw)
        cluster.seen["damaged on the way"] += 1
    if draw.random() < 0.2:
        sent = draw.choice((signal.SIGKILL, signal.SIGSTOP))
        met = cluster.engines[draw.choice(NAMES)]
        threading.Timer(draw.uniform(0.0, 0.02), tell, (met, sent)).start()
        cluster.seen[sent.name] += 1
    started = time.monotonic()
    coordinator.publish(started, publication)
    outcome = drive(coordinator, channels)
    took = time.monotonic() - started
    assert took < DEADLINES.stage + DEADLINES.end + SLACK_S, f"the sync took {took:.1f} s"
    cluster.transport.release(publication.handle)  # type: ignore[arg-type]
    cluster.seen["frames lost or damaged"] += sum(getattr(channel, "faults", 0) for channel in channels.values())
    time.sleep(0.03)  # the signal, where the sync was faster
    return outcome


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_no_engine_serves_what_was_not_decided(cluster: Cluster, seed: int) -> None:
    before = cluster.journal.last
    outcome = schedule(cluster, seed)
    cluster.seen["rolled back" if outcome.rolled_back else "committed"] += 1
    cluster.seen["lost"] += len(outcome.lost)
    due = (cluster.version, digest_of(entries_of(weights_of(cluster.version))))
    assert cluster.journal.last == (before if outcome.rolled_back else due)
    gone = [name for name in NAMES if name in outcome.lost]
    stopped = [name for name in NAMES if name not in gone and not runs(cluster.engines[name])]
    for name in NAMES:
        if name not in gone and name not in stopped:
            assert cluster.served(name) == cluster.journal.last, (name, outcome)
    cluster.catch_up([*gone, *stopped], random.Random(-seed))
    for name in NAMES:
        assert cluster.served(name) == cluster.journal.last, (name, outcome)


def test_an_engine_that_does_not_read_is_ended_by_the_deadline(cluster: Cluster) -> None:
    """Also where what it is sent does not fit into the pipe, and again and again."""
    cluster.catch_up([], random.Random(0))
    stopped = cluster.engines["e1"]
    before = cluster.journal.last
    tell(stopped, signal.SIGSTOP)
    for _ in range(3):
        version = cluster.journal.last[0] + 1 if cluster.journal.last is not None else 0
        publication = cluster.publication(version)
        large = {**publication.handle, "filling": "x" * 1_000_000}
        coordinator = cluster.coordinator(DEADLINES)
        started = time.monotonic()
        coordinator.publish(started, dataclasses.replace(publication, handle=large))
        outcome = drive(coordinator, {name: engine.channel() for name, engine in cluster.engines.items()})
        assert time.monotonic() - started < DEADLINES.stage + DEADLINES.end + SLACK_S
        cluster.transport.release(publication.handle)  # type: ignore[arg-type]
        assert outcome.rolled_back and outcome.lost == ("e1",) and cluster.journal.last == before
    with pytest.raises(Interrupted, match="engine e1 does not read what it is sent"):
        stopped.committed()
    tell(stopped, signal.SIGCONT)
    cluster.catch_up(["e1"], random.Random(1))
    assert {cluster.served(name) for name in NAMES} == {before}


def test_an_engine_that_does_not_read_can_be_closed(cluster: Cluster) -> None:
    engine = cluster._start("e3")
    tell(engine, signal.SIGSTOP)
    engine.channel().send(b"x" * 1_000_000)
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < SLACK_S and not runs(engine)


def test_an_engine_that_stops_in_the_middle_of_an_answer_is_ended_by_the_deadline(cluster: Cluster) -> None:
    cluster.catch_up([], random.Random(0))
    before = cluster.journal.last
    specification = {"engine_id": "e4", "transport": "shm", "transport_folder": str(cluster.folder)}
    engine = ProcessEngine(half_answering_engine, specification, deadline_s=1.0, start_method="forkserver")
    version = cluster.journal.last[0] + 1 if cluster.journal.last is not None else 0
    publication = cluster.publication(version)
    engines = {**cluster.engines, "e4": engine}
    cluster.attempts += 1000
    coordinator = Coordinator(
        list(engines), cluster.journal, DEADLINES, first_attempt=cluster.attempts, committed=before
    )
    started = time.monotonic()
    coordinator.publish(started, publication)
    outcome = drive(coordinator, {name: each.channel() for name, each in engines.items()})
    assert time.monotonic() - started < DEADLINES.stage + DEADLINES.end + SLACK_S
    cluster.transport.release(publication.handle)  # type: ignore[arg-type]
    assert outcome.rolled_back and outcome.lost == ("e4",) and cluster.journal.last == before
    with pytest.raises(Interrupted, match="engine e4 has not answered for 1 s"):
        engine.committed()
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < SLACK_S and not runs(engine)
    cluster.catch_up([], random.Random(2))
    assert {cluster.served(name) for name in NAMES} == {before}


def test_every_kind_of_fault_and_of_end_was_met(cluster: Cluster) -> None:
    """Of all schedules above together."""
    if cluster.schedules < SCHEDULES:
        pytest.skip("not all schedules ran in this process")
    met = dict(cluster.seen)
    planned = {f"{fault} at stage" for fault in STAGE_FAULTS} | {f"{fault} at commit" for fault in COMMIT_FAULTS}
    ends = {"committed", "rolled back", "lost", "started anew", "SIGKILL", "SIGSTOP", "damaged on the way"}
    assert planned | ends | {"frames lost or damaged"} <= set(met), met
