"""Reads what a child process sends, in a thread: one that stops in the middle of a message holds up nobody else."""

from __future__ import annotations

import multiprocessing
import queue
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from vime.runtime.messages import receive

Message = tuple[dict[str, Any], dict[str, Any]]


class Reader:
    """Messages of a connection, whole ones, in the order in which they came."""

    def __init__(self, connection: Connection) -> None:
        self._came: queue.SimpleQueue[Message | EOFError | OSError] = queue.SimpleQueue()
        self.ready, self._bell = multiprocessing.Pipe(duplex=False)
        """Readable when something has come since :meth:`take` last found nothing."""
        self._thread = Thread(target=self._read, args=(connection,), daemon=True)
        self._thread.start()

    def _read(self, connection: Connection) -> None:
        ended = False
        while not ended:
            found: Message | EOFError | OSError
            try:
                found = receive(connection)
            except (EOFError, OSError) as error:
                found, ended = error, True
            self._came.put(found)
            with suppress(OSError):  # closed: nobody waits any more
                self._bell.send_bytes(b"!")

    def take(self, timeout: float | None = None) -> Message | None:
        """The next message: one that is there, or comes within ``timeout`` seconds; else None.

        Raises EOFError or ConnectionError where the connection has ended; again at every further call.
        """
        while self.ready.poll():
            self.ready.recv_bytes()
        try:
            found = self._came.get(block=timeout is not None, timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(found, (EOFError, OSError)):
            self._came.put(found)
            raise EOFError from found
        return found

    def close(self, timeout: float) -> None:
        """Wait for the thread, which ends with the connection's other side."""
        self._thread.join(timeout)
        self.ready.close()
        self._bell.close()
