"""Digests of sources and the toolchain: what a certificate is bound to."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import platform
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
import torch

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
    """Digest of a candidate's sources: the modules of its class and of the classes it inherits from, and what it says
    in ``sources`` (modules of this package) and ``source_files`` (of a user's own).

    Implementations ``cpu.*`` are bound to all CPU kernels and to the packing of weights.
    """
    declared = tuple(getattr(candidate, "sources", ()))
    if str(getattr(candidate, "implementation", "")).startswith("cpu."):
        declared += CPU_SOURCES
    files = [*getattr(candidate, "source_files", ())] or files_of_class(type(candidate))
    text = digest_of_files(files) + (digest_of_modules(declared) if declared else "")
    return hashlib.sha256(text.encode()).hexdigest()


def files_of_class(kind: type) -> list[Path]:
    """The files of a class and of those that it inherits from. Raises ContractError where one cannot be found."""
    files = []
    for one in kind.__mro__:
        if one is object or one.__module__ in ("typing", "abc"):
            continue
        try:
            files.append(Path(inspect.getfile(one)))
        except (OSError, TypeError) as error:
            raise ContractError(
                f"the source file of {one.__name__} cannot be found, so that no certificate can be bound to it"
            ) from error
    return list(dict.fromkeys(files))


def files_of_function(function: Callable[..., Any]) -> tuple[Path, ...]:
    """The file of a user's function, and those of the modules beside it (below the same folder) that it has loaded.

    Of what is installed (``site-packages``) only the function's own file counts; the rest has a version.
    Raises ContractError where the file cannot be found (a builtin, a function made by ``exec``).
    """
    for wrapper in ("fn", "py_func"):  # where Triton and Numba keep the Python function
        function = getattr(function, wrapper, function)
    plain = inspect.unwrap(function)
    try:
        file = inspect.getsourcefile(plain) or inspect.getfile(plain)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise ContractError(
            f"the source file of {function!r} cannot be found, so that no certificate can be bound to it; "
            "a Python function that calls it has one"
        )
    own = Path(file).resolve()
    if "site-packages" in own.parts:
        return (own,)
    found, waiting = {own}, [sys.modules.get(plain.__module__)]
    while waiting:
        for other in _modules_named_in(waiting.pop()):
            path = Path(other.__file__ or "").resolve()
            if path.is_relative_to(own.parent) and "site-packages" not in path.parts and path not in found:
                found.add(path)
                waiting.append(other)
    return tuple(sorted(found))


def _modules_named_in(module: ModuleType | None) -> list[ModuleType]:
    """Modules with a file that a module has imported, or of whose classes and functions it has imported some."""
    named = []
    for value in list(vars(module).values()) if module is not None else []:
        if inspect.isclass(value) or inspect.isfunction(value):
            value = sys.modules.get(value.__module__)
        if isinstance(value, ModuleType) and getattr(value, "__file__", None):
            named.append(value)
    return named


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


def torch_toolchain(device: str) -> tuple[tuple[str, str], ...]:
    """What decides the bits of a torch function: versions, and the instruction set and threads, or the device."""
    found = [("torch", str(torch.__version__))]
    if torch.device(device).type == "cpu":
        return (
            *found,
            ("instructions", torch.backends.cpu.get_cpu_capability()),
            ("threads", str(torch.get_num_threads())),
        )
    found.append(("runtime", f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"))
    try:
        found.append(("triton", version("triton")))
    except PackageNotFoundError:
        found.append(("triton", "absent"))
    return (*found, ("device", torch.cuda.get_device_name(device)))


def device_target(device: str) -> str:
    """The target of a torch device: ``cpu``, ``sm_90``, ``gfx942``. Raises ContractError for one that is not here."""
    try:
        kind = torch.device(device).type
    except RuntimeError:  # torch knows no such name
        kind = "unknown"
    if kind == "cpu":
        return "cpu"
    if kind != "cuda" or not torch.cuda.is_available():
        raise ContractError(f"there is no device {device!r} here; 'cpu' there is")
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def identity_of(candidate: Any, target: str) -> Identity:
    """What a certificate of this candidate must say here and now.

    A candidate may name the ``device`` that it runs on (``cpu`` without it) and its own ``toolchain``.
    Raises ContractError for a target that the candidate does not run on here.
    """
    here = device_target(getattr(candidate, "device", "cpu"))
    if target != here:
        raise ContractError(
            f"{candidate.implementation} cannot be admitted for target {target!r} on this machine; for {here!r} it can"
        )
    toolchain = tuple(getattr(candidate, "toolchain", ())) or cpu_toolchain()
    return Identity(candidate.implementation, source_digest_of(candidate), target, toolchain, specification_digest())
