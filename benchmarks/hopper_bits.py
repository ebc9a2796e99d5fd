"""Bits of the Triton kernels on a GPU of sm_90 against the interpreter of the contract: counts, never tolerances.

    python -m benchmarks.hopper_bits --out results.json

Needs torch, Triton and NumPy, no other package. Every section runs even if another one fails; the file names what was
compared, how many elements differ, and on what. Exit code 1 if anything differs or failed. NaN patterns are mapped to
one before the comparison (a tensor core has its own), everything else is compared bit for bit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from hardware.cuda.exp2 import ex2_approx_ftz_sm90
from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.contract.points import SixPoints
from rlkernel.kernels.triton import elementwise, launch
from rlkernel.kernels.triton.launch import Tile
from rlkernel.models.config import ModelConfig
from rlkernel.reference import arith, primitives, reductions

DEVICE = "cuda"
EPS = 1e-6
CONFIG = ModelConfig(
    family="llama",
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    max_position=64,
    rms_norm_eps=EPS,
)
TILES = (
    Tile(128, 128, 64, num_warps=4, num_stages=3),
    Tile(128, 256, 64, num_warps=8, num_stages=3),
    Tile(64, 128, 32, num_warps=4, num_stages=4),
    Tile(64, 64, 128, num_warps=4, num_stages=2),
    Tile(16, 64, 64, num_warps=4, num_stages=3),
    Tile(32, 32, 16, num_warps=2, num_stages=1),
    Tile(16, 16, 256, group_m=1, num_warps=1, num_stages=2),
)
PORTABLE_TILES = (
    Tile(64, 64, 32, num_warps=4, num_stages=2),
    Tile(128, 64, 16, num_warps=8, num_stages=3),
    Tile(32, 32, 64, num_warps=4, num_stages=1),
    Tile(16, 64, 32, group_m=1, num_warps=2, num_stages=2),
)
Item = dict[str, Any]


def compare(item: str, ours: torch.Tensor, reference: torch.Tensor) -> Item:
    """Count the elements whose bits differ, after every NaN became one pattern."""
    if ours.shape != reference.shape or ours.dtype != reference.dtype:
        raise ValueError(f"{item}: {ours.dtype} {list(ours.shape)} against {reference.dtype} {list(reference.shape)}")
    integer = {2: torch.int16, 4: torch.int32}[ours.element_size()]
    left, right = ours.view(integer), reference.view(integer)
    nan_left, nan_right = torch.isnan(ours), torch.isnan(reference)
    differs = torch.where(nan_left | nan_right, nan_left != nan_right, left != right)
    count = int(differs.sum())
    result: Item = {"item": item, "compared": ours.numel(), "differing": count, "nan": int(nan_left.sum())}
    if count:
        where = [int(i) for i in torch.nonzero(differs)[0]]
        mask = (1 << 8 * ours.element_size()) - 1
        found, expected = (f"{int(x[tuple(where)]) & mask:#x}" for x in (left, right))
        result["first"] = {"index": where, "kernel": found, "interpreter": expected}
    return result


def points(profile: str, dtype: str, region: str, leaves: int = 1) -> SixPoints:
    """The contract's entry of a region, as the forward of a trainer has it."""
    contract = build_contract(CONFIG, profile=profile, dtype=dtype, topology=Topology(tp=leaves))
    return contract.entries[("trainer_forward", region)]


def hazard(name: str, rows: int, columns: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns] of one class of inputs."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator, device=DEVICE)

    def uniform() -> torch.Tensor:
        return torch.rand((rows, columns), generator=generator, device=DEVICE)

    x = normal()
    if name == "spread":
        x = torch.ldexp(x, ((uniform() - 0.5) * 40).to(torch.int32))
    elif name == "wide spread":
        x = torch.ldexp(x, ((uniform() - 0.5) * 120).to(torch.int32))
    elif name == "subnormal inputs":
        x = torch.ldexp(x, torch.full((), -130, dtype=torch.int32, device=DEVICE))
        x = torch.where(uniform() < 0.5, x, torch.ldexp(normal(), torch.tensor(100, dtype=torch.int32, device=DEVICE)))
    elif name == "subnormal results":
        x = torch.ldexp(x, torch.full((), -68, dtype=torch.int32, device=DEVICE))
    elif name == "cancellation":
        # the second half of the products are the first half's, negated and in another order
        half = columns // 2
        order = torch.randperm(half, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        x[:, half : 2 * half] = (-x if seed % 2 else x)[:, order]
    elif name == "zeros":
        x = torch.where(uniform() < 0.7, torch.where(uniform() < 0.5, 0.0, -0.0), x)
    elif name == "powers of two":
        x = torch.copysign(torch.exp2((uniform() * 60).floor() - 30), x)
    elif name == "NaN and infinity":
        draw = uniform()
        x = torch.where(draw < 2e-4, torch.inf, torch.where(draw > 1 - 2e-4, torch.nan, x))
        x = torch.where((draw > 0.5) & (draw < 0.5001), -torch.inf, x)
    elif name != "normal":
        raise ValueError(f"unknown hazard {name!r}")
    return x.to(dtype)


HAZARDS = (
    "normal",
    "spread",
    "wide spread",
    "subnormal inputs",
    "subnormal results",
    "cancellation",
    "zeros",
    "powers of two",
    "NaN and infinity",
)


def gemm_items(
    profile: str, dtype: torch.dtype, shape: tuple[int, int, int], hazards: tuple[str, ...], tiles: tuple[Tile, ...]
) -> Iterator[Item]:
    m, n, k = shape
    entry = points(profile, str(dtype).removeprefix("torch."), "qkv_proj")
    mac = "fma" if profile == "portable" else "matrix"
    for name in hazards:
        a, b = hazard(name, m, k, 1, dtype), hazard(name, n, k, 2, dtype)
        expected = reductions.matmul(entry, a, b)
        for tile in tiles:
            ours = launch.gemm(a, b, mac=mac, out_dtype=torch.float32, tile=tile)
            yield compare(f"{profile} gemm {m}x{n}x{k} {dtype} {name}, accumulator, {tile}", ours, expected)
        if dtype == torch.bfloat16:
            ours = launch.gemm(a, b, mac=mac, tile=tiles[0])
            rounded = arith.cast_bf16(expected).to(torch.bfloat16)
            yield compare(f"{profile} gemm {m}x{n}x{k} {dtype} {name}, rounded", ours, rounded)


def hopper_gemm() -> Iterator[Item]:
    yield from gemm_items("hopper", torch.bfloat16, (1024, 1024, 1024), HAZARDS, TILES)


def hopper_gemm_edges() -> Iterator[Item]:
    for shape in ((1, 1000, 1000), (17, 333, 200), (65, 129, 24), (1, 1, 1), (3, 64, 16), (300, 130, 4104)):
        yield from gemm_items("hopper", torch.bfloat16, shape, ("normal", "zeros", "cancellation"), TILES)


def tree_items(profile: str, dtype: torch.dtype, tiles: tuple[Tile, ...]) -> Iterator[Item]:
    mac = "fma" if profile == "portable" else "matrix"
    for leaves in (2, 4, 8):
        chosen = tiles if leaves < 8 else tiles[1:]  # the largest tile takes long to compile with eight leaves
        entry = points(profile, str(dtype).removeprefix("torch."), "o_proj", leaves)
        for k, name in ((512, "normal"), (512, "cancellation"), (1024, "wide spread"), (64 * leaves, "cancellation")):
            a, b = hazard(name, 512, k, 3, dtype), hazard(name, 512, k, 4, dtype)
            expected = reductions.matmul(entry, a, b)
            for tile in chosen:
                ours = launch.gemm(a, b, mac=mac, leaves=leaves, out_dtype=torch.float32, tile=tile)
                yield compare(f"{profile} gemm of {leaves} leaves, K {k}, {dtype} {name}, {tile}", ours, expected)


def hopper_tree() -> Iterator[Item]:
    yield from tree_items("hopper", torch.bfloat16, (TILES[0], TILES[2], TILES[4], TILES[5]))


def portable_gemm() -> Iterator[Item]:
    few = ("normal", "wide spread", "subnormal results", "cancellation", "zeros", "NaN and infinity")
    yield from gemm_items("portable", torch.float32, (1024, 1024, 512), few, PORTABLE_TILES)
    yield from gemm_items("portable", torch.bfloat16, (1024, 1024, 256), ("normal", "spread"), PORTABLE_TILES)
    for shape in ((1, 1000, 1000), (17, 333, 200), (65, 129, 24), (1, 1, 1)):
        yield from gemm_items("portable", torch.float32, shape, ("normal", "subnormal results"), PORTABLE_TILES)


def portable_tree() -> Iterator[Item]:
    yield from tree_items("portable", torch.float32, PORTABLE_TILES[:2])


ROW_SHAPES = ((1 << 20, 128), (1 << 18, 1000), (1 << 16, 4096), (5000, 1), (5000, 3), (5000, 257))
ROW_HAZARDS = ("normal", "wide spread", "subnormal results", "zeros", "NaN and infinity")


def row_reduction() -> Iterator[Item]:
    for dtype in (torch.float32, torch.bfloat16):
        for rows, n in ROW_SHAPES:
            for name in ROW_HAZARDS if n in (128, 257) else ("normal", "subnormal results"):
                a, b = hazard(name, rows, n, 5, dtype), hazard(name, rows, n, 6, dtype)
                expected = reductions.row_sum(points("portable", "float32", "rms_norm"), a.float(), b.float())
                for tile_rows, warps in ((1, 4), (4, 4), (2, 1)):
                    ours = launch.row_reduction(a, b, rows=tile_rows, num_warps=warps)
                    yield compare(
                        f"row reduction {rows}x{n} {dtype} {name}, {tile_rows} rows, {warps} warps", ours, expected
                    )


def reference_rms_norm(entry: SixPoints, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """docs/numerics.md: y in float32 before the cast, and r."""
    eps = torch.tensor(EPS, dtype=torch.float32, device=x.device)
    mean = arith.div(reductions.row_sum(entry, x.float(), x.float()), float(x.shape[1]))
    r = arith.div(torch.ones_like(mean), arith.sqrt(arith.add(mean, eps)))
    return arith.mul(arith.mul(x, r[:, None]), w[None, :]), r


def rms_norm() -> Iterator[Item]:
    for profile, dtype in (("hopper", torch.bfloat16), ("portable", torch.float32), ("portable", torch.bfloat16)):
        entry = points(profile, str(dtype).removeprefix("torch."), "rms_norm")
        for rows, n in ((1 << 18, 128), (1 << 15, 1000), (1 << 14, 4096), (1000, 1), (1000, 257)):
            for name in ROW_HAZARDS if n in (128, 257) else ("normal",):
                x, w = hazard(name, rows, n, 7, dtype), hazard("normal", 1, n, 8, dtype)[0]
                expected, r = reference_rms_norm(entry, x, w)
                narrowed = arith.cast_bf16(expected).to(dtype) if dtype == torch.bfloat16 else expected
                for tile_rows, warps in ((1, 4), (4, 4), (2, 1)):
                    y, inverse = launch.rms_norm(x, w, EPS, rows=tile_rows, num_warps=warps)
                    what = f"{profile} rms_norm {rows}x{n} {dtype} {name}, {tile_rows} rows, {warps} warps"
                    yield compare(what, y, narrowed)
                    yield compare(f"{what}, inverse root mean square", inverse, r)


CHUNK = 1 << 26


def patterns(first: int, last: int) -> Iterator[torch.Tensor]:
    """Every float32 whose bits lie in [first, last), by chunks."""
    for start in range(first, last, CHUNK):
        bits = torch.arange(start, min(last, start + CHUNK), dtype=torch.int64, device=DEVICE)
        yield torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def sweep(
    item: str, ours: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], first: int, last: int
) -> Iterator[Item]:
    total: Item = {"item": item, "compared": 0, "differing": 0, "nan": 0}
    for x in patterns(first, last):
        part = compare(item, ours(x), reference(x))
        for key in ("compared", "differing", "nan"):
            total[key] += part[key]
        if "first" in part and "first" not in total:
            index = part["first"]["index"][0]
            total["first"] = part["first"] | {"input": f"{int(x.view(torch.int32)[index]) & 0xFFFFFFFF:#x}"}
    yield total


def all_inputs() -> Iterator[Item]:
    every = 1 << 32
    for name, kernel, reference in (
        ("exp2.full", elementwise.exp2_full_kernel, primitives.exp2_full),
        ("exp2.p3", elementwise.exp2_p3_kernel, primitives.exp2_p3),
        ("log2.full", elementwise.log2_full_kernel, primitives.log2_full),
        ("cast.bf16 by integers", elementwise.round_bf16_kernel, arith.cast_bf16),
        ("sqrt.rn", elementwise.square_root_kernel, arith.sqrt),
    ):
        yield from sweep(f"{name}, all 2^32 inputs", lambda x, k=kernel: launch.elementwise(k, x), reference, 0, every)
    yield from sweep(
        "cast to bfloat16 by the device, all 2^32 inputs",
        lambda x: launch.elementwise(elementwise.cast_kernel, x, out_dtype=torch.bfloat16),
        lambda x: arith.cast_bf16(x).to(torch.bfloat16),
        0,
        every,
    )


def hardware_exp2() -> Iterator[Item]:
    yield from sweep(
        "ex2.approx.ftz.f32, every input that is not positive",
        lambda x: launch.elementwise(elementwise.hardware_exp2_kernel, x),
        ex2_approx_ftz_sm90,
        1 << 31,
        1 << 32,
    )


def two_operands() -> Iterator[Item]:
    generator = torch.Generator(DEVICE).manual_seed(9)
    for name, kernel, reference in (
        ("div.rn", elementwise.divide_kernel, arith.div),
        ("max", elementwise.maximum_kernel, arith.maximum),
    ):
        for kind in ("any bits", "near 1", "subnormal quotients"):
            bits = torch.randint(-(1 << 31), 1 << 31, (2, 1 << 26), generator=generator, device=DEVICE)
            if kind == "near 1":
                bits = 0x3F800000 + (bits & 0x1FFFFFF) - 0x1000000
            elif kind == "subnormal quotients":
                bits = torch.stack([0x08000000 + (bits[0] & 0x3FFFFFF), 0x46000000 + (bits[1] & 0x7FFFFFF)])
            a, b = bits.to(torch.int32).view(torch.float32)
            yield compare(f"{name}, {kind}", launch.elementwise(kernel, a, b), reference(a, b))
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45], device=DEVICE)
    a, b = (x.reshape(-1).contiguous() for x in torch.meshgrid(special, special, indexing="ij"))
    yield compare("max, special values", launch.elementwise(elementwise.maximum_kernel, a, b), arith.maximum(a, b))
    yield compare("div.rn, special values", launch.elementwise(elementwise.divide_kernel, a, b), arith.div(a, b))


SECTIONS: tuple[Callable[[], Iterator[Item]], ...] = (
    hopper_gemm,
    hopper_gemm_edges,
    hopper_tree,
    row_reduction,
    rms_norm,
    portable_gemm,
    portable_tree,
    all_inputs,
    hardware_exp2,
    two_operands,
)


def run_section(section: Callable[[], Iterator[Item]]) -> dict[str, Any]:
    """Run one section; what it raises is recorded, so that the others still run."""
    began = time.monotonic()
    items: list[Item] = []
    error = None
    try:
        items.extend(section())  # extend keeps what was yielded before an exception
    except Exception as problem:  # recorded in the result: one broken section must not hide the others
        error = {"error": f"{type(problem).__name__}: {problem}"[:4000], "traceback": traceback.format_exc()[-4000:]}
    torch.cuda.empty_cache()
    summary = {
        "section": section.__name__,
        "compared": sum(item["compared"] for item in items),
        "differing": sum(item["differing"] for item in items),
        "seconds": round(time.monotonic() - began, 2),
    }
    print(json.dumps(summary | ({"error": error["error"][:300]} if error else {})), flush=True)
    for item in items:
        if item["differing"]:
            print(f"  differs: {json.dumps(item)}", flush=True)
    return summary | (error or {}) | {"items": items}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "hopper_bits.json")
    parser.add_argument("--only", nargs="*", default=[], help="names of sections; all without it")
    arguments = parser.parse_args()
    names = [section.__name__ for section in SECTIONS]
    unknown = sorted(set(arguments.only) - set(names))
    if unknown:
        parser.error(f"no section is called {', '.join(unknown)}; there are {', '.join(names)}")
    began = time.monotonic()
    sections = [run_section(s) for s in SECTIONS if not arguments.only or s.__name__ in arguments.only]
    properties = torch.cuda.get_device_properties(0)
    result = {
        "what": "Triton kernels against the interpreter of the contract",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.hopper_bits " + " ".join(sys.argv[1:]),
        "device": {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "compared": sum(s["compared"] for s in sections),
        "differing": sum(s["differing"] for s in sections),
        "failed_sections": [s["section"] for s in sections if "error" in s],
        "seconds": round(time.monotonic() - began, 1),
        "sections": sections,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("compared", "differing", "failed_sections", "seconds")}))
    return 1 if result["differing"] or result["failed_sections"] else 0


if __name__ == "__main__":
    sys.exit(main())
