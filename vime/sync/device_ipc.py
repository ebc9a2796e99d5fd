"""Weights in device memory that engines of the same machine open: few handles of large buckets, devices by UUID.

An ordinal names another device in another process (HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES); so a handle carries the
UUID, and the receiver looks among its own devices for it. No pickle, no torch storage: addresses and bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from rlkernel.errors import DeviceError
from vime.errors import InputError, Interrupted, InvariantViolation
from vime.sync.transport import ALIGNMENT, DTYPES, Handle, Tensors, layout

BUCKET_BYTES = 1 << 30


class DeviceRuntime(Protocol):
    """Memory of devices; see :class:`hardware.rocm.runtime.HipRuntime`. Every method may raise DeviceError."""

    def device_count(self) -> int: ...

    def identity(self, ordinal: int) -> str: ...

    def use(self, ordinal: int) -> None: ...

    def allocate(self, size: int) -> int: ...

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes: ...

    def open(self, handle: bytes) -> int: ...

    def unmap(self, address: int) -> None: ...

    def copy(self, target: int, source: int, size: int) -> None: ...

    def synchronise(self) -> None: ...


@dataclass
class _Bucket:
    address: int
    size: int
    handle: str


@dataclass
class _Packing:
    """Where tensors lie: entries as in :func:`vime.sync.transport.layout`, each with its bucket; sizes of buckets."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def _pack(tensors: Tensors, bucket_bytes: int) -> _Packing:
    """Tensors in name order, one behind the other, in buckets; a tensor that is larger than one has its own."""
    packing = _Packing()
    placed, _ = layout(tensors)
    for entry in placed:
        room = -(-entry["bytes"] // ALIGNMENT) * ALIGNMENT
        if not packing.sizes or (packing.sizes[-1] and packing.sizes[-1] + room > bucket_bytes):
            packing.sizes.append(0)
        packing.entries.append({**entry, "bucket": len(packing.sizes) - 1, "offset": packing.sizes[-1]})
        packing.sizes[-1] += room
    return packing


class _DeviceBytes:
    """Device memory as torch takes it over, without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _view(address: int, size: int, device: str) -> torch.Tensor:
    """Memory that a runtime allocated or opened, uint8 [size]: valid for as long as it is mapped."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device == "cpu":  # where a runtime's memory is the host's
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_DeviceBytes(address, size), device=device)


def _tensors_of(entries: list[dict[str, Any]], buckets: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that lie in buckets, as views."""
    found = {}
    for entry in entries:
        raw = buckets[entry["bucket"]][entry["offset"] : entry["offset"] + entry["bytes"]]
        found[entry["name"]] = raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


class DeviceIpcTransport:
    """Buckets on one device, opened by engines in other processes that see the same device.

    Weights that :meth:`place` laid out are published as they are, without a copy. A receiver either has copies
    (``to`` is ``cpu`` or ``device``), or, with ``shared``, the sender's memory itself: then the sender writes the next
    weights elsewhere, into a second placement, and an engine serves what it opened until it has switched to that.

    Args:
        name: as the pipeline calls it (``hip_ipc``).
        runtime: of that kind of device.
        ordinal: the sender's device, in its own numbering.
        to: where a receiver puts its copies: ``cpu``, or ``device``, the one that the weights lie on; ``shared``: no
            copies, views of the sender's memory that stay mapped until :meth:`forget`.
        host_memory: the runtime's memory is the host's (a runtime without a device).
        bucket_bytes: least size at which a bucket is full.
    """

    def __init__(
        self,
        name: str,
        runtime: DeviceRuntime,
        ordinal: int = 0,
        to: Literal["cpu", "device", "shared"] = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
        *,
        host_memory: bool = False,
    ) -> None:
        self.name, self._to, self._host_memory = name, to, host_memory
        self._runtime, self._ordinal, self._bucket_bytes = runtime, ordinal, bucket_bytes
        self._sent: dict[int, list[_Bucket]] = {}
        self._unused: list[_Bucket] = []
        self._next = 0
        self._opened: dict[str, int] = {}
        self._placed: list[tuple[_Packing, list[_Bucket]]] = []

    def _device(self, ordinal: int) -> str:
        return "cpu" if self._host_memory else f"cuda:{ordinal}"  # torch's name of AMD's devices too

    # the trainer's side

    def place(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors, copied into buckets of their own: :meth:`send` publishes what is written there without a copy.

        They are valid until :meth:`close`. Raises Interrupted where the device has no room for them.
        """
        packing = _pack(tensors, self._bucket_bytes)
        with _told("the weights cannot be put on the device"):
            self._runtime.use(self._ordinal)
            buckets = self._allocate(packing.sizes)
            self._placed.append((packing, buckets))
        device = self._device(self._ordinal)
        placed = _tensors_of(packing.entries, [_view(b.address, b.size, device) for b in buckets])
        for name, tensor in placed.items():
            tensor.copy_(tensors[name])
        return placed

    def _placement(self, tensors: Tensors) -> tuple[_Packing, list[_Bucket]] | None:
        """The buckets that hold exactly these tensors where they were placed."""
        for packing, buckets in self._placed:
            places = {e["name"]: buckets[e["bucket"]].address + e["offset"] for e in packing.entries if e["bytes"]}
            given = {n: t.data_ptr() if t.is_contiguous() else None for n, t in tensors.items() if t.numel()}
            same = [(e["name"], e["dtype"], e["shape"]) for e in packing.entries] == [
                (n, str(tensors[n].dtype).removeprefix("torch."), list(tensors[n].shape)) for n in sorted(tensors)
            ]
            if same and places == given:
                return packing, buckets
        return None

    def send(self, tensors: Tensors) -> Handle:
        """Copy the tensors into buckets, but those that :meth:`place` put there.

        Raises Interrupted where the device has no room for them.
        """
        placed = self._placement(tensors)
        if placed is not None:
            packing, buckets = placed
            with _told("the placed weights cannot be published"):
                self._runtime.use(self._ordinal)
                self._runtime.synchronise()
                return self._handle(packing, buckets, self._runtime.identity(self._ordinal))
        packing = _pack(tensors, self._bucket_bytes)
        with _told("the weights cannot be put on the device"):
            self._runtime.use(self._ordinal)
            buckets = self._buckets(packing.sizes)
            try:
                sources = [tensors[entry["name"]].detach().contiguous() for entry in packing.entries]
                for entry, source in zip(packing.entries, sources, strict=True):
                    if entry["bytes"]:
                        target = buckets[entry["bucket"]].address + entry["offset"]
                        self._runtime.copy(target, source.data_ptr(), entry["bytes"])
                self._runtime.synchronise()
                identity = self._runtime.identity(self._ordinal)
            except BaseException:
                self._unused += buckets
                raise
        handle = self._handle(packing, buckets, identity)
        self._sent[self._next] = buckets
        return handle

    def _handle(self, packing: _Packing, buckets: list[_Bucket], identity: str) -> Handle:
        self._next += 1
        return {
            "transport": self.name,
            "key": self._next,
            "device": identity,
            "buckets": [{"handle": bucket.handle, "bytes": bucket.size} for bucket in buckets],
            "tensors": packing.entries,
        }

    def _buckets(self, sizes: list[int]) -> list[_Bucket]:
        """Buckets of these sizes: those of a publication before, where they fit; else what is unused is freed first."""
        if [bucket.size for bucket in self._unused] == sizes:
            found, self._unused = self._unused, []
            return found
        self._free_unused()
        return self._allocate(sizes)

    def _allocate(self, sizes: list[int]) -> list[_Bucket]:
        found: list[_Bucket] = []
        try:
            for size in sizes:
                address = self._runtime.allocate(max(size, 1))
                found.append(_Bucket(address, size, self._runtime.export(address).hex()))
        except BaseException:
            for bucket in found:
                self._runtime.free(bucket.address)
            raise
        return found

    def release(self, handle: Handle) -> None:
        """Keep the buckets for the next publication."""
        self._unused += self._sent.pop(handle["key"], [])

    def close(self) -> None:
        """Free everything that was sent and placed."""
        for key in list(self._sent):
            self.release({"key": key})
        while self._placed:
            self._unused += self._placed.pop()[1]
        self._free_unused()

    def _free_unused(self) -> None:
        while self._unused:
            self._runtime.free(self._unused.pop().address)

    # the engine's side

    def receive(self, handle: Handle) -> dict[str, torch.Tensor]:
        """The tensors: copies, one a bucket, of which they are views; or with ``shared`` the sender's memory.

        Raises:
            InputError: this process does not see the device that they lie on.
            InvariantViolation: a bucket cannot be opened.
            Interrupted: there is no room to map it.
        """
        with _told("the published weights cannot be opened on the device"):
            ordinal = self._ordinal_of(handle["device"])
            self._runtime.use(ordinal)
            device = "cpu" if self._to == "cpu" else self._device(ordinal)
            own = self._own()
            found = []
            for bucket in handle["buckets"]:  # a copy runs while the next bucket is opened and the views are made
                address = self._address(bucket["handle"], own)
                if self._to == "shared":
                    found.append(_view(address, bucket["bytes"], device))
                    continue
                found.append(torch.empty(bucket["bytes"], dtype=torch.uint8, device=device))
                self._runtime.copy(found[-1].data_ptr(), address, bucket["bytes"])
            tensors = _tensors_of(handle["tensors"], found)
            self._runtime.synchronise()
        return tensors

    def _own(self) -> dict[str, int]:
        """Addresses of what this process sent: a runtime opens no memory in the process that it belongs to."""
        placed = (buckets for _, buckets in self._placed)
        return {bucket.handle: bucket.address for buckets in (*self._sent.values(), *placed) for bucket in buckets}

    def _address(self, handle: str, own: dict[str, int]) -> int:
        if handle in own:
            return own[handle]
        if handle not in self._opened:
            self._opened[handle] = self._runtime.open(bytes.fromhex(handle))
        return self._opened[handle]

    def close_received(self) -> None:
        """Unmap what was opened and copied; ``shared`` memory stays mapped until :meth:`forget`."""
        if self._to != "shared":
            self._unmap(set(self._opened))

    def forget(self, handle: Handle) -> None:
        """Unmap what was received with ``shared``: its tensors are not to be touched any more."""
        self._unmap({bucket["handle"] for bucket in handle["buckets"]})

    def _unmap(self, names: set[str]) -> None:
        for name in names & self._opened.keys():
            self._runtime.unmap(self._opened.pop(name))

    def _ordinal_of(self, identity: str) -> int:
        seen = [self._runtime.identity(ordinal) for ordinal in range(self._runtime.device_count())]
        if identity not in seen:
            raise InputError(
                f"the weights lie on the device {identity}; this process sees {', '.join(seen) or 'none'}: let engine "
                "and trainer see the same devices"
            )
        return seen.index(identity)


@contextmanager
def _told(what: str) -> Iterator[None]:
    try:
        yield
    except DeviceError as error:
        if error.out_of_memory:
            raise Interrupted(f"{what}: {error}; make room on it, then resume") from error
        raise InvariantViolation(f"{what}: {error}") from error
