"""Weights in device memory that engines of the same machine open: few handles of large buckets, devices by UUID.

An ordinal names another device in another process (HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES); so a handle carries the
UUID, and the receiver looks among its own devices for it. No pickle, no torch storage: addresses and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from rlkernel.errors import DeviceError
from vime.errors import InputError, Interrupted, InvariantViolation
from vime.sync.transport import ALIGNMENT, DTYPES, Handle, Tensors, layout

BUCKET_BYTES = 256 << 20


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


class DeviceIpcTransport:
    """Buckets on one device, opened by engines in other processes that see the same device.

    Args:
        name: as the pipeline calls it (``hip_ipc``).
        runtime: of that kind of device.
        ordinal: the sender's device, in its own numbering.
        to: where a receiver puts its copies: ``cpu``, or ``device``, the one that the weights lie on.
        bucket_bytes: least size at which a bucket is full.
    """

    def __init__(
        self,
        name: str,
        runtime: DeviceRuntime,
        ordinal: int = 0,
        to: Literal["cpu", "device"] = "cpu",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.name, self._to = name, to
        self._runtime, self._ordinal, self._bucket_bytes = runtime, ordinal, bucket_bytes
        self._sent: dict[int, list[_Bucket]] = {}
        self._unused: list[_Bucket] = []
        self._next = 0
        self._opened: list[int] = []

    # the trainer's side

    def send(self, tensors: Tensors) -> Handle:
        """Copy the tensors into buckets. Raises Interrupted where the device has no room for them."""
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
        self._next += 1
        self._sent[self._next] = buckets
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
        found = []
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
        """Free everything that was sent."""
        for key in list(self._sent):
            self.release({"key": key})
        self._free_unused()

    def _free_unused(self) -> None:
        while self._unused:
            self._runtime.free(self._unused.pop().address)

    # the engine's side

    def receive(self, handle: Handle) -> dict[str, torch.Tensor]:
        """Copies of the tensors: one copy a bucket, of which they are views.

        Raises:
            InputError: this process does not see the device that they lie on.
            InvariantViolation: a bucket cannot be opened.
            Interrupted: there is no room to map it.
        """
        with _told("the published weights cannot be opened on the device"):
            ordinal = self._ordinal_of(handle["device"])
            self._runtime.use(ordinal)
            copies = []
            for bucket, address in zip(handle["buckets"], self._addresses(handle), strict=True):
                device = "cpu" if self._to == "cpu" else f"cuda:{ordinal}"  # torch's name of AMD's devices too
                copies.append(torch.empty(bucket["bytes"], dtype=torch.uint8, device=device))
                self._runtime.copy(copies[-1].data_ptr(), address, bucket["bytes"])
            self._runtime.synchronise()
        found = {}
        for entry in handle["tensors"]:
            raw = copies[entry["bucket"]][entry["offset"] : entry["offset"] + entry["bytes"]]
            found[entry["name"]] = raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return found

    def _addresses(self, handle: Handle) -> list[int]:
        """Of the buckets, here: a runtime opens no memory in the process that it belongs to."""
        own = self._sent.get(handle["key"], [])
        if own and [bucket.handle for bucket in own] == [bucket["handle"] for bucket in handle["buckets"]]:
            return [bucket.address for bucket in own]
        addresses = []
        for bucket in handle["buckets"]:
            addresses.append(self._runtime.open(bytes.fromhex(bucket["handle"])))
            self._opened.append(addresses[-1])
        return addresses

    def close_received(self) -> None:
        """Unmap what was opened."""
        while self._opened:
            self._runtime.unmap(self._opened.pop())

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
