"""Portable fp32 GEMM against torch's fp32 matmul, alternating in one run: medians and the ratio torch / ours.

Run as ``python -m benchmarks.cpu_gemm``. A ratio of 1 means equal time, above 1 that ours is faster.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.common import CLOCKS, Clock
from rlkernel.kernels.cpu.gemm import matmul
from rlkernel.kernels.cpu.gemm_gradient import weight_gradient
from rlkernel.kernels.cpu.panels import pack_rows
from rlkernel.kernels.cpu.threads import Workers

ROWS = (1, 8, 32, 64, 256, 1024)
DEPTHS = (576, 1536, 4096)
COLUMNS = (576, 1536, 49152)
WIDE_ROWS = 64  # the widest output (a vocabulary) is measured up to so many rows


BLOCK = 5
REST_S = 0.03
ROTATED = 64 * 2**20  # bytes of weights that calls take in turn, as the layers of a model do


@dataclass(frozen=True)
class Cell:
    """One measured shape: seconds are medians; ratio = torch's time over ours."""

    kind: str
    rows: int
    depth: int
    columns: int
    ours: float
    torch: float

    @property
    def ratio(self) -> float:
        return self.torch / self.ours

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "ratio": round(self.ratio, 4)}


def alternate(
    first: Callable[[], object], second: Callable[[], object], seconds: float, clock: Clock
) -> tuple[float, float]:
    """Median seconds of both, called in turn, ``BLOCK`` calls at a time, for about ``seconds`` in total.

    Before each block the machine rests: an OpenMP library's threads spin for some milliseconds after their last work,
    and would take a core from whoever comes next.
    """
    first(), second()
    times: tuple[list[float], list[float]] = ([], [])
    spent = 0.0
    while len(times[0]) < 3 * BLOCK or (spent < seconds and len(times[0]) < 40 * BLOCK):
        for function, record in ((first, times[0]), (second, times[1])):
            time.sleep(REST_S)
            for _ in range(BLOCK):
                start = clock()
                function()
                record.append(clock() - start)
                spent += record[-1]
    return float(np.median(times[0])), float(np.median(times[1]))


def measure(threads: int, seconds: float = 0.5, clock: str = "wall") -> Iterator[Cell]:
    """Every cell of the forward GEMM ``x @ w.T``, then some weight gradients, ``threads`` for both sides."""
    import torch

    torch.set_num_threads(threads)
    workers = Workers(threads)
    generator = np.random.default_rng(0)
    for columns in COLUMNS:
        for depth in DEPTHS:
            w = generator.standard_normal((columns, depth), dtype=np.float32)
            copies = -(-ROTATED // w.nbytes)
            panels = cycle([pack_rows(w, workers) for _ in range(copies)])
            tws = cycle([torch.from_numpy(w.copy()).t() for _ in range(copies)])
            for rows in ROWS:
                if columns == max(COLUMNS) and rows > WIDE_ROWS:
                    continue
                x = generator.standard_normal((rows, depth), dtype=np.float32)
                tx = torch.from_numpy(x)
                with torch.inference_mode():
                    ours, other = alternate(
                        lambda x=x, panels=panels: matmul(x, next(panels), workers),
                        lambda tx=tx, tws=tws: torch.mm(tx, next(tws)),
                        seconds,
                        CLOCKS[clock],
                    )
                yield Cell("x @ w.T", rows, depth, columns, ours, other)
    for tokens in (64, 1024):
        for columns, depth in ((576, 576), (1536, 576), (576, 1536), (4096, 1536)):
            dy = generator.standard_normal((tokens, columns), dtype=np.float32)
            x = generator.standard_normal((tokens, depth), dtype=np.float32)
            grad = np.zeros((columns, depth), np.float32)
            tdy, tx, tgrad = torch.from_numpy(dy).t(), torch.from_numpy(x), torch.zeros(columns, depth)
            with torch.inference_mode():
                ours, other = alternate(
                    partial(weight_gradient, dy, x, grad, workers),
                    partial(tgrad.addmm_, tdy, tx),
                    seconds,
                    CLOCKS[clock],
                )
            yield Cell("dy.T @ x", tokens, depth, columns, ours, other)
    workers.close()


def geometric_mean(cells: list[Cell]) -> float:
    """Geometric mean of the ratios."""
    return math.exp(sum(math.log(cell.ratio) for cell in cells) / len(cells))


def main(threads: int = 2, seconds: float = 0.5, clock: str = "wall") -> list[Cell]:
    """Measure and print every cell and the means; returns the cells."""
    cells = []
    print(f"{'':10}{'M':>6}{'K':>6}{'N':>7}{'ours ms':>11}{'torch ms':>11}{'GFLOP/s':>9}{'ratio':>7}")
    for cell in measure(threads, seconds, clock):
        cells.append(cell)
        speed = 2e-9 * cell.rows * cell.depth * cell.columns / cell.ours
        print(
            f"{cell.kind:10}{cell.rows:6}{cell.depth:6}{cell.columns:7}{cell.ours * 1e3:11.4f}{cell.torch * 1e3:11.4f}"
            f"{speed:9.1f}{cell.ratio:7.2f}",
            flush=True,
        )
    for kind in dict.fromkeys(cell.kind for cell in cells):
        group = [cell for cell in cells if cell.kind == kind]
        lowest = min(group, key=lambda cell: cell.ratio)
        print(
            f"{kind}: geometric mean {geometric_mean(group):.2f} over {len(group)} cells, lowest {lowest.ratio:.2f} "
            f"(M {lowest.rows}, K {lowest.depth}, N {lowest.columns})"
        )
    return cells


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="time to spend on a cell")
    options = parser.parse_args()
    main(options.threads, options.seconds)
