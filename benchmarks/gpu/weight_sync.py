"""Weights from a trainer's process to an engine's on one GPU: buckets, no copy at all, and torch's own way per tensor.

    python -m benchmarks.gpu.weight_sync --out result.json [--layers 36] [--rounds 7]

The weights have the shapes of an 8B model in bfloat16 (16.4 GB). Every arm is timed in the trainer's process, from the
call that publishes to the engine's answer; ``copy`` is torch's copy of the same bytes within one process, in the same
run. ``with digests``: the engine computes every tensor's digest from the bytes that it received, the trainer its own
meanwhile, and they are compared. Rates count each byte once. Exit code 1 if a digest or a byte differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import triton

from hardware.cuda.runtime import CudaRuntime
from rlkernel.kernels.triton.launch_digest import Part, TensorDigests
from vime.sync.device_ipc import DeviceIpcTransport

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD, VOCABULARY = 4096, 12288, 32, 8, 128, 151936
Tensors = dict[str, torch.Tensor]


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes as a checkpoint has them, embedding and head apart."""
    found: dict[str, tuple[int, ...]] = {name: (VOCABULARY, HIDDEN) for name in ("embed_tokens", "lm_head")}
    found["norm"] = (HIDDEN,)
    for i in range(layers):
        parts = {
            "q_proj": (HEADS * HEAD, HIDDEN), "k_proj": (KV_HEADS * HEAD, HIDDEN), "v_proj": (KV_HEADS * HEAD, HIDDEN),
            "o_proj": (HIDDEN, HEADS * HEAD), "q_norm": (HEAD,), "k_norm": (HEAD,), "gate_proj": (INTERMEDIATE, HIDDEN),
            "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE), "input_norm": (HIDDEN,),
            "post_norm": (HIDDEN,),
        }  # fmt: skip
        found |= {f"layers.{i}.{name}": shape for name, shape in parts.items()}
    return found


def digests(tensors: Mapping[str, torch.Tensor]) -> list[list[int]]:
    """Both lanes of every tensor, in name order, by one kernel."""
    found: list[list[int]] = TensorDigests([Part(tensors[name]) for name in sorted(tensors)])().cpu().tolist()
    return found


def engine(pipe: Connection) -> None:
    """The engine's process: does what it is told, and answers when it is done."""
    transports: dict[str, DeviceIpcTransport] = {
        to: DeviceIpcTransport("cuda_ipc", CudaRuntime(), to=to) for to in ("device", "shared")
    }
    own: Tensors = {}
    while (order := pipe.recv())["do"] != "end":
        tensors: Tensors = {}
        if order["do"] == "parameters":
            own = {
                name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in order["shapes"].items()
            }
        elif order["do"] == "receive":
            tensors = transports[order["to"]].receive(order["handle"])
            transports[order["to"]].close_received()
        elif order["do"] == "per tensor":
            for _ in range(order["count"]):
                name, tensor = pipe.recv()
                own[name].copy_(tensor)
                del tensor
            tensors = own
        torch.cuda.synchronize()
        pipe.send(digests(tensors) if order.get("digests") and tensors else None)


class Sync:
    """The trainer's side of every arm."""

    def __init__(self, pipe: Connection, layers: int) -> None:
        self._pipe = pipe
        generator = torch.Generator("cuda").manual_seed(1)
        self.elsewhere: Tensors = {
            name: torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            for name, shape in shapes(layers).items()
        }
        self.transport = DeviceIpcTransport("cuda_ipc", CudaRuntime())
        self.placed = [self.transport.place(self.elsewhere) for _ in range(2)]
        self.bytes = sum(tensor.nbytes for tensor in self.elsewhere.values())
        self.compared = self.differing = 0
        self._turn = 0

    def _next(self) -> Tensors:
        """The placement whose turn it is, with other bits than before in every tensor."""
        self._turn += 1
        tensors = self.placed[self._turn % 2]
        for tensor in tensors.values():
            tensor.view(torch.int16).bitwise_xor_(self._turn % 2 + 1)
        torch.cuda.synchronize()
        return tensors

    def _compare(self, theirs: list[list[int]] | None, ours: list[list[int]] | None) -> None:
        if ours is None:
            return
        self.compared += len(ours)
        self.differing += len(ours) if theirs is None else sum(a != b for a, b in zip(ours, theirs, strict=True))

    def received(self, tensors: Tensors, to: str, with_digests: bool) -> float:
        """Seconds of a publication through buckets."""
        start = time.perf_counter()
        handle = self.transport.send(tensors)
        self._pipe.send({"do": "receive", "to": to, "handle": handle, "digests": with_digests})
        ours = digests(tensors) if with_digests else None
        self._compare(self._pipe.recv(), ours)
        seconds = time.perf_counter() - start
        self.transport.release(handle)
        return seconds

    def per_tensor(self, tensors: Tensors, with_digests: bool) -> float:
        """Seconds of the same through torch's handles, a pickle a tensor, copied into the engine's parameters."""
        start = time.perf_counter()
        self._pipe.send({"do": "per tensor", "count": len(tensors), "digests": with_digests})
        for name, tensor in tensors.items():
            self._pipe.send_bytes(ForkingPickler.dumps((name, tensor)))
        ours = digests(tensors) if with_digests else None
        self._compare(self._pipe.recv(), ours)
        return time.perf_counter() - start

    def copied(self) -> float:
        """Seconds of a copy within this process."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for name, tensor in self.placed[0].items():
            self.placed[1][name].copy_(tensor)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def arms(self) -> dict[str, Callable[[], float]]:
        """Every arm, by what it does."""
        return {
            "copy within a process": self.copied,
            "cuda_ipc, no copy": lambda: self.received(self._next(), "shared", False),
            "cuda_ipc, no copy, with digests": lambda: self.received(self._next(), "shared", True),
            "cuda_ipc, the engine copies": lambda: self.received(self._next(), "device", False),
            "cuda_ipc, the engine copies, with digests": lambda: self.received(self._next(), "device", True),
            "cuda_ipc, both copy": lambda: self.received(self.elsewhere, "device", False),
            "torch, a handle a tensor": lambda: self.per_tensor(self.elsewhere, False),
            "torch, a handle a tensor, with digests": lambda: self.per_tensor(self.elsewhere, True),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=engine, args=(other,), daemon=True)
    process.start()
    sync = Sync(pipe, arguments.layers)
    pipe.send({"do": "parameters", "shapes": shapes(arguments.layers)})
    pipe.recv()
    arms = sync.arms()
    first = {name: arm() for name, arm in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(arguments.rounds):
        for name, arm in arms.items():
            times[name].append(arm())
    pipe.send({"do": "end"})
    process.join(30)
    medians = {name: statistics.median(values) for name, values in times.items()}
    copy, peer = medians["copy within a process"], medians["torch, a handle a tensor"]
    result: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.gpu.weight_sync " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name(0),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "bytes": sync.bytes,
        "tensors": len(sync.elsewhere),
        "digests compared": sync.compared,
        "digests differing": sync.differing,
        "arms": {
            name: {
                "ms": round(seconds * 1e3, 3),
                "least ms": round(min(times[name]) * 1e3, 3),
                "first ms": round(first[name] * 1e3, 3),
                "gb_per_s": round(sync.bytes / seconds / 1e9, 1),
                "of a copy": round(copy / seconds, 3),
                "times torch's": round(peer / seconds, 2),
            }
            for name, seconds in medians.items()
        },
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 1 if sync.differing or not sync.compared else 0


if __name__ == "__main__":
    sys.exit(main())
