"""Listings of PTX and SASS. nvdisasm comes with Triton or with the CUDA toolkit; nothing here needs a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

from hardware.listing import NOWHERE, Instruction, Listing, Location, split_operands

_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,()]*?(\w+_param_\d+)")
_SASS_LINE = re.compile(r'//## File "([^"]*)", line (\d+)')
_SASS_CODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;")
_SASS_GUARD = re.compile(r"^@(!?U?P[T\d]+)\s+")


def nvdisasm() -> Path:
    """The disassembler: Triton's own copy, or that of a CUDA toolkit on the path.

    Raises:
        FileNotFoundError: there is none.
    """
    spec = find_spec("triton")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        if bundled.exists():
            return bundled
    found = shutil.which("nvdisasm")
    if found is None:
        raise FileNotFoundError("nvdisasm is needed to list SASS: it comes with Triton's wheel and the CUDA toolkit")
    return Path(found)


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin with source lines.

    Raises:
        RuntimeError: nvdisasm refuses the cubin.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(nvdisasm()), "--print-code", "--print-line-info", file.name],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"nvdisasm exited with {done.returncode}: {done.stderr.strip()[:500]}")
    return done.stdout


def parse_sass(text: str) -> Listing:
    """The output of :func:`disassemble` as a listing. Slow paths that ptxas calls are part of it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    location, name = NOWHERE, ""
    for line in text.splitlines():
        found = _SASS_LINE.search(line)
        if found:
            location = Location(found[1], int(found[2]))
            continue
        stripped = line.strip()
        if stripped.startswith(".global") and not name:
            name = stripped.split()[1]
        if stripped.endswith(":") and not stripped.startswith("//"):
            labels[stripped[:-1]] = len(instructions)
            if stripped.startswith("$__internal"):
                location = Location(stripped[:-1], 0)
            continue
        code = _SASS_CODE.match(line)
        if not code:
            continue
        body, guard = code[1].strip("{} "), ""
        guarded = _SASS_GUARD.match(body)
        if guarded:
            guard, body = guarded[1], body[guarded.end() :]
        opcode, _, operands = body.partition(" ")
        instructions.append(Instruction(opcode, split_operands(operands), location, body, guard))
    return Listing(name, tuple(instructions), labels, {})


def parse_ptx(text: str) -> Listing:
    """PTX of a module with one entry as a listing.

    Directives: ``version``, ``target``, and ``param:NAME`` -> type in the order of the parameters.
    """
    files: dict[str, str] = {}
    for number, first, second in _FILE.findall(text):
        files[number] = f"{first}/{second}" if second else first
    directives: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith((".version", ".target")):
            key, _, value = line.partition(" ")
            directives[key[1:]] = value.strip()
    head, _, body = text.partition(".visible .entry")
    name = body.split("(")[0].strip()
    parameters, _, body = body.partition(")")
    for kind, parameter in _PARAMETER.findall(parameters):
        directives[f"param:{parameter}"] = kind
    shared = re.search(r"(?:\.extern )?\.shared [^;]*?(\w+)\[", head)
    if shared:
        directives["shared"] = shared[1]
    body = body[body.index("{") + 1 :]
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    location = near = NOWHERE
    pending = ""
    for raw in body.splitlines():
        line = raw.split("//")[0].strip()
        if not line:
            continue
        found = _LOC.match(line)
        if found:
            location = Location(files.get(found[1], ""), int(found[2]))
            near = location if location.line else near
            continue
        if line.startswith(".section") or (line == "}" and not pending and raw.startswith("}")):
            break
        pending = f"{pending} {line}".strip()
        while pending:
            label = re.match(r"^([$\w]+):\s*", pending)
            if label:
                labels[label[1]] = len(instructions)
                pending = pending[label.end() :]
                continue
            if pending[0] in "{}" and not re.match(r"^\{[^;]*\}\s*,", pending):
                pending = pending[1:].strip()
                continue
            statement, semicolon, rest = pending.partition(";")
            if not semicolon:
                break
            pending = rest.strip()
            if statement and not statement.startswith("."):
                instructions.append(_ptx_instruction(statement.strip(), location, near))
    return Listing(name, tuple(instructions), labels, directives)


def _ptx_instruction(statement: str, location: Location, near: Location) -> Instruction:
    guard, body = "", statement
    if body.startswith("@"):
        guard, _, body = body[1:].partition(" ")
        body = body.strip()
    opcode, _, operands = body.replace("\t", " ").partition(" ")
    return Instruction(opcode, split_operands(operands), location, " ".join(statement.split()), guard, near=near)
