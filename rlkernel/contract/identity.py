"""The three identities that engine and trainer exchange, and the manifest of a set of weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlkernel.contract.canonical import digest
from rlkernel.errors import ContractError


@dataclass(frozen=True)
class Identities:
    """SHA-256 digests (hex). ``semantic`` and ``numerical_policy`` must be equal on both sides."""

    semantic: str
    numerical_policy: str
    deployment: str

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if len(value) != 64 or any(c not in "0123456789abcdef" for c in value):
                raise ContractError(f"identity {item.name} is {value!r}: a SHA-256 in hex is required, none is missing")

    def as_json(self) -> dict[str, str]:
        """Plain data."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a manifest; ``lanes`` are the two lanes of its digest."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    lanes: tuple[int, int]

    def as_json(self) -> dict[str, Any]:
        """Plain data; lanes as 16 hex digits each."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "digest": "".join(f"{lane:016x}" for lane in self.lanes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorEntry:
        """Inverse of :meth:`as_json`. Raises KeyError or ValueError for anything else."""
        lanes = data["digest"]
        if set(data) != {"name", "shape", "dtype", "digest"} or len(lanes) != 32:
            raise ValueError(f"an entry of a manifest is {dict(data)}")
        return cls(data["name"], tuple(data["shape"]), data["dtype"], (int(lanes[:16], 16), int(lanes[16:], 16)))


def manifest_digest(entries: Iterable[TensorEntry]) -> str:
    """SHA-256 of the manifest, entries in name order. Raises ContractError for a repeated name."""
    ordered = sorted(entries, key=lambda entry: entry.name)
    names = [entry.name for entry in ordered]
    if len(set(names)) != len(names):
        raise ContractError(f"a manifest names these tensors twice: {sorted({n for n in names if names.count(n) > 1})}")
    return digest([entry.as_json() for entry in ordered])
