"""Comparisons of kernels with the interpreter as data, so that the kernels can be compiled in several processes first.

A section yields cases. :func:`main` compiles: it starts processes, each of which calls every kernel configuration of
its share once and throws the result away (what stays is the cache). Then it runs the comparisons one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.hopper_bits import compare

Section = Callable[[], Iterator["Case"]]


@dataclass(frozen=True)
class Case:
    """One comparison. ``config`` names what is compiled for it; ``what`` says the rest: shape and class of inputs.

    What stands before `` | `` in ``config`` is the kernel, for the tally by kernel.
    """

    config: str
    what: str
    kernel: Callable[[], torch.Tensor | Sequence[torch.Tensor]]
    expected: Callable[[], torch.Tensor | Sequence[torch.Tensor]]


def once(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function, called at its first use only."""
    found: list[Any] = []

    def run() -> Any:
        if not found:
            found.append(function())
        return found[0]

    return run


def _compile(sections: Sequence[Section], share: int, shares: int) -> None:
    seen: set[str] = set()
    for section in sections:
        with contextlib.suppress(Exception):  # what fails here fails again, and is recorded, in the comparison
            for case in section():
                if case.config not in seen and zlib.crc32(case.config.encode()) % shares == share:
                    seen.add(case.config)
                    with contextlib.suppress(Exception):
                        case.kernel()


def compile_ahead(module: str, arguments: Sequence[str], seconds: float) -> None:
    """Run ``python -m module arguments --share i shares`` side by side, for so many seconds at most."""
    shares = min(12, os.cpu_count() or 1)
    command = [sys.executable, "-m", module, *arguments, "--share"]
    processes = [subprocess.Popen([*command, str(i), str(shares)], stdout=subprocess.DEVNULL) for i in range(shares)]
    end = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _by_kernel(items: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Outputs, differing ones and configurations of every kernel that the items name."""
    found: dict[str, dict[str, int]] = {}
    configurations: dict[str, set[str]] = {}
    for item in items:
        config = item["item"].split(";")[0]
        kernel = config.split(" | ")[0]
        tally = found.setdefault(kernel, {"compared": 0, "differing": 0, "configurations": 0})
        tally["compared"] += item["compared"]
        tally["differing"] += item["differing"]
        configurations.setdefault(kernel, set()).add(config)
        tally["configurations"] = len(configurations[kernel])
    return found


def _several(found: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else found


def _run(section: Section) -> dict[str, Any]:
    began, items, failed = time.monotonic(), [], []
    try:
        for case in section():
            try:
                ours, expected = _several(case.kernel()), _several(case.expected())
                for i, (left, right) in enumerate(zip(ours, expected, strict=True)):
                    right = right.to(left.dtype)  # values of the dtype already: the interpreter holds float32
                    items.append(compare(f"{case.config}; {case.what}, output {i}", left, right))
            except Exception as problem:  # recorded: one broken case must not hide the others
                failed.append(
                    {"item": f"{case.config}; {case.what}", "error": f"{type(problem).__name__}: {problem}"[:600]}
                )
    except Exception:
        failed.append({"item": section.__name__, "error": traceback.format_exc()[-2000:]})
    torch.cuda.empty_cache()
    summary = {
        "section": section.__name__,
        "items": len(items),
        "compared": sum(item["compared"] for item in items),
        "differing": sum(item["differing"] for item in items),
        "configurations": len({item["item"].split(";")[0] for item in items}),
        "seconds": round(time.monotonic() - began, 2),
        "kernels": _by_kernel(items) if any(" | " in item["item"] for item in items) else {},
        "failed": failed,
        "differ": [item for item in items if item["differing"]][:50],
    }
    print(json.dumps({k: v for k, v in summary.items() if k not in ("failed", "differ")}), flush=True)
    for item in (*failed[:5], *summary["differ"][:5]):  # type: ignore[misc]
        print(f"  {json.dumps(item)[:600]}", flush=True)
    return summary


def main(what: str, module: str, sections: Sequence[Section]) -> int:
    """Command line of a benchmark of bits. Returns the exit code: 1 if anything differs or failed."""
    names = [section.__name__ for section in sections]
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    parser.add_argument("--only", nargs="*", default=names, choices=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument("--compile-seconds", type=float, default=60.0, help="for compiling ahead; 0: no such processes")
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = [section for section in sections if section.__name__ in arguments.only]
    if arguments.share:
        _compile(chosen, *arguments.share)
        return 0
    began = time.monotonic()
    if arguments.compile_seconds:
        compile_ahead(module, ["--only", *arguments.only], arguments.compile_seconds)
    compiled = time.monotonic()
    properties = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {
        "what": what,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python -m {module} " + " ".join(sys.argv[1:]),
        "device": {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
        "sections": [],
    }
    for section in chosen:
        result["sections"].append(_run(section))
        done = result["sections"]
        result |= {
            "compared": sum(s["compared"] for s in done),
            "differing": sum(s["differing"] for s in done),
            "failed": sum(len(s["failed"]) for s in done),
            "seconds": {"compiling": round(compiled - began, 1), "comparing": round(time.monotonic() - compiled, 1)},
        }
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result.get(key) for key in ("compared", "differing", "failed", "seconds")}))
    return 1 if result.get("differing") or result.get("failed") else 0
