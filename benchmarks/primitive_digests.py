"""Every float32 input of every scalar primitive, on two machines: digests of the outputs, chunk by chunk.

    python -m benchmarks.primitive_digests cpu  --out cpu.json        (Numba kernels; needs numba)
    python -m benchmarks.primitive_digests cuda --out cuda.json       (Triton kernels; needs torch, triton, numpy)
    python -m benchmarks.primitive_digests compare cpu.json cuda.json

A chunk is 2^24 consecutive bit patterns. Its digest is the tensor digest (docs/numerics.md) of the outputs with
every NaN as one
pattern, index = input pattern, so that equal digests of 256 chunks stand for 2^32 equal outputs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNK = 1 << 24
CHUNKS = 256
PRIMITIVES = ("exp2.full", "exp2.p3", "log2.full", "cast.bf16", "sqrt.rn", "reciprocal by div.rn", "max(x, -x)")


def cpu_runner() -> tuple[Callable[[str, int], list[int]], dict[str, str]]:
    """Digest of a chunk from the Numba primitives."""
    import numba
    import numpy as np
    from numba import float32 as f32

    from rlkernel.kernels.cpu.digest import tensor_digest
    from rlkernel.kernels.cpu.jit import kernel
    from rlkernel.kernels.cpu.primitives import exp2_full, exp2_p3, log2_full, maximum, round_bf16
    from rlkernel.kernels.cpu.threads import Workers

    @kernel
    def apply(first, last, x, out, which):
        for i in range(first, last):
            if which == 0:
                y = exp2_full(x[i])
            elif which == 1:
                y = exp2_p3(x[i])
            elif which == 2:
                y = log2_full(x[i])
            elif which == 3:
                y = round_bf16(x[i])
            elif which == 4:
                y = np.sqrt(x[i])
            elif which == 5:
                y = f32(1.0) / x[i]
            else:
                y = maximum(x[i], -x[i])
            out[i] = y

    workers = Workers()
    out = np.empty(CHUNK, np.float32)

    def run(name: str, chunk: int) -> list[int]:
        bits = np.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=np.uint32)
        workers.run(apply, CHUNK, bits.view(np.float32), out, PRIMITIVES.index(name))
        canonical = np.where(np.isnan(out), np.uint32(0x7FC00000), out.view(np.uint32))
        return list(tensor_digest(canonical, workers, index_offset=chunk * CHUNK))

    return run, {"device": platform.processor() or platform.machine(), "numba": numba.__version__}


def cuda_runner() -> tuple[Callable[[str, int], list[int]], dict[str, str]]:
    """Digest of a chunk from the Triton primitives."""
    import torch
    import triton

    from rlkernel.kernels.triton import elementwise, launch

    def signed(value: int) -> int:
        return value - (1 << 64) if value >> 63 else value

    def shifted(value: torch.Tensor, by: int) -> torch.Tensor:
        return (value >> by) & ((1 << (64 - by)) - 1)

    def mixed(value: torch.Tensor, shifts: tuple[int, int, int], multipliers: tuple[int, int]) -> torch.Tensor:
        value = (value ^ shifted(value, shifts[0])) * signed(multipliers[0])
        value = (value ^ shifted(value, shifts[1])) * signed(multipliers[1])
        return value ^ shifted(value, shifts[2])

    def digest(out: torch.Tensor, first: int) -> list[int]:
        bits = torch.where(torch.isnan(out), 0x7FC00000, out.view(torch.int32).long() & 0xFFFFFFFF)
        index = torch.arange(first + 1, first + 1 + len(out), device=out.device)
        one = mixed(index * signed(0x9E3779B97F4A7C15) + bits, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
        two = mixed(index * signed(0xD1B54A32D192ED03) + bits, (33, 33, 33), (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))
        return [int(lane.sum()) % (1 << 64) for lane in (one, two)]

    unary = {
        "exp2.full": elementwise.exp2_full_kernel,
        "exp2.p3": elementwise.exp2_p3_kernel,
        "log2.full": elementwise.log2_full_kernel,
        "cast.bf16": elementwise.round_bf16_kernel,
        "sqrt.rn": elementwise.square_root_kernel,
    }

    def run(name: str, chunk: int) -> list[int]:
        pattern = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK, device="cuda")
        x = torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).to(torch.int32).view(torch.float32)
        if name in unary:
            out = launch.elementwise(unary[name], x)
        elif name == "max(x, -x)":
            out = launch.elementwise(elementwise.maximum_kernel, x, -x)
        else:
            out = launch.elementwise(elementwise.divide_kernel, torch.ones_like(x), x)
        return digest(out, chunk * CHUNK)

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return run, {"device": torch.cuda.get_device_name(), **versions}


def measure(target: str, out: Path, every: int) -> None:
    """Digest all chunks (or each ``every``-th) and write them."""
    run, facts = cpu_runner() if target == "cpu" else cuda_runner()
    started = time.perf_counter()
    digests = {name: {str(c): run(name, c) for c in range(0, CHUNKS, every)} for name in PRIMITIVES}
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.primitive_digests {target}",
        "date": datetime.date.today().isoformat(),
        "facts": facts,
        "inputs": {name: len(found) * CHUNK for name, found in digests.items()},
        "seconds": round(time.perf_counter() - started, 1),
        "digests": digests,
    }
    out.write_text(json.dumps(result) + "\n")
    print(
        f"{target}: {len(PRIMITIVES)} primitives, {len(digests[PRIMITIVES[0]]) * CHUNK:,} "
        f"inputs each, {result['seconds']} s"
    )


def compare(one: Path, other: Path, out: Path | None) -> int:
    """Compare two files; returns the number of differing chunks."""
    a, b = json.loads(one.read_text()), json.loads(other.read_text())
    rows, differing = [], 0
    for name in PRIMITIVES:
        common = sorted(set(a["digests"][name]) & set(b["digests"][name]), key=int)
        wrong = [c for c in common if a["digests"][name][c] != b["digests"][name][c]]
        differing += len(wrong)
        rows.append(
            {"primitive": name, "inputs": len(common) * CHUNK, "chunks_differing": len(wrong), "first": wrong[:3]}
        )
        print(f"{name:24} {len(common) * CHUNK:>14,} inputs, {len(wrong)} of {len(common)} chunks differ {wrong[:3]}")
    if out is not None:
        sides = [{"command": x["command"], "date": x["date"], "facts": x["facts"]} for x in (a, b)]
        out.write_text(json.dumps({"sides": sides, "rows": rows}, indent=1) + "\n")
    return differing


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("cpu", "cuda", "compare"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.action == "compare":
        sys.exit(1 if compare(arguments.files[0], arguments.files[1], arguments.out) else 0)
    measure(arguments.action, arguments.out or Path(f"primitive_digests_{arguments.action}.json"), arguments.every)


if __name__ == "__main__":
    main()
