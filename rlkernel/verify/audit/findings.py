"""What an audit finds: violations of the contract, each with the instruction and the source line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hardware.listing import NOWHERE, Instruction, Location

POINTS = ("dependency", "split", "merge order", "precision", "rounding", "primitives")


@dataclass(frozen=True)
class Violation:
    """One thing that the entry does not allow.

    ``rule`` is a short name for programs, ``point`` which of the six points it breaks.
    """

    rule: str
    point: str
    message: str
    instruction: str = ""
    location: Location = NOWHERE

    def as_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "point": self.point,
            "message": self.message,
            "instruction": self.instruction,
            "file": self.location.file,
            "line": self.location.line,
        }

    def __str__(self) -> str:
        where = f" ({self.instruction}, {self.location})" if self.instruction else ""
        return f"{self.point}: {self.message}{where}"


def at(rule: str, point: str, message: str, instruction: Instruction) -> Violation:
    """A violation by one instruction."""
    text = instruction.text if len(instruction.text) <= 100 else f"{instruction.text[:97]}..."
    return Violation(rule, point, message, text, instruction.place)
