"""Which implementation runs a region in a case: picked by certificate, by a function of data, passed down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlkernel.contract.build import FORWARD_CASES, Contract
from rlkernel.errors import ContractError
from rlkernel.ops.head import LinearLogprob
from rlkernel.ops.portable import RegionOp, portable_ops
from rlkernel.verify.admission.certificate import BACKWARD, Certificate, Identity, invalid_because

Numerics = Literal["exact", "native"]
TARGET = "cpu"


@dataclass(frozen=True)
class Composition:
    """One implementation a region kind (every case of this composition uses the same), and the head.

    ``certificates`` admit them; a composition without any was not picked by :func:`compose`.
    """

    numerics: Numerics
    ops: dict[str, RegionOp]
    head: Any
    certificates: tuple[Certificate, ...] = ()

    def implementations(self) -> dict[str, str]:
        """Region kind -> implementation id, for the contract and the evidence."""
        return {**{kind: op.implementation for kind, op in self.ops.items()}, "logprob": self.head.implementation}

    def op(self, kind: str) -> RegionOp:
        """The implementation of a region kind. Raises ContractError if the composition has none."""
        if kind not in self.ops:
            raise ContractError(f"no implementation of region {kind!r}; this composition has {sorted(self.ops)}")
        return self.ops[kind]


@dataclass(frozen=True)
class Candidate:
    """An implementation that may run a region kind, if a certificate admits it."""

    region: str
    op: Any


def cpu_candidates() -> tuple[Candidate, ...]:
    """The CPU's implementations, in the order of preference."""
    return (*(Candidate(kind, op) for kind, op in portable_ops().items()), Candidate("logprob", LinearLogprob()))


def without_certificates(numerics: Numerics) -> Composition:
    """The CPU implementations, admitted or not: for admission itself, for benchmarks and for the ``native`` arm.

    A run's exact side is built by :func:`compose`.
    """
    if numerics == "exact":
        return Composition("exact", portable_ops(), LinearLogprob())
    from rlkernel.kernels.torch_native.regions import TorchLinearLogprob, torch_ops

    return Composition("native", torch_ops(), TorchLinearLogprob())


def region_cases(contract: Contract) -> dict[str, tuple[str, ...]]:
    """Regions of the model's forward and backward that the contract has, and the cases of each."""
    found: dict[str, tuple[str, ...]] = {}
    kinds = [candidate.region for candidate in cpu_candidates()]
    names = {(case, name.partition(".")[0]) for case, name in contract.entries}
    for kind in kinds:
        cases = tuple(case for case in (*FORWARD_CASES, BACKWARD) if (case, kind) in names)
        if cases:
            found[kind] = cases
    return found


def identify(op: Any) -> Identity:
    """What a certificate of this implementation must say on this machine."""
    from rlkernel.verify.admission.sources import identity_of

    return identity_of(op, getattr(op, "target", TARGET))


def _pick(
    contract: Contract, region: str, cases: Sequence[str], candidates: Sequence[Candidate], given: Sequence[Certificate]
) -> tuple[Any, list[Certificate], list[str]]:
    """The first candidate that is admitted for all cases; else why each one is not."""
    reasons = []
    for candidate in (c for c in candidates if c.region == region):
        identity = identify(candidate.op)
        own = [c for c in given if (c.implementation, c.region) == (identity.implementation, region)]
        admitting: list[Certificate] = []
        missing: dict[str, list[str]] = {}  # reason -> cases
        for case in cases:
            voids = [(c, invalid_because(c, identity, contract, region, case)) for c in own]
            valid = [c for c, why in voids if not why]
            admitting += valid[:1]
            if not valid:
                why = "; ".join(dict.fromkeys(reason for _, found in voids for reason in found))
                missing.setdefault(why or "it has no certificate", []).append(case)
        if not missing:
            return candidate.op, list(dict.fromkeys(admitting)), []
        told = "; ".join(f"{', '.join(where)}: {why}" for why, where in missing.items())
        reasons.append(f"{identity.implementation} is refused ({told})")
    return None, [], reasons or ["there is no candidate"]


def compose(
    contract: Contract, certificates: Sequence[Certificate], candidates: Sequence[Candidate] | None = None
) -> Composition:
    """Pick an admitted implementation for every region and case of the contract.

    Args:
        certificates: of implementations here, for instance from
            :func:`rlkernel.verify.admission.store.ensure_certificates`.
        candidates: in the order of preference; the CPU's without it.

    Raises:
        ContractError: a region has no implementation with a valid certificate for each of its cases. There is no
            fallback: the message lists every candidate and why it was refused.
    """
    chosen: dict[str, Any] = {}
    used: list[Certificate] = []
    problems = []
    candidates = cpu_candidates() if candidates is None else candidates
    for region, cases in region_cases(contract).items():
        op, admitting, reasons = _pick(contract, region, cases, candidates, certificates)
        if op is None:
            problems.append(f"{region}: {'; '.join(reasons)}")
        chosen[region] = op
        used += admitting
    if problems:
        raise ContractError(
            f"{len(problems)} regions have no admitted implementation in profile {contract.profile}, dtype "
            f"{contract.dtype}, on target {TARGET}. " + ". ".join(problems) + ". `vime admit --all` compares them again"
        )
    return Composition(
        "exact", {kind: op for kind, op in chosen.items() if kind != "logprob"}, chosen["logprob"], tuple(used)
    )
