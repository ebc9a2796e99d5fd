"""Tensor digests in Triton: two lanes of sums mod 2^64 of mixed (index, bits). Definition: docs/numerics.md.

Integer sums commute, so programs, tiles and ``tl.sum`` may cut and order them anywhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

INDEX_FIRST = tl.constexpr(0x9E3779B97F4A7C15)
INDEX_SECOND = tl.constexpr(0xD1B54A32D192ED03)


@triton.jit
def mix_first(value):
    """First lane's finaliser (constants of SplitMix64's mix13), uint64."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def mix_second(value):
    """Second lane's finaliser (constants of MurmurHash3), uint64."""
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD
    value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53
    return value ^ (value >> 33)


@triton.jit
def canonical_bits(bits, BITS: tl.constexpr):
    """Patterns of float32 (BITS 32, uint32) or bfloat16 (16, uint16) with every NaN as 0x7FC00000 or 0x7FC0."""
    if BITS == 32:
        return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    else:
        return tl.where((bits & 0x7FFF) > 0x7F80, 0x7FC0, bits)


@triton.jit
def tensor_digest(
    data, out, count, offset, CANONICAL: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr
):
    """``out[program] = lanes of BLOCK * STEPS elements``.

    Args:
        data: bits of the elements, an unsigned integer of BITS bits [count]; ``out``: int64 [programs, 2].
        offset: index of element 0, int64.
        CANONICAL: map every NaN to one pattern first (BITS 16: bfloat16; 32: float32).
    """
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    place = tl.arange(0, BLOCK)
    first = tl.zeros((BLOCK,), tl.uint64)
    second = tl.zeros((BLOCK,), tl.uint64)
    for step in range(STEPS):
        i = begin + step * BLOCK + place
        inside = i < count
        bits = tl.load(data + i, mask=inside, other=0)
        if CANONICAL:
            bits = canonical_bits(bits, BITS)
        wide = bits.to(tl.uint64)
        index = (i + offset + 1).to(tl.uint64)
        first += tl.where(inside, mix_first(index * INDEX_FIRST + wide), 0)
        second += tl.where(inside, mix_second(index * INDEX_SECOND + wide), 0)
    tl.store(out + tl.program_id(0) * 2, tl.sum(first.to(tl.int64), 0))
    tl.store(out + tl.program_id(0) * 2 + 1, tl.sum(second.to(tl.int64), 0))


@triton.jit
def rows_digest(z, out, columns, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """``out[row, program] = lanes of BLOCK * STEPS columns`` of canonical float32 bits; the index is the column.

    Args:
        z: uint32 [R, columns], bits of float32; ``out``: int64 [R, programs, 2]. Grid: (R, programs).
    """
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * (BLOCK * STEPS)
    place = tl.arange(0, BLOCK)
    first = tl.zeros((BLOCK,), tl.uint64)
    second = tl.zeros((BLOCK,), tl.uint64)
    for step in range(STEPS):
        v = begin + step * BLOCK + place
        inside = v < columns
        wide = canonical_bits(tl.load(z + row * columns + v, mask=inside, other=0), 32).to(tl.uint64)
        index = (v + 1).to(tl.uint64)
        first += tl.where(inside, mix_first(index * INDEX_FIRST + wide), 0)
        second += tl.where(inside, mix_second(index * INDEX_SECOND + wide), 0)
    place_out = out + (row * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(place_out, tl.sum(first.to(tl.int64), 0))
    tl.store(place_out + 1, tl.sum(second.to(tl.int64), 0))
