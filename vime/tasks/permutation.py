"""The seeded permutation of training rows, from integers only, so that every machine draws the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator


def _words(label: str) -> Iterator[int]:
    """Endless uniform 64-bit words: SHA-256 over ``LABEL/BLOCK``, four big-endian words a block."""
    block = 0
    while True:
        data = hashlib.sha256(f"{label}/{block}".encode()).digest()
        for offset in range(0, 32, 8):
            yield int.from_bytes(data[offset : offset + 8], "big")
        block += 1


def _below(bound: int, words: Iterator[int]) -> int:
    """A uniform integer in [0, bound), by rejection (no modulo bias)."""
    limit = 2**64 - 2**64 % bound
    while (word := next(words)) >= limit:
        pass
    return word % bound


def permutation(count: int, label: str) -> tuple[int, ...]:
    """Fisher-Yates over 0..count-1, from the last place down; the same label gives the same permutation."""
    items = list(range(count))
    words = _words(label)
    for last in range(count - 1, 0, -1):
        other = _below(last + 1, words)
        items[last], items[other] = items[other], items[last]
    return tuple(items)
