"""Weights on disk of which only what changed is written: tensors that are frozen, or that a small step did not move.

Every tensor has a digest of its own, over dtype, shape and bytes. A publication writes those that differ from the last
publication into one file; its handle says for every tensor in which file it lies. A receiver needs no memory of what
came before: an engine that starts late opens more files, and reads the same tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vime.errors import InvariantViolation
from vime.sync.transport import Handle, Tensors, raw_bytes, write_tensors


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) over dtype, shape and bytes of a tensor on any device."""
    hasher = hashlib.sha256(f"{tensor.dtype}|{','.join(map(str, tensor.shape))}|".encode())
    hasher.update(raw_bytes(tensor).data)
    return hasher.hexdigest()


@dataclass(frozen=True)
class _Place:
    path: str
    sha256: str


class DeltaDiskTransport:
    """One safetensors file a publication with the tensors that changed. Both sides see the folder."""

    name = "disk_delta"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, _Place] = {}
        self._live: dict[int, set[str]] = {}
        self._written: set[str] = set()
        self._next = 0

    def send(self, tensors: Tensors) -> Handle:
        """Write what differs from the publication before. Raises Interrupted where there is no room."""
        digests = {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
        places = {name: place for name, place in self._places.items() if digests.get(name) == place.sha256}
        changed = {name: tensor for name, tensor in tensors.items() if name not in places}
        if changed:
            path = write_tensors(self._folder, changed)
            self._written.add(path)
            places |= {name: _Place(path, digests[name]) for name in changed}
        self._places = places
        self._next += 1
        self._live[self._next] = {place.path for place in places.values()}
        self._sweep()
        entries = [{"name": name, "path": places[name].path, "sha256": places[name].sha256} for name in sorted(places)]
        return {"transport": self.name, "key": self._next, "written": sorted(changed), "tensors": entries}

    def receive(self, handle: Handle) -> dict[str, torch.Tensor]:
        """Every tensor of a publication, each compared with its digest. Raises InvariantViolation naming it."""
        by_path: dict[str, list[Mapping[str, Any]]] = {}
        for entry in handle["tensors"]:
            by_path.setdefault(entry["path"], []).append(entry)
        found: dict[str, torch.Tensor] = {}
        for path, entries in by_path.items():
            try:
                with safe_open(path, framework="pt") as stored:  # type: ignore[no-untyped-call]
                    for entry in entries:
                        found[entry["name"]] = stored.get_tensor(entry["name"])
            except (OSError, SafetensorError) as error:
                raise InvariantViolation(f"the published weights {path} cannot be read: {error}") from error
            for entry in entries:
                sha256 = tensor_sha256(found[entry["name"]])
                if sha256 != entry["sha256"]:
                    raise InvariantViolation(
                        f"tensor {entry['name']} in {path} has the SHA-256 {sha256}, published was {entry['sha256']}"
                    )
        return found

    def close_received(self) -> None:
        """Nothing is held open."""

    def release(self, handle: Handle) -> None:
        """Delete the files that neither another publication nor the next one needs."""
        self._live.pop(handle["key"], None)
        self._sweep()

    def close(self) -> None:
        """Delete what the next publication would have gone on from."""
        self._places, self._live = {}, {}
        self._sweep()

    def _sweep(self) -> None:
        """Delete the files of which no tensor is needed any more."""
        needed = {place.path for place in self._places.values()}.union(*self._live.values())
        for path in self._written - needed:
            with suppress(OSError):  # gone, or something else now
                Path(path).unlink()
        self._written &= needed
