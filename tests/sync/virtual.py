"""Engines, a network and a trainer that exist in virtual time, with faults drawn from a seed.

Engines hold real bytes: 64 of them a tensor, filled from the version. What a token is stamped with is compared with
what those bytes are.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from rlkernel.contract.identity import TensorEntry, manifest_digest
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.ops.weights import plain_manifest
from vime.errors import InvariantViolation
from vime.rollout.interface import CommittedVersion
from vime.rollout.native.weights import WeightSlots
from vime.sync.coordinator import Coordinator, Deadlines, Outcome, Publication
from vime.sync.messages import FrameError, decode, encode
from vime.sync.participant import Participant
from vime.sync.transport import raw_bytes

DEADLINES = Deadlines(stage=10.0, end=5.0, repeat=0.5)
WORKERS = Workers(1)
Tensors = dict[str, torch.Tensor]


@lru_cache
def weights_of(version: int) -> Tensors:
    """The tensors of a version: no two versions share one."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(4, 4, generator=generator) for name in ("embedding", "layers.0.down_proj", "norm")}


@lru_cache(maxsize=4096)
def _entry(name: str, shape: tuple[int, ...], dtype: str, data: bytes) -> TensorEntry:
    kind = getattr(torch, dtype)
    tensor = torch.frombuffer(bytearray(data), dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)
    return plain_manifest({name: tensor}, dtype, WORKERS)[0]


def entries_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorEntry, ...]:
    """The manifest of what the tensors' bytes are now; kept for bytes that came before."""
    return tuple(
        _entry(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), raw_bytes(t).tobytes())
        for name, t in sorted(tensors.items())
    )


digest_of = lru_cache(maxsize=4096)(manifest_digest)


class HeldWeights:
    """A copy of tensors, as :class:`vime.rollout.native.model.ServedWeights`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def manifest(self) -> list[TensorEntry]:
        return list(entries_of(self.tensors))

    def manifest_digest(self) -> str:
        return digest_of(entries_of(self.tensors))


class HeldEngine:
    """An engine that keeps weights and stamps tokens, by the product's own slots."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slots = WeightSlots(name, HeldWeights)
        self.fails: list[Exception] = []

    def stage_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> str:
        if self.fails:
            raise self.fails.pop()
        return self.slots.stage(version, tensors)

    def staged_manifest(self) -> Sequence[TensorEntry]:
        return self.slots.staged_manifest()

    def commit_weights(self, version: int, digest: str) -> CommittedVersion:
        self.slots.commit(self.slots.check_commit(version, digest))
        return CommittedVersion(version, digest)

    def rollback_weights(self) -> None:
        self.slots.rollback()

    def committed(self) -> CommittedVersion | None:
        return self.slots.committed()

    def token(self) -> tuple[int, str] | None:
        """Version that a token would be stamped with now, and the digest of the bytes that would make it."""
        if self.slots.served_version is None:
            return None
        return self.slots.served_version, self.slots.served.weights.manifest_digest()


class Store:
    """Stands for a transport: handles of byte copies, of which some are damaged on the way."""

    def __init__(self, draw: random.Random, damage: float) -> None:
        self._draw, self._damage = draw, damage
        self.sent: dict[str, Tensors] = {}
        self.damaged = 0

    def send(self, version: int) -> dict[str, Any]:
        self.sent[str(version)] = weights_of(version)
        return {"transport": "store", "key": str(version)}

    def receive(self, handle: Mapping[str, Any]) -> Tensors:
        if handle["key"] not in self.sent:
            raise InvariantViolation(f"the published weights {handle['key']} are gone")
        tensors = {name: tensor.clone() for name, tensor in self.sent[handle["key"]].items()}
        if self._draw.random() >= self._damage:
            return tensors
        self.damaged += 1
        kind = self._draw.choice(("bit", "missing", "extra", "shape", "stale"))
        if kind == "bit":
            tensors["norm"].view(torch.int32)[self._draw.randrange(4), 0] ^= 1 << self._draw.randrange(32)
        elif kind == "missing":
            del tensors["norm"]
        elif kind == "extra":
            tensors["bias"] = torch.zeros(4)
        elif kind == "shape":
            tensors["norm"] = tensors["norm"].reshape(2, 8)
        else:
            tensors = dict(weights_of(int(handle["key"]) - 1))
        return tensors

    def close_received(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Faults:
    """Chances of each message, and of each moment."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    truncate: float = 0.0
    damage: float = 0.0
    kill_engine: float = 0.0
    kill_trainer: float = 0.0
    fail_staging: float = 0.0
    change_staged: float = 0.0


class Hanging(AssertionError):
    """A sync did not end by its deadline."""


class World:
    """Trainer, engines, and messages between them, in virtual time."""

    def __init__(self, seed: int, engines: int, faults: Faults) -> None:
        self.draw = random.Random(seed)
        self.faults, self.now, self._count = faults, 0.0, 0
        self.store = Store(self.draw, faults.damage)
        self.engines = {f"e{n}": HeldEngine(f"e{n}") for n in range(engines)}
        self.participants = {name: Participant(engine, self.store) for name, engine in self.engines.items()}
        self.queue: list[tuple[float, int, str, str, bytes]] = []
        self.journal = Journal()
        self.coordinator = Coordinator(list(self.engines), self.journal, DEADLINES)
        self.published: dict[int, str] = {}
        self.tokens: list[tuple[str, int, str]] = []
        self.seen: Counter[str] = Counter()
        self.violations: list[str] = []
        self.given_up = False  # a trainer was killed that had never decided, and took its sync along

    # time

    def _post(self, to: str, engine: str, frame: bytes) -> None:
        """Put a frame on its way, or what becomes of it."""
        faults, draw = self.faults, self.draw
        if draw.random() < faults.drop:
            self.seen["dropped"] += 1
            return
        if draw.random() < faults.corrupt:
            self.seen["corrupted"] += 1
            place = draw.randrange(len(frame))
            frame = frame[:place] + bytes([frame[place] ^ 1 << draw.randrange(8)]) + frame[place + 1 :]
        if draw.random() < faults.truncate:
            self.seen["truncated"] += 1
            frame = frame[: draw.randrange(len(frame))]
        copies = 1
        if draw.random() < faults.duplicate:
            self.seen["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            late = draw.uniform(0.0, 0.05)
            if draw.random() < faults.delay:
                self.seen["delayed"] += 1
                late += draw.choice((0.3, 2.0, 12.0, 30.0))
            self._count += 1
            heapq.heappush(self.queue, (self.now + late, self._count, to, engine, frame))

    def _deliver(self, to: str, engine: str, frame: bytes) -> None:
        try:
            message = decode(frame)
        except FrameError:
            self.seen["refused frames"] += 1
            return
        if to == "trainer":
            try:
                self.coordinator.receive(self.now, engine, message)
            except InvariantViolation as error:
                self.violations.append(str(error))
            return
        if self.draw.random() < self.faults.fail_staging:
            self.seen["staging failed"] += 1
            self.engines[engine].fails.append(self.draw.choice((MemoryError(), OSError(28, "No space left on device"))))
        answer = self.participants[engine].answer(message)
        self.seen["damaged"] = self.store.damaged
        self.engines[engine].fails.clear()
        self._sample(engine)
        if answer is not None:
            self._post("trainer", engine, encode(answer))

    def _sample(self, engine: str) -> None:
        """A token of an engine that gets requests."""
        if engine in self.coordinator.live and (token := self.engines[engine].token()) is not None:
            self.tokens.append((engine, *token))

    def _mishaps(self) -> None:
        draw, faults = self.draw, self.faults
        for name in self.engines:
            if draw.random() < faults.change_staged:
                self.change_staged(name)
            if draw.random() < faults.kill_engine:
                self.restart(name)
        if draw.random() < faults.kill_trainer:
            self.kill_trainer()

    def change_staged(self, name: str) -> None:
        """A number in what an engine has staged becomes another."""
        staged: Any = self.engines[name].slots._staged
        if staged is not None:
            self.seen["staged bytes changed"] += 1
            next(iter(staged.weights.tensors.values())).view(-1)[0] += 1.0

    def restart(self, name: str) -> None:
        """An engine is killed and starts anew, with nothing."""
        self.seen["engines killed"] += 1
        self.engines[name] = HeldEngine(name)
        self.participants[name] = Participant(self.engines[name], self.store)

    def kill_trainer(self) -> None:
        """The trainer is killed; another reads the journal, and brings every engine to what had been decided."""
        self.seen["trainers killed"] += 1
        self.coordinator = Coordinator(
            list(self.engines), self.journal, DEADLINES, first_attempt=1000 * self.seen["trainers killed"],
            committed=self.journal.last,
        )  # fmt: skip
        self.given_up = self.journal.last is None
        if self.journal.last is not None:
            self.coordinator.catch_up(self.now, list(self.engines), self.publication(self.journal.last[0]))

    def publication(self, version: int) -> Publication:
        """A version on offer."""
        entries = entries_of(weights_of(version))
        self.published[version] = digest_of(entries)
        return Publication(version, self.published[version], self.store.send(version), lambda: entries)

    def step(self) -> None:
        """Let time go on to whatever happens next."""
        for engine, message in self.coordinator.outbox:
            self._post("engine", engine, encode(message))
        self.coordinator.outbox.clear()
        moments = [self.queue[0][0]] if self.queue else []
        moments += [tick] if (tick := self.coordinator.next_tick) is not None else []
        self.now = max(self.now, min(moments)) if moments else self.now + 0.1
        while self.queue and self.queue[0][0] <= self.now:
            self._deliver(*heapq.heappop(self.queue)[2:])
        self._mishaps()
        self.coordinator.tick(self.now)
        for engine in self.engines:
            self._sample(engine)

    def finish(self) -> Outcome | None:
        """Until the sync has ended; None if the trainer was killed and there was nothing to bring engines to."""
        began = self.now
        while self.coordinator.busy:
            self.step()
            killed = self.seen["trainers killed"] + 1
            if self.now - began > killed * (DEADLINES.stage + 2 * DEADLINES.end):
                raise Hanging("a sync hangs past its deadline")
        return None if self.given_up else self.coordinator.outcome

    def synchronise(self, version: int) -> Outcome | None:
        """Publish a version and wait for the end."""
        self.given_up = False
        self.coordinator.publish(self.now, self.publication(version))
        self.journal.events.append(("published", str(version), *self.coordinator.live))
        return self.finish()


class Journal:
    """The trainer's log: what the next trainer finds."""

    def __init__(self) -> None:
        self.last: tuple[int, str] | None = None
        self.events: list[tuple[str, ...]] = []

    def staged(self, engine: str, digest: str) -> None:
        self.events.append(("staged", engine, digest))

    def verified(self, engine: str) -> None:
        self.events.append(("verified", engine))

    def decided(self, version: int, digest: str) -> None:
        self.last = (version, digest)
        self.events.append(("decided", str(version), digest))

    def committed(self, engine: str, digest: str) -> None:
        self.events.append(("committed", engine, digest))

    def rolled_back(self, engine: str, reason: str) -> None:
        self.events.append(("rolled_back", engine, reason))

    def lost(self, engine: str, reason: str) -> None:
        self.events.append(("lost", engine, reason))

    def rejoined(self, engine: str, digest: str) -> None:
        self.events.append(("rejoined", engine, digest))
