"""The protocol of weight syncs against everything that a network, an engine or a trainer can do to it."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.sync import virtual
from tests.sync.virtual import Faults, HeldEngine, World
from vime.rollout.interface import CommittedVersion
from vime.sync.coordinator import Coordinator, Outcome, Step
from vime.sync.messages import Committed, Message, decode
from vime.sync.participant import Participant

SCHEDULES, PARTS, SYNCS = 1000, 10, 4


class Broken(AssertionError):
    """The protocol did what it must not."""


def faults_of(draw: random.Random) -> Faults:
    """Some of the faults, mild or harsh."""
    names = [name for name in Faults.__dataclass_fields__ if draw.random() < 0.4]
    rates = {"kill_engine": 0.02, "kill_trainer": 0.01, "damage": 0.1, "fail_staging": 0.05, "change_staged": 0.02}
    harsh = draw.choice((1.0, 1.0, 3.0))
    return Faults(**{name: harsh * rates.get(name, 0.15) for name in names})


def require(condition: bool, sentence: str) -> None:
    """Raise :class:`Broken` with the sentence unless the condition holds."""
    if not condition:
        raise Broken(sentence)


def check(world: World) -> None:
    """What has to hold whatever happened."""
    decided = {int(event[1]) for event in world.journal.events if event[0] == "decided"}
    for engine, version, digest in world.tokens:
        require(version in decided, f"{engine} served version {version}, which was never decided")
        require(world.published[version] == digest, f"other bytes than version {version}'s made a token of {engine}")
    require(not world.violations, f"{world.violations}")
    staged: dict[str, str] = {}
    asked: tuple[str, ...] = ()
    for event in world.journal.events:
        if event[0] == "published":
            staged, asked = {}, event[2:]
        elif event[0] == "staged":
            staged[event[1]] = event[2]
        elif event[0] == "decided":
            expected = dict.fromkeys(asked, event[2])
            require(staged == expected, f"version {event[1]} with digest {event[2]} was decided over {staged}")


def agree(world: World, outcome: Outcome, before: int | None) -> None:
    """After a sync every engine that gets requests serves the same: the new version, or what it served.

    One that was killed after its last answer serves nothing, and so makes no token, until somebody notices.
    """
    served = {world.engines[engine].token() for engine in world.coordinator.live}
    expected: tuple[int, str] | None = (outcome.version, outcome.digest)
    if outcome.rolled_back:
        require(bool(outcome.reason), "a sync was rolled back without a reason")
        expected = None if before is None else (before, world.published[before])
    require(served <= {expected, None}, f"engines serve {served} after {outcome}")


def revive(world: World) -> None:
    """Engines that are lost, or serve nothing, catch up before they get requests again."""
    assert world.journal.last is not None
    for name, engine in world.engines.items():
        if engine.token() is None:
            world.coordinator.lose(world.now, name, "serves nothing")
    for _ in range(3):
        gone = [name for name in world.engines if name not in world.coordinator.live]
        if not gone:
            return
        world.coordinator.catch_up(world.now, gone, world.publication(world.journal.last[0]))
        world.finish()


def schedule(seed: int) -> tuple[World, Counter[str]]:
    """Four syncs with the faults of a seed; how each ended."""
    draw = random.Random(seed)
    world = World(seed, draw.randrange(1, 5), faults_of(draw))
    ends: Counter[str] = Counter()
    version = 0
    for _ in range(SYNCS):
        if not world.coordinator.live and world.journal.last is not None:
            ends["nobody left"] += 1
            break
        before = None if world.journal.last is None else world.journal.last[0]
        outcome = world.synchronise(version)
        check(world)
        if outcome is None:
            ends["never decided"] += 1
        else:
            agree(world, outcome, before)
            ends["rolled back" if outcome.rolled_back else "some" if outcome.lost else "all"] += 1
        if world.journal.last is not None:
            version = world.journal.last[0] + 1
            revive(world)
    check(world)
    return world, ends


@pytest.mark.parametrize("part", range(PARTS))
def test_schedules(part: int) -> None:
    ends: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    tokens = 0
    for seed in range(part * SCHEDULES // PARTS, (part + 1) * SCHEDULES // PARTS):
        world, ended = schedule(seed)
        ends.update(ended)
        seen.update(world.seen)
        tokens += len(world.tokens)
    assert tokens > 10_000
    assert min(ends[end] for end in ("all", "some", "rolled back")) > 5, ends
    kinds = ("dropped", "duplicated", "delayed", "corrupted", "truncated", "refused frames", "staging failed")
    kinds += ("engines killed", "trainers killed", "staged bytes changed", "damaged")
    assert min(seen[kind] for kind in kinds) > 5, seen


@pytest.mark.parametrize("engines", [1, 2, 3, 4])
def test_without_faults_every_engine_follows(engines: int) -> None:
    world = World(0, engines, Faults())
    for version in range(5):
        outcome = world.synchronise(version)
        assert outcome is not None
        assert set(outcome.committed) == set(world.engines)
        assert (outcome.rolled_back, outcome.lost, outcome.reason) == (False, (), "")
        check(world)
    assert world.now < 1.0
    assert {engine.token() for engine in world.engines.values()} == {(4, world.published[4])}


# what a protocol with a flaw would do: the schedules have to find each of them


def _no_check_at_commit(self: HeldEngine, version: int, digest: str) -> CommittedVersion:
    staged = self.slots._staged
    assert staged is not None
    self.slots.commit(staged)
    return CommittedVersion(version, digest)


def _decides_early(self: Coordinator, now: float, engine: str, message: Any) -> None:
    ON_STAGED(self, now, engine, message)
    sync = self._sync
    if sync is None or sync.decided or sync.peers[engine].step is not Step.VERIFIED:
        return
    self._committed = (sync.publication.version, sync.publication.digest)
    self._journal.decided(*self._committed)
    sync.decided = True
    self._commit(now, engine)


def _waits_for_ever(self: Coordinator, now: float) -> None:
    self._running().deadline = now + 1e9


def _says_committed(self: Participant, message: Any) -> Message:
    COMMIT(self, message)
    return Committed(message.version, message.attempt, message.digest)


def _reads_what_came(frame: bytes) -> Message:
    return decode(hashlib.sha256(frame[65:]).hexdigest().encode() + frame[64:])


COMMIT, ON_STAGED = Participant._commit, Coordinator._on_staged
FLAWS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "staged bytes are not looked at again": (HeldEngine, "commit_weights", _no_check_at_commit),
    "a label advances without the bytes": (Participant, "_commit", _says_committed),
    "one engine decides for all": (Coordinator, "_on_staged", _decides_early),
    "manifests are not compared": (Coordinator, "_difference", lambda self, message: ""),
    "no deadline": (Coordinator, "_over", _waits_for_ever),
    "frames are not checked": (virtual, "decode", _reads_what_came),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_protocol_with_a_flaw_is_found(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FLAWS[flaw])
    with pytest.raises((Broken, virtual.Hanging)) as found:
        for seed in range(200):
            schedule(seed)
    assert str(found.value)
