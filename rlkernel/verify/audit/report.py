"""Audits kernels: compiles each, applies the rules to its machine code, executes its launches."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rlkernel.contract.canonical import digest
from rlkernel.errors import ContractError
from rlkernel.verify.audit import rules_cuda, rules_rocm
from rlkernel.verify.audit.allowed import allowed_by
from rlkernel.verify.audit.catalogue import Audited
from rlkernel.verify.audit.findings import Violation
from rlkernel.verify.audit.proof import Proof, prove
from rlkernel.verify.audit.rules_common import written_counts
from rlkernel.verify.audit.targets import Compiled, compile_variant, why_not_audited


@dataclass(frozen=True)
class Audit:
    """The audit of one kernel on one target.

    Attributes:
        written: scalar operations of each kind that the source writes, for a program, loop bodies counted once.
        machine: basic operations in the machine code, for a thread; ``matrix``: its matrix instructions.
        proofs: what the executed launches showed.
    """

    name: str
    target: str
    claims: str
    entry: str
    written: dict[str, int]
    machine: dict[str, int]
    matrix: dict[str, int]
    proofs: tuple[Proof, ...]
    violations: tuple[Violation, ...]
    versions: tuple[tuple[str, str], ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.violations

    def as_json(self) -> dict[str, Any]:
        """Plain data for a line of JSON."""
        return {
            "kernel": self.name,
            "target": self.target,
            "claims": self.claims,
            "entry": self.entry,
            "passed": self.passed,
            "written": self.written,
            "machine": self.machine,
            "matrix": self.matrix,
            "outputs_proven": sum(p.outputs for p in self.proofs) if self.passed else 0,
            "launches": [p.what for p in self.proofs],
            "violations": [v.as_json() for v in self.violations],
            "versions": dict(self.versions),
            "seconds": round(self.seconds, 2),
        }


def audit(kernel: Audited) -> Audit:
    """Audit one kernel. Everything that is wrong is in the result; errors of the compiler are passed on.

    Raises ContractError where the installed Triton is older than the one whose code for the target is understood.
    """
    if reason := why_not_audited(kernel.target):
        raise ContractError(reason)
    began = time.monotonic()
    compiled = compile_variant(kernel.variant, kernel.target)
    allowed = allowed_by(kernel.entry)
    if kernel.target.backend == "cuda":
        found = [
            *rules_cuda.ptx(compiled.assembly, compiled.written, allowed),
            *rules_cuda.sass(compiled.machine, compiled.assembly, compiled.written, allowed),
        ]
    else:
        found = list(rules_rocm.amdgcn(compiled.assembly, compiled.written, allowed))
    found += written_counts(_basic(compiled), compiled.written, compiled.threads)
    proofs = []
    for launch in kernel.launches:
        proof, problems = prove(compiled, launch)
        proofs.append(proof)
        found += problems
    return Audit(
        kernel.name,
        kernel.target.name,
        kernel.claims,
        digest(kernel.entry.as_json()),
        dict(compiled.written.scalars),
        dict(_basic(compiled)),
        dict(_matrix(compiled)),
        tuple(proofs),
        tuple(found),
        compiled.versions,
        time.monotonic() - began,
    )


def _basic(compiled: Compiled) -> Counter[str]:
    if compiled.target.backend == "cuda":
        by_line = rules_cuda.sass_counts(compiled.machine, compiled.written)
    else:
        by_line = rules_rocm.counts(compiled.machine, compiled.written)
    return sum(by_line.values(), Counter())


def _matrix(compiled: Compiled) -> Counter[str]:
    marks = ("HGMMA", "HMMA", "v_mfma", "v_smfma")
    return Counter(i.opcode for i in compiled.machine.instructions if i.opcode.startswith(marks))
