"""Reference-counted KV blocks and the prefix cache over the full ones.

A block belongs to the weight version that wrote it: ``oldest`` and ``newest`` bound the versions of its entries. Full
blocks are cached under (version, chain hash of their tokens and all before them); a hit also compares the tokens.
Only full blocks are ever shared and they are never written again, so no copy-on-write is needed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vime.errors import InvariantViolation
from vime.rollout.native.model import NULL_PAGE

UNWRITTEN_OLDEST = np.iinfo(np.int64).max
UNWRITTEN_NEWEST = -1
ROOT = b"\x00" * 32


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Content of a full block: SHA-256 of its parent's digest and its tokens (int64 bytes)."""

    digest: bytes
    parent: bytes
    tokens: bytes

    @classmethod
    def of(cls, parent: bytes, tokens: NDArray[np.int64]) -> BlockKey:
        """Key of the block that follows the block with digest ``parent`` (:data:`ROOT` for the first)."""
        raw = tokens.tobytes()
        return cls(hashlib.sha256(parent + raw).digest(), parent, raw)


class BlockManager:
    """Owns blocks 1 .. num_blocks (0 is the null page).

    A block is free, referenced (by one or more sequences), or cached (unreferenced, its content still findable).
    Cached blocks count as available: the least recently used is evicted first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)
        self.oldest: NDArray[np.int64] = np.full(num_blocks + 1, UNWRITTEN_OLDEST, np.int64)
        self.newest: NDArray[np.int64] = np.full(num_blocks + 1, UNWRITTEN_NEWEST, np.int64)
        self._free = list(range(num_blocks, NULL_PAGE, -1))
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        self._by_key: dict[tuple[int, bytes], int] = {}
        self._key_of: dict[int, tuple[int, BlockKey]] = {}
        self.peak_in_use = 0
        self.evictions = 0

    @property
    def available(self) -> int:
        """Blocks that :meth:`allocate` can give now."""
        return len(self._free) + len(self._unreferenced)

    @property
    def in_use(self) -> int:
        """Blocks that a sequence references."""
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        """Blocks whose content can be found."""
        return len(self._key_of)

    def allocate(self, count: int) -> list[int]:
        """Take blocks of undefined content, each with one reference. Raises InvariantViolation if too few are left."""
        if count > self.available:
            raise InvariantViolation(f"{count} KV blocks were asked for, {self.available} are available")
        result = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._unreferenced.popitem(last=False)
                self._forget(block)
                self.evictions += 1
            self.references[block] = 1
            self.oldest[block] = UNWRITTEN_OLDEST
            self.newest[block] = UNWRITTEN_NEWEST
            result.append(block)
        self.peak_in_use = max(self.peak_in_use, self.in_use)
        return result

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference a block, the last first (a prefix outlives what follows it)."""
        for block in reversed(blocks):
            if block == NULL_PAGE or self.references[block] < 1:
                raise InvariantViolation(f"KV block {block} is released, but nothing references it")
            self.references[block] -= 1
            if self.references[block] == 0:
                if block in self._key_of:
                    self._unreferenced[block] = None
                else:
                    self._free.append(block)

    def lookup(self, version: int, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks of the longest cached prefix of a chain of keys, without taking references."""
        result = []
        for key in keys:
            block = self._by_key.get((version, key.digest))
            if block is None:
                break
            _, known = self._key_of[block]
            if known.tokens != key.tokens or known.parent != key.parent:
                break
            result.append(block)
        return result

    def unreferenced(self, blocks: Sequence[int]) -> int:
        """How many of these blocks count as available now."""
        return sum(block in self._unreferenced for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Take one reference on each block that :meth:`lookup` found."""
        for block in blocks:
            self._unreferenced.pop(block, None)
            self.references[block] += 1
        self.peak_in_use = max(self.peak_in_use, self.in_use)

    def register(self, block: int, version: int, key: BlockKey) -> None:
        """Make a full block findable. Of two blocks with equal content the first stays the shared one."""
        if self.references[block] < 1:
            raise InvariantViolation(f"KV block {block} is registered for sharing, but nothing references it")
        if (version, key.digest) in self._by_key or block in self._key_of:
            return
        self._by_key[(version, key.digest)] = block
        self._key_of[block] = (version, key)

    def invalidate(self) -> int:
        """Forget all cached content (a commit of weights does this); returns how many blocks lost theirs."""
        count = len(self._key_of)
        self._free.extend(reversed(self._unreferenced))
        self._unreferenced.clear()
        self._by_key.clear()
        self._key_of.clear()
        return count

    def cached_versions(self) -> list[int]:
        """Weight versions that wrote the blocks whose content can be found, ascending."""
        return self._versions(
            np.array(sorted(self._key_of), np.int64), {version for version, _ in self._key_of.values()}
        )

    def versions_in_use(self) -> list[int]:
        """Weight versions that wrote the entries of the blocks that a sequence references, ascending."""
        return self._versions(np.flatnonzero(self.references), set())

    def _versions(self, blocks: NDArray[np.int64], labels: set[int]) -> list[int]:
        written = blocks[self.newest[blocks] != UNWRITTEN_NEWEST]
        return sorted(labels.union(self.oldest[written].tolist(), self.newest[written].tolist()))

    def _forget(self, block: int) -> None:
        version, key = self._key_of.pop(block)
        del self._by_key[(version, key.digest)]

    def mark_written(self, blocks: NDArray[np.integer], version: int) -> None:
        """Note that entries of these blocks are written by a version."""
        self.oldest[blocks] = np.minimum(self.oldest[blocks], version)
        self.newest[blocks] = np.maximum(self.newest[blocks], version)

    def written_by(self, blocks: NDArray[np.integer], version: int) -> bool:
        """Whether every entry of these blocks was written by this version."""
        return bool((self.oldest[blocks] == version).all() and (self.newest[blocks] == version).all())

    def check(self) -> None:
        """Raise InvariantViolation unless every block is in exactly one state and the cache maps agree."""
        referenced = set((np.flatnonzero(self.references[1:]) + 1).tolist())
        free, cached = set(self._free), set(self._unreferenced)
        if (self.references < 0).any():
            raise InvariantViolation(f"negative references: blocks {np.flatnonzero(self.references < 0).tolist()}")
        if len(free) != len(self._free) or free & cached or free & referenced or cached & referenced:
            raise InvariantViolation("a KV block is in two states, or free twice")
        lost = set(range(1, self.num_blocks + 1)) - free - cached - referenced
        if lost:
            raise InvariantViolation(f"KV blocks {sorted(lost)} are neither free, cached nor referenced")
        if {block: (v, k.digest) for block, (v, k) in self._key_of.items()} != {b: k for k, b in self._by_key.items()}:
            raise InvariantViolation("the prefix cache's two maps disagree")
        if not cached <= set(self._key_of) or free & set(self._key_of):
            raise InvariantViolation("an unreferenced block is kept without content, or a free one with content")
