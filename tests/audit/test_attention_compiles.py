"""The attention kernels compile for both targets, and their machine code holds nothing that the entry does not allow.

The order of their sums is compared as bits on a GPU (benchmarks/gpu/attention_bits.py); here the instructions are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from hardware.cuda.listing import disassemble, parse_ptx, parse_sass
from rlkernel.contract.points import SixPoints
from rlkernel.contract.profiles import EX2_SM90, EXP2, EXP2_P3, LOG2, MFMA_GFX942, MMA_SM90
from rlkernel.kernels.triton import attention, attention_backward, attention_decode, attention_hopper
from rlkernel.kernels.triton import attention_hopper_backward as hopper_backward
from rlkernel.kernels.triton.launch import compiler_options
from rlkernel.reference.arith import div, fma32, mul
from rlkernel.verify.audit import rules_cuda, rules_rocm
from rlkernel.verify.audit.allowed import allowed_by
from rlkernel.verify.audit.catalogue import entry
from rlkernel.verify.audit.findings import Violation
from rlkernel.verify.audit.targets import GFX942, SM_90, Target, Variant, compile_variant
from rlkernel.verify.audit.written import read_written

ARRAYS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
FLOATS = ("lse2", "stash", "stash_rows", "part", "part_m", "part_l", "delta")
INTEGERS = ("starts", "positions", "table", "counter")
NUMBERS = ("table_step", "sequences", "tiles", "stash_splits", "splits", "length")
TYPES = {
    **dict.fromkeys(ARRAYS, "*bf16"),
    **dict.fromkeys(FLOATS, "*fp32"),
    **dict.fromkeys(INTEGERS, "*i32"),
    **dict.fromkeys(NUMBERS, "i32"),
    "scale": "fp32",
    "scale2": "fp32",
}
SHAPE = {"QH": 4, "KVH": 2, "D": 64, "BLOCK_D": 64, "NARROW": True, "SPLIT": 512, "LANES": 8}
PROFILES = {
    SM_90: ("hopper", {"MAC": MMA_SM90, "KIND": EX2_SM90, "KEYS": 128}),
    GFX942: ("cdna3", {"MAC": MFMA_GFX942, "KIND": EXP2_P3, "KEYS": 64}),
}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "forward": (attention.attention_forward, {"PAGE": 0, "SEVERAL": True, "BLOCK_M": 16}),
    "paged forward": (attention.attention_forward, {"PAGE": 8, "SEVERAL": False, "BLOCK_M": 16}),
    "decode": (attention_decode.decode_split, {"PAGE": 8, "ROWS": 16}),
    "dq": (attention_backward.query_gradient, {"BLOCK_M": 16, "BLOCK_N": 32}),
    "dk dv": (attention_backward.key_gradients, {"BLOCK_M": 32, "BLOCK_N": 16}),
}


def _part(points: SixPoints, without: tuple[str, ...]) -> SixPoints:
    """The entry as one kernel of the region has it: without the polynomials that stand in another one."""
    return replace(points, primitives=tuple((role, name) for role, name in points.primitives if name not in without))


def _problems(found: list[Violation]) -> list[str]:
    # gfx942 lists a multiply-add of a polynomial, and the reciprocal inside of a division, under a neighbour's line
    return [
        str(violation)
        for violation in found
        if violation.rule not in ("unwritten", "count") and not violation.instruction.startswith("v_rcp_f32")
    ]


def _without_scopes(ptx: str) -> str:
    """PTX without the braces of inline assembly, which would end the listing of the kernel."""
    lines = ptx.splitlines()
    braces = [i for i, line in enumerate(lines) if line.strip() in ("{", "}")]
    inner = set(braces[1 : braces.index(max(i for i in braces if lines[i] == "}"))])
    return "\n".join(line for i, line in enumerate(lines) if i not in inner)


@pytest.mark.parametrize("target", [SM_90, GFX942], ids=lambda target: target.name)
@pytest.mark.parametrize("name", KERNELS)
def test_plain_kernels(name: str, target: Target) -> None:
    function, constants = KERNELS[name]
    profile, primitives = PROFILES[target]
    known = SHAPE | primitives | constants
    variant = Variant(
        function,
        tuple((argument, TYPES[argument]) for argument in function.arg_names if argument in TYPES),
        tuple((argument, known[argument]) for argument in function.arg_names if argument not in TYPES),
        num_warps=2,
        num_stages=1,
    )
    compiled = compile_variant(variant, target)
    points = _part(entry(profile, "bfloat16", "attention"), {"decode": (LOG2,)}.get(name, ()))
    if name in ("dq", "dk dv"):
        points = _part(points, (LOG2, EXP2))
    allowed = allowed_by(points)
    if target is SM_90:
        found = [
            *rules_cuda.ptx(compiled.assembly, compiled.written, allowed),
            *rules_cuda.sass(compiled.machine, compiled.assembly, compiled.written, allowed),
        ]
        unit = "HMMA"
    else:
        found, unit = list(rules_rocm.amdgcn(compiled.assembly, compiled.written, allowed)), "v_mfma"
    assert not _problems(found)
    assert any(i.opcode.startswith(unit) for i in compiled.machine.instructions)
    # the twin: an entry without the exponential of the weights does not allow this code
    narrower = allowed_by(_part(points, (EX2_SM90,) if target is SM_90 else ("max.f32", EXP2_P3, EXP2, "fma.rn.f32")))
    rules = rules_cuda.ptx if target is SM_90 else rules_rocm.amdgcn
    assert _problems(list(rules(compiled.assembly, compiled.written, narrower)))


def _descriptor(rows: int, columns: int = 64, kind: str = "bf16") -> str:
    if kind == "bf16":
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    else:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return f"tensordesc<{kind}[{rows}, {columns}],{layout!r}>"


SPECIALISED: dict[str, tuple[Any, int, int]] = {
    "forward": (attention_hopper.attention_forward_hopper, 64, 128),
    "dq": (hopper_backward.query_gradient_hopper, 64, 128),
    "dk dv": (hopper_backward.key_gradients_hopper, 64, 64),
}


@pytest.mark.parametrize("name", SPECIALISED)
def test_warp_specialised_kernels(name: str) -> None:
    function, queries, keys = SPECIALISED[name]
    types = TYPES | {
        "q_desc": _descriptor(queries), "dout_desc": _descriptor(queries), "k_desc": _descriptor(keys),
        "v_desc": _descriptor(keys), "lse_desc": _descriptor(1, 64, "fp32"), "delta_desc": _descriptor(1, 64, "fp32"),
    }  # fmt: skip
    known = {"QH": 4, "KVH": 2, "D": 64, "SPLIT_BLOCKS": 4, "PINGPONG": False, "STAGES": 2, "REGISTERS": 240}
    signature = {argument: types.get(argument, "constexpr") for argument in function.arg_names}
    constants = {argument: known[argument] for argument, kind in signature.items() if kind == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source: ASTSource = GluonASTSource(function, signature, constants, aligned)
    asm = triton.compile(source, target=SM_90.gpu, options=compiler_options("cuda") | {"num_warps": 4}).asm
    assembly, machine = parse_ptx(_without_scopes(asm["ptx"])), parse_sass(disassemble(asm["cubin"]))
    written = read_written(asm["ttgir"])
    points = _part(entry("hopper", "bfloat16", "attention"), () if name == "forward" else (LOG2, EXP2))
    found = [
        *rules_cuda.ptx(assembly, written, allowed_by(points)),
        *rules_cuda.sass(machine, assembly, written, allowed_by(points)),
    ]
    assert not _problems(found)
    assert any(i.opcode.startswith("HGMMA") for i in machine.instructions)
    assert _problems(list(rules_cuda.ptx(assembly, written, allowed_by(_part(points, (EX2_SM90,))))))


def _quotient(x: torch.Tensor, total: torch.Tensor, corrections: int) -> torch.Tensor:
    """What ``attention_hopper._quotients`` does where nothing leaves the range of normal numbers."""
    reciprocal = div(1.0, total)
    found = mul(x, reciprocal)
    for _ in range(corrections):
        found = fma32(fma32(found, -total, x), reciprocal, found)
    return found


def _between(low: int, high: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Random float32 numbers between two bit patterns, both among them."""
    bits = torch.randint(low, high + 1, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    bits[0], bits[1] = low, high
    return bits.view(torch.float32)


def test_a_reciprocal_and_two_corrections_divide_as_division_does() -> None:
    low, high = attention_hopper._DIVIDEND_LOW.value, attention_hopper._DIVIDEND_HIGH.value
    bounds = attention_hopper._DIVISOR_LOW.value, attention_hopper._DIVISOR_HIGH.value
    generator = torch.Generator().manual_seed(1)
    dividends = ((low, high), (low, low + 4096), (high - 4096, high), (0x3F7FF000, 0x3F801000))
    divisors = (bounds, (bounds[0], bounds[0] + 4096), (bounds[1] - 4096, bounds[1]), (0x3F7FFF00, 0x3F800100))
    differing = 0
    for ends in dividends:
        for others in divisors:
            x, total = _between(*ends, 1 << 16, generator), _between(*others, 1 << 16, generator)
            x[::2] = -x[::2]
            x[2] = 0.0
            want = div(x, total).view(torch.int32)
            assert torch.equal(_quotient(x, total, 2).view(torch.int32), want)
            differing += int((_quotient(x, total, 0).view(torch.int32) != want).sum())
    assert differing > 1000  # the product with the reciprocal alone is another number
