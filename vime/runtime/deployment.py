"""Deployment: implementations, versions, source digests and the device of one side, as plain data."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlkernel.kernels.cpu.jit import source_digest

PACKAGES = ("vime", "torch", "numpy", "numba", "llvmlite", "zarr", "transformers", "tokenizers")


def package_versions() -> dict[str, str]:
    """Versions of the packages that a run computes with; ``absent`` for one that is not installed."""
    return {name: _package_version(name) for name in PACKAGES}


@cache
def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def cpu_name() -> str:
    """The processor's name, as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_deployment(implementations: Mapping[str, str], sources: Mapping[str, str]) -> dict[str, Any]:
    """What computes: implementations by region, source digests (kernels, user functions), versions, device."""
    return {
        "implementations": dict(implementations),
        "sources": {"rlkernel.kernels.cpu": source_digest(), **sources},
        "versions": {**package_versions(), "python": platform.python_version()},
        "device": {"kind": "cpu", "name": cpu_name(), "machine": platform.machine()},
    }
