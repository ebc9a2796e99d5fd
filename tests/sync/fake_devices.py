"""Device runtimes of fake_hip.c and fake_cuda.c: built by the system's C compiler, in the place of the vendors'."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

LIBRARIES = {"hip_ipc": ("fake_hip.c", "libamdhip64.so"), "cuda_ipc": ("fake_cuda.c", "libcuda.so.1")}
NEEDS = "the test libraries of device runtimes are built by a C compiler"


def can_be_built() -> bool:
    """Whether there is a C compiler."""
    return shutil.which("cc") is not None


@cache
def build(transport: str, folder: Path) -> str:
    """Compile the library behind a transport into a folder; its path."""
    source, name = LIBRARIES[transport]
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{name}"]
    subprocess.run(["cc", *options, "-o", str(folder / name), str(Path(__file__).with_name(source))], check=True)
    return str(folder / name)


def load(library: str, devices: str) -> None:
    """Let this process find the library under the vendor's name, with ``devices`` (``aa,bb``) in this order.

    Whoever asks the loader for the name gets the library of that name that is there already.
    """
    os.environ["FAKE_HIP_DEVICES"] = devices
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def runtime(transport: str) -> Any:
    """The runtime of a transport's kind of device."""
    from hardware.cuda.runtime import CudaRuntime
    from hardware.rocm.runtime import HipRuntime

    return {"hip_ipc": HipRuntime, "cuda_ipc": CudaRuntime}[transport]()
