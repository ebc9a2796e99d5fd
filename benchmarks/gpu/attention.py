"""Attention kernels of the hopper profile on a GPU: time against torch's, and the share of the physical limit.

    python -m benchmarks.gpu.attention --out result.json [--only forward backward decode] [--sweep]

Work: causal floating-point operations (half of the square); bytes of keys and values for decoding.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.attention_bits import DEVICE, entries, starts_of
from rlkernel.kernels.triton import launch_attention as launch
from rlkernel.kernels.triton.attention_points import attention_points, backward_points
from rlkernel.kernels.triton.launch_attention import AttentionTile
from rlkernel.kernels.triton.launch_attention_hopper import backward_hopper, varlen_hopper

COPY_BANDWIDTH = 4.0e12
"""Bytes a second that a copy reaches on an H200."""
VARIANTS = ((False, 2, 2048), (True, 2, 2048), (False, 2, 512), (False, 2, 1 << 20))
"""Of the warp-specialised forward: turns at the matrix unit, stages, keys of a split."""


def seconds(function: Callable[[int], object], repeats: int = 12, warmups: int = 3) -> float:
    """Median of CUDA events around calls; the argument rotates the inputs."""
    for i in range(warmups):
        function(i)
    times = []
    for i in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function(i)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


class Training:
    """Shapes of one training batch: packed sequences of equal length."""

    def __init__(
        self, batch: int = 4, length: int = 4096, heads: int = 32, kv_heads: int = 8, depth: int = 128
    ) -> None:
        generator = torch.Generator(DEVICE).manual_seed(1)
        self.batch, self.length, self.heads, self.kv_heads, self.depth = batch, length, heads, kv_heads, depth
        self.flops = 4 * batch * heads * length * length * depth / 2
        rows = batch * length

        def normal(count: int) -> torch.Tensor:
            return torch.randn((rows, count, depth), generator=generator, device=DEVICE).bfloat16()

        self.sets = [(normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)) for _ in range(2)]
        self.starts = starts_of((length,) * batch)
        forward, backward = entries("hopper", "bfloat16", depth)
        self.points, self.gradient_points = attention_points(forward), backward_points(backward)

    def forward(self, tile: AttentionTile | None = None) -> Callable[[int], Any]:
        def call(i: int) -> Any:
            q, k, v, _ = self.sets[i % 2]
            return launch.attention_varlen(q, k, v, self.starts, self.length, self.points, tile=tile)

        return call

    def specialised(self, pingpong: bool, stages: int, split: int) -> Callable[[int], Any]:
        """The warp-specialised forward; another split than the contract's gives other bits, to see what splits cost."""
        out = torch.empty_like(self.sets[0][0])
        lse2 = torch.empty(out.shape[:2], device=DEVICE)
        points = replace(self.points, split=split)

        def call(i: int) -> Any:
            q, k, v, _ = self.sets[i % 2]
            varlen_hopper(q, k, v, self.starts, self.length, points, out, lse2, pingpong, stages)

        return call

    def specialised_backward(self) -> Callable[[int], Any]:
        saved = [self.forward()(i) for i in range(2)]
        found = tuple(torch.empty_like(x) for x in self.sets[0][:3])

        def call(i: int) -> Any:
            q, k, v, dout = self.sets[i % 2]
            backward_hopper(dout, q, k, v, *saved[i % 2], self.starts, self.length, self.gradient_points, *found)

        return call

    def backward(self, dq: AttentionTile | None = None, dkv: AttentionTile | None = None) -> Callable[[int], Any]:
        saved = [self.forward()(i) for i in range(2)]

        def call(i: int) -> Any:
            q, k, v, dout = self.sets[i % 2]
            return launch.attention_backward(
                dout, q, k, v, *saved[i % 2], self.starts, self.length, self.gradient_points, dq_tile=dq, dkv_tile=dkv
            )

        return call

    def peer(self, backend: SDPBackend, with_backward: bool) -> Callable[[int], Any]:
        """torch SDPA on [B, H, L, D], keys and values expanded to all heads beforehand."""
        prepared = []
        for q, k, v, dout in self.sets:
            parts = [
                x.view(self.batch, self.length, -1, self.depth).transpose(1, 2).contiguous() for x in (q, k, v, dout)
            ]
            parts[1], parts[2] = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in parts[1:3])
            prepared.append([x.requires_grad_(with_backward and i < 3) for i, x in enumerate(parts)])

        def call(i: int) -> Any:
            q, k, v, dout = prepared[i % 2]
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), dout) if with_backward else out

        return call


class Decoding:
    """One query row a sequence over pages of 64 keys."""

    def __init__(self, sequences: int = 256, shortest: int = 2048, longest: int = 8192, depth: int = 128) -> None:
        lengths = torch.linspace(shortest, longest, sequences).long().tolist()
        self.lengths, self.heads, self.kv_heads = tuple(lengths), 32, 8
        page = 64
        needed = [-(-n // page) for n in lengths]
        generator = torch.Generator(DEVICE).manual_seed(2)
        shape = (sum(needed), page, self.kv_heads, depth)
        self.caches = tuple(
            torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
        )
        order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3)).int()
        table = torch.zeros((sequences, max(needed)), dtype=torch.int32)
        at = 0
        for s, n in enumerate(needed):
            table[s, :n] = order[at : at + n]
            at += n
        self.table = table.to(DEVICE)
        self.positions = (torch.tensor(lengths, dtype=torch.int32) - 1).to(DEVICE)
        self.q = torch.randn((sequences, self.heads, depth), generator=generator, device=DEVICE).bfloat16()
        self.bytes = 2 * 2 * sum(lengths) * self.kv_heads * depth
        self.points = attention_points(entries("hopper", "bfloat16", depth)[0])
        self.splits = -(-longest // self.points.split)

    def call(self, tile: AttentionTile | None = None) -> Callable[[int], Any]:
        return lambda _: launch.attention_decode(
            self.q, *self.caches, self.table, self.positions, self.splits, self.points, tile=tile
        )


def record(result: dict[str, Any], path: Path, name: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Measure, note what was raised, write the file."""
    try:
        result["items"][name] = measure()
    except Exception as problem:  # the others still run
        result["items"][name] = {
            "error": f"{type(problem).__name__}: {problem}"[:500],
            "trace": traceback.format_exc()[-800:],
        }
    print(name, json.dumps(result["items"][name]), flush=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def rate(flops: float, measured: float) -> dict[str, Any]:
    return {"ms": round(measured * 1e3, 4), "tflops": round(flops / measured / 1e12, 1)}


def candidates() -> list[tuple[str, AttentionTile]]:
    tiles = [(warps, stages) for warps in (1, 2, 4, 8) for stages in (1, 2, 3)]
    return [("decode", AttentionTile(16, 64, warps, stages)) for warps, stages in tiles]


def measure_candidate(
    training: Training | None, decoding: Decoding | None, kind: str, tile: AttentionTile
) -> dict[str, Any]:
    if kind == "decode":
        assert decoding is not None
        measured = seconds(decoding.call(tile))
        return {
            "ms": round(measured * 1e3, 4),
            "of_copy_bandwidth": round(decoding.bytes / measured / COPY_BANDWIDTH, 4),
        }
    assert training is not None
    if kind == "forward":
        return rate(training.flops, seconds(training.forward(tile)))
    call = training.backward(tile, None) if kind == "dq" else training.backward(None, tile)
    return rate(2.5 * training.flops, seconds(call, 6, 2))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=["forward", "backward", "decode"])
    parser.add_argument("--sweep", action="store_true", help="time every tuning, not only the default")
    parser.add_argument(
        "--warm", type=int, default=None, help="compile the candidates of this number modulo 12 and stop"
    )
    arguments = parser.parse_args()
    if arguments.warm is not None:
        training, decoding = Training(1, 1024), Decoding(4)
        jobs: list[Callable[[], Any]] = [lambda v=v: training.specialised(*v)(0) for v in VARIANTS]
        jobs += [lambda: training.specialised_backward()(0)]
        jobs += [lambda t=tile: decoding.call(t)(0) for _, tile in candidates()]
        calls = jobs[arguments.warm :: 12]
        for call in calls:
            try:
                call()
            except Exception as problem:  # a tuning that does not fit the device is reported when it is timed
                print(f"{type(problem).__name__}: {problem}"[:300], flush=True)
        torch.cuda.synchronize()
        return 0
    properties = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {
        "what": "attention of the hopper profile, bf16, against torch",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.gpu.attention " + " ".join(sys.argv[1:]),
        "device": properties.name,
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "items": {},
    }  # fmt: skip
    path = arguments.out
    training = Training() if {"forward", "backward", "specialised"} & set(arguments.only) else None
    decoding = Decoding() if "decode" in arguments.only else None
    if training is not None and "forward" in arguments.only:
        record(result, path, "forward", lambda: rate(training.flops, seconds(training.forward())))
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash2", SDPBackend.FLASH_ATTENTION)):
            record(
                result,
                path,
                f"forward {name}",
                lambda b=backend: rate(training.flops, seconds(training.peer(b, False))),
            )
    if decoding is not None:
        record(result, path, "decode", lambda: measure_candidate(None, decoding, "decode", None))  # type: ignore[arg-type]
    if training is not None and "backward" in arguments.only:
        record(result, path, "backward", lambda: rate(2.5 * training.flops, seconds(training.backward(), 6, 2)))
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash2", SDPBackend.FLASH_ATTENTION)):
            record(
                result, path, f"forward+backward {name}",
                lambda b=backend: rate(3.5 * training.flops, seconds(training.peer(b, True), 6, 2)),
            )  # fmt: skip
    if arguments.sweep:
        for kind, tile in candidates():
            if (kind == "decode" and decoding is None) or (kind != "decode" and training is None):
                continue
            record(
                result, path, f"sweep {kind} {asdict(tile)}",
                lambda kind=kind, tile=tile: measure_candidate(training, decoding, kind, tile),
            )  # fmt: skip
    if training is not None and "specialised" in arguments.only:
        for pingpong, stages, split in VARIANTS:
            record(
                result, path, f"specialised forward, pingpong {pingpong}, stages {stages}, split {split}",
                lambda p=pingpong, n=stages, s=split: rate(training.flops, seconds(training.specialised(p, n, s))),
            )  # fmt: skip
        record(
            result, path, "specialised backward",
            lambda: rate(2.5 * training.flops, seconds(training.specialised_backward(), 6, 2)),
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
