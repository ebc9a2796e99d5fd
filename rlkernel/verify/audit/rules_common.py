"""Rules that are the same on both targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hardware.listing import Instruction
from rlkernel.verify.audit.allowed import POLYNOMIALS, Allowed
from rlkernel.verify.audit.findings import Violation, at
from rlkernel.verify.audit.written import Written

EXPANDED = frozenset({"div", "sqrt", "integer division"})
"""What a compiler expands into a sequence of other operations on the same source line."""
_CHAINED = {"fma": {"fma", "dot"}, "mul": {"mul"}, "add": {"add"}}


def contraction(kind: str, instruction: Instruction, written: Written, allowed: Allowed) -> Violation | None:
    """A basic operation on a line where the source does not write one of its kind, or that the entry does not have."""
    here = written.at(instruction.location)
    if here & EXPANDED:
        return None
    if kind == "fma" and "fma" not in here and not ("dot" in here and allowed.chain_of_fma):
        if "mul" in here or "add" in here:
            return at(
                "contraction",
                "rounding",
                "a multiplication and an addition that are written apart are fused into one rounding",
                instruction,
            )
        return at(
            "unwritten", "rounding", "a fused multiply-add that the source does not write on this line", instruction
        )
    if instruction.location.line and not here & _CHAINED[kind] and not (kind != "fma" and "dot" in here):
        return at(
            "unwritten", "rounding", f"an operation ({kind}) that the source does not write on this line", instruction
        )
    if kind not in allowed.kinds and not (kind == "fma" and allowed.chain_of_fma):
        return at("primitive", "primitives", f"the entry has no {kind}", instruction)
    return None


def polynomials(literals: Iterable[int], allowed: Allowed) -> Iterator[Violation]:
    """Polynomials in the code against those of the entry, recognised by their coefficients."""
    found = set(literals)
    for name, coefficients in POLYNOMIALS.items():
        present = len(coefficients & found)
        if name in allowed.polynomials and present < len(coefficients):
            yield Violation(
                "polynomial",
                "primitives",
                f"the entry has {name}, but the code holds {present} of its {len(coefficients)} coefficients",
            )
        elif name not in allowed.polynomials and present == len(coefficients):
            yield Violation("polynomial", "primitives", f"the code evaluates {name}, which the entry does not have")


def written_counts(machine: Mapping[str, int], written: Written, threads: int) -> Iterator[Violation]:
    """Operations in the code of a thread, times threads, against those that the source writes for a program.

    A source without loops whose operations all fill the threads must agree exactly. Where an operation has fewer
    elements than the program has threads, several threads repeat it, and the code may only have more.
    """
    if written.loops or "dot" in written.scalars:
        return
    for kind in ("fma", "mul", "add"):
        sizes = written.sizes.get(kind, ())
        found, expected = machine.get(kind, 0) * threads, sum(sizes)
        exact = all(size % threads == 0 for size in sizes)
        if (exact and found != expected) or found < expected:
            message = f"the source writes {expected} {kind} for a program, the code executes {found}"
            yield Violation("count", "rounding", message)
