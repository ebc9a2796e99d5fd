"""Profiles: what differs between targets, as data. Everything else is the same in every profile."""

from __future__ import annotations

from dataclasses import dataclass

from rlkernel.errors import ContractError
from rlkernel.names import hint

FMA, ADD, MUL, DIV, SQRT, MAX = "fma.rn.f32", "add.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32", "max.f32"
EXP2, EXP2_P3, LOG2 = "exp2.full", "exp2.p3", "log2.full"
MMA_SM90, MFMA_GFX942, EX2_SM90 = "mma.bf16.sm90", "mfma.bf16.gfx942", "ex2.approx.ftz.sm90"
COPY = "copy"
PRIMITIVES = (FMA, ADD, MUL, DIV, SQRT, MAX, EXP2, EXP2_P3, LOG2, MMA_SM90, MFMA_GFX942, EX2_SM90, COPY)
"""The closed set: docs/numerics.md defines each."""


@dataclass(frozen=True)
class Profile:
    """One profile.

    ``mac`` is the multiply-accumulate primitive, ``step`` how many elements of the reduction it takes at a time.
    ``weights_exp2`` maps the dtype to the exponential of attention weights. ``key_block`` keys enter the online softmax
    at a time; inside a block the row sum runs in ``row_sum_lanes`` strided chains that merge as a tree (1: one chain,
    continued from the rescaled sum). Every ``key_split`` keys an online softmax of their own begins; results merge
    by the largest maximum.
    """

    name: str
    mac: str
    step: int
    dtypes: tuple[str, ...]
    weights_exp2: tuple[tuple[str, str], ...]
    key_block: int
    row_sum_lanes: int
    key_split: int

    def attention_exp2(self, dtype: str) -> str:
        """The exponential of attention weights."""
        return dict(self.weights_exp2)[dtype]


PROFILES: tuple[Profile, ...] = (
    Profile("portable", FMA, 1, ("float32", "bfloat16"), (("float32", EXP2), ("bfloat16", EXP2_P3)), 64, 1, 512),
    Profile("hopper", MMA_SM90, 16, ("bfloat16",), (("bfloat16", EX2_SM90),), 128, 8, 2048),
    Profile("cdna3", MFMA_GFX942, 8, ("bfloat16",), (("bfloat16", EXP2_P3),), 64, 8, 512),
)


def find_profile(name: str, dtype: str) -> Profile:
    """A profile by name. Raises ContractError for an unknown one, or a dtype that it does not have."""
    for profile in PROFILES:
        if profile.name == name:
            if dtype not in profile.dtypes:
                raise ContractError(f"profile {name!r} has dtype {' or '.join(profile.dtypes)}, not {dtype!r}")
            return profile
    names = [profile.name for profile in PROFILES]
    raise ContractError(f"profile {name!r} is unknown; there are {', '.join(names)}{hint(name, names)}")
