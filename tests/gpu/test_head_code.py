"""Machine code of the Gluon kernels of the head, compiled without a GPU: which operations on floats, and how many."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from rlkernel.kernels.triton.launch import compiler_options
from rlkernel.kernels.triton.logprob_gradient_hopper import linear_gradient_hopper
from rlkernel.kernels.triton.logprob_hopper import linear_leaves_hopper

FLOATS = re.compile(r"\b(add|sub|mul|fma|div|sqrt|rcp|ex2|lg2|rsqrt|min|max|mad)((?:\.\w+)*)\.f32\b")
POINTERS = {
    "targets": "*i64", "maxima": "*fp32", "sums": "*fp32", "moments": "*fp32", "lanes": "*i64", "chosen": "*fp32",
    "log_sums": "*fp32", "coefficients": "*fp32", "dz": "*bf16",
}  # fmt: skip
INTEGERS = ("M", "N", "K", "leaves", "programs", "nothing", "first")
LOGITS = 16
"""Of a thread that makes statistics or gradients, in one pass of its loop."""


def _compile(kernel: Any, division: str, **constants: Any) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    types = POINTERS | dict.fromkeys(INTEGERS, "i32") | dict.fromkeys(("temperature", "divisor"), "fp32")
    types |= dict.fromkeys("ab", f"tensordesc<bf16[128, 64],{layout!r}>")
    constants |= {
        "DIVISION": division, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "STAGES": 5,
        "REGISTERS": 128, "num_warps": 8,
    }  # fmt: skip
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    options = compiler_options("cuda") | {"num_warps": 8}
    source = GluonASTSource(kernel, signature, constants, aligned)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def _floats(ptx: str) -> Counter[str]:
    """Operations by name, sub as add; each rounds to nearest even and keeps subnormals."""
    found: Counter[str] = Counter()
    for name, modifiers in FLOATS.findall(ptx):
        assert modifiers in ("", ".rn"), f"{name}{modifiers}.f32"
        found["add" if name == "sub" else name] += 1
    return found


def _is_one_chain(ptx: str) -> bool:
    units = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx)
    return units == ["m64n128k16.f32.bf16.bf16"] * 4 and not re.search(r"\b(?:red|atom)\.(?!async)\S*f32", ptx)


@pytest.mark.parametrize(
    ("division", "more"), [("one", {}), ("product", {"mul": LOGITS}), ("quotient", {"div": LOGITS})]
)
@pytest.mark.parametrize("masked", [False, True])
def test_statistics_are_the_operations_of_the_definition(division: str, more: dict[str, int], masked: bool) -> None:
    ptx = _compile(linear_leaves_hopper, division, MASKED=masked)
    # a difference and three additions of exp2.full a logit; trees of s and u over 16 logits, then over 8 threads' sums
    expected = Counter({"add": 4 * LOGITS + 2 * (LOGITS - 1) + 2 * 7, "fma": 6 * LOGITS, "mul": 2 * LOGITS})
    assert _floats(ptx) == expected + Counter(more)
    assert _is_one_chain(ptx)


def test_gradients_are_the_operations_of_the_definition() -> None:
    ptx = _compile(linear_gradient_hopper, "one")
    # two differences and three additions of exp2.full, one - p; the coefficient's division in each of a thread's rows
    assert _floats(ptx) == Counter({"add": 6 * LOGITS, "fma": 6 * LOGITS, "mul": 2 * LOGITS, "div": 2})
    assert _is_one_chain(ptx)
