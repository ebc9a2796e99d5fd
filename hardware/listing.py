"""What a disassembly is, on any device: instructions with operands and the source line that they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Location:
    """A source line, from the debug information of the machine code. Line 0: the compiler gave none."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else "no source line"


NOWHERE = Location("", 0)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with all suffixes, as the assembler writes it.
        operands: in order of the text; a vector (``{...}``), an address (``[...]``) or a register range is one operand.
        guard: the predicate that guards it (``%p1``, ``!%p1``), or empty.
        modifiers: what follows the operands, by name (``offset:16`` is ``offset`` -> ``16``; a flag maps to ``""``).
        text: the whole instruction.
        near: the last source line before it in the listing, for an instruction that has none of its own.
    """

    opcode: str
    operands: tuple[str, ...]
    location: Location
    text: str
    guard: str = ""
    modifiers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    near: Location = NOWHERE

    @property
    def place(self) -> Location:
        """Its source line, or else the last one before it."""
        return self.location if self.location.line else self.near


@dataclass(frozen=True)
class Listing:
    """Instructions of one kernel in the order of the text, labels (index of the next instruction), directives."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    directives: Mapping[str, str]


def split_operands(text: str) -> tuple[str, ...]:
    """Split at commas outside of brackets and braces."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[{(" and 1) or (-1 if character in "]})" else 0)
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    if current.strip():
        parts.append(current.strip())
    return tuple(parts)
