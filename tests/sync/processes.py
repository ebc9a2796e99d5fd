"""Engines in processes of their own that follow a plan of faults, and ways to them that lose and damage frames."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import struct
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.sync import fake_devices
from tests.sync.virtual import HeldEngine
from vime.rollout.interface import CommittedVersion
from vime.sync.drive import Channel

STAGE_FAULTS = ("kill", "hang", "memory", "disk", "bit")
COMMIT_FAULTS = ("kill", "hang")
HANG_S = 0.9


def write_plan(path: Path, plan: Mapping[str, str]) -> None:
    """As a whole: the other side may read meanwhile."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(plan))
    new.replace(path)


class PlannedEngine(HeldEngine):
    """Does what ``plan-NAME.json`` says (call -> fault), each fault once."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name)
        self.engine_id = name
        self._plan = folder / f"plan-{name}.json"

    def _fault(self, call: str) -> str | None:
        try:
            plan = json.loads(self._plan.read_text())
        except FileNotFoundError:
            return None
        fault = plan.pop(call, None)
        write_plan(self._plan, plan)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "hang":
            time.sleep(HANG_S)
        elif fault == "memory":
            raise MemoryError
        elif fault == "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return str(fault)

    def stage_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> str:
        if self._fault("stage") == "bit":
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            tensors["norm"].view(torch.int32)[0, 0] ^= 1 << 7
        return super().stage_weights(version, tensors)

    def commit_weights(self, version: int, digest: str) -> CommittedVersion:
        self._fault("commit")
        return super().commit_weights(version, digest)

    def close(self) -> None:
        """Nothing is held open."""


def half_answering_engine(specification: Mapping[str, Any]) -> PlannedEngine:
    """An engine whose process stops in the middle of its first answer in a sync."""
    import vime.runtime.process as serving

    whole = serving.send

    def half(connection: Connection, header: Mapping[str, Any], arrays: Any = None) -> None:
        if not header.get("sync"):
            whole(connection, header, arrays)
            return
        os.write(connection.fileno(), struct.pack("!i", 5000) + b'{"sync": true, ')
        os.kill(os.getpid(), signal.SIGSTOP)

    serving.send = half
    return planned_engine(specification)


def planned_engine(specification: Mapping[str, Any]) -> PlannedEngine:
    """Factory for :class:`vime.runtime.process.ProcessEngine`; ``fake``: its device runtime and devices."""
    if "fake" in specification:
        fake_devices.load(**specification["fake"])
    return PlannedEngine(specification["engine_id"], Path(specification["transport_folder"]))


class LossyChannel:
    """Drops, cuts off, changes and repeats frames, in both directions, with the chance ``each``."""

    def __init__(self, channel: Channel, draw: random.Random, each: float) -> None:
        self._channel, self._draw, self._each = channel, draw, each
        self._old: list[bytes] = []
        self.faults = 0

    @property
    def connection(self) -> Connection | None:
        return self._channel.connection

    def _changed(self, frame: bytes) -> bytes | None:
        if self._draw.random() >= self._each:
            return frame
        self.faults += 1
        kind = self._draw.choice(("drop", "cut", "bit"))
        at = self._draw.randrange(len(frame))
        if kind == "cut":
            return frame[:at]
        return (
            frame[:at] + bytes([frame[at] ^ 1 << self._draw.randrange(8)]) + frame[at + 1 :] if kind == "bit" else None
        )

    def send(self, frame: bytes) -> None:
        if self._old and self._draw.random() < self._each:
            self._channel.send(self._draw.choice(self._old))  # a frame of before, late
        self._old.append(frame)
        sent = self._changed(frame)
        if sent:
            self._channel.send(sent)

    def receive(self) -> bytes | None:
        frame = self._channel.receive()
        return frame and (self._changed(frame) or b"lost")


def shared_reader(pipe: Connection, name: str, library: str, devices: str) -> None:
    """A process that serves a sender's own memory: takes handles, answers with the sum of every tensor's bytes."""
    from vime.sync.device_ipc import DeviceIpcTransport

    fake_devices.load(library, devices)
    transport = DeviceIpcTransport(name, fake_devices.runtime(name), to="shared", host_memory=True)
    served: dict[str, torch.Tensor] = {}
    while (order := pipe.recv()) is not None:
        if "receive" in order:
            served = transport.receive(order["receive"])
            transport.close_received()
        elif "forget" in order:
            transport.forget(order["forget"])
            served = {}
        pipe.send({key: tensor.flatten().view(torch.uint8).tolist() for key, tensor in served.items()})
