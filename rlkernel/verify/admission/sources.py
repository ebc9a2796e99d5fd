"""Digests of sources and the toolchain: what a certificate is bound to."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.microkernel import LANES, VECTORS
from rlkernel.verify.admission.certificate import Identity

CPU_SOURCES = ("rlkernel.kernels.cpu", "rlkernel.contract.constants", "rlkernel.ops.weights")
SPECIFICATION = ("rlkernel.reference", "rlkernel.verify.admission", "hardware.matrix", "rlkernel.contract.constants")


def _files(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        if spec is not None and spec.submodule_search_locations:
            return sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.py"))
        raise ContractError(f"the sources of {name!r} cannot be found, so that no certificate can be bound to them")
    origin = Path(spec.origin)
    return sorted(origin.parent.glob("*.py")) if spec.submodule_search_locations else [origin]


def digest_of_files(files: Iterable[Path]) -> str:
    """SHA-256 over names and contents."""
    total = hashlib.sha256()
    for path in files:
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


@cache
def digest_of_modules(names: tuple[str, ...]) -> str:
    """SHA-256 over the sources of modules and packages (a package: the files of its own folder)."""
    return digest_of_files(path for name in names for path in _files(name))


def specification_digest() -> str:
    """Digest of the interpreter and of the problems and comparison of the admission."""
    return digest_of_modules(SPECIFICATION)


def source_digest_of(candidate: Any) -> str:
    """Digest of a candidate's sources: the module of its class or function, and what it says in ``sources``.

    Implementations ``cpu.*`` are bound to all CPU kernels and to the packing of weights.
    """
    owner = candidate if inspect.isfunction(candidate) else type(candidate)
    declared = tuple(getattr(candidate, "sources", ()))
    if str(getattr(candidate, "implementation", "")).startswith("cpu."):
        declared += CPU_SOURCES
    own = getattr(candidate, "source_file", None) or inspect.getsourcefile(inspect.unwrap(owner))
    if own is None:
        raise ContractError(f"the source file of {owner!r} cannot be found, so that no certificate can be bound to it")
    text = digest_of_files([Path(own)]) + (digest_of_modules(declared) if declared else "")
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def cpu_toolchain() -> tuple[tuple[str, str], ...]:
    """Versions that decide which machine code a CPU kernel becomes."""
    return (
        ("llvmlite", llvmlite.__version__),
        ("machine", platform.machine()),
        ("numba", numba.__version__),
        ("numpy", np.__version__),
        ("vectors", f"{VECTORS}x{LANES}"),
    )


def identity_of(candidate: Any, target: str) -> Identity:
    """What a certificate of this candidate must say here and now. Raises ContractError for an unknown target."""
    if target != "cpu":
        raise ContractError(f"target {target!r} cannot be admitted on this machine; 'cpu' can")
    return Identity(
        candidate.implementation, source_digest_of(candidate), target, cpu_toolchain(), specification_digest()
    )
