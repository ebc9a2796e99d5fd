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
from rlkernel.kernels.triton.launch_attention_hopper import varlen_hopper

COPY_BANDWIDTH = 4.0e12
"""Bytes a second that a copy reaches on an H200."""
SPLITS = (512, 1 << 20)
"""Keys of a split that the contract does not have, to see what splits cost."""
PEERS = (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash2", SDPBackend.FLASH_ATTENTION))


def medians(calls: dict[str, Callable[[int], object]], repeats: int = 20) -> dict[str, float]:
    """Seconds of each call, the calls in turn; the argument rotates the inputs.

    The device sleeps before every turn until all its calls are queued, so that no launch is timed.
    """
    for call in calls.values():
        call(0), call(1)
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats):
        torch.cuda._sleep(2_000_000 * len(calls))
        events = {}
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call(i)
            end.record()
            events[name] = (begin, end)
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def seconds(function: Callable[[int], object], repeats: int = 12) -> float:
    """Seconds of one call (see :func:`medians`)."""
    return medians({"": function}, repeats)[""]


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

    def with_split(self, split: int) -> Callable[[int], Any]:
        """The warp-specialised forward with another split than the contract's: other bits."""
        out = torch.empty_like(self.sets[0][0])
        lse2 = torch.empty(out.shape[:2], device=DEVICE)
        points = replace(self.points, split=split)

        def call(i: int) -> Any:
            q, k, v, _ = self.sets[i % 2]
            varlen_hopper(q, k, v, self.starts, self.length, points, out, lse2)

        return call

    def step(self) -> Callable[[int], Any]:
        """Forward and backward."""

        def call(i: int) -> Any:
            q, k, v, dout = self.sets[i % 2]
            out, lse2 = launch.attention_varlen(q, k, v, self.starts, self.length, self.points)
            return launch.attention_backward(dout, q, k, v, out, lse2, self.starts, self.length, self.gradient_points)

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


def note(result: dict[str, Any], path: Path, name: str, item: dict[str, Any]) -> None:
    """Add an item and write the file, so that an interrupted run keeps what it has."""
    result["items"][name] = item
    print(name, json.dumps(item), flush=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def record(result: dict[str, Any], path: Path, calls: dict[str, Callable[[int], object]], flops: float) -> None:
    """Time calls in turn and note each."""
    for name, measured in medians(calls).items():
        note(result, path, name, {"ms": round(measured * 1e3, 4), "tflops": round(flops / measured / 1e12, 1)})


def candidates() -> list[AttentionTile]:
    """Tunings of the decode kernel."""
    return [AttentionTile(16, 64, warps, stages) for warps in (2, 4, 8) for stages in (1, 2, 3)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=["forward", "backward", "decode"])
    parser.add_argument("--sweep", action="store_true", help="time every tuning, not only the default")
    arguments = parser.parse_args()
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
    training = Training() if {"forward", "backward"} & set(arguments.only) else None
    decoding = Decoding() if "decode" in arguments.only else None
    if training is not None and "forward" in arguments.only:
        plain = launch.default_tile(training.points, "forward", training.length, training.depth)
        calls = {"forward": training.forward(), "forward, plain kernel": training.forward(plain)}
        calls |= {f"forward, splits of {split}": training.with_split(split) for split in SPLITS}
        calls |= {f"forward {name}": training.peer(backend, False) for name, backend in PEERS}
        record(result, path, calls, training.flops)
    if training is not None and "backward" in arguments.only:
        tiles = [launch.default_tile(training.gradient_points, kind, training.length, training.depth)
                 for kind in ("dq", "dkv")]  # fmt: skip
        calls = {"backward": training.backward(), "backward, plain kernels": training.backward(*tiles)}
        record(result, path, calls, 2.5 * training.flops)
        calls = {"forward+backward": training.step()}
        calls |= {f"forward+backward {name}": training.peer(backend, True) for name, backend in PEERS}
        record(result, path, calls, 3.5 * training.flops)
    if decoding is not None:
        tunings: list[AttentionTile | None] = [None, *(candidates() if arguments.sweep else ())]
        for tile in tunings:
            name = "decode" if tile is None else f"decode {asdict(tile)}"
            measured = seconds(decoding.call(tile))
            share = round(decoding.bytes / measured / COPY_BANDWIDTH, 4)
            note(result, path, name, {"ms": round(measured * 1e3, 4), "of_copy_bandwidth": share})
    return 0


if __name__ == "__main__":
    sys.exit(main())
