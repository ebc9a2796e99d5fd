"""Bits of the GEMM kernels on a GPU of sm_90 against the interpreter of the contract: counts, never tolerances.

    python -m benchmarks.gpu.gemm_bits --out results.json

Every operand layout, leaves, bias and continued chains, over tiles that differ in everything that a tile can differ
in, and over the hazards of :mod:`benchmarks.hopper_bits`. Exit code 1 if anything differs or failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.cases import Case, main, once
from benchmarks.hopper_bits import HAZARDS, hazard
from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.contract.points import SixPoints
from rlkernel.kernels.triton import launch
from rlkernel.kernels.triton.launch import Tile
from rlkernel.kernels.triton.launch_hopper import gemm_hopper
from rlkernel.kernels.triton.tiles import SHARED_BYTES, HopperTile
from rlkernel.models.config import ModelConfig
from rlkernel.reference import arith, reductions

FEW = ("normal", "wide spread", "subnormal results", "cancellation", "zeros", "NaN and infinity")


def _fits(tile: HopperTile, leaves: int, size: int) -> bool:
    return tile.shared_bytes(leaves, size) <= SHARED_BYTES


def _tiles() -> tuple[HopperTile, ...]:
    found = [HopperTile(), HopperTile(stages=4, parts=2), HopperTile(256, 128), HopperTile(group_m=1, stages=2)]
    for (m, warps), n, (k, stages), parts in product(
        ((64, 4), (128, 4), (128, 8)), (32, 64, 128, 256), ((16, 5), (64, 3), (128, 2)), (1, 2)
    ):
        tile = HopperTile(m, n, k, 4 if n == 64 else 8, stages, parts, warps)
        small = m * n // (warps * 32) <= 128  # accumulators of a thread
        if small and _fits(tile, 1, 4) and (parts == 1) == ((m + n + k) // 16 % 3 > 0):
            found.append(tile)
    return (*found[:4], *found[4::3], *found[5::3])


TILES = _tiles()
TREES = (HopperTile(128, 128, 64, 8, 4), HopperTile(64, 128, 64, 2, 3, 1, 4), HopperTile(128, 64, 32, 8, 4, 2, 8))
LAYOUT_TILES = (HopperTile(128, 128, 64, 8, 4), HopperTile(128, 256, 64, 8, 3, 2), HopperTile(64, 64, 128, 8, 2, 1, 4))
POINTERS = (
    Tile(128, 128, 64, num_warps=8, num_stages=3),
    Tile(16, 32, 256, num_warps=4, num_stages=3),
    Tile(64, 64, 32, num_warps=4, num_stages=2),
)
PORTABLE = (Tile(64, 64, 32, num_warps=4, num_stages=2), Tile(16, 32, 64, num_warps=2, num_stages=2))
_MODEL = ModelConfig(
    family="qwen2", vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_layers=1, num_heads=8,
    num_kv_heads=8, head_dim=128, max_position=64, qkv_bias=True,
)  # fmt: skip


def points(profile: str, region: str, leaves: int = 1, case: str = "trainer_forward") -> SixPoints:
    """The contract's entry of a region."""
    dtype = "float32" if profile == "portable" else "bfloat16"
    contract = build_contract(_MODEL, profile=profile, dtype=dtype, topology=Topology(tp=leaves))
    return contract.entries[(case, region)]


def _stored(x: torch.Tensor, depth_first: bool) -> torch.Tensor:
    return x.t().contiguous() if depth_first else x


def _cases(
    shape: str,
    name: str,
    expected: Callable[[], torch.Tensor],
    operands: tuple[torch.Tensor, torch.Tensor],
    tiles: tuple[HopperTile | Tile, ...],
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    mac: launch.MultiplyAccumulate = "matrix",
    ragged: int = 0,
    **keys: Any,
) -> Iterator[Case]:
    """The product by every tile, in every dtype of the result."""
    for tile, dtype in product(tiles, dtypes):
        if isinstance(tile, HopperTile) and not _fits(tile, keys.get("leaves", 1), dtype.itemsize):
            continue
        said = {k: (v if isinstance(v, (bool, int)) else True) for k, v in keys.items()}
        config = f"{tile} to {dtype} {said} {mac}" + (f" ragged {ragged}" if ragged else "")

        def kernel(tile: HopperTile | Tile = tile, dtype: torch.dtype = dtype) -> torch.Tensor:
            given = dict(keys)
            if "grad" in given:
                given["grad"] = given["grad"].clone()
            else:
                given["out_dtype"] = dtype
            if isinstance(tile, HopperTile):
                return gemm_hopper(*operands, tile=tile, **given)
            return launch.gemm(*operands, mac=mac, tile=tile, **given)

        yield Case(config, f"{shape} {name}", kernel, partial(_narrow, expected, dtype))


def _narrow(expected: Callable[[], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return arith.cast_bf16(expected()).to(dtype) if dtype == torch.bfloat16 else expected()


def forward_tiles() -> Iterator[Case]:
    entry = points("hopper", "gate_up_proj")
    for m, n, k in ((304, 784, 1024), (144, 272, 208), (130, 264, 200), (1, 40, 16)):
        ragged = m % 16 > 0
        for name in HAZARDS if k == 1024 else ("normal", "zeros", "cancellation"):
            a, b = hazard(name, m, k, 1, torch.bfloat16), hazard(name, n, k, 2, torch.bfloat16)
            expected = once(partial(reductions.matmul, entry, a, b))
            tiles = (*TILES[:1], *TILES[4::6]) if ragged else TILES
            yield from _cases(f"{m}x{n}x{k}", name, expected, (a, b), tiles, ragged=m if ragged else 0)


def layouts() -> Iterator[Case]:
    entry = points("hopper", "gate_up_proj")
    for k, name in product((512, 80), FEW):
        a, b = hazard(name, 304, k, 1, torch.bfloat16), hazard(name, 528, k, 2, torch.bfloat16)
        expected = once(partial(reductions.matmul, entry, a, b))
        for first in ((False, True), (True, True), (True, False)):
            stored = (_stored(a, first[0]), _stored(b, first[1]))
            keys = {"a_depth_first": first[0], "b_depth_first": first[1]}
            yield from _cases(f"304x528x{k}", name, expected, stored, (*LAYOUT_TILES, *POINTERS), **keys)


def trees() -> Iterator[Case]:
    for leaves, per_leaf, name in product((2, 4, 8), (64, 192), FEW):
        entry, k = points("hopper", "o_proj", leaves), leaves * per_leaf
        a, b = hazard(name, 208, k, 3, torch.bfloat16), hazard(name, 336, k, 4, torch.bfloat16)
        expected = once(partial(reductions.matmul, entry, a, b))
        for first in (False, True):
            stored = (a, _stored(b, first))
            yield from _cases(
                f"208x336, {per_leaf} a leaf", name, expected, stored, TREES, leaves=leaves, b_depth_first=first
            )
        yield from _cases(f"208x336, {per_leaf} a leaf", name, expected, (a, b), POINTERS, leaves=leaves, split=True)


def biased() -> Iterator[Case]:
    entry = points("hopper", "qkv_proj")
    for name in FEW:
        a, b = hazard(name, 208, 512, 5, torch.bfloat16), hazard(name, 336, 512, 6, torch.bfloat16)
        bias = hazard(name, 1, 336, 7, torch.bfloat16)[0].contiguous()
        expected = once(partial(reductions.matmul, entry, a, b, bias=bias))
        yield from _cases("208x336x512", name, expected, (a, b), (*LAYOUT_TILES, *POINTERS), bias=bias)


def continued() -> Iterator[Case]:
    entry = points("hopper", "gate_up_proj.wgrad", case="trainer_backward")
    for name, tokens in product(FEW, (16, 208)):
        dy, x = hazard(name, 208, tokens, 8, torch.bfloat16), hazard(name, 336, tokens, 9, torch.bfloat16)
        start = hazard(name, 208, 336, 10, torch.float32)
        expected = once(partial(reductions.matmul, entry, dy, x, start=start))
        stored = (_stored(dy, True), _stored(x, True))
        yield from _cases(
            f"{tokens} tokens", name, expected, stored, (*LAYOUT_TILES, *POINTERS), (torch.float32,),
            grad=start, a_depth_first=True, b_depth_first=True,
        )  # fmt: skip


def portable() -> Iterator[Case]:
    entry = points("portable", "qkv_proj")
    wgrad = points("portable", "qkv_proj.wgrad", case="trainer_backward")
    for name, k in product(FEW, (128, 77)):
        a, b = hazard(name, 65, k, 11, torch.float32), hazard(name, 130, k, 12, torch.float32)
        bias, start = hazard(name, 1, 130, 13, torch.float32)[0].contiguous(), hazard(name, 65, 130, 14, torch.float32)
        expected = once(partial(reductions.matmul, entry, a, b, bias=bias))
        running = once(partial(reductions.matmul, wgrad, a, b, start=start))
        for first in ((False, False), (False, True), (True, True)):
            stored, keys = (
                (_stored(a, first[0]), _stored(b, first[1])),
                {"a_depth_first": first[0], "b_depth_first": first[1]},
            )
            only = (torch.float32,)
            yield from _cases(f"65x130x{k}", name, expected, stored, PORTABLE, only, "fma", bias=bias, **keys)
            yield from _cases(f"65x130x{k}", name, running, stored, PORTABLE, only, "fma", grad=start, **keys)


SECTIONS = (forward_tiles, layouts, trees, biased, continued, portable)


if __name__ == "__main__":
    sys.exit(main("GEMM kernels against the interpreter of the contract", "benchmarks.gpu.gemm_bits", SECTIONS))
