"""Speed of the row kernels on an H200: microseconds, bytes a second, and what torch takes for the same where it has it.

    python -m benchmarks.gpu.rows --out benchmarks/results/gpu_rows_h200.json

4,096 tokens of a model with 4,096 columns, 32 q heads and 8 KV heads of 128, 12,288 columns inside, and 151,936 ids.
``share`` is the part of the memory's peak that is reached, counting every operand once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.timing import MEMORY_BYTES_A_SECOND, about, microseconds
from rlkernel.kernels.triton import launch, launch_heads, launch_optimizer, launch_rows
from rlkernel.kernels.triton.launch_chains import Rows, column_chain
from rlkernel.kernels.triton.launch_rows import RowTuning

MODULE = "benchmarks.gpu.rows"
TOKENS, COLUMNS, INSIDE, HEADS, KV_HEADS, DEPTH, IDS = 4096, 4096, 12288, 32, 8, 128, 151936
EPS = 1e-6
DEVICE = "cuda"
SIZE = 2 * TOKENS * COLUMNS
Work = Callable[[int], Any]


@dataclass(frozen=True)
class Line:
    """One measurement: bytes that have to move, our work, and torch's."""

    what: str
    bytes: int
    ours: Work
    torch: Work | None = None
    captured: bool = True


def _tensors(*shape: int, count: int = 6) -> list[torch.Tensor]:
    return [torch.randn(shape, device=DEVICE).bfloat16() for _ in range(count)]


def norms() -> Iterator[Line]:
    x, other = _tensors(TOKENS, COLUMNS), _tensors(TOKENS, COLUMNS)
    w, r = torch.randn(COLUMNS, device=DEVICE).bfloat16(), torch.rand(TOKENS, device=DEVICE)
    dw = torch.zeros(COLUMNS, device=DEVICE)
    tunings = [RowTuning(rows, warps) for rows, warps in ((1, 4), (1, 1), (2, 2), (4, 4))]
    for t in tunings:
        name = f"{t.rows} rows, {t.num_warps} warps a program"
        yield Line(
            f"rms_norm, {name}",
            2 * SIZE,
            lambda i, t=t: launch.rms_norm(x[i % 6], w, EPS, rows=t.rows, num_warps=t.num_warps),
            lambda i: functional.rms_norm(x[i % 6], (COLUMNS,), w, EPS),
        )
        yield Line(
            f"add_rms_norm, {name}",
            4 * SIZE,
            lambda i, t=t: launch_rows.add_rms_norm(x[i % 6], other[i % 6], w, EPS, tuning=t),
            lambda i: functional.rms_norm(x[i % 6] + other[i % 6], (COLUMNS,), w, EPS),
        )
    yield Line(
        "rms_norm backward, dx and dw", 5 * SIZE,
        lambda i: launch_rows.rms_norm_backward(other[i % 6], x[i % 6], w, r, dw),
    )  # fmt: skip
    yield Line("rms_norm dw alone", 2 * SIZE, lambda i: launch_rows.rms_norm_dw(other[i % 6], x[i % 6], r, dw))
    yield Line("bias gradient", SIZE, lambda i: launch_rows.bias_gradient(x[i % 6], dw))
    yield Line(
        "residual_add", 3 * SIZE,
        lambda i: launch_rows.residual_add(x[i % 6], other[i % 6]), lambda i: x[i % 6] + other[i % 6],
    )  # fmt: skip


def activations() -> Iterator[Line]:
    fused, dy = _tensors(TOKENS, 2 * INSIDE, count=2), _tensors(TOKENS, INSIDE, count=2)
    size = 2 * TOKENS * INSIDE

    def peer(i: int) -> torch.Tensor:
        return functional.silu(fused[i % 2][:, :INSIDE]) * fused[i % 2][:, INSIDE:]

    for leaves in (1, 8):
        yield Line(
            f"swiglu, {leaves} leaves", 3 * size, lambda i, n=leaves: launch_rows.swiglu(fused[i % 2], leaves=n), peer
        )
        yield Line(
            f"swiglu backward, {leaves} leaves", 5 * size,
            lambda i, n=leaves: launch_rows.swiglu_backward(dy[i % 2], fused[i % 2], leaves=n),
        )  # fmt: skip


def heads() -> Iterator[Line]:
    fused = _tensors(TOKENS, (HEADS + 2 * KV_HEADS) * DEPTH)
    angle = torch.rand((TOKENS, DEPTH // 2), device=DEVICE)
    positions = torch.arange(TOKENS, device=DEVICE, dtype=torch.int32)
    rotation = launch_heads.Rotation(positions, torch.cos(angle), torch.sin(angle))
    q, _, v = launch_heads.fused_places(HEADS, KV_HEADS, DEPTH)
    w, dw = torch.randn(DEPTH, device=DEVICE).bfloat16(), torch.zeros(DEPTH, device=DEVICE)
    out, r = launch_heads.rope(fused[0], q, rotation, w=w, eps=EPS)
    assert r is not None
    gradient, plain = torch.empty_like(fused[0]), torch.empty((TOKENS, KV_HEADS, DEPTH), device=DEVICE).bfloat16()
    flat, rows = out.view(-1, DEPTH), Rows(DEPTH, q.groups, q.per, q.slots, q.first)
    yield Line("rope of q", 2 * SIZE, lambda i: launch_heads.rope(fused[i % 6], q, rotation))
    yield Line("norm and rope of q", 2 * SIZE, lambda i: launch_heads.rope(fused[i % 6], q, rotation, w=w, eps=EPS))
    yield Line("rope backward of q", 2 * SIZE, lambda i: launch_heads.rope_backward(out, q, rotation, gradient))
    yield Line(
        "norm and rope backward of q, dx and dw", 6 * SIZE,
        lambda i: launch_heads.rope_backward(
            out, q, rotation, gradient, launch_heads.HeadNorm(fused[i % 6], w, r, dw)
        ),
    )  # fmt: skip
    yield Line(
        "head norm dw of q alone: one chain of 131,072 steps", 2 * SIZE,
        lambda i: column_chain(flat, dw, x=fused[i % 6], inv_rms=r, rows=rows),
    )  # fmt: skip
    yield Line("copy of v", SIZE // 2, lambda i: launch_heads.copy_heads(plain, fused[i % 6], v, gathers=True))


def tables() -> Iterator[Line]:
    table, dh = torch.randn((IDS, COLUMNS), device=DEVICE).bfloat16(), _tensors(TOKENS, COLUMNS, count=2)
    ids = torch.randint(0, IDS, (TOKENS,), device=DEVICE)
    grad = torch.zeros((IDS, COLUMNS), device=DEVICE)
    total, clip = torch.zeros(1, device=DEVICE), torch.ones(1, device=DEVICE)
    yield Line(
        "embedding", 2 * SIZE, lambda i: launch_rows.embedding(table, ids), lambda i: functional.embedding(ids, table)
    )
    yield Line(
        "embedding gradient", 5 * SIZE, lambda i: launch_rows.embedding_gradient(dh[i % 2], ids, grad), captured=False
    )
    yield Line(
        "sum of squares, 622 million elements", 4 * grad.numel(),
        lambda i: launch_optimizer.sum_of_squares(grad, total), lambda i: torch.linalg.vector_norm(grad),
    )  # fmt: skip
    count = IDS * 1024
    part = [grad.view(-1)[i * count : (i + 1) * count] for i in range(4)]
    weight, scalars = torch.empty(count, device=DEVICE).bfloat16(), torch.rand(9, device=DEVICE)
    yield Line(
        "adamw, 156 million elements", 30 * count,
        lambda i: launch_optimizer.adamw(part[0], part[1], part[2], part[3], weight, scalars, clip),
    )  # fmt: skip


def _uncaptured(work: Work) -> float:
    """Time of work that waits for the host, which no graph holds: a median of single calls."""
    times = []
    for i in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work(i)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return sorted(times)[3]


def measure(line: Line) -> dict[str, Any]:
    """One line of the result."""
    ours = microseconds(line.ours) if line.captured else _uncaptured(line.ours)
    found: dict[str, Any] = {
        "what": line.what,
        "our_us": round(ours, 2),
        "bytes_a_second": round(line.bytes / ours * 1e6),
        "share": round(line.bytes / ours * 1e6 / MEMORY_BYTES_A_SECOND, 3),
    }
    if line.torch is not None:
        theirs = microseconds(line.torch)
        found |= {"torch_us": round(theirs, 2), "ratio": round(theirs / ours, 3)}
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"what": "row kernels", **about(MODULE, sys.argv[1:]), "lines": [], "failed": []}
    for section in (norms, activations, heads, tables):
        try:
            for line in section():
                result["lines"].append(measure(line))
                print(json.dumps(result["lines"][-1]), flush=True)
        except Exception as problem:  # recorded: one broken section must not hide the others
            error = f"{type(problem).__name__}: {problem}"[:600]
            result["failed"].append({"section": section.__name__, "error": error})
            print(json.dumps(result["failed"][-1]), flush=True)
        torch.cuda.empty_cache()
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
