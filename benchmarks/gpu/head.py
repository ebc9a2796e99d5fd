"""Times of the head's kernels on a GPU: linear log-probability, gradient, decode's statistics and sampling, digests.

    python -m benchmarks.gpu.head --out result.json [--only forward backward decode digests]
        [--gemm hopper vendor triton] [--sweep]

The peer is torch in the same run: ``F.linear``, ``log_softmax`` (of float32 logits, and of bfloat16 ones, which is what
a naive bfloat16 model does), ``gather``, autograd; for decoding ``softmax`` and ``multinomial``. ``limit`` is the share
of 989 TFLOP/s of the matrix products alone, or of 4.8 TB/s. Extra memory is what a call allocates at its peak.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.head_bits import _keys, device_keys, outputs, vendor
from rlkernel.kernels.triton.launch_digest import tensor_digest
from rlkernel.kernels.triton.launch_logprob import Gemm, HeadTile, KeptLogits, LeafTile, linear_logprob
from rlkernel.kernels.triton.launch_logprob_backward import BackwardTuning, linear_logprob_backward
from rlkernel.kernels.triton.launch_logprob_hopper import HopperHeadTile
from rlkernel.kernels.triton.launch_sampling import row_statistics, sample

DEVICE = "cuda"
ROWS, HIDDEN, VOCABULARY = 4096, 4096, 151936
FLOPS, BANDWIDTH = 989e12, 4.8e12
Tensor = torch.Tensor
Record = dict[str, Any]


def milliseconds(function: Callable[[], object], repeats: int = 7, warmups: int = 2) -> float:
    """Median over CUDA events; the operands (over 1 GB) do not fit into the L2 cache."""
    for _ in range(warmups):
        function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return round(statistics.median(times), 4)


def extra_gigabytes(function: Callable[[], object]) -> float:
    """What a call allocates at its peak, its results included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 1e9, 3)


class Head:
    """x [4096, 4096], w [151936, 4096] and targets of one training step."""

    def __init__(self) -> None:
        vendor()
        generator = torch.Generator(DEVICE).manual_seed(1)
        self.x = torch.randn((ROWS, HIDDEN), generator=generator, device=DEVICE).bfloat16()
        self.w = (torch.randn((VOCABULARY, HIDDEN), generator=generator, device=DEVICE) * 0.03).bfloat16()
        self.targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator, device=DEVICE)
        self.coefficient = torch.full((ROWS,), 1.0 / ROWS, device=DEVICE)

    def naive(self, widened: bool, backward: bool = False) -> Callable[[], Tensor]:
        def run() -> Tensor:
            x, w = (v.detach().requires_grad_(backward) for v in (self.x, self.w))
            z = torch.nn.functional.linear(x, w)
            found = torch.log_softmax(z.float() if widened else z, -1).gather(1, self.targets[:, None])
            if backward:
                found.mean().backward()
            return found

        return run

    def ours(self, **tuning: Any) -> Callable[[], Any]:
        return lambda: linear_logprob(self.x, self.w, self.targets, 1.0, 1, "matrix", **tuning)

    def gradient(self, arm: Arm, grad: Tensor) -> Callable[[], Tensor]:
        """The backward alone, after a forward of the same arm."""
        kept = KeptLogits(arm.kept)
        found = self.ours(gemm=arm.forward, keep=kept)()
        return lambda: self._backward(arm, found, kept, grad)

    def both(self, arm: Arm, grad: Tensor) -> Callable[[], Tensor]:
        """Forward and backward in turn."""

        def run() -> Tensor:
            kept = KeptLogits(arm.kept)
            return self._backward(arm, self.ours(gemm=arm.forward, keep=kept)(), kept, grad)

        return run

    def _backward(self, arm: Arm, found: Any, kept: KeptLogits, grad: Tensor) -> Tensor:
        tuning = BackwardTuning(chunk=arm.chunk, vendor_products=arm.vendor_products)
        return linear_logprob_backward(
            self.x, self.w, found, self.targets, self.coefficient, 1.0, 1, grad, "matrix",
            gemm=arm.backward, fresh=arm.fresh, kept=kept, tuning=tuning,
        )  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """Kernels of a forward with its backward; ``kept``: columns of logits that stay in memory between the two."""

    forward: Gemm
    backward: Gemm
    kept: int = 0
    vendor_products: bool = False
    fresh: bool = True
    chunk: int = 16896

    def __str__(self) -> str:
        return (
            f"{self.forward} forward, {self.backward} backward, {self.kept} columns kept"
            f"{', chains from +0 by the vendor' if self.vendor_products else ''}"
            f", chains {'from +0' if self.fresh else 'continued'}, chunk {self.chunk}"
        )


ARMS = (
    Arm("hopper", "hopper"),
    Arm("hopper", "hopper", fresh=False),
    Arm("vendor", "hopper"),
    Arm("vendor", "hopper", vendor_products=True),
    Arm("vendor", "hopper", 33664),
    Arm("vendor", "hopper", 33664, vendor_products=True),
    Arm("vendor", "hopper", 33664, fresh=False),
    Arm("vendor", "vendor"),
    Arm("vendor", "hopper", 50560, vendor_products=True, chunk=8448),
)


def in_turn(functions: Mapping[str, Callable[[], object]], rounds: int = 9) -> dict[str, float]:
    """Medians in ms over rounds in which every function runs once: all of them under the same clocks."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if turn:
                times[name].append(begin.elapsed_time(end))
    return {name: round(statistics.median(values), 4) for name, values in times.items()}


def forward(head: Head, record: Record, gemms: list[Gemm], sweep: bool) -> None:
    peers = {"naive, float32 softmax": head.naive(True), "naive, bfloat16 softmax": head.naive(False)}
    for name, peer in peers.items():
        record[name] = {"ms": milliseconds(peer), "extra_gb": extra_gigabytes(peer)}
    linear = lambda: torch.nn.functional.linear(head.x, head.w)  # noqa: E731
    record["linear alone"] = {"ms": milliseconds(linear), "extra_gb": extra_gigabytes(linear)}
    torch.cuda.empty_cache()
    variants: dict[str, dict[str, Any]] = {gemm: {"gemm": gemm} for gemm in gemms}
    if sweep:
        variants |= {f"hopper {t}": {"gemm": "hopper", "hopper_tile": t} for t in _hopper_tiles()}
        variants |= {f"vendor {t}": {"gemm": "vendor", "leaf_tile": t} for t in (LeafTile(4, 1, 8), LeafTile(1, 2, 16))}
        variants |= {f"vendor {c}": {"gemm": "vendor", "chunk": c} for c in (4224, 16896)}
        variants |= {"triton 128x256": {"tile": HeadTile(128, 256, 64, 8, 4, 8, 3)}}
    base: list[Tensor] = []
    for name, tuning in variants.items():
        run = head.ours(**tuning)
        found = outputs(run())
        base = base or found
        time = milliseconds(run)
        record[name] = {
            "ms": time,
            "extra_gb": extra_gigabytes(run),
            "differing": sum(
                int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in zip(found, base, strict=True)
            ),
            "limit": round(2 * ROWS * HIDDEN * VOCABULARY / FLOPS / time * 1e3, 3),
            **{f"ratio to {peer}": round(time / record[peer]["ms"], 3) for peer in peers},
        }


def _hopper_tiles() -> list[HopperHeadTile]:
    return [HopperHeadTile(group_m=g, stages=s) for g, s in ((16, 5), (32, 5), (4, 5), (8, 4))]


def _integers(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


NAIVE = {"naive, float32 softmax": True, "naive, bfloat16 softmax": False}


def backward(head: Head, record: Record) -> None:
    """Forward and backward of every arm and of the naive paths, in turn; the bits of all arms; memory."""
    grad = torch.zeros((VOCABULARY, HIDDEN), dtype=torch.float32, device=DEVICE)
    both = {str(arm): head.both(arm, grad) for arm in ARMS}
    peers = {name: head.naive(widened, True) for name, widened in NAIVE.items()}
    times = in_turn({**peers, **both})
    alone = in_turn({str(arm): head.gradient(arm, grad) for arm in ARMS[:4]}, 5)
    base: tuple[Tensor, Tensor] | None = None
    for name, peer in peers.items():
        record[name] = {"forward and backward ms": times[name], "extra_gb": extra_gigabytes(peer)}
    for arm in ARMS:
        run, name = both[str(arm)], str(arm)
        item: Record = {"forward and backward ms": times[name], "extra_gb": extra_gigabytes(run)}
        item["limit"] = round(3 * 2 * ROWS * HIDDEN * VOCABULARY / FLOPS / times[name] * 1e3, 3)
        item |= {f"ratio to {peer}": round(times[name] / times[peer], 3) for peer in peers}
        if name in alone:
            item["backward ms"] = alone[name]
        if arm.fresh:
            found = (run(), grad[::64].clone())
            base = base or found
            item["compared"] = sum(part.numel() for part in found)
            item["differing"] = sum(int((_integers(a) != _integers(b)).sum()) for a, b in zip(found, base, strict=True))
        record[name] = item


def _decode(rows: int) -> Record:
    # more logits than the L2 cache holds
    count = max(1, 320 // rows) if rows > 1 else 96
    sets = [torch.randn((rows, VOCABULARY), device=DEVICE) * 3 for _ in range(count)]
    keys = _keys(rows, VOCABULARY, 1)
    cut = device_keys(keys)
    given = device_keys(keys | {"top_k": keys["top_k"] * 0, "top_p": keys["top_p"] * 0 + 1})
    targets = torch.arange(rows, device=DEVICE)
    item: Record = {}
    runs: dict[str, Callable[[Tensor], object]] = {
        "sample": lambda z: sample(z, 1.0, given, 1, truncation=False),
        "statistics": lambda z: row_statistics(z, 1.0, targets, 1),
        "torch softmax and multinomial": lambda z: torch.multinomial(torch.softmax(z, -1), 1),
        "torch log_softmax": lambda z: torch.log_softmax(z, -1),
    }
    for name, run in runs.items():
        run(sets[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [run(z) for z in sets]
        item[f"{name} ms"] = round(milliseconds(graph.replay) / len(sets), 4)
        del kept
    item["bandwidth share of sample"] = round(rows * VOCABULARY * 4 / BANDWIDTH / item["sample ms"] * 1e3, 3)
    if rows <= 64:
        item["truncated sample ms"] = milliseconds(lambda: sample(sets[0], 1.0, cut, 1, truncation=True), 3, 1)
    return item


def decode(record: Record, sweep: bool) -> None:
    for rows in (32, 128, 256, 512, 64, 8, 1) if sweep else (32, 256, 512, 1):
        record[f"{rows} rows"] = _decode(rows)


def digests(record: Record) -> None:
    for dtype, count in ((torch.bfloat16, 1 << 29), (torch.float32, 1 << 28)):
        x = torch.randn(count, device=DEVICE).to(dtype)
        time = milliseconds(lambda x=x: tensor_digest(x))
        rate = x.nbytes / time / 1e9
        record[str(dtype)] = {"bytes": x.nbytes, "ms": time, "tb_per_s": round(rate, 3), "limit": round(rate / 4.8, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    parser.add_argument("--only", nargs="*", default=["forward", "backward", "decode", "digests"])
    parser.add_argument("--gemm", nargs="*", default=["hopper", "vendor", "triton"], help="kernels of the products")
    parser.add_argument("--sweep", action="store_true", help="other tuning too")
    arguments = parser.parse_args()
    result: Record = {
        "what": __doc__.splitlines()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.gpu.head " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_properties(0).name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "shape": {"rows": ROWS, "hidden": HIDDEN, "vocabulary": VOCABULARY},
    }
    head = Head() if {"forward", "backward"} & set(arguments.only) else None
    failed = 0
    for name in arguments.only:
        record = result.setdefault(name, {})
        try:
            if name in ("forward", "backward"):
                assert head is not None
                if name == "forward":
                    forward(head, record, arguments.gemm, arguments.sweep)
                else:
                    backward(head, record)
            elif name == "decode":
                head = None
                decode(record, arguments.sweep)
            else:
                digests(record)
        except Exception:
            record["error"] = traceback.format_exc()[-1500:]
            failed += 1
        torch.cuda.empty_cache()
        print(json.dumps({name: record}), flush=True)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
