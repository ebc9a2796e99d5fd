"""Every order of what up to three engines, the trainer and the network can do, searched by Hypothesis."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.sync.virtual import DEADLINES, Faults, HeldEngine, World
from vime.rollout.interface import CommittedVersion
from vime.sync.messages import encode


class Syncs(RuleBasedStateMachine):
    """Messages are delivered, lost, repeated and reordered one by one, and time passes when Hypothesis says so."""

    world: World
    version: int

    @initialize(engines=st.integers(1, 3))
    def begin(self, engines: int) -> None:
        self.world, self.version, self.wire = World(0, engines, Faults()), -1, []

    def _collect(self) -> None:
        world = self.world
        self.wire += [("engine", engine, encode(message)) for engine, message in world.coordinator.outbox]
        world.coordinator.outbox.clear()
        self.wire += [(to, engine, frame) for _, _, to, engine, frame in world.queue]
        world.queue.clear()

    @precondition(lambda self: not self.world.coordinator.busy)
    @rule()
    def publish(self) -> None:
        world = self.world
        if world.journal.last is not None and not world.coordinator.live:
            return
        last = -1 if world.journal.last is None else world.journal.last[0]
        self.version = last + 1
        world.coordinator.publish(world.now, world.publication(self.version))
        world.journal.events.append(("published", str(self.version), *world.coordinator.live))
        self._collect()

    @precondition(lambda self: not self.world.coordinator.busy and self.world.journal.last is not None)
    @rule()
    def catch_up(self) -> None:
        world = self.world
        assert world.journal.last is not None
        gone = [name for name in world.engines if name not in world.coordinator.live]
        if gone:
            world.coordinator.catch_up(world.now, gone, world.publication(world.journal.last[0]))
            self._collect()

    @precondition(lambda self: self.wire)
    @rule(which=st.integers(0, 1000), keep=st.booleans())
    def deliver(self, which: int, keep: bool) -> None:
        """One frame arrives, and perhaps stays to arrive again."""
        place = which % len(self.wire)
        frame = self.wire[place] if keep else self.wire.pop(place)
        self.world._deliver(*frame)
        self._collect()
        del self.wire[60:]

    @precondition(lambda self: self.wire)
    @rule(which=st.integers(0, 1000))
    def lose_a_frame(self, which: int) -> None:
        self.wire.pop(which % len(self.wire))

    @precondition(lambda self: self.wire)
    @rule(which=st.integers(0, 1000), place=st.integers(0, 10_000), bit=st.integers(0, 7))
    def flip_a_bit(self, which: int, place: int, bit: int) -> None:
        to, engine, frame = self.wire.pop(which % len(self.wire))
        place %= len(frame)
        self.world._deliver(to, engine, frame[:place] + bytes([frame[place] ^ 1 << bit]) + frame[place + 1 :])
        self._collect()

    @rule(seconds=st.sampled_from([0.1, DEADLINES.repeat, DEADLINES.end, DEADLINES.stage]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.coordinator.tick(self.world.now)
        self._collect()

    @rule(which=st.integers(0, 2))
    def an_engine_dies(self, which: int) -> None:
        names = list(self.world.engines)
        self.world.restart(names[which % len(names)])

    @rule(which=st.integers(0, 2))
    def staged_bytes_change(self, which: int) -> None:
        names = list(self.world.engines)
        self.world.change_staged(names[which % len(names)])

    @rule()
    def the_trainer_dies(self) -> None:
        self.world.kill_trainer()
        self._collect()

    @invariant()
    def tokens_are_what_they_say(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        decided = {int(event[1]) for event in world.journal.events if event[0] == "decided"}
        for name in world.coordinator.live:
            token = world.engines[name].token()
            if token is not None:
                assert token[0] in decided
                assert token[1] == world.published[token[0]]
        assert world.violations == []

    def teardown(self) -> None:
        """Whatever was going on ends, with nothing arriving any more."""
        if hasattr(self, "world") and self.world.coordinator.busy:
            for _ in range(3):
                self.world.now += DEADLINES.stage + DEADLINES.end
                self.world.coordinator.tick(self.world.now)
            assert not self.world.coordinator.busy


Syncs.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSyncs = Syncs.TestCase


def test_the_search_finds_an_engine_that_serves_what_it_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = HeldEngine.stage_weights

    def stage(self: HeldEngine, version: int, tensors: Mapping[str, torch.Tensor]) -> str:
        digest = whole(self, version, tensors)
        self.slots._served = self.slots._staged
        return digest

    monkeypatch.setattr(HeldEngine, "stage_weights", stage)
    search = settings(max_examples=500, stateful_step_count=40, deadline=None, database=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Syncs, settings=search)


def test_the_invariant_finds_an_engine_that_labels_what_it_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """It commits without a look at the bytes, and says of them afterwards what it was told: only its tokens tell."""

    def commit(self: HeldEngine, version: int, digest: str) -> CommittedVersion:
        staged = self.slots._staged
        assert staged is not None
        self.slots.commit(staged)
        self.label = CommittedVersion(version, digest)  # type: ignore[attr-defined]
        return CommittedVersion(version, digest)

    monkeypatch.setattr(HeldEngine, "commit_weights", commit)
    monkeypatch.setattr(HeldEngine, "committed", lambda self: getattr(self, "label", None))
    machine = Syncs()
    machine.begin(engines=1)
    machine.publish()
    machine.deliver(0, keep=False)  # it stages
    machine.staged_bytes_change(0)
    machine.deliver(0, keep=False)  # the digest of before is the published one: decided
    machine.tokens_are_what_they_say()
    machine.deliver(0, keep=False)  # it commits
    with pytest.raises(AssertionError):
        machine.tokens_are_what_they_say()
