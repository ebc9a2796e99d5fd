"""Measures the tiles of the GEMM kernels over the shapes of dense models, and writes their table.

    python -m benchmarks.gpu.tune --out rlkernel/kernels/triton/tables/nvidia_h200.json
    python -m benchmarks.gpu.tune --rows 64 256 --leaves 4 8 --out ...   # only these; the table's other choices stay

Tiles change no bit; the table changes only time. Nothing is tuned while a model runs. Every line also says what
torch's default (cuBLAS) takes for one chain of this shape.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cases import compile_ahead
from benchmarks.gpu.timing import about, microseconds, rotating
from rlkernel.kernels.triton.launch import Tile, gemm
from rlkernel.kernels.triton.launch_hopper import gemm_hopper
from rlkernel.kernels.triton.tiles import SHARED_BYTES, Choice, HopperTile, Layout, TileTable

MODULE = "benchmarks.gpu.tune"
ROWS = (8, 64, 256, 512, 1024, 2048, 4096, 8192)
FEW_ROWS = (1, 16, 32, 64, 128, 256)
TOKENS = (1024, 4096, 16384)
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
HEAD = (151936, 4096)
SMALL_SHAPES = ((4096, 2048), (2048, 2048), (12288, 2048), (2048, 6144), (151936, 2048))
"""Of 1.7 billion parameters, in decode."""
LEAF_COUNTS = (2, 4, 8)


@dataclass(frozen=True)
class Work:
    """One product [M, K] x [N, K] to find a tile for."""

    layout: Layout
    leaves: int
    m: int
    n: int
    k: int


def works() -> Iterator[Work]:
    """Every product that is measured."""
    for m, (n, k) in product(ROWS, (*SHAPES, HEAD)):
        yield Work("forward", 1, m, n, k)
    for m, (n, k) in product(FEW_ROWS, SMALL_SHAPES):
        yield Work("forward", 1, m, n, k)
    for leaves, m, (n, k) in product(LEAF_COUNTS, ROWS[:-1], (SHAPES[1], SHAPES[3])):
        yield Work("forward", leaves, m, n, k)
    for m, (n, k) in product(ROWS[3:], (SHAPES[1], SHAPES[3])):
        yield Work("dgrad", 1, m, k, n)
    for leaves, m, (n, k) in product((1, *LEAF_COUNTS), ROWS[3::2], (SHAPES[0], SHAPES[2])):
        yield Work("dgrad", leaves, m, k, n)
    for tokens, (n, k) in product(TOKENS, SHAPES):
        yield Work("wgrad", 1, n, k, tokens)


def candidates(work: Work) -> Iterator[HopperTile | Tile]:
    """Tiles to try for one product."""
    if work.layout == "wgrad":
        yield from (HopperTile(128, 128, 64, g, 4) for g in (4, 8, 16))
        yield from (HopperTile(128, 256, 64, g, 3, 2) for g in (4, 8, 16))
        return
    deep = 5 if work.leaves > 2 else 6
    if work.m <= 256 and work.n <= 4096:
        yield HopperTile(64, 16, 128, 8, 10, 1, 4)
    if work.m <= 16:
        if work.leaves == 1:
            yield Tile(16, 32, 256, num_warps=4, num_stages=4)
            yield Tile(16, 16, 256, num_warps=2, num_stages=6)
            yield Tile(16, 16, 256, num_warps=4, num_stages=6)
        else:
            yield Tile(16, 64, 128, num_warps=4, num_stages=4)
            yield Tile(16, 128, 64, num_warps=4, num_stages=4)
    if work.m <= 256:
        yield HopperTile(64, 32, 128, 8, 8, 1, 4)
    if work.m <= 64:
        yield HopperTile(64, 128, 64, 8, deep + 1, 1, 4)
        if work.leaves == 1:
            yield HopperTile(64, 128, 128, 8, 4, 1, 4)
            yield HopperTile(64, 256, 64, 8, 4, 1, 4)
    if work.m <= 256:
        yield HopperTile(64, 64, 128, 8, deep, 1, 4)
    if work.leaves > 2 and work.m <= 512:
        yield HopperTile(64, 32, 64, 8, 6, 1, 4, 2)
        yield HopperTile(64, 64, 64, 8, 4, 1, 4, 2)
        if work.m <= 64:
            yield HopperTile(64, 16, 128, 8, 10, 1, 4, paired=True)
        yield HopperTile(64, 32, 128, 8, 8, 1, 4, paired=True)
        yield HopperTile(64, 64, 64, 8, 12, 1, 4, paired=True)
        yield HopperTile(64, 64, 64, 8, 5, 1, 4, 2, paired=True)
        if work.m > 64:
            yield HopperTile(128, 64, 64, 8, 8, paired=True)
        if work.m > 64 and work.leaves == 4:  # more leaves do not fit into registers
            yield HopperTile(128, 128, 64, 8, 6, paired=True)
    if work.leaves == 1 and work.m <= 64:
        yield HopperTile(64, 16, 256, 8, 5, 1, 4)
        yield HopperTile(64, 32, 256, 8, 4, 1, 4)
    if 64 < work.m <= 256:
        yield HopperTile(128, 32, 128, 8, 5)
        yield HopperTile(128, 64, 128, 8, 3 if work.leaves > 2 else 4)
    if 64 < work.m <= 512:
        yield HopperTile(64, 128, 64, 8, 6 if work.leaves > 2 else 8, 1, 4)
        yield HopperTile(128, 64, 64, 8, 6 if work.leaves > 2 else 8, 1, 4)
    if work.m > 64:
        yield from (HopperTile(128, 128, 64, g, 4 if work.leaves > 2 else 6) for g in (4, 8, 16))
    if work.m > 64 and work.leaves == 1:
        yield from (HopperTile(128, 256, 64, g, 3) for g in (4, 8, 16))


def _split(work: Work, tile: HopperTile | Tile) -> bool:
    return work.leaves > 1 and isinstance(tile, Tile)


class Runner:
    """Runs one product by one tile on rotating operands."""

    def __init__(self, work: Work) -> None:
        self.work = work
        m, n, k = work.m, work.n, work.k
        first = (work.layout == "wgrad", work.layout != "forward")
        self.keys: dict[str, Any] = {"a_depth_first": first[0], "b_depth_first": first[1]}

        def make(rows: int, turned: bool) -> torch.Tensor:
            return torch.randn((k, rows) if turned else (rows, k), device="cuda").bfloat16()

        most = max(2, int(4e9 // (2 * n * k)))
        self.a = rotating(lambda: make(m, first[0]), 2 * m * k, 4)
        self.b = rotating(lambda: make(n, first[1]), 2 * n * k, min(16, most))
        self.grad = torch.zeros((m, n), device="cuda") if work.layout == "wgrad" else None

    def run(self, tile: HopperTile | Tile, i: int) -> torch.Tensor:
        a, b, work = self.a[i % len(self.a)], self.b[i % len(self.b)], self.work
        if isinstance(tile, HopperTile):
            return gemm_hopper(a, b, leaves=work.leaves, grad=self.grad, tile=tile, **self.keys)
        return gemm(
            a, b, mac="matrix", leaves=work.leaves, split=_split(work, tile), grad=self.grad, tile=tile, **self.keys
        )


def _fits(work: Work, tile: HopperTile | Tile) -> bool:
    size = 4 if work.layout == "wgrad" else 2
    return isinstance(tile, Tile) or tile.shared_bytes(work.leaves, size) <= SHARED_BYTES


def _compile(chosen: list[Work], share: int, shares: int) -> None:
    seen = set()
    for work in chosen:
        for tile in candidates(work):
            small = Work(work.layout, work.leaves, min(work.m, 256), 256, 2048)
            name = f"{tile} {small}"
            if name in seen or zlib.crc32(name.encode()) % shares != share or not _fits(work, tile):
                continue
            seen.add(name)
            with contextlib.suppress(Exception):  # what fails here fails again, and is said, in the measurement
                Runner(small).run(tile, 0)


def best(work: Work) -> Choice:
    """The fastest of the candidates."""
    runner, found = Runner(work), []
    for tile in candidates(work):
        if _fits(work, tile):
            found.append((microseconds(lambda i, tile=tile: runner.run(tile, i), budget=3000.0, replays=3), tile))
    took, tile = min(found, key=lambda pair: pair[0])
    for us, t in sorted(found, key=lambda pair: pair[0])[:4]:
        print(f"  {us:.1f} {_short(t)}", flush=True)
    hopper, plain = (tile, None) if isinstance(tile, HopperTile) else (None, tile)
    return Choice(
        work.layout, work.leaves, work.m, work.n, work.k, _split(work, tile), hopper, plain, round(took, 2)
    )  # fmt: skip


def _short(tile: HopperTile | Tile) -> str:
    return type(tile).__name__ + str(tuple(vars(tile).values()))


def library(work: Work) -> float:
    """Microseconds of torch's default for one chain of the shape, whatever the order of its sums."""
    runner = Runner(work)

    def run(i: int) -> torch.Tensor:
        a, b = runner.a[i % len(runner.a)], runner.b[i % len(runner.b)]
        return torch.mm(a.t() if work.layout == "wgrad" else a, b if work.layout != "forward" else b.t())

    return microseconds(run, budget=3000.0, replays=3)


def _kept(path: Path | None, found: list[Choice]) -> list[Choice]:
    """The choices of an existing table that ``found`` does not replace."""
    if path is None or not path.exists():
        return []
    new = {(c.layout, c.leaves, c.m, c.n, c.k) for c in found}
    return [c for c in TileTable.load(path).choices if (c.layout, c.leaves, c.m, c.n, c.k) not in new]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of the table")
    parser.add_argument("--compile-seconds", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop measuring after so long")
    parser.add_argument("--rows", nargs="*", type=int, help="only products with so many rows (M)")
    parser.add_argument("--columns", nargs="*", type=int, help="only products with so many columns (N)")
    parser.add_argument("--depth", nargs="*", type=int, help="only products of this depth (K)")
    parser.add_argument("--leaves", nargs="*", type=int, help="only products in so many leaves")
    parser.add_argument("--layouts", nargs="*", choices=("forward", "dgrad", "wgrad"))
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = {"m": arguments.rows, "n": arguments.columns, "k": arguments.depth}
    wanted |= {"leaves": arguments.leaves, "layout": arguments.layouts}
    chosen = [w for w in works() if all(not of or getattr(w, name) in of for name, of in wanted.items())]
    if arguments.share:
        _compile(chosen, *arguments.share)
        return 0
    options = [["--rows", arguments.rows], ["--columns", arguments.columns], ["--depth", arguments.depth]]
    options += [["--leaves", arguments.leaves], ["--layouts", arguments.layouts]]
    passed = [word for name, of in options if of for word in (name, *map(str, of))]
    compile_ahead(MODULE, passed, arguments.compile_seconds)
    began, found = time.monotonic(), []
    for work in chosen:
        if time.monotonic() - began > arguments.seconds:
            print(f"stopped before {work}: the time is up")
            break
        choice = best(work)
        found.append(choice)
        print(work, choice.hopper or choice.plain, choice.microseconds, "cuBLAS", round(library(work), 2), flush=True)
        torch.cuda.empty_cache()
        if arguments.out:
            TileTable([*_kept(arguments.out, found), *found]).save(arguments.out, **about(MODULE, sys.argv[1:]))
    print(f"{len(found)} products in {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
