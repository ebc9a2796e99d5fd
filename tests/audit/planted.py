"""Kernels that break the contract on purpose: each with the target, the entry that it claims and what must be found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from rlkernel.contract.profiles import EXP2, FMA, MUL
from rlkernel.kernels.triton.gemm import gemm
from rlkernel.kernels.triton.launch import Tile
from rlkernel.kernels.triton.primitives import exp2_p3
from rlkernel.kernels.triton.reductions import lane_dot
from rlkernel.verify.audit import launches
from rlkernel.verify.audit.catalogue import Audited, entry, gemm_launches, gemm_variant, scalar_entry, scalar_variant
from rlkernel.verify.audit.targets import GFX942, SM_90, TARGETS, Target, Variant

TILE = Tile(64, 64, 32, num_warps=4, num_stages=2)


@dataclass(frozen=True)
class Planted:
    """A planted fault. ``instruction`` and ``line`` are parts of what the violation must name."""

    name: str
    audited: Audited
    rule: str
    instruction: str = ""
    line: str = ""


@triton.jit
def uses_exp(x, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.exp(tl.load(x + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit
def uses_another_exp2(x, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, exp2_p3(tl.load(x + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit
def uses_hardware_exp2(x, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.exp2(tl.load(x + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit
def uses_rsqrt(x, w, y, inv_rms, row_count, eps, N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = rows < row_count
    total = lane_dot(x, x, rows, present, N, ROWS, LANES)
    r = tl.rsqrt(tl.div_rn(total, tl.full((ROWS,), N, tl.float32)) + eps)
    tl.store(inv_rms + rows, r, mask=present)
    columns = tl.arange(0, N)
    place = rows[:, None] * N + columns[None, :]
    scaled = tl.load(x + place, mask=present[:, None], other=0.0) * r[:, None]
    tl.store(y + place, scaled * tl.load(w + columns)[None, :], mask=present[:, None])


@triton.jit
def fused(x, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < count, other=0.0)
    product = value * value
    total = product + value
    tl.store(out + i, total, mask=i < count)


@triton.jit
def adds_atomically(a, b, out, row_count, N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    for first in range(0, N, LANES):
        inside = first + lane < N
        u = tl.load(a + row * N + first + lane, mask=inside, other=0.0)
        v = tl.load(b + row * N + first + lane, mask=inside, other=0.0)
        tl.atomic_add(out + row + lane * 0, tl.fma(u, v, u * 0.0), mask=inside)


@triton.jit
def sums_by_layout(a, b, out, row_count, N: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    acc = tl.zeros((LANES,), tl.float32)
    for first in range(0, N, LANES):
        u = tl.load(a + row * N + first + lane)
        v = tl.load(b + row * N + first + lane)
        acc = tl.fma(u, v, acc)
    tl.store(out + row, tl.sum(acc, axis=0))


@triton.jit
def tf32_product(
    a, b, c, bias, grad, M, N, K, zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    rows, columns, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.full((BLOCK_M, BLOCK_N), zero, tl.float32)
    for first in range(0, K, BLOCK_K):
        x = tl.load(a + rows[:, None] * K + first + k[None, :])
        y = tl.load(b + columns[None, :] * K + first + k[:, None])
        acc = tl.dot(x, y, acc, input_precision="tf32")
    tl.store(c + rows[:, None] * N + columns[None, :], acc)


@triton.jit
def folded_leaves(
    a, b, c, bias, grad, M, N, K, zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    rows, columns, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    x = tl.load(a + rows[:, None] * K + k[None, :])
    y = tl.load(b + columns[None, :] * K + k[:, None])
    total = tl.dot(x, y, tl.full((BLOCK_M, BLOCK_N), zero, tl.float32), input_precision="ieee")
    x = tl.load(a + rows[:, None] * K + BLOCK_K + k[None, :])
    y = tl.load(b + columns[None, :] * K + BLOCK_K + k[:, None])
    total = total + tl.dot(x, y, input_precision="ieee")
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty))


@triton.jit
def descending(
    a, b, c, bias, grad, M, N, K, zero, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    rows, columns, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.full((BLOCK_M, BLOCK_N), zero, tl.float32)
    for first in range(0, K, BLOCK_K):
        x = tl.load(a + rows[:, None] * K + (K - BLOCK_K - first) + k[None, :])
        y = tl.load(b + columns[None, :] * K + (K - BLOCK_K - first) + k[:, None])
        acc = tl.dot(x, y, acc, input_precision="ieee")
    tl.store(c + rows[:, None] * N + columns[None, :], acc.to(c.dtype.element_ty))


def _scalar(function: Any, primitive: str, target: Target, **options: Any) -> Audited:
    variant = scalar_variant(function, 1)
    variant = Variant(variant.function, variant.signature, variant.constants, options=options)
    return Audited(function.__name__, target, f"primitive {primitive}", scalar_entry(primitive), variant)


def _product(
    function: Any, target: Target, profile: str, dtype: str, leaves: int, make: Callable[..., Any] | None = None
) -> Audited:
    points = entry(profile, dtype, "o_proj", leaves)
    pointer = "*bf16" if dtype == "bfloat16" else "*fp32"
    names = tuple((name, pointer) for name in ("a", "b", "c", "bias"))
    names += (("grad", "*fp32"), ("M", "i32"), ("N", "i32"), ("K", "i32"), ("zero", "fp32"))
    constants = (("BLOCK_M", 64), ("BLOCK_N", 64), ("BLOCK_K", 32))
    variant = Variant(function, names, constants, ("N", "K"))
    depth = 64 if leaves > 1 else 96
    launch = launches.matrix_product(points, 64, 64, depth, dtype, 1)
    return Audited(function.__name__, target, f"{profile} {dtype} o_proj", points, variant, (launch,))


def _rows(function: Any, target: Target, what: str) -> Audited:
    points = entry("portable", "float32", "rms_norm")
    pointers = (("a", "*fp32"), ("b", "*fp32"), ("out", "*fp32"), ("row_count", "i32"))
    constants = (("N", 512), ("ROWS", 1), ("LANES", 256))
    if what == "norm":
        pointers = (("x", "*fp32"), ("w", "*fp32"), ("y", "*fp32"), ("inv_rms", "*fp32"), ("row_count", "i32"))
        variant = Variant(function, (*pointers, ("eps", "fp32")), constants)
        return Audited(function.__name__, target, "portable float32 rms_norm", points, variant)
    launch = launches.row_sum(points, 1, 512, "float32", 1)
    variant = Variant(function, pointers, constants)
    return Audited(function.__name__, target, "portable float32 lane_sum", points, variant, (launch,))


def _kpack(dtype: str, leaves: int) -> Audited:
    profile = "cdna3" if dtype == "bfloat16" else "portable"
    points = entry(profile, dtype, "o_proj", leaves)
    variant = gemm_variant(dtype, TILE, leaves, fma=dtype == "float32", kpack=2)
    found = gemm_launches(points, dtype, TILE, leaves)
    return Audited(gemm.__name__, GFX942, f"{profile} {dtype} o_proj", points, variant, found[:1])


def planted_kernels() -> tuple[Planted, ...]:
    """Every planted fault, on each target where it can be compiled."""
    exp = {"sm_90": "ex2.approx", "gfx942": "v_exp_f32"}
    root = {"sm_90": "rsqrt.approx", "gfx942": "v_rsq_f32"}
    fma = {"sm_90": "fma.rn.f32", "gfx942": "v_fma"}
    atomic = {"sm_90": "atom.global", "gfx942": "global_atomic"}
    matrix = {"sm_90": ("hopper", "mma"), "gfx942": ("cdna3", "v_mfma")}
    found = []
    for target in TARGETS:
        name = target.name
        profile, unit = matrix[name]
        found += [
            Planted("tl.exp", _scalar(uses_exp, EXP2, target), "approximate", exp[name], "tl.exp("),
            Planted("tl.exp2", _scalar(uses_hardware_exp2, EXP2, target), "approximate", exp[name], "tl.exp2("),
            Planted("another exp2", _scalar(uses_another_exp2, EXP2, target), "polynomial"),
            Planted("tl.rsqrt", _rows(uses_rsqrt, target, "norm"), "approximate", root[name], "tl.rsqrt("),
            Planted(
                "fused multiply-add",
                _scalar(fused, FMA, target, enable_fp_fusion=True),
                "contraction",
                fma[name],
                "",
            ),
            Planted(
                "float atomics", _rows(adds_atomically, target, "sum"), "float atomic", atomic[name], "tl.atomic_add("
            ),
            Planted("tl.sum", _rows(sums_by_layout, target, "sum"), "order" if target is SM_90 else "not proven"),
            Planted(
                "leaf folded into the chain",
                _product(folded_leaves, target, profile, "bfloat16", 2),
                "leaf",
                unit,
                "tl.dot(",
            ),
            Planted("descending K", _product(descending, target, profile, "bfloat16", 1), "k order", unit, "tl.dot("),
            Planted("a primitive that the entry lacks", _scalar(fused, MUL, target), "primitive"),
        ]
    found += [
        Planted("tf32 dot", _product(tf32_product, SM_90, "portable", "float32", 1), "matrix type", "tf32", "tl.dot("),
        Planted("tf32 dot", _product(tf32_product, GFX942, "portable", "float32", 1), "matrix type", "xf32", "tl.dot("),
        Planted("kpack=2, bf16", _kpack("bfloat16", 1), "k order", "v_mfma", "tl.dot("),
        Planted("kpack=2, fp32", _kpack("float32", 1), "k order", "v_mfma", "tl.dot("),
        Planted(
            "flushed subnormals",
            _scalar(uses_another_exp2, "exp2.p3", GFX942, allow_flush_denorm=True),
            "mode",
        ),
    ]
    return tuple(found)
