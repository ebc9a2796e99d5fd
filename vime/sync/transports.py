"""Transports by the names that a pipeline has for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vime.errors import InputError
from vime.sync.delta import DeltaDiskTransport
from vime.sync.device_ipc import DeviceIpcTransport
from vime.sync.transport import DiskTransport, MemoryTransport, SharedMemoryTransport, Transport


def _hip_ipc(folder: Path) -> Transport:
    from hardware.rocm.runtime import HipRuntime

    return DeviceIpcTransport("hip_ipc", HipRuntime())


def _cuda_ipc(folder: Path) -> Transport:
    from hardware.cuda.runtime import CudaRuntime

    return DeviceIpcTransport("cuda_ipc", CudaRuntime())


TRANSPORTS: dict[str, Callable[[Path], Transport]] = {
    "memory": lambda folder: MemoryTransport(),
    "shm": lambda folder: SharedMemoryTransport(),
    "disk": DiskTransport,
    "disk_delta": DeltaDiskTransport,
    "hip_ipc": _hip_ipc,
    "cuda_ipc": _cuda_ipc,
}


def make_transport(name: str, folder: Path) -> Transport:
    """A transport by its pipeline name; ``folder`` is where those on disk write. Raises InputError for other names."""
    if name not in TRANSPORTS:
        raise InputError(f"stages.sync.transport is {name!r}; accepted: {', '.join(TRANSPORTS)}")
    return TRANSPORTS[name](folder)
