"""Memory that carries symbols beside its bits, and the arguments of one launch laid out in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkernel.verify.audit import symbols
from rlkernel.verify.audit.symbols import NONE, Symbols
from rlkernel.verify.audit.words import NotModelled, Word

_16, _HALF = np.uint32(16), np.uint32(0xFFFF)


class Memory:
    """16-bit units with symbols: global memory (argument buffers with gaps between them) or shared memory."""

    def __init__(self, units: int, base: int, name: str) -> None:
        self.bits = np.zeros(units, dtype=np.uint16)
        self.symbols = np.zeros(units, dtype=np.uint64)
        self.allowed = np.zeros(units, dtype=np.bool_)
        self._base, self._name = base, name

    def _units(self, address: NDArray[Any], count: int, active: NDArray[np.bool_]) -> NDArray[np.int64]:
        offset = address.astype(np.int64) - self._base
        if np.any((offset[active] & 1) != 0):
            raise NotModelled(f"an access to {self._name} memory that is not aligned to two bytes")
        units = (offset >> 1)[:, None] + np.arange(count)
        inside = (units >= 0) & (units < len(self.bits))
        legal = inside & self.allowed[np.where(inside, units, 0)]
        if not bool(np.all(legal[active])):
            wrong = int(offset[active][~legal[active].all(axis=1)][0])
            raise NotModelled(f"an access outside of the arguments: {self._name} memory at offset {wrong}")
        return np.where(active[:, None] & inside, units, 0)

    def load(self, address: NDArray[Any], words: int, active: NDArray[np.bool_]) -> list[Word]:
        """``words`` consecutive registers a thread; threads that are not active get 0."""
        units = self._units(address, 2 * words, active)
        bits = np.where(active[:, None], self.bits[units], np.uint16(0)).astype(np.uint32)
        found = np.where(active[:, None], self.symbols[units], NONE)
        return [
            Word(bits[:, i] | (bits[:, i + 1] << _16), found[:, i], found[:, i + 1]) for i in range(0, 2 * words, 2)
        ]

    def load_half(self, address: NDArray[Any], active: NDArray[np.bool_]) -> Word:
        """One 16-bit unit, in the lower half."""
        units = self._units(address, 1, active)[:, 0]
        bits = np.where(active, self.bits[units], np.uint16(0)).astype(np.uint32)
        return Word(bits, np.where(active, self.symbols[units], NONE), np.zeros(len(bits), dtype=np.uint64))

    def store(self, address: NDArray[Any], values: Sequence[Word], active: NDArray[np.bool_]) -> None:
        """Consecutive registers of each active thread."""
        units = self._units(address, 2 * len(values), active)[active]
        for i, word in enumerate(values):
            self.bits[units[:, 2 * i]] = (word.bits & _HALF)[active]
            self.bits[units[:, 2 * i + 1]] = (word.bits >> _16)[active]
            self.symbols[units[:, 2 * i]] = word.low[active]
            self.symbols[units[:, 2 * i + 1]] = word.high[active]

    def store_half(self, address: NDArray[Any], value: Word, active: NDArray[np.bool_]) -> None:
        """The lower half of each active thread's register."""
        units = self._units(address, 1, active)[active][:, 0]
        self.bits[units] = (value.bits & _HALF)[active]
        self.symbols[units] = value.low[active]

    def gather(self, address: NDArray[np.int64]) -> tuple[NDArray[np.uint16], Symbols]:
        """Bits and symbols of single units at byte addresses of any shape."""
        flat = self._units(address.reshape(-1), 1, np.ones(address.size, dtype=np.bool_))[:, 0]
        return self.bits[flat].reshape(address.shape), self.symbols[flat].reshape(address.shape)


@dataclass(frozen=True)
class Argument:
    """One kernel argument: a scalar of ``kind``, or a buffer of ``shape`` elements of ``dtype``.

    ``kind`` is ``i32``, ``i64`` or ``fp32``; ``dtype`` is ``float32`` or ``bfloat16``, and empty for a scalar.
    """

    name: str
    value: int | float = 0
    kind: str = "i32"
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: NDArray[np.float32] | None = None

    @property
    def is_buffer(self) -> bool:
        return bool(self.dtype)


GLOBAL_BASE = 1 << 32
_GAP = 1 << 12


class Buffers:
    """Global memory with the arguments of one launch. Inputs carry ``element`` symbols, outputs start without any."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self.addresses: dict[str, int] = {}
        self._arguments = {a.name: (number, a) for number, a in enumerate(arguments)}
        offset = _GAP
        for a in arguments:
            if a.is_buffer:
                self.addresses[a.name] = GLOBAL_BASE + offset
                offset += -(-self._size(a) // _GAP) * _GAP + _GAP
        self.memory = Memory(offset // 2, GLOBAL_BASE, "global")
        for number, a in enumerate(arguments):
            if a.is_buffer:
                self._fill(number, a)

    @staticmethod
    def _size(a: Argument) -> int:
        return int(np.prod(a.shape)) * (2 if a.dtype == "bfloat16" else 4)

    def _place(self, a: Argument) -> slice:
        first = (self.addresses[a.name] - GLOBAL_BASE) // 2
        return slice(first, first + self._size(a) // 2)

    def _fill(self, number: int, a: Argument) -> None:
        place = self._place(a)
        self.memory.allowed[place] = True
        if a.data is None:
            return
        found = symbols.element(number, np.arange(int(np.prod(a.shape))))
        flat = np.ascontiguousarray(a.data, dtype=np.float32).reshape(-1)
        if a.dtype == "bfloat16":
            self.memory.bits[place] = flat.view(np.uint16)[1::2]
            self.memory.symbols[place] = found
        else:
            self.memory.bits[place] = flat.view(np.uint16)
            self.memory.symbols[place] = np.stack([symbols.low_mark(found), found], axis=1).reshape(-1)

    def output(self, name: str) -> tuple[NDArray[np.float32], Symbols]:
        """Values and symbols of a buffer, in its shape."""
        _, a = self._arguments[name]
        place = self._place(a)
        bits, found = self.memory.bits[place], self.memory.symbols[place]
        if a.dtype == "bfloat16":
            values = (bits.astype(np.uint32) << _16).view(np.float32)
            return values.reshape(a.shape), found.reshape(a.shape)
        word = Word(np.ascontiguousarray(bits).view(np.uint32), found[0::2], found[1::2])
        return word.floats().reshape(a.shape), word.value().reshape(a.shape)
