"""Machine code of the Gluon kernels, compiled without a GPU: which operations on floats there are, and how many."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from rlkernel.kernels.triton.chains_hopper import column_chain
from rlkernel.kernels.triton.gemm_hopper import gemm_hopper
from rlkernel.kernels.triton.launch import compiler_options
from rlkernel.kernels.triton.tiles import HopperTile

FLOATS = re.compile(r"\b(?:add|sub|mul|fma|div|sqrt|rcp|ex2|lg2|rsqrt|min|max|mad)[.\w]*\.f32\b")
TYPES = {"bf16": gl.bfloat16, "fp32": gl.float32}


def _compile(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> str:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name == "N"
    }
    options = compiler_options("cuda") | {"num_warps": warps}
    source = GluonASTSource(kernel, signature, constants, aligned)
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def _product(tile: HopperTile, **keys: Any) -> str:
    part = tile.block_n // 2 if keys.get("SWIGLU") else tile.block_n
    a_first, b_first = keys.get("A_DEPTH_FIRST", False), keys.get("B_DEPTH_FIRST", False)
    out = "fp32" if keys.get("CONTINUES") else "bf16"
    blocks = {
        "a": ((tile.block_k, tile.block_m) if a_first else (tile.block_m, tile.block_k), "bf16"),
        "b": ((tile.block_k, tile.block_n) if b_first else (part, tile.block_k), "bf16"),
        "c": ((tile.block_m, part // tile.parts), out),
    }
    types = {
        name: f"tensordesc<{kind}[{shape[0]}, {shape[1]}],"
        f"{gl.NVMMASharedLayout.get_default_for(list(shape), TYPES[kind])!r}>"
        for name, (shape, kind) in blocks.items()
    }
    types |= {"bias": "*bf16", "grad": "*fp32", "workspace": "*fp32"}
    types |= dict.fromkeys(("M", "N", "K", "programs", "slice_width"), "i32")
    constants = {
        "LEAVES": 1, "HAS_BIAS": False, "CONTINUES": False, "A_DEPTH_FIRST": False, "B_DEPTH_FIRST": False,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "A_ROWS": tile.block_m,
        "GROUP_M": tile.group_m, "STAGES": tile.stages, "PARTS": tile.parts, "SWIGLU": False,
        "OVERLAPS": False, "FOUR_SHARED": False, "WIDE": tile.wide, "PAIRED": tile.paired,
        "num_warps": tile.num_warps,
    } | keys  # fmt: skip
    return _compile(gemm_hopper, types, constants, tile.num_warps)


def _floats(ptx: str) -> Counter[str]:
    return Counter(FLOATS.findall(ptx))


@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("paired", [False, True])
def test_a_tree_of_leaves_is_made_of_additions_that_stand_alone(leaves: int, bias: bool, paired: bool) -> None:
    tile = HopperTile(64, 64, 64, 8, 4, 1, 4, paired=paired and leaves > 1)
    ptx = _product(tile, LEAVES=leaves, HAS_BIAS=bias)
    elements = tile.block_m * tile.block_n // (tile.num_warps * 32)
    # a thread adds each of its elements once for every merge, and once for the bias: no sum was folded into a chain
    assert sum(_floats(ptx).values()) == elements * (leaves - 1 + bias)
    assert set(_floats(ptx)) <= {"add.rn.f32", "add.f32"}
    units = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", ptx)
    assert set(units) == {"m64n64k16.f32.bf16.bf16"} and len(units) == leaves * tile.block_k // 16
    assert not re.search(r"\b(?:red|atom)\.", ptx) and ".ftz" not in ptx


@pytest.mark.parametrize(
    "keys", [{"B_DEPTH_FIRST": True}, {"A_DEPTH_FIRST": True, "B_DEPTH_FIRST": True, "CONTINUES": True}]
)
def test_other_layouts_add_nothing(keys: dict[str, bool]) -> None:
    ptx = _product(HopperTile(128, 128, 64, 8, 4), **keys)
    assert not _floats(ptx) and ptx.count("wgmma.mma_async") == 4 and ".local" not in ptx


@pytest.mark.parametrize(("norm", "expected"), [(True, {"mul", "fma"}), (False, {"add"})])
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_a_step_of_a_chain_is_one_operation(norm: bool, expected: set[str], kind: str) -> None:
    types = {"dy": f"*{kind}", "x": f"*{kind}", "inv_rms": "*fp32", "total": "*fp32"}
    types |= dict.fromkeys(("rows", "width", "stride"), "i32")  # whatever they are divisible by
    block, columns = 8, 32
    constants = {
        "GROUPS": 4, "PER": 2, "SLOTS": 4, "FIRST": 0, "BLOCK": block, "COLUMNS": columns, "STAGES": 3, "NORM": norm,
        "VECTOR": 8 if kind == "bf16" else 4,
    }  # fmt: skip
    ptx = _compile(column_chain, types, constants, 1)
    assert ptx.count("cp.async.cg.shared.global") and "cp.async.ca" not in ptx  # 16 bytes at a time
    found = _floats(ptx)
    assert {name.split(".")[0] for name in found} == expected and all("ftz" not in name for name in found)
    assert all(count == block * columns // 32 for count in found.values())
