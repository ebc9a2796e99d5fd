"""Exclusive use of a run directory by one process."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

from vime.errors import InputError
from vime.store.files import disk_errors

LOCK_NAME = ".lock"


class RunLock:
    """Held from construction to ``close``; the system releases it when the process dies, however it dies.

    A fork (a user's function may fork) has no part in it: a copy that lives on does not keep the run locked.

    Raises InputError naming the process that holds it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_NAME
        with disk_errors(str(path)):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 4096, 0).decode("utf-8", "replace")
            os.close(self._descriptor)
            raise InputError(
                f"the run directory {folder} is in use by {_describe(holder)}: wait until it ends, or stop it"
            ) from None
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        with disk_errors(str(path)):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(owner).encode(), 0)
        own = weakref.ref(self)

        def left_to_the_parent() -> None:
            lock = own()
            if lock is not None:
                lock.close()

        os.register_at_fork(after_in_child=left_to_the_parent)

    def close(self) -> None:
        """Let others use the run directory."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def holder_of(folder: Path) -> str | None:
    """The process that works on a run directory now, in words; None where none does. Nothing is written."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _describe(os.pread(descriptor, 4096, 0).decode("utf-8", "replace"))
    finally:
        os.close(descriptor)
    return None


def _describe(holder: str) -> str:
    try:
        data = json.loads(holder)
        return f"process {data['pid']} on {data['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
