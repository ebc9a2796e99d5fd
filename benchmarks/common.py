"""What the benchmarks share: alternating measurements, the machine they ran on, models for both sides, result files."""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Comparison:
    """One measured pair. Seconds of every repeat; ratio = median of the peer's seconds over the median of ours.

    Attributes:
        work: units of work in one repeat (``unit``), from which rates are computed.
        threshold: least ratio that is accepted; None where the ratio is only reported.
    """

    name: str
    ours_computes: str
    peer_computes: str
    ours: tuple[float, ...]
    peer: tuple[float, ...]
    work: float
    unit: str
    threshold: float | None

    @property
    def ours_median(self) -> float:
        return float(np.median(self.ours))

    @property
    def peer_median(self) -> float:
        return float(np.median(self.peer))

    @property
    def ratio(self) -> float:
        return self.peer_median / self.ours_median

    @property
    def accepted(self) -> bool:
        """Whether the ratio reaches the threshold (true where there is none)."""
        return self.threshold is None or self.ratio >= self.threshold

    def line(self) -> str:
        """One line of the printed table."""
        verdict = "" if self.threshold is None else f"  >= {self.threshold:g}: {'yes' if self.accepted else 'NO'}"
        return (
            f"{self.name:34} ours {self.ours_median:9.4f} s ({self.work / self.ours_median:10.1f} {self.unit}/s)   "
            f"peer {self.peer_median:9.4f} s ({self.work / self.peer_median:10.1f})   ratio {self.ratio:5.2f}{verdict}"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data with every repeat."""
        return {
            "name": self.name,
            "ours_computes": self.ours_computes,
            "peer_computes": self.peer_computes,
            "ours_seconds": [round(value, 6) for value in self.ours],
            "peer_seconds": [round(value, 6) for value in self.peer],
            "ours_median_seconds": round(self.ours_median, 6),
            "peer_median_seconds": round(self.peer_median, 6),
            "work": self.work,
            "unit": self.unit,
            "ratio": round(self.ratio, 4),
            "threshold": self.threshold,
            "accepted": self.accepted,
        }


Clock = Callable[[], float]
CLOCKS: Mapping[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def alternate(
    ours: Callable[[], object],
    peer: Callable[[], object],
    repeats: int,
    *,
    warmups: int = 1,
    clock: Clock = time.perf_counter,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of both, called in turn after a short rest.

    Whatever else the machine does meets both alike, and no library's spinning threads take a core from the other side.
    """
    for _ in range(warmups):
        ours()
        peer()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, record in ((ours, times[0]), (peer, times[1])):
            time.sleep(0.03)
            start = clock()
            function()
            record.append(clock() - start)
    return tuple(times[0]), tuple(times[1])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def load_average() -> tuple[float, float, float]:
    """Runnable threads, averaged over 1, 5 and 15 minutes. A machine at rest shows no more than the benchmark's own."""
    first, second, third = os.getloadavg()
    return round(first, 2), round(second, 2), round(third, 2)


def machine(threads: int) -> dict[str, Any]:
    """What ran where: CPU, threads, versions, date, load, and the digest of the kernels' sources."""
    import llvmlite
    import numba
    import torch
    import transformers

    from rlkernel.kernels.cpu.jit import source_digest
    from rlkernel.kernels.cpu.microkernel import LANES, VECTORS

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": threads,
        "vector_lanes": LANES,
        "panel_width": LANES * VECTORS,
        "load_average": load_average(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kernel_sources": source_digest(),
    }


def write_result(path: Path, value: Mapping[str, Any]) -> None:
    """Write a result as JSON, keys in the given order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
