"""The two targets, and compilation of a Triton kernel for them without a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hardware.cuda.listing import disassemble, parse_ptx, parse_sass
from hardware.listing import Listing
from hardware.rocm.listing import parse_amdgcn
from rlkernel.errors import ContractError
from rlkernel.kernels.triton.launch import compiler_options
from rlkernel.verify.audit.written import Written, read_written


@dataclass(frozen=True)
class Target:
    """One kind of device that kernels are compiled for.

    ``since`` is the first Triton (major, minor) whose code for it the audit was built for.
    """

    name: str
    backend: str
    architecture: int | str
    lanes: int
    since: tuple[int, int]

    @property
    def gpu(self) -> GPUTarget:
        return GPUTarget(self.backend, self.architecture, self.lanes)


SM_90 = Target("sm_90", "cuda", 90, 32, (3, 6))
GFX942 = Target("gfx942", "hip", "gfx942", 64, (3, 9))
TARGETS = (SM_90, GFX942)


def find_target(name: str) -> Target:
    """A target by name. Raises ContractError for an unknown one."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise ContractError(f"target {name!r} is unknown; there are {', '.join(t.name for t in TARGETS)}")


def why_not_audited(target: Target) -> str:
    """Why the installed Triton's code for a target cannot be audited; empty where it can.

    Raises ContractError where Triton's version cannot be read.
    """
    found = re.match(r"(\d+)\.(\d+)", triton.__version__)
    if not found:
        raise ContractError(
            f"Triton's version is {triton.__version__!r}: MAJOR.MINOR is needed to know what it compiles"
        )
    if (int(found[1]), int(found[2])) >= target.since:
        return ""
    needed = ".".join(map(str, target.since))
    return (
        f"the audit of {target.name} is for Triton {needed} and later, and Triton {triton.__version__} is installed, "
        "which makes other instructions: pip install -U -e '.[triton]'"
    )


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that its compilation depends on.

    Attributes:
        signature: Triton's type of every argument that is no constant, in order (``*bf16``, ``i32``, ``fp32``).
        constants: value of every constexpr.
        aligned: integer arguments that are multiples of 16; pointers always are.
        options: of the compiler, over those that every kernel is compiled with.
    """

    function: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What the audit reads: operations as written, and the listings of the machine code."""

    target: Target
    threads: int
    written: Written
    assembly: Listing
    """PTX on sm_90, amdgcn on gfx942."""
    machine: Listing
    """SASS on sm_90, amdgcn on gfx942."""
    versions: tuple[tuple[str, str], ...]


def compile_variant(variant: Variant, target: Target) -> Compiled:
    """Compile ahead of time. Errors of the compiler are passed on."""
    defaults = {p.name: p.default for p in variant.function.params if p.is_constexpr and p.has_default}
    constants = defaults | dict(variant.constants)
    types = dict(variant.signature)
    signature = {name: types.get(name, "constexpr") for name in variant.function.arg_names}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in constants]
    if missing:
        raise ContractError(f"kernel {variant.function.__name__}: no type and no value for {', '.join(missing)}")
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in variant.aligned
    }
    options = compiler_options(target.backend) | {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    options |= dict(variant.options)
    source = ASTSource(variant.function, signature, constants, attributes)
    asm = triton.compile(source, target=target.gpu, options=options).asm
    if target.backend == "cuda":
        assembly, machine = parse_ptx(asm["ptx"]), parse_sass(disassemble(asm["cubin"]))
    else:
        assembly = machine = parse_amdgcn(asm["amdgcn"])
    return Compiled(
        target=target,
        threads=variant.num_warps * target.lanes,
        written=read_written(asm["ttir"]),
        assembly=assembly,
        machine=machine,
        versions=(("triton", triton.__version__),),
    )
