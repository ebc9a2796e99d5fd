"""Admission of a vendor's GEMM: a record for one exact shape on one device, and the table of records.

A vendor's library may change its algorithm, and with it the order of a sum, with any part of the key. So nothing is
inferred: what was not compared on this device, with this library, in this very shape, is not admitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rlkernel.errors import ContractError

Product = Literal["forward", "dgrad", "wgrad"]
SCHEMA = 1


@dataclass(frozen=True)
class VendorShape:
    """One GEMM as the library sees it.

    ``forward``: [M, K] times [N, K]; ``dgrad``: [M, K] times [K, N]; ``wgrad``: [K, M] times [K, N].
    ``m``, ``n``, ``k`` are exact sizes; operands are bfloat16, C-contiguous, aligned to 16 bytes; ``out`` is
    ``bfloat16`` or ``float32``.
    """

    product: Product
    m: int
    n: int
    k: int
    out: str

    def __str__(self) -> str:
        return f"{self.product} {self.m}x{self.n}x{self.k} to {self.out}"


@dataclass(frozen=True)
class Library:
    """What the algorithm may depend on besides the shape."""

    device: str
    torch: str
    cuda: str
    cublas: str
    workspace: str


@dataclass(frozen=True)
class Admission:
    """The comparison of one shape: elements compared and differing, by class of inputs."""

    shape: VendorShape
    library: Library
    compared: int
    differing: int
    inputs: tuple[str, ...]
    date: str

    @property
    def admitted(self) -> bool:
        return self.compared > 0 and self.differing == 0


def _strict(kind: type, data: Any, place: str) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    if not isinstance(data, Mapping) or set(data) != names:
        found = sorted(data) if isinstance(data, Mapping) else type(data).__name__
        raise ContractError(f"{place} holds {found}; exactly {sorted(names)} are expected")
    return dict(data)


class AdmissionTable:
    """Records by shape and library; a later record of the same key takes the place of an earlier one."""

    def __init__(self, records: Iterable[Admission] = ()) -> None:
        self._records: dict[tuple[VendorShape, Library], Admission] = {}
        for record in records:
            self.add(record)

    def add(self, record: Admission) -> None:
        """Take a record up, whether it admits or refuses."""
        self._records[(record.shape, record.library)] = record

    def find(self, shape: VendorShape, library: Library) -> Admission | None:
        """The record of exactly this shape and library."""
        return self._records.get((shape, library))

    def records(self) -> tuple[Admission, ...]:
        """All records, by shape."""
        return tuple(sorted(self._records.values(), key=lambda r: (str(r.shape), str(r.library))))

    def save(self, path: Path) -> None:
        """Write the table as JSON."""
        data = {"schema": SCHEMA, "records": [asdict(r) for r in self.records()]}
        path.write_text(json.dumps(data, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> AdmissionTable:
        """Read a table. Raises ContractError with the place of what is missing, unknown or of another schema."""
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or set(data) != {"schema", "records"} or data["schema"] != SCHEMA:
            raise ContractError(f"{path} is no table of admissions of schema {SCHEMA}")
        table = AdmissionTable()
        for index, item in enumerate(data["records"]):
            place = f"{path}, record {index}"
            found = _strict(Admission, item, place)
            shape = VendorShape(**_strict(VendorShape, found["shape"], f"{place}, shape"))
            library = Library(**_strict(Library, found["library"], f"{place}, library"))
            for name in ("compared", "differing"):
                if type(found[name]) is not int or found[name] < 0:
                    raise ContractError(f"{place}: {name} is {found[name]!r}; a count is expected")
            inputs = tuple(str(x) for x in found["inputs"])
            table.add(Admission(shape, library, found["compared"], found["differing"], inputs, str(found["date"])))
        return table
