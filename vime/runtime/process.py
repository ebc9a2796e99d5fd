"""An engine in a process of its own (``placement: split``), behind the interface of an embedded one."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from rlkernel.contract.identity import Identities
from rlkernel.errors import NumericsError, RlkernelError
from vime.errors import ERRORS, InputError, Interrupted, InvariantViolation, VimeError
from vime.mismatch.localise import Boundary
from vime.rollout.interface import CommittedVersion
from vime.runtime.messages import (
    receive,
    request_from_json,
    request_to_json,
    sample_from_message,
    sample_to_message,
    send,
    train_sample_from_json,
    train_sample_to_json,
)
from vime.runtime.reader import Reader
from vime.sync.drive import Channel, ChannelClosed
from vime.sync.messages import FrameError, decode, encode
from vime.sync.participant import Participant
from vime.sync.transports import make_transport
from vime.train.interface import ScoredSample, TrainSample
from vime.types import GeneratedSample, RolloutRequest

_TAKEN_WITHIN_S = 0.05
EngineFactory = Callable[[Mapping[str, Any]], Any]
_ERRORS: dict[str, type[VimeError]] = {**ERRORS, NumericsError.__name__: InvariantViolation}


def _committed_json(committed: CommittedVersion | None) -> dict[str, Any] | None:
    return None if committed is None else {"version": committed.version, "digest": committed.digest}


def _serve(connection: Connection, factory: EngineFactory, specification: Mapping[str, Any]) -> None:
    """The child's loop: one request, one or several answers. Ends when the parent is gone."""
    # Ctrl-C on a terminal reaches every process of the run: when to stop, the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = factory(specification)
    transport = make_transport(specification["transport"], Path(specification["transport_folder"]))
    participant = Participant(engine, transport)
    try:
        send(connection, {"ready": True})
        while _answer(connection, engine, participant):
            pass
    except (EOFError, ConnectionError):
        pass  # the parent is gone, killed perhaps: nobody is left to answer
    finally:
        engine.close()


def _answer(connection: Connection, engine: Any, participant: Participant) -> bool:
    """Serve one request; False when it was the last. Raises EOFError or ConnectionError without a parent."""
    header, given = receive(connection)
    call = header["call"]
    if call == "close":
        return False
    try:
        if call == "identities":
            send(connection, {"value": engine.identities().as_json()})
        elif call == "sync":
            _answer_sync(connection, participant, given["frame"].tobytes())
        elif call == "committed":
            send(connection, {"value": _committed_json(engine.committed())})
        elif call == "score":
            scored = engine.score(train_sample_from_json(header["sample"]), header["temperature"])
            arrays = {"logprobs": scored.logprobs, "digests": scored.digests, "entropies": scored.entropies}
            send(connection, {"value": None}, arrays)
        elif call == "trace":
            boundaries = engine.trace(train_sample_from_json(header["sample"]), header["temperature"])
            names = [[boundary.region, boundary.output] for boundary in boundaries]
            send(connection, {"value": names}, {str(i): boundary.values for i, boundary in enumerate(boundaries)})
        elif call == "evidence":
            send(connection, {"value": engine.evidence()})
        elif call == "generate":
            for sample in engine.generate([request_from_json(r) for r in header["requests"]]):
                described, arrays = sample_to_message(sample)
                send(connection, {"sample": described}, arrays)
            send(connection, {"value": None})
        else:
            send(connection, {"error": "InputError", "message": f"unknown call {call!r}"})
    except (VimeError, RlkernelError) as error:
        send(connection, {"error": type(error).__name__, "message": str(error)})
    return True


def _answer_sync(connection: Connection, participant: Participant, frame: bytes) -> None:
    """Each frame gets one answer, so that the parent knows how many are still to come; it may be that there is none."""
    try:
        answer = participant.answer(decode(frame))
    except FrameError:
        answer = None  # as if it had not arrived: what was asked is asked again
    if answer is None:
        send(connection, {"sync": False})
    else:
        send(connection, {"sync": True}, {"frame": np.frombuffer(encode(answer), np.uint8)})


class ProcessEngine:
    """A rollout engine served by a child process.

    Args:
        factory: a module-level function that builds the engine in the child from ``specification`` (plain data
            with at least ``engine_id``, ``transport``, ``transport_folder``).
        deadline_s: the longest silence of the child before it counts as lost.
        start_method: of :mod:`multiprocessing`.

    Raises:
        Interrupted: the child ended or fell silent; the run can be resumed.
    """

    def __init__(
        self,
        factory: EngineFactory,
        specification: Mapping[str, Any],
        *,
        deadline_s: float = 600.0,
        start_method: str = "spawn",
    ) -> None:
        self._id = str(specification["engine_id"])
        self._deadline = deadline_s
        context: Any = multiprocessing.get_context(start_method)
        self._connection, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, factory, dict(specification)), daemon=True)
        self._process.start()
        child.close()
        self._reader = Reader(self._connection)
        self._gone = False
        self._busy = False
        """An answer is due. It stays due when an exception (a signal, say) leaves a call half way."""
        self._frames: deque[bytes] = deque()
        """Frames of a sync that are not answered yet, in the order in which the answers will come."""
        self._sending: Thread | None = None
        """Puts the last frame into the pipe, which takes it at once unless the child does not read."""
        self._receive()

    @property
    def engine_id(self) -> str:
        return self._id

    @property
    def pid(self) -> int | None:
        """Process id of the child."""
        return self._process.pid

    def _receive(self) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            found = self._reader.take(self._deadline)
        except (EOFError, ConnectionError) as error:
            raise Interrupted(
                f"engine {self._id} (process {self.pid}) ended with exit code {self._end()}; resume the run"
            ) from error
        if found is None:
            raise Interrupted(f"engine {self._id} has not answered for {self._deadline:.0f} s; resume the run")
        header, arrays = found
        if "sync" in header:  # the last word of a sync that was ended by its deadline
            self._frames.popleft()
            return self._receive()
        if "sample" not in header:
            self._busy = False
        if "error" in header:
            raise _ERRORS.get(header["error"], InputError)(f"engine {self._id}: {header['message']}")
        return header, arrays

    @property
    def _does_not_read(self) -> bool:
        """A frame is still on its way into a full pipe: nothing else may be sent."""
        return self._sending is not None and self._sending.is_alive()

    def _end(self) -> int | None:
        """The exit code of the child, which has ended."""
        self._gone = True
        self._process.join(timeout=5)
        return self._process.exitcode

    def _send(self, header: Mapping[str, Any]) -> None:
        if self._gone:
            raise Interrupted(f"engine {self._id} is gone; resume the run")
        if self._busy:
            raise Interrupted(f"engine {self._id} is still at work on what was given up; resume the run")
        if self._does_not_read:
            raise Interrupted(f"engine {self._id} does not read what it is sent; resume the run")
        self._busy = True
        try:
            send(self._connection, header)
        except (BrokenPipeError, ConnectionError) as error:
            raise Interrupted(f"engine {self._id} is gone; resume the run") from error

    def _call(self, call: str, **arguments: Any) -> Any:
        self._send({"call": call, **arguments})
        return self._receive()[0]["value"]

    def identities(self) -> Identities:
        return Identities(**self._call("identities"))

    def channel(self) -> Channel:
        """Its way for the messages of a sync."""
        return _SyncChannel(self)

    def committed(self) -> CommittedVersion | None:
        value = self._call("committed")
        return None if value is None else CommittedVersion(**value)

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[GeneratedSample]:
        self._send({"call": "generate", "requests": [request_to_json(r) for r in requests]})
        while True:
            header, arrays = self._receive()
            if "sample" not in header:
                return
            yield sample_from_message(header["sample"], arrays)

    def score(self, sample: TrainSample, temperature: float) -> ScoredSample:
        header = {"call": "score", "sample": train_sample_to_json(sample), "temperature": temperature}
        self._send(header)
        _, arrays = self._receive()
        return ScoredSample(sample.sample_id, arrays["logprobs"], arrays["digests"], arrays["entropies"])

    def trace(self, sample: TrainSample, temperature: float) -> list[Boundary]:
        """Every region boundary of :meth:`score`'s forward."""
        self._send({"call": "trace", "sample": train_sample_to_json(sample), "temperature": temperature})
        header, arrays = self._receive()
        return [Boundary(region, output, arrays[str(i)]) for i, (region, output) in enumerate(header["value"])]

    def evidence(self) -> dict[str, Any]:
        return dict(self._call("evidence"))

    def close(self) -> None:
        if self._process.is_alive():
            try:
                if self._does_not_read or self._frames:
                    self._process.kill()  # it may be stopped, and would not end of itself
                elif self._busy:
                    self._process.terminate()
                else:
                    send(self._connection, {"call": "close"})
            except ConnectionError:
                self._process.terminate()
            self._process.join(timeout=10)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(timeout=10)
        self._reader.close(timeout=10)
        self._connection.close()


class _SyncChannel:
    """The messages of a sync over an engine's pipe.

    The pipe loses nothing: a frame that is not answered yet is not sent again, so that an engine that takes long is not
    asked many times. One that does not read fills the pipe; then nothing more is sent, and its deadline ends the sync.
    So it does where an engine stops in the middle of an answer: what has come of it is with the reader's thread.
    """

    def __init__(self, engine: ProcessEngine) -> None:
        self._engine = engine

    @property
    def connection(self) -> Connection:
        return self._engine._reader.ready

    def send(self, frame: bytes) -> None:
        engine = self._engine
        if engine._gone:
            raise ChannelClosed("it is gone")
        if engine._busy:
            raise ChannelClosed("it is still at work on what was given up")
        if frame in engine._frames or engine._does_not_read:
            return  # asked again later
        engine._frames.append(frame)
        # a thread, because a full pipe takes nothing while the child does not read: the deadlines are the caller's
        engine._sending = Thread(target=self._put, args=(frame,), daemon=True)
        engine._sending.start()
        engine._sending.join(_TAKEN_WITHIN_S)

    def _put(self, frame: bytes) -> None:
        with suppress(OSError):  # who reads next sees that the child is gone
            send(self._engine._connection, {"call": "sync"}, {"frame": np.frombuffer(frame, np.uint8)})

    def receive(self) -> bytes | None:
        engine = self._engine
        try:
            while (found := engine._reader.take()) is not None:
                header, arrays = found
                if "sync" not in header or not engine._frames:
                    said = f"{header['error']}: {header['message']}" if "error" in header else "what nobody asked for"
                    raise ChannelClosed(f"it answered {said}")
                engine._frames.popleft()
                if header["sync"]:
                    return arrays["frame"].tobytes()
        except (EOFError, ConnectionError) as error:
            raise ChannelClosed(f"process {engine.pid} ended with exit code {engine._end()}") from error
        return None
