"""What a contract of any version has to be: types are checked before, here ranges, names, dtypes and bit patterns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from rlkernel.contract.build import FORWARD_CASES, Contract
from rlkernel.contract.canonical import bits_float32, bits_float64
from rlkernel.contract.claims import check_topology
from rlkernel.contract.constants import MAX_LANES
from rlkernel.contract.points import SixPoints
from rlkernel.contract.profiles import (
    ADD,
    COPY,
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
    find_profile,
)
from rlkernel.errors import ContractError
from rlkernel.models.definition import define_model

ROLES = {
    "mac": (FMA, MMA_SM90, MFMA_GFX942),
    "weights_exp2": (EXP2, EXP2_P3, EX2_SM90),
    "fma": (FMA,),
    "add": (ADD,),
    "mul": (MUL,),
    "div": (DIV,),
    "sqrt": (SQRT,),
    "max": (MAX,),
    "exp2": (EXP2,),
    "log2": (LOG2,),
    "copy": (COPY,),
}
"""Roles of primitives, and what may play each."""

PATTERNS, COUNTS = ("eps", "scale", "scale2"), ("key_block", "padding_multiple")
OPTIMIZER_REGIONS = ("gradient_norm", "loss", "adamw")
GRADIENTS = ("", "wgrad", "bias")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COUNT = re.compile(r"[1-9][0-9]*")


def structural_problems(contract: Contract) -> Iterator[tuple[str, str]]:
    """(path inside the contract, what is wrong there), lazily; nothing for a contract that some version could make.

    Whether the entries follow from the model is another question: :func:`rlkernel.contract.serial.departures`.
    """
    policy = "numerical_policy"
    yield from _model_problems(contract)
    try:
        find_profile(contract.profile, contract.dtype)
    except ContractError as error:
        yield f"{policy}:", str(error)
    for problem in check_topology(contract.topology, contract.config):
        yield f"{policy}:", problem
    temperature = bits_float32(contract.temperature)
    if not (math.isfinite(temperature) and temperature > 0):
        yield f"{policy}.temperature", f"is {contract.temperature} ({temperature!r}): a finite number above 0 is needed"
    if not _SHA256.fullmatch(contract.rope):
        yield f"{policy}.rope_tables", f"is {contract.rope!r}: a SHA-256 of 64 hexadecimal digits is needed"
    for path, problem in _pattern_problems(contract.optimizer, f"{policy}.optimizer"):
        yield path, problem
    regions = {region.kind for region in define_model(contract.config).regions} | {"lm_head"}
    for (case, region), points in contract.entries.items():
        path = f"{policy}.entries.{case}/{region}"
        if problem := _unknown(case, region, regions):
            yield f"{path}:", problem
        for field, problem in entry_problems(points, contract.dtype):
            yield f"{path}.{field}", problem
        if case in FORWARD_CASES:
            for field, problem in _stream_problems(region, points, contract.dtype):
                yield f"{path}.{field}", problem


def _model_problems(contract: Contract) -> Iterator[tuple[str, str]]:
    config = contract.config
    if not (math.isfinite(config.rms_norm_eps) and config.rms_norm_eps >= 0):
        yield "semantic.model.rms_norm_eps", f"is {config.rms_norm_eps!r}: a finite number from 0 is needed"
    if not (math.isfinite(config.rope.theta) and config.rope.theta > 0):
        yield "semantic.model.rope.theta", f"is {config.rope.theta!r}: a finite number above 0 is needed"
    for name, value in config.rope.parameters:
        if not math.isfinite(value):
            yield f"semantic.model.rope.parameters.{name}", f"is {value!r}: a finite number is needed"


def _unknown(case: str, region: str, regions: set[str]) -> str:
    """Why a case does not have such a region; empty where it may."""
    if case == "optimizer_step":
        known: set[str] = set(OPTIMIZER_REGIONS)
    elif case == "trainer_backward":
        known = {f"{kind}.{part}".rstrip(".") for kind in regions for part in GRADIENTS}
    elif case in FORWARD_CASES:
        known = regions
    else:
        return f"there is no case {case!r}; there are {', '.join((*FORWARD_CASES, 'trainer_backward, optimizer_step'))}"
    return "" if region in known else f"the case {case} of this model has no region {region!r}"


def entry_problems(points: SixPoints, dtype: str) -> Iterator[tuple[str, str]]:
    """(field, what is wrong with it) of one entry; ``dtype`` is the contract's."""
    if not points.dependency.inputs or not all(points.dependency.inputs):
        yield "dependency.inputs", f"is {list(points.dependency.inputs)!r}: names of inputs are needed"
    if not points.dependency.domain:
        yield "dependency.domain", "is empty: an axis, or 'none', is needed"
    split = points.split
    for name, least in (("leaves", 0), ("leaf_size", 0), ("lanes", 1), ("step", 1), ("shards", 1)):
        if getattr(split, name) < least:
            yield f"split.{name}", f"is {getattr(split, name)}: at least {least} is needed"
    if split.lanes > MAX_LANES:
        yield "split.lanes", f"is {split.lanes}: at most {MAX_LANES} are defined"
    if bool(split.leaves) == bool(split.leaf_size):
        yield "split", f"has leaves {split.leaves} and leaf_size {split.leaf_size}: exactly one of them is not 0"
    dtypes = sorted({dtype, "float32"})
    for name, value in vars(points.precision).items():
        if value not in dtypes:
            yield f"precision.{name}", f"is {value!r}: a contract in {dtype} has {' and '.join(dtypes)}"
    for site in points.rounding:
        if not site.site or site.to not in dtypes:
            yield "rounding", f"narrows {site.site!r} to {site.to!r}: a contract in {dtype} has {' and '.join(dtypes)}"
    yield from _repeated("rounding", [site.site for site in points.rounding])
    yield from _role_problems(points)
    yield from _constant_problems(points)


def _role_problems(points: SixPoints) -> Iterator[tuple[str, str]]:
    if not points.primitives:
        yield "primitives", "is empty: every region consists of at least one primitive"
    yield from _repeated("primitives", [role for role, _ in points.primitives])
    for role, primitive in points.primitives:
        if role not in ROLES:
            yield "primitives", f"has the role {role!r}; there are {', '.join(ROLES)}"
        elif primitive not in ROLES[role]:
            yield f"primitives.{role}", f"is {primitive!r}, which plays no such role; {' or '.join(ROLES[role])} does"


def _constant_problems(points: SixPoints) -> Iterator[tuple[str, str]]:
    yield from _repeated("constants", [name for name, _ in points.constants])
    for name, value in points.constants:
        if name in COUNTS:
            if not _COUNT.fullmatch(value):
                yield f"constants.{name}", f"is {value!r}: a whole number above 0 is needed"
        elif name not in PATTERNS:
            yield "constants", f"has {name!r}; there are {', '.join((*PATTERNS, *COUNTS))}"
        else:
            try:
                number = bits_float32(value)
            except ContractError as error:
                yield f"constants.{name}:", str(error)
                continue
            if not (math.isfinite(number) and number >= 0):
                yield f"constants.{name}", f"is {value} ({number!r}): a finite number from 0 is needed"


def _repeated(field: str, names: list[str]) -> Iterator[tuple[str, str]]:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield field, f"names {twice} twice"


def _stream_problems(region: str, points: SixPoints, dtype: str) -> Iterator[tuple[str, str]]:
    """What flows from region to region has the contract's dtype; the head's logits and what follows are float32."""
    precision = points.precision
    for name, value, needed in (
        ("inputs", precision.inputs, "float32" if region == "logprob" else dtype),
        ("output", precision.output, "float32" if region in ("lm_head", "logprob") else dtype),
    ):
        if value != needed:
            yield f"precision.{name}", f"is {value!r}: {region} has {needed} in a contract in {dtype}"


def _pattern_problems(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Texts that begin as a bit pattern does and are none."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _pattern_problems(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _pattern_problems(item, f"{path}[{index}]")
    elif isinstance(value, str) and value.startswith(("f32:", "f64:")):
        try:
            (bits_float32 if value.startswith("f32:") else bits_float64)(value)
        except ContractError as error:
            yield f"{path}:", str(error)
