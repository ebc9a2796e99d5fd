"""How weight bytes travel from the trainer to an engine: in memory, through POSIX shared memory, or on disk.

A transport packs logical tensors into one buffer and describes it by a handle of plain JSON data; the receiving side
opens the handle and reads the tensors. No pickle is involved. What arrives is verified by the engine, which recomputes
the manifest digest from the bytes that it will serve; a transport is never trusted.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vime.errors import InputError, Interrupted, InvariantViolation

Handle = dict[str, Any]
Tensors = Mapping[str, torch.Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ALIGNMENT = 64


class Transport(Protocol):
    """One way to move a set of tensors. ``send`` and ``release`` run on the trainer's side."""

    name: str

    def send(self, tensors: Tensors) -> Handle:
        """Pack the tensors; the handle is plain JSON data."""

    def receive(self, handle: Handle) -> dict[str, torch.Tensor]:
        """Open a handle; the tensors stay valid until :meth:`close_received`."""

    def close_received(self) -> None:
        """Let go of what was received."""

    def release(self, handle: Handle) -> None:
        """Free what was sent, after every engine has its copy. Freeing twice does nothing."""

    def close(self) -> None:
        """Free everything that was sent."""


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a tensor in C order, uint8 [n]; a copy where it is not contiguous, or not on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)  # weights of a trainer on a GPU come home here
    return flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)


def layout(tensors: Tensors) -> tuple[list[dict[str, Any]], int]:
    """Name, shape, dtype, offset and bytes of every tensor, in name order, and the bytes of all together.

    Raises InputError for a dtype that weights do not have.
    """
    entries, offset = [], 0
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise InputError(f"{name} is {tensor.dtype}; weights travel as {' or '.join(DTYPES)}")
        size = tensor.numel() * tensor.element_size()
        entries.append({"name": name, "shape": list(tensor.shape), "dtype": dtype, "offset": offset, "bytes": size})
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return entries, offset


class MemoryTransport:
    """Engine and trainer share a process: the tensors are handed over as they are (the engine copies them)."""

    name = "memory"

    def __init__(self) -> None:
        self._held: dict[int, Tensors] = {}
        self._next = 0

    def send(self, tensors: Tensors) -> Handle:
        self._next += 1
        self._held[self._next] = tensors
        return {"transport": self.name, "key": self._next}

    def receive(self, handle: Handle) -> dict[str, torch.Tensor]:
        return dict(self._held[handle["key"]])

    def close_received(self) -> None:
        """Nothing is held by the receiver."""

    def release(self, handle: Handle) -> None:
        self._held.pop(handle["key"], None)

    def close(self) -> None:
        self._held.clear()


def _bytes_of(segment: shared_memory.SharedMemory) -> memoryview:
    """The segment's memory. Raises InvariantViolation for one that was closed."""
    if segment.buf is None:
        raise InvariantViolation(f"the shared-memory segment {segment.name!r} is closed")
    return segment.buf


class SharedMemoryTransport:
    """One POSIX shared-memory segment a publication, all tensors packed into it."""

    name = "shm"

    def __init__(self) -> None:
        self._sent: dict[str, shared_memory.SharedMemory] = {}
        self._received: list[shared_memory.SharedMemory] = []

    def send(self, tensors: Tensors) -> Handle:
        entries, size = layout(tensors)
        segment = None
        try:
            segment = shared_memory.SharedMemory(create=True, size=max(1, size))
            # reserves the pages: a full /dev/shm would otherwise kill the process at the first write that finds none
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(segment._fd, 0, max(1, size))  # type: ignore[attr-defined]
        except OSError as error:
            if segment is not None:
                segment.close()
                segment.unlink()
            raise Interrupted(
                f"{size} bytes of shared memory for the weights cannot be had ({error.strerror}): make room in "
                "/dev/shm, or set stages.sync.transport: disk; then resume"
            ) from error
        view = np.frombuffer(_bytes_of(segment), np.uint8)
        for entry in entries:
            view[entry["offset"] : entry["offset"] + entry["bytes"]] = raw_bytes(tensors[entry["name"]])
        del view
        self._sent[segment.name] = segment
        return {"transport": self.name, "segment": segment.name, "size": size, "tensors": entries}

    def receive(self, handle: Handle) -> dict[str, torch.Tensor]:
        try:
            segment = shared_memory.SharedMemory(name=handle["segment"])
        except FileNotFoundError as error:
            raise InvariantViolation(f"the weights' shared-memory segment {handle['segment']!r} is gone") from error
        if handle["segment"] not in self._sent and multiprocessing.parent_process() is None:
            # The sender owns the segment; this process's own tracker would unlink it at its end (until Python 3.13).
            # A child of multiprocessing shares the sender's tracker, which must keep the segment: it removes it
            # when the sender is killed.
            resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
        if segment.size < handle["size"]:
            raise InvariantViolation(
                f"shared memory {handle['segment']!r} has {segment.size} bytes, not {handle['size']}"
            )
        self._received.append(segment)
        result = {}
        for entry in handle["tensors"]:
            raw = np.frombuffer(_bytes_of(segment), np.uint8, entry["bytes"], entry["offset"])
            tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
            if entry["bytes"]:
                # a copy: a tensor that outlives the segment must not read freed memory
                tensor.reshape(-1).view(torch.uint8).numpy()[:] = raw
            result[entry["name"]] = tensor
            del raw
        return result

    def close_received(self) -> None:
        for segment in self._received:
            segment.close()
        self._received.clear()

    def release(self, handle: Handle) -> None:
        segment = self._sent.pop(handle["segment"], None)
        if segment is not None:
            segment.close()
            with suppress(FileNotFoundError):
                segment.unlink()

    def close(self) -> None:
        for name in list(self._sent):
            self.release({"segment": name})


def _delete(path: str) -> None:
    """Delete a file that was written here; what somebody put into its place stays."""
    with suppress(OSError):
        Path(path).unlink()


def _apart(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors on the CPU; of those that share memory, which the file format refuses, all but one as copies."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        found[name] = tensor.detach().cpu().contiguous()
        storage = found[name].untyped_storage().data_ptr()
        if storage in seen:
            found[name] = found[name].clone()
        seen.add(storage)
    return found


def write_tensors(folder: Path, tensors: Tensors) -> str:
    """Write tensors into a new safetensors file of a folder; its path. Raises Interrupted where there is no room."""
    path = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(suffix=".safetensors", dir=folder)
        os.close(descriptor)
        save_file(_apart(tensors), path)
    except (OSError, SafetensorError) as error:
        if path is not None:
            _delete(path)
        raise Interrupted(
            f"the weights cannot be written to {path or folder} ({error}): make room, then resume"
        ) from error
    return path


class DiskTransport:
    """One safetensors file a publication, in a folder that both sides see."""

    name = "disk"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: set[str] = set()

    def send(self, tensors: Tensors) -> Handle:
        path = write_tensors(self._folder, tensors)
        self._sent.add(path)
        return {"transport": self.name, "path": path}

    def receive(self, handle: Handle) -> dict[str, torch.Tensor]:
        try:
            return load_file(handle["path"])
        except (OSError, SafetensorError) as error:
            raise InvariantViolation(f"the published weights {handle['path']} cannot be read: {error}") from error

    def close_received(self) -> None:
        """Nothing is held open."""

    def release(self, handle: Handle) -> None:
        self._sent.discard(handle["path"])
        _delete(handle["path"])

    def close(self) -> None:
        for path in list(self._sent):
            self.release({"path": path})
