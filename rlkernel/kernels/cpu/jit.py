"""Compilation of the CPU kernels with Numba.

Two properties of Numba decide what this module does (both were observed, see docs/numerics.md):

* ``cache=True`` notices an edit of the file that holds a kernel, but not an edit of a helper that the
  kernel imports. The cache folder is therefore named by a digest of every source file of this package:
  after any edit nothing old can run.
* ``fastmath`` would allow contraction and reassociation. It stays off; where a fused multiply-add is
  meant it is written, as :func:`rlkernel.kernels.cpu.primitives.fma`.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import config

from rlkernel.contract import constants


@cache
def source_digest() -> str:
    """SHA-256 over the names and contents of all sources of the CPU kernels, the constants that they take included."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), Path(constants.__file__)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _user_cache_root() -> Path:
    home = Path.home() / ".cache"
    try:
        home.mkdir(parents=True, exist_ok=True)
        return home
    except OSError:
        return Path(tempfile.gettempdir())


@cache
def cache_folder() -> Path:
    """Where compiled kernels are kept: one folder a (sources, Numba, llvmlite) triple."""
    toolchain = f"numba-{numba.__version__}-llvmlite-{llvmlite.__version__}"
    return _user_cache_root() / "rlkernel" / toolchain / source_digest()[:32]


@contextmanager
def _own_cache() -> Iterator[None]:
    """What is compiled meanwhile is kept in :func:`cache_folder`."""
    previous = getattr(config, "CACHE_DIR", "")
    setattr(config, "CACHE_DIR", str(cache_folder()))  # noqa: B010 (the module's attributes are made at run time)
    try:
        yield
    finally:
        setattr(config, "CACHE_DIR", previous)  # noqa: B010


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a kernel: no GIL, NumPy's division semantics, no fast math, cached by all sources."""
    with _own_cache():
        return numba.njit(nogil=True, error_model="numpy", fastmath=False, cache=True)(function)


def device_function(function: Callable[..., Any]) -> Any:
    """Compile a helper that is always inlined into the kernels that call it."""
    return numba.njit(nogil=True, error_model="numpy", fastmath=False, inline="never", forceinline=True)(function)


def c_function(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile a function with a C address, which compiled code of other threads can call; as :func:`kernel` else."""
    with _own_cache():
        return numba.cfunc(signature, error_model="numpy", fastmath=False, cache=True)(function)
