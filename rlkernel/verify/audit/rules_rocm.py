"""What may stand in amdgcn of gfx942."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from hardware.listing import Instruction, Listing, Location
from rlkernel.verify.audit.allowed import Allowed
from rlkernel.verify.audit.findings import Violation, at
from rlkernel.verify.audit.rules_common import EXPANDED, contraction, polynomials
from rlkernel.verify.audit.written import Written

_BASIC = {
    "v_fma_f32": ("fma", 1),
    "v_fmac_f32": ("fma", 1),
    "v_fmaak_f32": ("fma", 1),
    "v_fmamk_f32": ("fma", 1),
    "v_pk_fma_f32": ("fma", 2),
    "v_mul_f32": ("mul", 1),
    "v_pk_mul_f32": ("mul", 2),
    "v_add_f32": ("add", 1),
    "v_sub_f32": ("add", 1),
    "v_subrev_f32": ("add", 1),
    "v_pk_add_f32": ("add", 2),
}
_APPROXIMATE = re.compile(r"^v_(exp|log|rsq|rcp|sqrt|sin|cos|rcp_iflag|exp_legacy|log_legacy)_f(16|32|64)$")
_EXPANSIONS = {
    "v_rcp_f32": {"div", "integer division"},
    "v_rcp_iflag_f32": {"integer division"},
    "v_sqrt_f32": {"sqrt"},
}
_SEQUENCE = ("v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32", "v_ldexp_f32")
_OTHER_FLOAT = re.compile(
    r"^v_(mad_(f32|mix\w*|legacy\w*)|mac_f32|madak\w*|madmk\w*|fma_mix\w*|fma_legacy\w*|mul_legacy\w*|dot\w+"
    r"|(pk_)?(add|mul|fma|fmac)_(f16|bf16|f64)|(min|max|med3|pk_min|pk_max|min3|max3)_f(16|32|64))$"
)
_FLOAT_ATOMIC = re.compile(r"^(global|buffer|flat|ds)_(atomic_)?\w*(_f32|_f64|_f16|_bf16|fadd|pk_add\w*)")
_MFMA = re.compile(r"^v_s?mfmac?_")
_LITERAL = re.compile(r"^(?:0x[0-9a-fA-F]+|-?\d+)$")
_INLINE = {"0.5": 0x3F000000, "1.0": 0x3F800000, "2.0": 0x40000000, "4.0": 0x40800000}
_MODES = {
    "amdhsa_float_denorm_mode_32": ("3", "precision", "float32 subnormals are flushed"),
    "amdhsa_float_denorm_mode_16_64": ("3", "precision", "16-bit and 64-bit subnormals are flushed"),
    "amdhsa_float_round_mode_32": ("0", "rounding", "float32 does not round to nearest even"),
    "amdhsa_float_round_mode_16_64": ("0", "rounding", "16-bit and 64-bit floats do not round to nearest even"),
}


def plain(opcode: str) -> str:
    """The opcode without the suffix of its encoding."""
    for suffix in ("_e32", "_e64", "_sdwa", "_dpp", "_e64_dpp"):
        opcode = opcode.removesuffix(suffix)
    return opcode


def literals(listing: Listing) -> Iterator[int]:
    """Every 32-bit constant that an instruction names."""
    for instruction in listing.instructions:
        for operand in instruction.operands:
            if _LITERAL.match(operand):
                yield int(operand, 0) & 0xFFFFFFFF


def amdgcn(listing: Listing, written: Written, allowed: Allowed) -> Iterator[Violation]:
    """Violations in amdgcn."""
    for directive, (expected, point, meaning) in _MODES.items():
        found = listing.directives.get(directive)
        if found != expected:
            yield Violation("mode", point, f"{meaning}: .{directive} is {found}, {expected} is expected")
    for i in listing.instructions:
        name = plain(i.opcode)
        here = written.at(i.location)
        if name.startswith("s_setreg") or name.startswith(("s_denorm_mode", "s_round_mode")):
            if not any(part in i.text for part in ("HW_REG_MODE", "denorm", "round")):
                continue
            yield at("mode", "precision", "the mode of rounding or of subnormals is changed while the kernel runs", i)
        elif _APPROXIMATE.match(name):
            if not here & _EXPANSIONS.get(name, set()):
                message = f"{name} is approximate and stands outside of a division or square root"
                yield at("approximate", "primitives", message, i)
        elif name in _SEQUENCE:
            if not here & EXPANDED:
                yield at("approximate", "primitives", f"{name} where the source writes no division", i)
        elif _MFMA.match(name):
            yield from _matrix(i, name, allowed)
        elif _FLOAT_ATOMIC.match(name):
            yield at("float atomic", "merge order", "an atomic operation on floats adds in the order of arrival", i)
        elif name in _BASIC:
            if {"clamp", "mul", "div"} & i.modifiers.keys():
                yield at("rounding mode", "rounding", f"{name} with {', '.join(sorted(i.modifiers))}", i)
            problem = contraction(_BASIC[name][0], i, written, allowed)
            if problem:
                yield problem
        elif _OTHER_FLOAT.match(name):
            yield at("primitive", "primitives", f"{name} is no operation of the contract", i)
    yield from _divisions(listing, written)
    if allowed.hardware_exp2:
        yield Violation("polynomial", "primitives", "the entry has the exp2 instruction of sm_90, which gfx942 lacks")
    yield from polynomials(literals(listing), allowed)


def _matrix(i: Instruction, name: str, allowed: Allowed) -> Iterator[Violation]:
    if "xf32" in name:
        yield at("matrix type", "precision", "operands are rounded to xf32, gfx942's tf32", i)
    elif allowed.matrix == "mfma.bf16.gfx942":
        if not re.match(r"^v_mfma_f32_(32x32x8|16x16x16)_?bf16(_1k)?$", name):
            yield at("matrix type", "primitives", "the entry's step is k8 of bf16 into float32", i)
    elif allowed.chain_of_fma:
        if not re.match(r"^v_mfma_f32_(32x32x2|16x16x4)_?f32$", name):
            yield at("matrix type", "primitives", "the entry's chain is one of fma.rn.f32", i)
    else:
        yield at("matrix type", "primitives", "a matrix instruction where the entry has none of gfx942", i)


def _divisions(listing: Listing, written: Written) -> Iterator[Violation]:
    """Each float division is one whole sequence: two scalings, a reciprocal, five fma, one v_div_fmas, one fixup."""
    by_line: dict[Location, Counter[str]] = {}
    first: dict[Location, Instruction] = {}
    for i in listing.instructions:
        if "div" in written.at(i.location):
            by_line.setdefault(i.location, Counter())[plain(i.opcode)] += 1
            first.setdefault(i.location, i)
    for place, found in by_line.items():
        whole = found["v_div_fixup_f32"]
        parts = (found["v_div_scale_f32"], found["v_rcp_f32"], found["v_div_fmas_f32"])
        if parts != (2 * whole, whole, whole):
            message = f"a division that is not one whole sequence of correct rounding: {dict(found)}"
            yield at("approximate", "primitives", message, first[place])


def counts(listing: Listing, written: Written) -> dict[Location, Counter[str]]:
    """Basic operations by line (a packed one counts twice), without lines that are expanded into sequences."""
    found: dict[Location, Counter[str]] = {}
    for i in listing.instructions:
        name = plain(i.opcode)
        if name in _BASIC and i.location.line and not written.at(i.location) & EXPANDED:
            kind, width = _BASIC[name]
            found.setdefault(i.location, Counter())[kind] += width
    return found
