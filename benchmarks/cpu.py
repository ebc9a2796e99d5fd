"""Speed of the portable profile on this CPU against torch and transformers, alternating in one run.

Run as ``python -m benchmarks.cpu models/smollm2-135m``. Every line prints our median, the peer's and the ratio (peer's
time over ours: above 1 ours is faster), with the least ratio that is accepted where there is one. Both sides use the
same number of threads, the same weights and tokens, float32, and run in turn: ours, peer, ours, peer.
Exit code 1 if a ratio is below its threshold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import cpu_gemm, cpu_model
from benchmarks.common import CLOCKS, RESULTS, Comparison, load_average, machine, write_result
from benchmarks.models import Models

SECTIONS = ("gemm", "forward", "decode", "training")
GEMM_MEAN, GEMM_CELL = 1.0, 0.8


def gemm_section(threads: int, seconds: float, clock: str) -> dict[str, Any]:
    """Every cell of the GEMM benchmark, and whether the mean and the lowest cell are accepted (forward GEMM)."""
    cells = cpu_gemm.main(threads, seconds, clock)
    forward = [cell for cell in cells if cell.kind == "x @ w.T"]
    mean, lowest = cpu_gemm.geometric_mean(forward), min(forward, key=lambda cell: cell.ratio)
    accepted = mean >= GEMM_MEAN and lowest.ratio >= GEMM_CELL
    print(
        f"portable GEMM: geometric mean {mean:.2f} (at least {GEMM_MEAN:g}), lowest cell {lowest.ratio:.2f} "
        f"(at least {GEMM_CELL:g}): {'yes' if accepted else 'NO'}"
    )
    return {
        "ours_computes": "x @ w.T with w packed beforehand, float32 FMA chains over K",
        "peer_computes": "torch.mm(x, w.t()), float32",
        "geometric_mean": round(mean, 4),
        "lowest": round(lowest.ratio, 4),
        "threshold_geometric_mean": GEMM_MEAN,
        "threshold_every_cell": GEMM_CELL,
        "accepted": accepted,
        "cells": [cell.as_json() for cell in cells],
    }


def _comparisons(folder: Path, options: argparse.Namespace) -> Iterator[Comparison]:
    models = Models(folder, options.threads, clock=options.clock)
    if "forward" in options.sections:
        yield from cpu_model.forward(models, options.repeats)
    if "decode" in options.sections:
        yield from cpu_model.decode(models, options.repeats)
    if "training" in options.sections:
        yield from cpu_model.training(models, options.repeats)


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All sections that were asked for; prints as it goes and returns the result as plain data."""
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"machine": machine(options.threads), "model": folder.name, "clock": options.clock}
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    accepted = True
    if "gemm" in options.sections:
        result["gemm"] = gemm_section(options.threads, options.seconds, options.clock)
        accepted = accepted and result["gemm"]["accepted"]
    result["comparisons"] = []
    for comparison in _comparisons(folder, options):
        print(comparison.line(), flush=True)
        result["comparisons"].append(comparison.as_json())
        accepted = accepted and comparison.accepted
    result["load_average_at_end"] = load_average()
    result["accepted"] = accepted
    print(f"load average at the start {result['machine']['load_average']}, at the end {result['load_average_at_end']}")
    print("every threshold is reached" if accepted else "NOT every threshold is reached")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder, as `vime model fetch smollm2-135m` writes it")
    parser.add_argument("--json", type=Path, default=RESULTS / "cpu.json", help="where the result is written")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7, help="of each side, for everything but the GEMM")
    parser.add_argument("--seconds", type=float, default=0.5, help="time to spend on a GEMM cell")
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="cpu: CPU seconds of the process, for a machine that others use too (one thread only)",
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options = parser.parse_args(arguments)
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu needs --threads 1: threads that wait in a loop would count as work")
    result = run(options.model, options)
    write_result(options.json, result)
    return 0 if result["accepted"] else 1


if __name__ == "__main__":
    sys.exit(main())
