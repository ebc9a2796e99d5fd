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
def _lanes(bits, index, inside, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over COLUMNS neighbours of both lanes, uint64 [GROUPS].

    Args:
        bits: unsigned [GROUPS, COLUMNS]; ``inside``: bool of that shape, elements that exist.
        index: of each group's first element, int64 [GROUPS]. Its product with a lane's constant is one number a thread,
            the rest are constants of its registers.
    """
    wide = bits.to(tl.uint64)
    start = (index + 1).to(tl.uint64)
    c = tl.arange(0, COLUMNS)[None, :].to(tl.uint64)
    first = mix_first((start * INDEX_FIRST)[:, None] + c * INDEX_FIRST + wide)
    second = mix_second((start * INDEX_SECOND)[:, None] + c * INDEX_SECOND + wide)
    first = tl.sum(tl.where(inside, first, 0).to(tl.int64), 1)
    second = tl.sum(tl.where(inside, second, 0).to(tl.int64), 1)
    return first, second


@triton.jit
def tensor_digest(
    data,
    out,
    count,
    offset,
    CANONICAL: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """``out[program] = lanes of GROUPS * COLUMNS * STEPS elements``.

    Args:
        data: bits of the elements, an unsigned integer of BITS bits [count]; ``out``: int64 [programs, 2].
        offset: index of element 0, int64.
        CANONICAL: map every NaN to one pattern first (BITS 16: bfloat16; 32: float32).
        COLUMNS: neighbours that a thread takes together: 16 bytes.
    """
    begin = tl.program_id(0).to(tl.int64) * (GROUPS * COLUMNS * STEPS)
    group = tl.arange(0, GROUPS) * COLUMNS
    first = tl.zeros((GROUPS,), tl.int64)
    second = tl.zeros((GROUPS,), tl.int64)
    for step in range(STEPS):
        i = begin + step * (GROUPS * COLUMNS) + group
        place = i[:, None] + tl.arange(0, COLUMNS)[None, :]
        inside = place < count
        bits = tl.load(data + place, mask=inside, other=0)
        if CANONICAL:
            bits = canonical_bits(bits, BITS)
        a, b = _lanes(bits, i + offset, inside, GROUPS, COLUMNS)
        first += a
        second += b
    tl.store(out + tl.program_id(0) * 2, tl.sum(first, 0))
    tl.store(out + tl.program_id(0) * 2 + 1, tl.sum(second, 0))


@triton.jit
def pieces_digest(
    addresses,
    counts,
    offsets,
    out,
    stride,
    ALIGNED: tl.constexpr,
    BITS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out[:, program] = lanes of one piece``: elements that lie one after the other, anywhere in memory.

    Args:
        addresses: of each piece's first element, int64 [programs]; ``counts`` int32 [programs]: its elements;
            ``offsets`` int64 [programs]: the index of its first element.
        out: int64 [2, programs], rows ``stride`` apart.
        ALIGNED: every address is a multiple of 16 bytes, every count one of COLUMNS.
    """
    piece = tl.program_id(0)
    count = tl.load(counts + piece)
    offset = tl.load(offsets + piece)
    address = tl.load(addresses + piece)
    data = address.to(tl.pointer_type(tl.uint16)) if BITS == 16 else address.to(tl.pointer_type(tl.uint32))
    if ALIGNED:
        data = tl.multiple_of(data, 16)
        count = tl.multiple_of(count, COLUMNS)
    group = tl.arange(0, GROUPS) * COLUMNS
    first = tl.zeros((GROUPS,), tl.int64)
    second = tl.zeros((GROUPS,), tl.int64)
    begin = tl.zeros((), tl.int32)
    while begin < count:
        i = begin + group
        place = i[:, None] + tl.arange(0, COLUMNS)[None, :]
        inside = place < count
        bits = tl.load(data + place, mask=inside, other=0)
        a, b = _lanes(bits, i + offset, inside, GROUPS, COLUMNS)
        first += a
        second += b
        begin += GROUPS * COLUMNS
    tl.store(out + piece, tl.sum(first, 0))
    tl.store(out + stride + piece, tl.sum(second, 0))


@triton.jit
def rows_digest(z, out, columns, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr):
    """``out[row, program] = lanes of GROUPS * COLUMNS * STEPS columns`` of canonical float32 bits, indexed by column.

    Args:
        z: uint32 [R, columns], bits of float32; ``out``: int64 [R, programs, 2]. Grid: (R, programs).
    """
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * (GROUPS * COLUMNS * STEPS)
    group = tl.arange(0, GROUPS) * COLUMNS
    first = tl.zeros((GROUPS,), tl.int64)
    second = tl.zeros((GROUPS,), tl.int64)
    for step in range(STEPS):
        v = begin + step * (GROUPS * COLUMNS) + group
        place = v[:, None] + tl.arange(0, COLUMNS)[None, :]
        inside = place < columns
        bits = canonical_bits(tl.load(z + row * columns + place, mask=inside, other=0), 32)
        a, b = _lanes(bits, v.to(tl.int64), inside, GROUPS, COLUMNS)
        first += a
        second += b
    place_out = out + (row * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(place_out, tl.sum(first, 0))
    tl.store(place_out + 1, tl.sum(second, 0))
