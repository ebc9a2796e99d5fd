"""Speed of the matrix products on an H200 against torch's default (cuBLAS) in the same run, and admissions.

    python -m benchmarks.gpu.gemm --out benchmarks/results/gpu_gemm_h200.json

Every cell: our own kernel, cuBLASLt as it would be admitted (without split-K, up to 32 rows padded to 32), and torch's
default, on the same rotating operands. ``ratio`` is torch's time over ours: above 1 we are faster. ``share`` is the
part of the device's peak that our kernel reaches: of the matrix units, or of the memory where reading takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.gpu.cases import compile_ahead
from benchmarks.gpu.timing import BF16_FLOPS, MEMORY_BYTES_A_SECOND, about, microseconds, rotating
from rlkernel.kernels.products import PADDED_ROWS, Products
from rlkernel.kernels.triton.tiles import Layout
from rlkernel.kernels.vendor.admission import AdmissionTable

MODULE = "benchmarks.gpu.gemm"
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))
ROWS = (1, 8, 64, 256, 1024, 4096)
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Cell:
    """One product: ``forward`` and ``dgrad`` [M, K] x [N, K], ``wgrad`` continues float32 [M, N] over K tokens."""

    layout: Layout
    leaves: int
    m: int
    n: int
    k: int
    fresh: bool = False

    def __str__(self) -> str:
        what = f"{self.layout} {self.m}x{self.n}x{self.k}"
        return what + (f" in {self.leaves} leaves" if self.leaves > 1 else "") + (" fresh" if self.fresh else "")


def cells() -> Iterator[Cell]:
    """Everything that is measured."""
    for m, (n, k) in product(ROWS, SHAPES):
        yield Cell("forward", 1, m, n, k)
    for leaves, m, (n, k) in product((2, 4, 8), ROWS, (SHAPES[1], SHAPES[3])):
        yield Cell("forward", leaves, m, n, k)
    for tokens, (n, k) in product((1024, 8192), SHAPES[:4]):
        yield Cell("dgrad", 1, tokens, k, n)
    for leaves, (n, k) in product((4, 8), (SHAPES[0], SHAPES[2])):
        yield Cell("dgrad", leaves, 8192, k, n)
    for tokens, (n, k), fresh in product((1024, 8192), SHAPES[:4], (False, True)):
        yield Cell("wgrad", 1, n, k, tokens, fresh)


class Sides:
    """Our products and torch's on the operands of one cell."""

    def __init__(self, cell: Cell, own: Products, exact: Products | None) -> None:
        self.cell, self.own, self.exact = cell, own, exact
        m, n, k = cell.m, cell.n, cell.k
        turned = (cell.layout == "wgrad", cell.layout != "forward")

        def make(rows: int, first: bool) -> torch.Tensor:
            return torch.randn((k, rows) if first else (rows, k), device=DEVICE).bfloat16()

        self.a = rotating(lambda: make(m, turned[0]), 2 * m * k, 4)
        self.b = rotating(lambda: make(n, turned[1]), 2 * n * k, max(2, min(16, int(4e9 // (2 * n * k)))))
        self.grad = torch.zeros((m, n), device=DEVICE) if cell.layout == "wgrad" else None

    def product(self, side: Products, i: int) -> Any:
        a, b, cell = self.a[i % len(self.a)], self.b[i % len(self.b)], self.cell
        if self.grad is not None:
            return side.wgrad(a, b, self.grad, fresh=cell.fresh)
        return (side.forward if cell.layout == "forward" else side.dgrad)(a, b, leaves=cell.leaves)

    def torch_default(self, i: int) -> torch.Tensor:
        a, b = self.a[i % len(self.a)], self.b[i % len(self.b)]
        if self.grad is not None:
            return torch.mm(a.t(), b, out_dtype=torch.float32)
        return torch.nn.functional.linear(a, b) if self.cell.layout == "forward" else a @ b


def _torch_defaults(chosen: bool) -> None:
    if chosen:
        torch.backends.cuda.preferred_blas_library("default")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    else:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)  # type: ignore[assignment]


def measure(cell: Cell, own: Products, exact: Products | None) -> dict[str, Any]:
    """One cell's line; without ``exact`` the library is neither compared nor timed."""
    _torch_defaults(False)
    out, record, found = "float32" if cell.layout == "wgrad" else "bfloat16", None, None
    plain = cell.leaves == 1 and (cell.fresh or cell.layout != "wgrad")
    if plain and exact is not None:
        rows = PADDED_ROWS if cell.m <= PADDED_ROWS and cell.layout != "wgrad" else cell.m
        record = exact.admit(cell.layout, rows, cell.n, cell.k, out)
    sides = Sides(cell, own, exact)
    ours = microseconds(lambda i: sides.product(own, i))
    if exact is not None and record is not None and record.admitted:
        found = microseconds(lambda i: sides.product(exact, i))
    _torch_defaults(True)
    theirs = microseconds(sides.torch_default)
    flops = 2 * cell.m * cell.n * cell.k
    read = 2 * (cell.m * cell.k + cell.n * cell.k) + cell.m * cell.n * (8 if cell.layout == "wgrad" else 2)
    limit = 1e6 * max(flops / BF16_FLOPS, read / MEMORY_BYTES_A_SECOND)
    return {
        "cell": str(cell),
        "layout": cell.layout, "leaves": cell.leaves, "m": cell.m, "n": cell.n, "k": cell.k, "fresh": cell.fresh,
        "kernel": own.describe(cell.layout, cell.m, cell.n, cell.k, leaves=cell.leaves, out=out, plain=plain).kernel,
        "our_us": round(ours, 2),
        "torch_us": round(theirs, 2),
        "ratio": round(theirs / ours, 3),
        "share": round(limit / ours, 3),
        "tflops": round(flops / ours / 1e6, 1),
        "library": None if record is None else {
            "admitted": record.admitted, "compared": record.compared, "differing": record.differing,
            "us": None if found is None else round(found, 2),
            "ratio": None if found is None else round(theirs / found, 3),
        },
    }  # fmt: skip


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of the ratios by group of cells, and the counts of the admissions."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        for name in (f"{line['layout']}, {line['leaves']} leaves" + (", fresh" if line["fresh"] else ""),):
            groups.setdefault(name, []).append(line)
            if line["layout"] == "forward":
                groups.setdefault(f"{name}, {'64 rows and less' if line['m'] <= 64 else 'more rows'}", []).append(line)
    libraries = [line["library"] for line in lines if line["library"] is not None]
    return {
        "ratios": {
            name: {
                "cells": len(group),
                "mean": round(mean(x["ratio"] for x in group), 3),
                "least": min(x["ratio"] for x in group),
            }
            for name, group in groups.items()
        },
        "library": {
            "shapes": len(libraries),
            "admitted": sum(x["admitted"] for x in libraries),
            "compared": sum(x["compared"] for x in libraries),
            "differing": sum(x["differing"] for x in libraries),
            "mean ratio": round(mean([x["ratio"] for x in libraries if x["ratio"]] or [0.0]), 3),
        },
    }  # fmt: skip


def _compile(share: int, shares: int) -> None:
    own = Products("matrix", DEVICE)
    for cell in cells():
        if zlib.crc32(str(cell).encode()) % shares == share:
            with contextlib.suppress(Exception):  # what fails here fails again, and is recorded, when it is measured
                size = Cell(cell.layout, cell.leaves, min(cell.m, 4096), min(cell.n, 4096), cell.k, cell.fresh)
                small = Sides(size, own, None)
                route = own.describe(cell.layout, cell.m, cell.n, cell.k, leaves=cell.leaves)
                dtype = torch.float32 if cell.layout == "wgrad" else torch.bfloat16
                own._own(route, cell.layout, small.a[0], small.b[0], cell.leaves, None, dtype, None, small.grad)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    parser.add_argument("--admissions", type=Path, help="JSON file of the admissions")
    parser.add_argument("--own-only", action="store_true", help="neither compare nor time cuBLASLt")
    parser.add_argument("--compile-seconds", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop measuring after so long")
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share:
        _compile(*arguments.share)
        return 0
    compile_ahead(MODULE, [], arguments.compile_seconds)
    table = AdmissionTable()
    own = Products("matrix", DEVICE)
    exact = None if arguments.own_only else Products("matrix", DEVICE, admissions=table, check_every=0)
    began, lines, failed = time.monotonic(), [], []
    result = {"what": "matrix products against torch's default", **about(MODULE, sys.argv[1:])}
    for cell in cells():
        if time.monotonic() - began > arguments.seconds:
            failed.append({"cell": str(cell), "error": "the time was up before this cell"})
            continue
        try:
            lines.append(measure(cell, own, exact))
            print(json.dumps(lines[-1]), flush=True)
        except Exception as problem:  # recorded: one broken cell must not hide the others
            failed.append({"cell": str(cell), "error": f"{type(problem).__name__}: {problem}"[:600]})
            print(json.dumps(failed[-1]), flush=True)
        torch.cuda.empty_cache()
        if arguments.out and lines:
            found = result | summary(lines) | {"failed": failed, "cells": lines}
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.admissions:
        table.save(arguments.admissions)
    print(json.dumps(summary(lines) if lines else {}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
