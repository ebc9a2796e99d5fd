"""Times of GPU work: replays of CUDA graphs, medians, operands that rotate through more memory than L2 has."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import triton

L2_BYTES = 64 * 2**20
"""More than the L2 cache of an H200 (50 MB)."""
MEMORY_BYTES_A_SECOND = 4.8e12
"""Peak of an H200's memory, from its data sheet."""
BF16_FLOPS = 989.4e12
"""Peak of an H200's matrix units for dense bfloat16, from its data sheet."""


def rotating(make: Callable[[], torch.Tensor], size: int, most: int = 16) -> list[torch.Tensor]:
    """As many tensors of ``size`` bytes as make up more than the L2 cache, at least 2 and at most ``most``."""
    return [make() for _ in range(max(2, min(most, 2 + L2_BYTES // max(1, size))))]


def microseconds(work: Callable[[int], Any], *, budget: float = 6000.0, replays: int = 5) -> float:
    """Median time of ``work(i)`` in a graph of calls i = 0, 1, ...; ``budget``: microseconds of one replay, about."""
    for i in range(2):
        work(i)
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work(0)
    work(1)
    end.record()
    torch.cuda.synchronize()
    calls = max(3, min(64, int(budget / max(1.0, begin.elapsed_time(end) * 500))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            work(i)
    graph.replay()
    times = []
    for _ in range(replays):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return median(times)


def about(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Date, command, device and versions, for a recorded result."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m", module, *arguments]),
        "device": {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
    }
