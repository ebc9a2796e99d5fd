"""Registers, predicates and memory of one block of threads, and how the text of an operand reads and writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.listing import Listing
from rlkernel.verify.audit import words
from rlkernel.verify.audit.memory import Argument, Buffers, Memory
from rlkernel.verify.audit.words import MatrixEvent, NotModelled, Word

SHARED_BASE = 1024
_SHARED_BYTES = 228 * 1024
_ADDRESS = re.compile(r"^\[\s*([%$\w]+)\s*(?:\+\s*(-?\d+))?\s*\]$")
INTEGERS: Mapping[str, Any] = {
    "u16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
}


class PtxState:
    """What all groups of instructions work on. 64-bit registers that hold two traced values are kept as pairs too."""

    def __init__(self, listing: Listing, arguments: Sequence[Argument], threads: int, block: int = 0) -> None:
        self._listing, self._threads, self._block = listing, threads, block
        self.buffers = Buffers(arguments)
        self.events: list[MatrixEvent] = []
        self._shared = Memory(_SHARED_BYTES // 2, SHARED_BASE, "shared")
        self._shared.allowed[:] = True
        self._registers: dict[str, Word] = {}
        self._wide: dict[str, NDArray[np.uint64]] = {}
        self._pairs: dict[str, tuple[Word, Word]] = {}
        self._predicates: dict[str, NDArray[np.bool_]] = {}
        self._all = np.ones(threads, dtype=np.bool_)

    def _literal(self, text: str) -> int | None:
        if text.startswith(("0f", "0F")):
            return int(text[2:], 16)
        try:
            return int(text, 0)
        except ValueError:
            return None

    def _word(self, text: str) -> Word:
        if text in self._registers:
            return self._registers[text]
        value = self._literal(text)
        if value is None and text == self._listing.directives.get("shared"):
            value = SHARED_BASE
        if value is None:
            raise NotModelled(f"operand {text!r}")
        return words.plain(value & 0xFFFFFFFF, self._threads)

    def _wide_value(self, text: str) -> NDArray[np.uint64]:
        if text in self._wide:
            return self._wide[text]
        value = self._literal(text)
        if value is None:
            if text in self._registers:
                raise NotModelled(f"the 32-bit register {text} where 64 bits are read")
            raise NotModelled(f"operand {text!r}")
        return np.full(self._threads, value & (1 << 64) - 1, dtype=np.uint64)

    def _predicate(self, text: str) -> NDArray[np.bool_]:
        if text.startswith("!"):
            return ~self._predicate(text[1:])
        if text in self._predicates:
            return self._predicates[text]
        value = self._literal(text)
        if value is None:
            raise NotModelled(f"predicate {text!r}")
        return np.full(self._threads, value != 0)

    def _vector(self, text: str) -> list[str]:
        return [part.strip() for part in text.strip("{} ").split(",")] if text.startswith("{") else [text]

    def _address(self, text: str) -> NDArray[np.uint64]:
        found = _ADDRESS.match(text)
        if not found:
            raise NotModelled(f"address {text!r}")
        base = self._wide[found[1]] if found[1] in self._wide else self._word(found[1]).bits.astype(np.uint64)
        return np.asarray(base + np.uint64(int(found[2] or 0) & (1 << 64) - 1))

    def _set(self, name: str, value: Word, active: NDArray[np.bool_]) -> None:
        if name.startswith("%rd"):  # a 32-bit load may name a 64-bit register: the rest becomes 0
            self._set_pair(name, value, words.plain(0, self._threads), active)
            return
        if not active.all() and name in self._registers:
            value = words.select(active, value, self._registers[name])
        self._registers[name] = value

    def _set_bits(self, name: str, bits: Any, active: NDArray[np.bool_]) -> None:
        self._set(name, words.plain(np.asarray(bits).astype(np.uint32), self._threads), active)

    def _set_pair(self, name: str, low: Word, high: Word, active: NDArray[np.bool_]) -> None:
        if not active.all() and name in self._pairs:
            old = self._pairs[name]
            low, high = words.select(active, low, old[0]), words.select(active, high, old[1])
        self._set_wide(name, low.bits.astype(np.uint64) | (high.bits.astype(np.uint64) << np.uint64(32)), active)
        self._pairs[name] = (low, high)

    def _pair(self, name: str) -> tuple[Word, Word]:
        if name in self._pairs:
            return self._pairs[name]
        value = self._wide_value(name)
        low, high = value & np.uint64(0xFFFFFFFF), value >> np.uint64(32)
        return words.plain(low, self._threads), words.plain(high, self._threads)

    def _set_wide(self, name: str, value: Any, active: NDArray[np.bool_]) -> None:
        self._pairs.pop(name, None)
        value = np.asarray(value).astype(np.uint64)
        self._wide[name] = np.where(active, value, self._wide[name]) if name in self._wide else value

    def _integers(self, kind: str, texts: Sequence[str]) -> list[Any]:
        if kind.endswith("64"):
            return [self._wide_value(text).view(INTEGERS.get(kind, np.uint64)) for text in texts]
        dtype = INTEGERS.get(kind, np.uint32)
        return [
            np.ascontiguousarray(self._word(text).bits).view(np.int32 if dtype is np.int32 else np.uint32)
            for text in texts
        ]

    def _result(self, kind: str, name: str, value: Any, active: Any) -> None:
        value = np.asarray(value)
        if kind.endswith("64"):
            self._set_wide(name, value.view(np.uint64) if value.dtype == np.int64 else value, active)
        else:
            self._set_bits(name, value.view(np.uint32) if value.dtype == np.int32 else value, active)
