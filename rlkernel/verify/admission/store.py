"""Where certificates are kept, and how missing ones are made at the first use.

They are kept in the user's cache, beside the compiled kernels of the same sources. None is shipped with the package: a
certificate is bound to the toolchain that compiled the kernels, and the comparison itself takes seconds. One counts
only while the implementation's sources, the toolchain, the target, the entries and the specification are those that it
names, and while it is what was written. What is missing is compared at once with the quick budget, and kept; a
difference is a refusal, never a warning.
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
from rlkernel.verify.admission.admit import admit, cases_of
from rlkernel.verify.admission.budget import BUDGETS, QUICK, Budget
from rlkernel.verify.admission.certificate import Certificate, certificate_from_json, invalid_because
from rlkernel.verify.admission.parallel import Pending, admit_in_processes, shares
from rlkernel.verify.admission.sources import identity_of


@dataclass(frozen=True)
class Admitted:
    """Certificates for every region and case asked for, which of them were made just now, and sentences about files
    that did not count or could not be written.
    """

    certificates: tuple[Certificate, ...]
    made: tuple[Certificate, ...]
    notes: tuple[str, ...] = ()


def user_folder() -> Path:
    """The user's certificates, beside the compiled kernels of the same sources and toolchain."""
    return cache_folder() / "certificates"


def read_certificates(folder: Path, say: Callable[[str], None] = lambda _: None) -> list[Certificate]:
    """All certificates in a folder's JSON files; one that is damaged, or is not what was written, is named and does not
    count.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(_whole(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, ContractError) as error:
            say(f"the certificate {path} does not count: {error}")
        except RecursionError:
            say(f"the certificate {path} does not count: it is nested too deeply to be one")
    return found


def _whole(data: Any) -> Certificate:
    """The certificate in a file's content. Raises ContractError where it is not what was written."""
    if not isinstance(data, dict) or set(data) != {"certificate", "digest"}:
        raise ContractError("it is no object with a certificate and its digest")
    certificate = certificate_from_json(data["certificate"])
    if (now := certificate.digest()) != data["digest"]:
        raise ContractError(
            f"it was changed after it was written: its digest is {now[:12]}, the file says {str(data['digest'])[:12]}"
        )
    return certificate


def write_certificates(certificates: Iterable[Certificate], folder: Path) -> None:
    """One file a certificate, named by its digest and holding it, each written whole. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for certificate in certificates:
        path = folder / f"{certificate.region}-{certificate.digest()[:16]}.json"
        part = path.with_suffix(f".{os.getpid()}.part")
        data = {"certificate": certificate.as_json(), "digest": certificate.digest()}
        part.write_bytes(canonical_json(data) + b"\n")
        part.replace(path)


def valid_certificates(
    known: Sequence[Certificate],
    op: Any,
    contract: Contract,
    region: str,
    cases: Sequence[str],
    target: str,
    budget: Budget = QUICK,
) -> tuple[list[Certificate], list[str]]:
    """Known certificates that together admit an implementation for all cases, compared at least as ``budget`` says.

    Returns them (none, if one case is not admitted) and why others of this implementation, region, profile and dtype
    do not count.
    """
    identity = identity_of(op, target)
    what = (identity.implementation, region, contract.profile, contract.dtype)
    own = [c for c in known if (c.implementation, c.region, c.profile, c.dtype) == what]
    void = {(c, case): invalid_because(c, identity, contract, region, case) for c in own for case in cases}
    enough = [c for c in own if BUDGETS.index(c.budget) >= BUDGETS.index(budget.name)]
    valid = {c: {case for case in cases if not void[c, case]} for c in enough}
    found: list[Certificate] = []
    for case in cases:
        admitting = [c for c in enough if case in valid[c]]
        if not admitting:
            return [], list(dict.fromkeys(reason for why in void.values() for reason in why))
        found.append(max(admitting, key=lambda c: (len(valid[c]), c.outputs, c.digest())))
    return list(dict.fromkeys(found)), []


def ensure_certificates(
    contract: Contract,
    candidates: Sequence[tuple[str, Any]],
    workers: Workers,
    *,
    target: str = "cpu",
    budget: Budget = QUICK,
    folders: Sequence[Path] | None = None,
    keep: Path | None = None,
    processes: int = 1,
    say: Callable[[str], None] = lambda _: None,
) -> Admitted:
    """Certificates of every candidate for all its cases, made now where they are missing.

    Args:
        candidates: pairs (region, implementation).
        folders: where to read; the user's folder without it.
        keep: where to write new ones; the user's folder without it.
        processes: so many regions are compared at a time, each in a process of its own if there are several; the
            candidates have to be such that they can be sent there.
        say: gets a sentence for every region that is compared now, and one when it is done in another process.

    Raises:
        AdmissionRefused: an implementation's bits are not the contract's.
        ContractError: a process of its own failed.
    """
    notes: list[str] = []
    known = [c for folder in folders or (user_folder(),) for c in read_certificates(folder, notes.append)]
    all_of: dict[tuple[str, tuple[str, ...]], list[Certificate]] = {}
    pending: list[Pending] = []
    for region, op in candidates:
        every = cases_of(region, contract)
        if not every:
            continue
        for cases in shares(region, every, contract) if processes > 1 else [every]:
            found, reasons = valid_certificates(known, op, contract, region, cases, target, budget)
            all_of[region, cases] = found
            if not found:
                why = f"; a certificate that was kept does not count: {'; '.join(reasons)}" if reasons else ""
                say(f"admission of {op.implementation} for {region} ({contract.profile}, {contract.dtype}){why}")
                pending.append(Pending(region, op, cases))
    place = user_folder() if keep is None else keep
    if processes > 1 and len(pending) > 1:
        made, found_notes = admit_in_processes(pending, contract, target, budget, place, processes, say)
        notes += dict.fromkeys(found_notes)
    else:
        made = [admit(p.op, p.region, p.cases, contract, target, budget, workers=workers) for p in pending]
        try:
            write_certificates(made, place)
        except OSError as error:  # they hold for this process all the same
            notes.append(f"certificates cannot be kept, so that the next run compares again: {error}")
    for item, certificate in zip(pending, made, strict=True):
        all_of[item.key] = [certificate]
    return Admitted(tuple(dict.fromkeys(c for found in all_of.values() for c in found)), tuple(made), tuple(notes))
