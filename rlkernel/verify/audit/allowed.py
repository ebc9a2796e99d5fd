"""What an entry of the contract allows in machine code: basic operations, matrix instructions, polynomials."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from rlkernel.contract import constants
from rlkernel.contract.points import SixPoints
from rlkernel.contract.profiles import (
    ADD,
    DIV,
    EX2_SM90,
    EXP2,
    EXP2_P3,
    FMA,
    LOG2,
    MAX,
    MFMA_GFX942,
    MMA_SM90,
    MUL,
    SQRT,
)

_CONSISTS_OF = {
    EXP2: (FMA, ADD),
    EXP2_P3: (FMA, ADD),
    LOG2: (FMA, ADD, MUL),
}
_KINDS = {FMA: "fma", ADD: "add", MUL: "mul", DIV: "div", SQRT: "sqrt", MAX: "max"}


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


POLYNOMIALS: dict[str, frozenset[int]] = {
    EXP2: frozenset(map(_bits, constants.EXP2_FULL[2:])),
    EXP2_P3: frozenset(map(_bits, constants.EXP2_P3[1:])),
    LOG2: frozenset(map(_bits, constants.LOG2_FULL)),
}
"""Coefficients that only this primitive has, as bits: how a polynomial is recognised in machine code."""


@dataclass(frozen=True)
class Allowed:
    """Derived from one entry.

    Attributes:
        kinds: of basic operations (``fma``, ``add``, ``mul``, ``div``, ``sqrt``, ``max``).
        matrix: the matrix unit's primitive, or empty.
        chain_of_fma: the multiply-accumulate is fma.rn.f32.
        polynomials: primitives that are evaluated by fma.
        hardware_exp2: ``ex2.approx.ftz.f32`` is a primitive of the entry.
    """

    kinds: frozenset[str]
    matrix: str
    chain_of_fma: bool
    polynomials: frozenset[str]
    hardware_exp2: bool


def allowed_by(entry: SixPoints) -> Allowed:
    """What the entry's primitives allow."""
    names = {name for _, name in entry.primitives}
    basic = {part for name in names for part in _CONSISTS_OF.get(name, (name,))}
    matrix = next((name for name in (MMA_SM90, MFMA_GFX942) if name in names), "")
    return Allowed(
        kinds=frozenset(_KINDS[name] for name in basic if name in _KINDS),
        matrix=matrix,
        chain_of_fma=dict(entry.primitives).get("mac") == FMA,
        polynomials=frozenset(names & POLYNOMIALS.keys()),
        hardware_exp2=EX2_SM90 in names,
    )
