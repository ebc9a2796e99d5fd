"""Digest of one stored array."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def array_digest(array: NDArray[Any]) -> str:
    """SHA-256 (hex) over dtype, shape and bytes in C order, little endian.

    Bits count: -0 and +0 differ, and so do NaNs of different patterns.
    """
    canonical = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    header = f"{canonical.dtype.name}|{','.join(str(n) for n in array.shape)}|"
    hasher = hashlib.sha256(header.encode())
    hasher.update(canonical.tobytes())
    return hasher.hexdigest()


def arrays_digest(**arrays: NDArray[Any]) -> str:
    """One SHA-256 over several named arrays, in name order."""
    hasher = hashlib.sha256()
    for name in sorted(arrays):
        hasher.update(f"{name}={array_digest(arrays[name])};".encode())
    return hasher.hexdigest()
