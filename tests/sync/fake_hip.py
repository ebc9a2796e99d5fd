"""The HIP runtime of fake_hip.c: built by the system's C compiler, and put in the place of libamdhip64.so."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_hip.c")
NEEDS = "the test library of HIP calls is built by a C compiler"


def can_be_built() -> bool:
    """Whether there is a C compiler."""
    return shutil.which("cc") is not None


@cache
def build(folder: Path) -> Path:
    """Compile the library into a folder; its path."""
    library = folder / "libamdhip64.so"
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *options, "-o", str(library), str(SOURCE)], check=True)
    return library


def load(library: str, devices: str, memory: str = "") -> None:
    """Let hip-python find this library in this process, which sees ``devices`` (``aa,bb``) in this order.

    hip-python asks the loader for the name, and the loader takes a library of that name which is there already.
    """
    os.environ["FAKE_HIP_DEVICES"] = devices
    os.environ["FAKE_HIP_MEMORY"] = memory or str(1 << 40)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
