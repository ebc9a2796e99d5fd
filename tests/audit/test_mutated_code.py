"""Machine code that is changed by one instruction is no longer proven: the machines hold each one to account."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from hardware.listing import Instruction
from rlkernel.kernels.triton.launch import Tile
from rlkernel.verify.audit import launches
from rlkernel.verify.audit.catalogue import audited_kernels, entry, gemm_variant
from rlkernel.verify.audit.findings import Violation
from rlkernel.verify.audit.launches import Launch
from rlkernel.verify.audit.proof import prove
from rlkernel.verify.audit.targets import GFX942, SM_90, TARGETS, Compiled, Target, compile_variant

Code = list[Instruction]
MATRIX = {"sm_90": "wgmma.mma_async", "gfx942": "v_mfma"}
PROFILE = {"sm_90": "hopper", "gfx942": "cdna3"}


@cache
def _product(target: Target) -> tuple[Compiled, Launch]:
    tile = Tile(64, 64, 64, num_warps=4, num_stages=2)
    points = entry(PROFILE[target.name], "bfloat16", "o_proj")
    compiled = compile_variant(gemm_variant("bfloat16", tile, 1, fma=False), target)
    return compiled, launches.matrix_product(points, 64, 64, 64, "bfloat16", 1)


@cache
def _rows(target: Target) -> tuple[Compiled, Launch]:
    kernel = next(k for k in audited_kernels() if k.name == "row_reduction 200" and k.target is target)
    return compile_variant(kernel.variant, target), kernel.launches[0]


def _changed(of: tuple[Compiled, Launch], change: Callable[[Code], Code]) -> list[Violation]:
    compiled, launch = of
    code = change(list(compiled.assembly.instructions))
    assert len(code) == len(compiled.assembly.instructions), "labels hold indices"
    return prove(replace(compiled, assembly=replace(compiled.assembly, instructions=tuple(code))), launch)[1]


def _executed(compiled: Compiled, mark: str) -> list[int]:
    """Indices of the instructions of a kind in straight code: all matrix instructions of the first pass."""
    return [n for n, i in enumerate(compiled.assembly.instructions) if i.opcode.startswith(mark)]


def _chain(compiled: Compiled, target: Target) -> list[int]:
    """Matrix instructions that continue one accumulator, in order."""
    found = _executed(compiled, MATRIX[target.name])
    accumulator = compiled.assembly.instructions[found[-1]].operands[0]
    return [n for n in found if compiled.assembly.instructions[n].operands[0] == accumulator]


def _swap(first: int, second: int, fields: slice) -> Callable[[Code], Code]:
    """Exchange the factors of two matrix instructions (their K), leaving the accumulators."""

    def change(code: Code) -> Code:
        a, b = code[first], code[second]
        left, right = list(a.operands), list(b.operands)
        left[fields], right[fields] = right[fields], left[fields]
        code[first], code[second] = replace(a, operands=tuple(left)), replace(b, operands=tuple(right))
        return code

    return change


def _nothing(n: int, target: Target) -> Callable[[Code], Code]:
    idle = "s_nop" if target is GFX942 else "fence.proxy.async"

    def change(code: Code) -> Code:
        code[n] = replace(code[n], opcode=idle, operands=("0",), guard="")
        return code

    return change


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_unchanged_code_is_proven(target: Target) -> None:
    assert not _changed(_product(target), lambda code: code)
    assert not _changed(_rows(target), lambda code: code)


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_two_steps_of_k_exchanged(target: Target) -> None:
    chain = _chain(_product(target)[0], target)
    problems = _changed(_product(target), _swap(chain[-2], chain[-1], slice(1, 3)))
    assert [p.rule for p in problems] == ["k order"], problems


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_one_step_left_out(target: Target) -> None:
    chain = _chain(_product(target)[0], target)
    assert _changed(_product(target), _nothing(chain[-1], target))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_one_addition_left_out_of_the_tree(target: Target) -> None:
    compiled, _ = _rows(target)
    additions = _executed(compiled, "add.rn.f32" if target is SM_90 else "v_add_f32")
    assert additions
    assert _changed(_rows(target), _nothing(additions[-1], target))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_a_multiplication_instead_of_a_fused_one(target: Target) -> None:
    compiled, _ = _rows(target)
    place = _executed(compiled, "fma.rn.f32" if target is SM_90 else "v_pk_fma_f32")[-1]
    name = "mul.rn.f32" if target is SM_90 else "v_pk_mul_f32"

    def change(code: Code) -> Code:
        code[place] = replace(code[place], opcode=name, operands=code[place].operands[:3], modifiers={})
        return code

    assert [p.rule for p in _changed(_rows(target), change)] == ["order"]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_an_unknown_instruction_proves_nothing(target: Target) -> None:
    def change(code: Code) -> Code:
        code[3] = replace(code[3], opcode="mystery.b32" if target is SM_90 else "v_mystery_b32")
        return code

    problems = _changed(_rows(target), change)
    assert [p.rule for p in problems] == ["not proven"]
    assert "mystery" in problems[0].message or "no model" in problems[0].message
