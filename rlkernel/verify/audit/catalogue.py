"""The audited kernels: each a compiled variant, the contract's entry that it claims, and launches to execute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.contract.points import Dependency, Merge, Precision, SixPoints, Split
from rlkernel.contract.profiles import DIV, EX2_SM90, EXP2, EXP2_P3, LOG2, MAX, SQRT
from rlkernel.kernels.triton import elementwise as kernels
from rlkernel.kernels.triton.launch import Tile, lanes
from rlkernel.kernels.triton.norm import rms_norm
from rlkernel.kernels.triton.reductions import row_reduction
from rlkernel.models.config import ModelConfig
from rlkernel.reference.primitives import PRIMITIVES
from rlkernel.verify.audit import launches
from rlkernel.verify.audit.audited import Audited, gemm_variant, pointers, type_of
from rlkernel.verify.audit.catalogue_attention import attention_kernels
from rlkernel.verify.audit.catalogue_model import model_kernels
from rlkernel.verify.audit.launches import Launch
from rlkernel.verify.audit.targets import GFX942, SM_90, TARGETS, Target, Variant

_MODEL = ModelConfig(
    family="llama",
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    max_position=64,
)


def entry(profile: str, dtype: str, region: str, leaves: int = 1) -> SixPoints:
    """The entry of a region in the forward of a trainer, with ``leaves`` claimed tensor-parallel ranks."""
    contract = build_contract(_MODEL, profile=profile, dtype=dtype, topology=Topology(tp=leaves))
    return contract.entries[("trainer_forward", region)]


def scalar_entry(primitive: str) -> SixPoints:
    """An entry for one scalar primitive alone."""
    scalar = Precision("float32", "float32", "float32", "float32", "float32")
    return SixPoints(Dependency(("x",), "none"), Split(), Merge(), scalar, (), ((primitive, primitive),))


def scalar_variant(function: Any, operands: int, block: int = 1024) -> Variant:
    """An elementwise kernel on float32."""
    names = ("x",) if operands == 1 else ("a", "b")
    signature = (*pointers((*names, "out"), "*fp32"), ("count", "i32"))
    return Variant(function, signature, (("BLOCK", block),))


def _on_arrays(primitive: str) -> Callable[..., NDArray[np.float32]]:
    function = PRIMITIVES[primitive].function

    def run(*operands: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(function(*(torch.from_numpy(x.copy()) for x in operands)).numpy())

    return run


def _scalars() -> Iterator[Audited]:
    both = (
        ("exp2_full", EXP2, kernels.exp2_full_kernel, 1),
        ("exp2_p3", EXP2_P3, kernels.exp2_p3_kernel, 1),
        ("log2_full", LOG2, kernels.log2_full_kernel, 1),
        ("maximum", MAX, kernels.maximum_kernel, 2),
        ("divide", DIV, kernels.divide_kernel, 2),
        ("square_root", SQRT, kernels.square_root_kernel, 1),
        ("round_bf16", "cast.bf16", kernels.round_bf16_kernel, 1),
    )
    for target in TARGETS:
        for name, primitive, function, operands in both:
            launch = launches.elementwise(_on_arrays(primitive), operands, 1000)
            variant = scalar_variant(function, operands)
            yield Audited(name, target, f"primitive {primitive}", scalar_entry(primitive), variant, (launch,))
    launch = launches.elementwise(_on_arrays(EX2_SM90), 1, 1000, "not positive")
    variant = scalar_variant(kernels.hardware_exp2_kernel, 1)
    yield Audited("hardware_exp2", SM_90, f"primitive {EX2_SM90}", scalar_entry(EX2_SM90), variant, (launch,))


def _rows() -> Iterator[Audited]:
    for target in TARGETS:
        profile = "hopper" if target is SM_90 else "cdna3"
        for dtype, width, rows, warps in (("bfloat16", 1024, 1, 4), ("float32", 200, 2, 2)):
            claimed = profile if dtype == "bfloat16" else "portable"
            points = entry(claimed, dtype, "rms_norm")
            pointer = type_of(dtype)
            constants = (("N", width), ("ROWS", rows), ("LANES", lanes(width)))
            norm = Variant(
                rms_norm,
                (
                    *pointers(("x", "branch", "w", "stream", "y"), pointer),
                    ("inv_rms", "*fp32"),
                    ("row_count", "i32"),
                    ("eps", "fp32"),
                ),
                (*constants, ("ADDS", False)),
                num_warps=warps,
            )
            launch = launches.root_mean_square_norm(points, 3 * rows - 1, width, dtype, 3)
            yield Audited(f"rms_norm {width}", target, f"{claimed} {dtype} rms_norm", points, norm, (launch,))
            reduction = Variant(
                row_reduction,
                (("a", pointer), ("b", pointer), ("out", "*fp32"), ("row_count", "i32")),
                constants,
                num_warps=warps,
            )
            launch = launches.row_sum(points, 3 * rows - 1, width, dtype, 3)
            what = f"{claimed} {dtype} lane_sum of rms_norm"
            yield Audited(f"row_reduction {width}", target, what, points, reduction, (launch,))


def gemm_launches(points: SixPoints, dtype: str, tile: Tile, leaves: int, even: bool = True) -> tuple[Launch, ...]:
    """One tile of K in each leaf, more than the pipeline holds, and rows and columns that do not fill a tile."""
    m, n, k = tile.block_m, tile.block_n, tile.block_k
    if not even:
        return (launches.matrix_product(points, m, n, leaves * (k + k // 2 + 1), dtype, 1),)
    found = [launches.matrix_product(points, m, n, leaves * k, dtype, 1)]
    found.append(launches.matrix_product(points, m, n, leaves * (5 if leaves == 1 else 2) * k, dtype, 1))
    if leaves == 1:
        found.append(launches.matrix_product(points, m + 5, n - 16 if n > 16 else n, 2 * k, dtype, 2))
    return tuple(found)


def _products() -> Iterator[Audited]:
    units: dict[Target, tuple[str, tuple[tuple[Tile, int], ...]]] = {
        SM_90: (
            "hopper",
            (
                (Tile(128, 128, 64, num_warps=4, num_stages=3), 1),
                (Tile(128, 64, 32, num_warps=8, num_stages=4), 1),
                (Tile(16, 64, 64, num_warps=4, num_stages=3), 1),
                (Tile(64, 64, 64, num_warps=4, num_stages=3), 4),
                (Tile(16, 32, 32, num_warps=1, num_stages=2), 8),
            ),
        ),
        GFX942: (
            "cdna3",
            (
                (Tile(128, 128, 64, num_warps=4, num_stages=2), 1),
                (Tile(64, 64, 32, num_warps=4, num_stages=2), 1),
                (Tile(16, 64, 64, num_warps=4, num_stages=2), 1),
                (Tile(64, 64, 32, num_warps=4, num_stages=2), 4),
                (Tile(16, 32, 32, num_warps=1, num_stages=2), 8),
            ),
        ),
    }
    for target, (profile, tiles) in units.items():
        for tile, leaves in tiles:
            points = entry(profile, "bfloat16", "o_proj", leaves)
            yield _product(target, profile, "bfloat16", points, tile, leaves, fma=False)
        small = Tile(32, 32, 16, num_warps=2, num_stages=2)
        for dtype, leaves, even in (
            ("float32", 1, True),
            ("float32", 2, True),
            ("bfloat16", 1, True),
            ("float32", 1, False),
        ):
            points = entry("portable", dtype, "o_proj", leaves)
            yield _product(target, "portable", dtype, points, small, leaves, fma=True, even=even)


def _product(
    target: Target,
    profile: str,
    dtype: str,
    points: SixPoints,
    tile: Tile,
    leaves: int,
    *,
    fma: bool,
    even: bool = True,
) -> Audited:
    name = f"gemm {tile.block_m}x{tile.block_n}x{tile.block_k}" + (f" leaves {leaves}" if leaves > 1 else "")
    return Audited(
        f"{name} {'fma' if fma else 'matrix'}" + ("" if even else " tail"),
        target,
        f"{profile} {dtype} o_proj, {leaves} {'leaves' if leaves > 1 else 'chain'}",
        points,
        gemm_variant(dtype, tile, leaves, fma=fma, even=even),
        gemm_launches(points, dtype, tile, leaves, even),
    )


def audited_kernels() -> tuple[Audited, ...]:
    """Every kernel that ``vime audit`` compiles and reads."""
    return (*_scalars(), *_rows(), *_products(), *model_kernels(), *attention_kernels())
