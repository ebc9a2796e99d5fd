"""Where the operands of sm_90's matrix instructions lie: registers of a warp, shared memory behind a descriptor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlkernel.verify.audit.memory import Memory
from rlkernel.verify.audit.symbols import Symbols
from rlkernel.verify.audit.words import NotModelled, Word

_SWIZZLE_BITS = {0: 0, 1: 7, 2: 3, 3: 1}
_SWIZZLE_BYTES = {1: 128, 2: 64, 3: 32}


def tile_behind_descriptor(memory: Memory, descriptor: int, rows: int, transposed: bool) -> Symbols:
    """Symbols [rows, 16] of a K-major operand of ``wgmma`` k16 with 16-bit elements.

    Fields (PTX ISA, matrix descriptor): start address, stride between groups of eight rows, swizzle. The exclusive-or
    of the swizzle acts on the address bits 4-6 with bits 7-9.

    Raises:
        NotModelled: an operand that is not K-major, or a layout without swizzle.
    """
    if transposed:
        raise NotModelled("a wgmma operand in shared memory that is not K-major")
    start = (descriptor & 0x3FFF) << 4
    stride = ((descriptor >> 32) & 0x3FFF) << 4
    swizzle = (descriptor >> 62) & 3
    if swizzle == 0:
        raise NotModelled("a wgmma operand without swizzle")
    if (descriptor >> 49) & 7:
        raise NotModelled("a matrix descriptor with a base offset")
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    address = start + (r // 8) * stride + (r % 8) * _SWIZZLE_BYTES[swizzle] + 2 * k
    address = address ^ (((address >> 7) & _SWIZZLE_BITS[swizzle]) << 4)
    return memory.gather(address.astype(np.int64))[1]


def _lanes(threads: int) -> NDArray[np.int64]:
    return np.arange(threads) % 32


def fragment_a(registers: Sequence[Word]) -> Symbols:
    """Operand A [16 * warps, 16] from four registers of each thread (m16n8k16, wgmma with A in registers)."""
    threads = len(registers[0].bits)
    lane, warp = _lanes(threads), np.arange(threads) // 32
    out = np.zeros((threads // 32 * 16, 16), dtype=np.uint64)
    for number, word in enumerate(registers):
        row = 16 * warp + lane // 4 + 8 * (number % 2)
        column = 2 * (lane % 4) + 8 * (number // 2)
        out[row, column], out[row, column + 1] = word.halves()
    return out


def fragment_b(registers: Sequence[Word], warp: int) -> Symbols:
    """Operand B as [8, 16] (n, k) of one warp, from two registers of each of its threads (m16n8k16)."""
    lane = np.arange(32)
    out = np.zeros((8, 16), dtype=np.uint64)
    for number, word in enumerate(registers):
        low, high = (half[32 * warp : 32 * warp + 32] for half in word.halves())
        out[lane // 4, 2 * (lane % 4) + 8 * number] = low
        out[lane // 4, 2 * (lane % 4) + 8 * number + 1] = high
    return out


def accumulator_places(threads: int, columns: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(row, column) of every thread for each accumulator register: 16 rows a warp, ``columns`` in chunks of 8."""
    lane, warp = _lanes(threads), np.arange(threads) // 32
    places = []
    for chunk in range(columns // 8):
        for number in range(4):
            row = 16 * warp + lane // 4 + 8 * (number // 2)
            places.append((row, 8 * chunk + 2 * (lane % 4) + number % 2))
    return places
