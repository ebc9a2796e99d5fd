"""Where certificates are kept, and how missing ones are made at the first use.

Two places are read: those that are shipped with the package (``rlkernel/verify/certificates``, made with the full
budget)
and the user's cache, beside the compiled kernels. A certificate counts only while the implementation's sources, the
toolchain, the target, the entries and the specification are those that it names. What is missing is compared at once
with the quick budget (seconds), and kept; a difference is a refusal, never a warning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkernel.contract.build import Contract
from rlkernel.contract.canonical import canonical_json
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.jit import cache_folder
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.admit import QUICK, Budget, admit, cases_of
from rlkernel.verify.admission.certificate import Certificate, certificate_from_json, invalid_because
from rlkernel.verify.admission.sources import identity_of

SHIPPED = Path(__file__).parent.parent / "certificates"


@dataclass(frozen=True)
class Admitted:
    """Certificates for every region and case asked for, and which of them were made just now."""

    certificates: tuple[Certificate, ...]
    made: tuple[Certificate, ...]


def user_folder() -> Path:
    """The user's certificates, beside the compiled kernels of the same sources and toolchain."""
    return cache_folder() / "certificates"


def read_certificates(folder: Path, say: Callable[[str], None] = lambda _: None) -> list[Certificate]:
    """All certificates in a folder's JSON files; a damaged file is named and counts as absent (it is made again)."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found += [certificate_from_json(item) for item in (data if isinstance(data, list) else [data])]
        except (OSError, ValueError, ContractError) as error:
            say(f"the certificate {path} cannot be read ({error}); it counts as absent")
    return found


def write_certificates(certificates: Iterable[Certificate], folder: Path) -> None:
    """One file a certificate, named by its digest, each written whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for certificate in certificates:
        path = folder / f"{certificate.region}-{certificate.digest()[:16]}.json"
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(canonical_json(certificate.as_json()) + b"\n")
        part.replace(path)


def valid_certificates(
    known: Sequence[Certificate], op: Any, contract: Contract, region: str, cases: Sequence[str], target: str
) -> list[Certificate]:
    """Known certificates that together admit an implementation for all cases; empty if one case is not admitted."""
    identity = identity_of(op, target)
    found = []
    for case in cases:
        valid = [c for c in known if not invalid_because(c, identity, contract, region, case)]
        if not valid:
            return []
        found.append(max(valid, key=lambda c: c.outputs))
    return list(dict.fromkeys(found))


def ensure_certificates(
    contract: Contract,
    candidates: Sequence[tuple[str, Any]],
    workers: Workers,
    *,
    target: str = "cpu",
    budget: Budget = QUICK,
    folders: Sequence[Path] | None = None,
    keep: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Admitted:
    """Certificates of every candidate for all its cases, made now where they are missing.

    Args:
        candidates: pairs (region, implementation).
        folders: where to read; the shipped ones and the user's without it.
        keep: where to write new ones; the user's folder without it.
        say: gets a sentence for every region that is compared now.

    Raises:
        AdmissionRefused: an implementation's bits are not the contract's.
    """
    places = [SHIPPED, user_folder()] if folders is None else list(folders)
    known = [c for folder in places for c in read_certificates(folder, say)]
    all_of, made = [], []
    for region, op in candidates:
        cases = cases_of(region, contract)
        if not cases:
            continue
        found = valid_certificates(known, op, contract, region, cases, target)
        if not found:
            say(f"admission of {op.implementation} for {region} ({contract.profile}, {contract.dtype})")
            found = [admit(op, region, cases, contract, target, budget, workers=workers)]
            made += found
        all_of += found
    if made:
        write_certificates(made, user_folder() if keep is None else keep)
    return Admitted(tuple(all_of), tuple(made))
