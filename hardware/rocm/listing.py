"""Listings of amdgcn assembly, as LLVM writes it. Nothing here needs a GPU."""

from __future__ import annotations

import re

from hardware.listing import NOWHERE, Instruction, Listing, Location, split_operands

_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_DIRECTIVE = re.compile(r"\.(amdhsa_\w+|amdgcn_target)\s+(.*)")
_LABEL = re.compile(r"^([.$\w]+):$")
_MODIFIER = re.compile(
    r"\s+((?:(?:offset|offset0|offset1|op_sel|op_sel_hi|neg_lo|neg_hi|cbsz|abid|blgp|mul|div|dst_sel|dst_unused"
    r"|src0_sel|src1_sel|quad_perm|row_shr|row_shl|row_ror|row_bcast|row_newbcast|wave_\w+|row_mask|bank_mask"
    r"|bound_ctrl):(?:\[[^\]]*\]|\S+)"
    r"|offen|idxen|off|sc0|sc1|nt|glc|slc|clamp|lds|gds|tfe|row_mirror|row_half_mirror))$"
)


def parse_amdgcn(text: str) -> Listing:
    """Assembly of a module with one kernel as a listing. Directives: those of ``.amdhsa_kernel``, without the dot."""
    files: dict[str, str] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    directives: dict[str, str] = {}
    location, near, name, code = NOWHERE, NOWHERE, "", True
    for raw in text.splitlines():
        line = raw.split(";")[0].strip()
        if not line or line.startswith("//"):
            continue
        if line.startswith((".section", ".text")):
            code = line.startswith(".text")
        file, loc, directive, label = (p.match(line) for p in (_FILE, _LOC, _DIRECTIVE, _LABEL))
        if file:
            files[file[1]] = f"{file[2]}/{file[3]}" if file[3] else file[2]
        elif loc:
            location = Location(files.get(loc[1], ""), int(loc[2]))
            near = location if location.line else near
        elif directive:
            directives[directive[1]] = directive[2].strip()
        elif label and code:
            labels[label[1]] = len(instructions)
        elif line.startswith(".globl"):
            name = line.split()[1]
        elif code and line[0].isalpha():
            instructions.append(_instruction(line, location, near))
    return Listing(name, tuple(instructions), labels, directives)


def _instruction(line: str, location: Location, near: Location) -> Instruction:
    opcode, _, rest = line.replace("\t", " ").partition(" ")
    modifiers: dict[str, str] = {}
    rest = f" {rest.strip()}"
    while True:
        found = _MODIFIER.search(rest)
        # "off" is an operand of global memory instructions: it stands right after a comma
        if not found or rest[: found.start()].endswith(","):
            break
        key, _, value = found[1].partition(":")
        modifiers[key] = value
        rest = rest[: found.start()]
    return Instruction(opcode, split_operands(rest.strip()), location, " ".join(line.split()), "", modifiers, near)
