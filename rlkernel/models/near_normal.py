"""Nearly normal numbers from Philox, compiled: billions of elements of a large random model in seconds."""

from __future__ import annotations

import hashlib

import numpy as np
from numba import float32, float64, int64, uint64
from numpy.typing import NDArray

from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.philox import philox4x32
from rlkernel.kernels.cpu.threads import Workers

_GRAIN = 1 << 16


@kernel
def _fill(first, last, out, label0, label1, k0, k1, factor):
    for i in range(first, last):
        index = uint64(i)
        w0, w1, w2, w3 = philox4x32(index & uint64(0xFFFFFFFF), index >> uint64(32), label0, label1, k0, k1)
        total = uint64(0)
        for word in (w0, w1, w2, w3):
            total += (word & uint64(0xFFFF)) + (word >> uint64(16))
        # a 16-bit uniform has mean 65535/2: twice the sum is centred by an integer
        out[i] = float32(float64(int64(2) * int64(total) - int64(8 * 65535)) * factor)


def near_normal(
    name: str, seed: int, count: int, deviation: float, workers: Workers | None = None
) -> NDArray[np.float32]:
    """``count`` float32 of mean 0 and the given standard deviation, nearly normal, from (seed, name, index).

    Each is the sum of the eight 16-bit halves of one Philox block, an exact integer (Irwin-Hall, bounded at 4.9
    standard deviations), times one float64 constant, rounded once to float32.
    """
    label = hashlib.sha256(name.encode()).digest()
    words = [np.uint64(int.from_bytes(label[i : i + 4], "little")) for i in (0, 4)]
    # a 16-bit uniform has variance (2^32 - 1)/12
    unit = 0.5 / float(np.sqrt(np.float64(8.0 * 4294967295.0 / 12.0)))
    out = np.empty(count, np.float32)
    key = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    if count:
        (workers or Workers(1)).run(_fill, count, out, *words, *key, unit * deviation, grain=_GRAIN)
    return out
