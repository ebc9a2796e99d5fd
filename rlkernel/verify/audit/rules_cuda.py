"""What may stand in PTX and SASS of sm_90."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from hardware.listing import Instruction, Listing, Location
from rlkernel.verify.audit.allowed import Allowed
from rlkernel.verify.audit.findings import Violation, at
from rlkernel.verify.audit.rules_common import EXPANDED, contraction, polynomials
from rlkernel.verify.audit.written import Written

_APPROXIMATE = re.compile(r"^(ex2|lg2|rsqrt|rcp|sqrt|sin|cos|tanh|div)\.(approx|full)")
_DIRECTED = re.compile(r"\.(rz|rm|rp)(\.|$)")
_FLOAT_ATOMIC = re.compile(r"^(atom|red)\..*\.(f16|bf16|f32|f64|f16x2|bf16x2)")
_FLOATS = (".f32", ".f16", ".bf16", ".f64", ".tf32", ".f16x2", ".bf16x2", ".e4m3", ".e5m2")
_LITERAL = re.compile(r"(?<![\w.])(?:0[fF]([0-9A-Fa-f]{8})|(0x[0-9A-Fa-f]+|-?\d+))(?![\w.])")
_BASIC = {"fma": "fma", "mul": "mul", "add": "add", "sub": "add"}
_SASS_BASIC = {"FFMA": "fma", "FMUL": "mul", "FADD": "add"}
_MUFU = {"RCP": {"div", "integer division"}, "RSQ": {"sqrt"}, "RCP64H": set(), "SQRT": set()}


def literals(listing: Listing) -> Iterator[int]:
    """Every 32-bit constant that a PTX instruction names."""
    for instruction in listing.instructions:
        for operand in instruction.operands:
            for floating, integer in _LITERAL.findall(operand):
                yield int(floating, 16) if floating else int(integer, 0) & 0xFFFFFFFF


def ptx(listing: Listing, written: Written, allowed: Allowed) -> Iterator[Violation]:
    """Violations in PTX."""
    hardware_exp2 = False
    for i in listing.instructions:
        root = i.opcode.split(".")[0]
        if i.opcode == "ex2.approx.ftz.f32" and allowed.hardware_exp2:
            hardware_exp2 = True
        elif _APPROXIMATE.match(i.opcode):
            yield at("approximate", "primitives", f"{i.opcode} is approximate and no primitive of the entry", i)
        elif _FLOAT_ATOMIC.match(i.opcode):
            yield at("float atomic", "merge order", "an atomic operation on floats adds in the order of arrival", i)
        elif root in ("mma", "wgmma") and i.opcode.startswith(("mma.sync", "wgmma.mma_async")):
            yield from _matrix(i, allowed)
        elif ".ftz" in i.opcode:
            yield at("flush", "precision", f"{i.opcode} flushes subnormals", i)
        elif ".f64" in i.opcode:
            yield at("type", "precision", f"{i.opcode} computes in float64", i)
        elif root in _BASIC and i.opcode.endswith(_FLOATS):
            yield from _basic(i, root, written, allowed)
        elif root in ("div", "sqrt") and i.opcode.endswith(".f32"):
            if root not in allowed.kinds:
                yield at("primitive", "primitives", f"the entry has no {root}", i)
        elif root in ("min", "max") and i.opcode.endswith(_FLOATS):
            if ".NaN" not in i.opcode or root == "min" or "max" not in allowed.kinds:
                yield at("primitive", "primitives", f"{i.opcode} is not the contract's max, which propagates NaN", i)
        elif root in ("fma", "mad") and "." in i.opcode and i.opcode.endswith(_FLOATS):
            yield at("primitive", "primitives", f"{i.opcode} is no primitive", i)
    if allowed.hardware_exp2 and not hardware_exp2:
        yield Violation(
            "polynomial", "primitives", "the entry has ex2.approx.ftz.f32, but the code does not execute it"
        )
    yield from polynomials(literals(listing), allowed)


def _basic(i: Instruction, root: str, written: Written, allowed: Allowed) -> Iterator[Violation]:
    if not i.opcode.endswith(".f32"):
        yield at("type", "precision", f"{i.opcode} does not compute in float32", i)
    elif _DIRECTED.search(i.opcode):
        yield at("rounding mode", "rounding", f"{i.opcode} does not round to nearest even", i)
    elif ".rn" not in i.opcode:
        yield at("contractible", "rounding", f"{i.opcode} without .rn: the assembler may fuse it", i)
    else:
        found = contraction(_BASIC[root], i, written, allowed)
        if found:
            yield found


def _matrix(i: Instruction, allowed: Allowed) -> Iterator[Violation]:
    if "tf32" in i.opcode:
        yield at("matrix type", "precision", "operands are rounded to tf32", i)
    elif allowed.matrix != "mma.bf16.sm90":
        yield at("matrix type", "primitives", "a matrix instruction where the entry has none of sm_90", i)
    elif not (".f32.bf16.bf16" in i.opcode and "k16" in i.opcode):
        yield at("matrix type", "primitives", "the entry's step is k16 of bf16 into float32", i)


def counts(listing: Listing, basic: Mapping[str, str], written: Written) -> dict[Location, Counter[str]]:
    """Basic operations by line, without the lines whose operations are expanded into sequences."""
    found: dict[Location, Counter[str]] = {}
    for i in listing.instructions:
        root = i.opcode.split(".")[0]
        is_float = root in _SASS_BASIC or i.opcode.endswith(".f32")
        if root in basic and is_float and i.location.line and not written.at(i.location) & EXPANDED:
            found.setdefault(i.location, Counter())[basic[root]] += 1
    return found


def ptx_counts(listing: Listing, written: Written) -> dict[Location, Counter[str]]:
    return counts(listing, _BASIC, written)


def sass_counts(listing: Listing, written: Written) -> dict[Location, Counter[str]]:
    return counts(listing, _SASS_BASIC, written)


def sass(listing: Listing, assembly: Listing, written: Written, allowed: Allowed) -> Iterator[Violation]:
    """Violations in SASS, and differences between what PTX says and what the assembler made of it."""
    for i in listing.instructions:
        parts = i.opcode.split(".")
        root, here = parts[0], written.at(i.location)
        slow_path = i.location.file.startswith("$__internal")
        if root == "MUFU":
            unit = parts[1]
            if unit == "EX2" and allowed.hardware_exp2:
                continue
            if slow_path and unit in ("RCP", "RSQ"):
                continue
            if not here & _MUFU.get(unit, set()):
                yield at("approximate", "primitives", f"{i.opcode} outside of a division or square root", i)
        elif root in ("HGMMA", "HMMA"):
            if allowed.matrix != "mma.bf16.sm90" or "BF16" not in parts or "F32" not in parts or "TF32" in i.opcode:
                yield at("matrix type", "primitives", "a matrix instruction that is not the entry's", i)
            elif not (parts[1].endswith("x16") or parts[1].endswith("816")):
                yield at("matrix type", "split", "the entry's step is k16", i)
        elif root in ("ATOM", "ATOMG", "ATOMS", "RED", "REDG") and re.search(r"\.(F32|F16|BF16|F64)", i.opcode):
            yield at("float atomic", "merge order", "an atomic operation on floats adds in the order of arrival", i)
        elif root in ("DADD", "DMUL", "DFMA", "DMMA", "QGMMA", "IGMMA", "QMMA"):
            yield at("type", "precision", f"{i.opcode} is no operation of the contract", i)
        elif root in ("HADD2", "HMUL2", "HFMA2") and not _moves_constant(i):
            yield at("type", "precision", f"{i.opcode} computes in 16 bits", i)
        elif root in _SASS_BASIC and not slow_path and not here & EXPANDED:
            if "FTZ" in parts:
                yield at("flush", "precision", f"{i.opcode} flushes subnormals", i)
            elif any(mode in parts for mode in ("RZ", "RM", "RP", "SAT")):
                yield at("rounding mode", "rounding", f"{i.opcode} does not round to nearest even", i)
            else:
                found = contraction(_SASS_BASIC[root], i, written, allowed)
                if found:
                    yield found
    yield from _assembled(listing, assembly, written)


def _moves_constant(i: Instruction) -> bool:
    """``HFMA2.MMA R, -RZ, RZ, a, b`` loads a constant; so does HADD2 with -RZ or RZ alone."""
    sources = i.operands[1:]
    return sum(text.lstrip("-").startswith("RZ") for text in sources) >= 2 or (
        i.opcode.startswith("HADD2.F32") and len(sources) == 2 and sources[0].lstrip("-") == "RZ"
    )


def _assembled(machine: Listing, assembly: Listing, written: Written) -> Iterator[Violation]:
    loops = any(
        i.opcode.startswith("bra") and assembly.labels.get(i.operands[0], 1 << 30) <= position
        for position, i in enumerate(assembly.instructions)
    )
    before, after = ptx_counts(assembly, written), sass_counts(machine, written)
    for place in sorted(before.keys() | after.keys(), key=str):
        a, b = before.get(place, Counter()), after.get(place, Counter())
        ratio = b[next(iter(a))] / a[next(iter(a))] if a else 0.0
        unrolled = loops and ratio >= 1 and ratio == int(ratio) and all(b[k] == ratio * a[k] for k in a | b)
        if a != b and not unrolled:
            message = f"PTX has {dict(a)} at this line, SASS has {dict(b)}"
            yield Violation("count", "rounding", message, "", place)
