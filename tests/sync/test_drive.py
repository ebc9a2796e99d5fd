"""Syncs driven over channels to engines of this process."""

from __future__ import annotations

import random

import pytest

from tests.sync.virtual import HeldEngine, Journal, Store, digest_of, entries_of, weights_of
from vime.sync.coordinator import Coordinator, Deadlines, Publication
from vime.sync.drive import ChannelClosed, LocalChannel, drive
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
