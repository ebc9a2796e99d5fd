"""A command whose output nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys


def without_reader(*arguments: object) -> tuple[int, bytes]:
    """Exit code and standard error of ``vime`` in a process of its own, its output a pipe with no reader."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "vime", *map(str, arguments)]
    try:
        ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    return ended.returncode, ended.stderr
