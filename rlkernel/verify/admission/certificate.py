"""Certificates: which implementation was compared with which entries, on what, and what makes one void."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rlkernel.contract.build import Contract
from rlkernel.contract.canonical import digest
from rlkernel.contract.decode import check_fields
from rlkernel.errors import ContractError, NumericsError
from rlkernel.verify.admission.budget import BUDGETS
from rlkernel.verify.admission.classes import required_classes

SCHEMA = 1
BACKWARD, OPTIMIZER = "trainer_backward", "optimizer_step"


class AdmissionRefused(NumericsError):
    """An implementation's bits are not the contract's.

    ``report`` is plain data: region, case, problem, difference (index, both bit patterns) and explanation.
    """

    def __init__(self, sentence: str, report: Mapping[str, Any] | None = None) -> None:
        super().__init__(sentence)
        self.report = dict(report or {})


@dataclass(frozen=True)
class Link:
    """One link of the chain from the interpreter to the implementation: ``outputs`` were compared, none differs."""

    left: str
    right: str
    outputs: int


@dataclass(frozen=True)
class Certificate:
    """The bits of ``implementation`` equal those of ``entries`` wherever they were compared.

    Attributes:
        source: SHA-256 of the implementation's sources.
        region, cases: what it may be picked for.
        entries: pairs (``case/entry``, SHA-256 of the entry's canonical JSON).
        target, toolchain: where, and with which versions, it was compiled and compared.
        specification: SHA-256 of the interpreter's and the admission's sources.
        shape_classes, hazards: what the comparison went through.
        links: from the interpreter to the implementation.
        budget: ``quick`` or ``full``.
    """

    implementation: str
    source: str
    region: str
    cases: tuple[str, ...]
    profile: str
    dtype: str
    entries: tuple[tuple[str, str], ...]
    target: str
    toolchain: tuple[tuple[str, str], ...]
    specification: str
    shape_classes: tuple[str, ...]
    hazards: tuple[str, ...]
    links: tuple[Link, ...]
    budget: str

    @property
    def outputs(self) -> int:
        """Outputs of the implementation that were compared."""
        return self.links[-1].outputs if self.links else 0

    def as_json(self) -> dict[str, Any]:
        """Plain data; the inverse is :func:`certificate_from_json`."""
        data = asdict(self)
        for name in ("cases", "shape_classes", "hazards"):
            data[name] = list(data[name])
        for name in ("entries", "toolchain"):
            data[name] = [list(pair) for pair in data[name]]
        data["links"] = [asdict(link) for link in self.links]
        return {"schema": SCHEMA, **data}

    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return digest(self.as_json())


def _strings(value: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ContractError(f"{path} is {value!r}; a list of strings is expected")
    return tuple(value)


def _pairs(value: Any, path: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list):
        raise ContractError(f"{path} is {value!r}; a list of pairs is expected")
    pairs = [_strings(item, f"{path}[{i}]") for i, item in enumerate(value)]
    wrong = [pair for pair in pairs if len(pair) != 2]
    if wrong:
        raise ContractError(f"{path} holds {wrong[0]!r}; pairs of strings are expected")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _links(value: Any) -> tuple[Link, ...]:
    if not isinstance(value, list) or not value:
        raise ContractError(f"links is {value!r}; a certificate has at least one link")
    links = []
    for i, item in enumerate(value):
        if not isinstance(item, dict) or set(item) != {"left", "right", "outputs"}:
            raise ContractError(f"links[{i}] is {item!r}; an object with left, right and outputs is expected")
        if isinstance(item["outputs"], bool) or not isinstance(item["outputs"], int) or item["outputs"] < 1:
            raise ContractError(f"links[{i}].outputs is {item['outputs']!r}; a positive integer is expected")
        links.append(Link(**item))
    return tuple(links)


def certificate_from_json(data: Any) -> Certificate:
    """Strict inverse of :meth:`Certificate.as_json`. Raises ContractError for what is unknown, missing or misshapen."""
    if not isinstance(data, dict):
        raise ContractError(f"a certificate is an object, not {data!r}")
    check_fields(data, [*(item.name for item in fields(Certificate)), "schema"], "certificate", "a certificate")
    if data["schema"] != SCHEMA:
        raise ContractError(f"a certificate of schema {data['schema']!r}; schema {SCHEMA} can be read")
    values = {name: value for name, value in data.items() if name != "schema"}
    for name in ("cases", "shape_classes", "hazards"):
        values[name] = _strings(values[name], name)
    for name in ("entries", "toolchain"):
        values[name] = _pairs(values[name], name)
    values["links"] = _links(values["links"])
    if values["budget"] not in BUDGETS:
        raise ContractError(f"budget of a certificate is {values['budget']!r}; it is one of {', '.join(BUDGETS)}")
    texts = ("implementation", "source", "region", "profile", "dtype", "target", "specification")
    for name in texts:
        if not isinstance(values[name], str):
            raise ContractError(f"{name} of a certificate is {values[name]!r}; a string is expected")
    return Certificate(**values)


def entry_names(contract: Contract, region: str, case: str) -> tuple[str, ...]:
    """Entries that a region's implementation executes in a case.

    A region may have several: its weight gradients, and the logits of the linear log-probability.
    Raises ContractError where the contract has none.
    """
    family = (region, "lm_head") if region == "logprob" else (region,)
    suffixes = ("", ".wgrad", ".bias") if case == BACKWARD else ("",)
    names = tuple(name + suffix for name in family for suffix in suffixes if (case, name + suffix) in contract.entries)
    if not names:
        raise ContractError(f"the contract has no entry for region {region!r} in case {case!r}")
    return names


def entry_digests(contract: Contract, region: str, cases: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Pairs (``case/entry``, digest) of everything that a region executes in these cases."""
    return tuple(
        (f"{case}/{name}", digest(contract.entries[(case, name)].as_json()))
        for case in cases
        for name in entry_names(contract, region, case)
    )


@dataclass(frozen=True)
class Identity:
    """What a certificate must say to be valid for an implementation here and now."""

    implementation: str
    source: str
    target: str
    toolchain: tuple[tuple[str, str], ...]
    specification: str


def invalid_because(
    certificate: Certificate, identity: Identity, contract: Contract, region: str, case: str
) -> list[str]:
    """Every reason why a certificate does not admit an implementation for (region, case); empty: it does."""
    reasons = []
    if (certificate.implementation, certificate.region) != (identity.implementation, region):
        return [f"it is for {certificate.implementation} in region {certificate.region}"]
    if case not in certificate.cases:
        reasons.append(f"it covers {', '.join(certificate.cases)}, not {case}")
    if certificate.source != identity.source:
        reasons.append(
            f"the kernel changed after admission: its sources have digest {identity.source[:12]}, "
            f"the certificate's {certificate.source[:12]}"
        )
    if certificate.target != identity.target:
        reasons.append(f"it is for target {certificate.target}, not {identity.target}")
    if certificate.toolchain != identity.toolchain:
        old, new = dict(certificate.toolchain), dict(identity.toolchain)
        changed = [
            f"{name} {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
        reasons.append(f"the toolchain is another one ({', '.join(changed)})")
    if certificate.specification != identity.specification:
        reasons.append("the interpreter or the admission's own problems changed since")
    if absent := sorted(required_classes(region, case) - set(certificate.shape_classes)):
        reasons.append(f"it was not compared on these shapes: {', '.join(absent)}")
    if case in certificate.cases:
        admitted, needed = dict(certificate.entries), dict(entry_digests(contract, region, (case,)))
        other = [name for name, value in needed.items() if admitted.get(name) != value]
        if other:
            reasons.append(f"it was made for another entry of {', '.join(other)} (other constants or points)")
    return reasons
