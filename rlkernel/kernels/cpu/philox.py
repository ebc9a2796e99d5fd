"""Philox4x32-10, the counter-based generator of the samplers.

Definition: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). 32-bit words are carried in
uint64: one multiplication then gives the high and the low half, and LLVM vectorises it over counters.
"""

from __future__ import annotations

from numba import uint64

from rlkernel.kernels.cpu.jit import device_function

ROUNDS = 10
_LOW = 0xFFFFFFFF


@device_function
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four random 32-bit words for a counter (c0..c3) and a key (k0, k1); all are uint64 that hold 32 bits."""
    for _ in range(ROUNDS):
        first = c0 * uint64(0xD2511F53)
        second = c2 * uint64(0xCD9E8D57)
        c0 = (second >> uint64(32)) ^ c1 ^ k0
        c1 = second & uint64(_LOW)
        c2 = (first >> uint64(32)) ^ c3 ^ k1
        c3 = first & uint64(_LOW)
        k0 = (k0 + uint64(0x9E3779B9)) & uint64(_LOW)
        k1 = (k1 + uint64(0xBB67AE85)) & uint64(_LOW)
    return c0, c1, c2, c3
