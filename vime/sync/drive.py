"""Runs a coordinator over channels to engines: in this process, or in others behind connections."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Protocol

from vime.errors import VimeError
from vime.sync.coordinator import Coordinator, Outcome
from vime.sync.messages import FrameError, decode, encode
from vime.sync.participant import Participant


class ChannelClosed(VimeError):
    """The engine behind a channel is gone."""


class Channel(Protocol):
    """The way to one engine. Frames may be lost and come twice."""

    @property
    def connection(self) -> Connection | None:
        """What becomes readable when a frame has come; None if frames are there as soon as one was sent."""

    def send(self, frame: bytes) -> None:
        """Raises ChannelClosed if the engine is gone."""

    def receive(self) -> bytes | None:
        """A frame that has come, or None. Raises ChannelClosed if the engine is gone."""


class LocalChannel:
    """To an engine of this process: it has answered when :meth:`send` returns."""

    connection = None

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._answers: deque[bytes] = deque()

    def send(self, frame: bytes) -> None:
        """Hand the engine a frame."""
        answer = self._participant.answer(decode(frame))
        if answer is not None:
            self._answers.append(encode(answer))

    def receive(self) -> bytes | None:
        """Its next answer."""
        return self._answers.popleft() if self._answers else None


def drive(
    coordinator: Coordinator, channels: Mapping[str, Channel], clock: Callable[[], float] = time.monotonic
) -> Outcome:
    """Carry frames until the sync that was begun has ended, at the latest by its deadline.

    Raises InvariantViolation if an engine serves other bytes under the version's name; the sync has not ended then,
    and another call goes on with it.
    """
    here = dict(channels)  # those that are closed leave it: they would be readable for ever
    while coordinator.busy:
        _send(coordinator, here, clock)
        _take(coordinator, here, clock)
        coordinator.tick(clock())
    return coordinator.outcome


Clock = Callable[[], float]


def _lose(coordinator: Coordinator, here: dict[str, Channel], engine: str, clock: Clock, error: ChannelClosed) -> None:
    del here[engine]
    coordinator.lose(clock(), engine, str(error))


def _send(coordinator: Coordinator, here: dict[str, Channel], clock: Clock) -> None:
    while coordinator.outbox:
        engine, message = coordinator.outbox.pop(0)
        try:
            if engine in here:
                here[engine].send(encode(message))
        except ChannelClosed as error:
            _lose(coordinator, here, engine, clock, error)


def _take(coordinator: Coordinator, here: dict[str, Channel], clock: Clock) -> None:
    """Hand in every answer that is there; wait for one, or for the next moment, if there is none."""
    waiting = {channel.connection: engine for engine, channel in here.items() if channel.connection is not None}
    local = [engine for engine, channel in here.items() if channel.connection is None]
    came = sum(_take_from(coordinator, here, engine, clock) for engine in local)
    moment = coordinator.next_tick
    if moment is None:
        return
    timeout = 0.0 if came or coordinator.outbox else max(0.0, moment - clock())
    if not waiting:
        time.sleep(timeout)
        return
    for connection in wait(list(waiting), timeout):
        engine = waiting[connection]  # type: ignore[index]
        _take_from(coordinator, here, engine, clock)


def _take_from(coordinator: Coordinator, here: dict[str, Channel], engine: str, clock: Clock) -> int:
    """Hand in what an engine has answered; how many frames there were."""
    count, channel = 0, here[engine]
    try:
        while (frame := channel.receive()) is not None:
            count += 1
            try:
                message = decode(frame)
            except FrameError:
                continue  # as if it had been lost: what was asked is asked again
            coordinator.receive(clock(), engine, message)
    except ChannelClosed as error:
        _lose(coordinator, here, engine, clock, error)
    return count
