"""Registers of one wave of 64 lanes on gfx942, and how the text of an operand reads and writes them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkernel.verify.audit import symbols, words
from rlkernel.verify.audit.symbols import Symbols
from rlkernel.verify.audit.words import NotModelled, Word

LANES = 64
ALL = (1 << LANES) - 1
MASK32 = 0xFFFFFFFF
_RANGE = re.compile(r"^([sva])(?:(\d+)|\[(\d+):(\d+)\])$")
_INLINE_FLOATS = {
    "0.5": 0x3F000000,
    "1.0": 0x3F800000,
    "2.0": 0x40000000,
    "4.0": 0x40800000,
    "0.15915494": 0x3E22F983,
    "0.15915494309189532": 0x3E22F983,
}


def to_mask(lanes: NDArray[np.bool_]) -> int:
    """A 64-bit mask from one boolean a lane."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def to_lanes(mask: int) -> NDArray[np.bool_]:
    """One boolean a lane from a 64-bit mask."""
    return np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), dtype=np.uint8), bitorder="little").astype(np.bool_)


def register_range(text: str) -> tuple[str, int, int]:
    """File (``s``, ``v``, ``a``), first register, number of registers."""
    found = _RANGE.match(text)
    if not found:
        raise NotModelled(f"operand {text!r}")
    if found[2] is not None:
        return found[1], int(found[2]), 1
    return found[1], int(found[3]), int(found[4]) - int(found[3]) + 1


def literal(text: str) -> int | None:
    """Bits of a literal or inline constant, 32 bits wide; None for anything else."""
    if text.lstrip("-") in _INLINE_FLOATS:
        return _INLINE_FLOATS[text.lstrip("-")] | (0x80000000 if text.startswith("-") else 0)
    try:
        return int(text, 0) & MASK32
    except ValueError:
        return None


class WaveState:
    """Scalar registers are Python integers (bits alone); vector registers are words with symbols."""

    def __init__(self, unit: tuple[int, int] = (0, 0)) -> None:
        self.unit = unit
        self.s: dict[int, int] = {}
        self.v: dict[tuple[str, int], Word] = {}
        self.special: dict[str, int] = {"vcc": 0, "exec": ALL, "scc": 0, "m0": 0}
        self.exec_lanes = to_lanes(ALL)
        self.classified: dict[str, Symbols] = {}

    # --- scalar -------------------------------------------------------------------------------------------------

    def scalar(self, text: str, words_wide: int = 1) -> int:
        """A scalar source of 32 or 64 bits."""
        if text in ("vcc", "exec"):
            return self.special[text]
        if text in ("vcc_lo", "vcc_hi", "exec_lo", "exec_hi"):
            return self.special[text[:-3]] >> (32 if text.endswith("hi") else 0) & MASK32
        if text == "m0":
            return self.special["m0"]
        value = literal(text)
        if value is not None:
            if words_wide == 2 and value >> 31 and "0x" not in text:
                value |= MASK32 << 32
            return value
        file, first, count = register_range(text)
        if file != "s":
            raise NotModelled(f"vector register {text} where a scalar one is read")
        return sum(self._s(first + i) << (32 * i) for i in range(count))

    def _s(self, index: int) -> int:
        if index not in self.s:
            raise NotModelled(f"s{index} is read before it is written")
        return self.s[index]

    def set_scalar(self, text: str, value: int, words_wide: int = 1) -> None:
        value &= (1 << 32 * words_wide) - 1
        self.classified.pop(text, None)
        if text in ("vcc", "exec"):
            self.special[text] = value
            if text == "exec":
                self.exec_lanes = to_lanes(value)
        elif text in ("vcc_lo", "vcc_hi"):
            shift = 32 if text.endswith("hi") else 0
            self.special["vcc"] = self.special["vcc"] & ~(MASK32 << shift) | (value << shift)
        elif text == "m0":
            self.special["m0"] = value
        else:
            file, first, count = register_range(text)
            if file != "s" or count != words_wide:
                raise NotModelled(f"a scalar result of {32 * words_wide} bits in {text}")
            for i in range(count):
                self.s[first + i] = value >> (32 * i) & MASK32

    # --- vector -------------------------------------------------------------------------------------------------

    def register(self, file: str, index: int) -> Word:
        if (file, index) not in self.v:
            raise NotModelled(f"{file}{index} is read before it is written")
        return self.v[(file, index)]

    def vector(self, text: str) -> Word:
        """A 32-bit source of a vector instruction, modifiers ``-`` and ``|x|`` included."""
        if text.startswith("-") and literal(text) is None:
            return words.negated(self.vector(text[1:]))
        if text.startswith("|") and text.endswith("|"):
            inner = self.vector(text[1:-1])
            if inner.has_symbol():
                raise NotModelled("the absolute value of a traced number")
            return words.plain(inner.bits & np.uint32(0x7FFFFFFF), LANES)
        if text[0] in "va" and text != "vcc":
            file, first, count = register_range(text)
            if count != 1:
                raise NotModelled(f"{text} where one register is read")
            return self.register(file, first)
        return words.plain(self.scalar(text) & MASK32, LANES)

    def vector_range(self, text: str, count: int) -> list[Word]:
        """``count`` registers from a range, or a constant for each of them."""
        if text[0] in "va" and text != "vcc":
            file, first, found = register_range(text)
            if found != count:
                raise NotModelled(f"{text} where {count} registers are read")
            return [self.register(file, first + i) for i in range(count)]
        value = literal(text)
        if value is not None:  # an inline constant stands for each register of a matrix operand
            return [words.plain(value, LANES)] * count
        wide = self.scalar(text, count)
        return [words.plain(wide >> (32 * i) & MASK32, LANES) for i in range(count)]

    def half_of_pair(self, text: str, part: int) -> Word:
        """One register of a pair; the other one is not read, and need not have been written."""
        if text[0] in "va" and text != "vcc":
            file, first, count = register_range(text)
            if count != 2:
                raise NotModelled(f"{text} where a pair of registers is read")
            return self.register(file, first + part)
        if text[0] == "s" and "[" in text:
            _, first, _ = register_range(text)
            return words.plain(self.scalar(f"s{first + part}", 1), LANES)
        return self.vector_range(text, 2)[part]

    def wide(self, text: str) -> NDArray[np.uint64]:
        """A 64-bit source of a vector instruction, bits alone."""
        if text[0] in "va" and text != "vcc":
            low, high = self.vector_range(text, 2)
            return low.bits.astype(np.uint64) | (high.bits.astype(np.uint64) << np.uint64(32))
        return np.full(LANES, self.scalar(text, 2), dtype=np.uint64)

    def set_vector(self, text: str, value: Word) -> None:
        file, first, count = register_range(text)
        if file == "s" or count != 1:
            raise NotModelled(f"a vector result in {text}")
        self.set_register(file, first, value)

    def set_register(self, file: str, index: int, value: Word) -> None:
        key = (file, index)
        if self.special["exec"] != ALL and key in self.v:
            value = words.select(self.exec_lanes, value, self.v[key])
        self.v[key] = value

    def set_range(self, text: str, values: list[Word]) -> None:
        file, first, count = register_range(text)
        if file == "s" or count != len(values):
            raise NotModelled(f"{len(values)} vector results in {text}")
        for i, value in enumerate(values):
            self.set_register(file, first + i, value)

    def set_bits(self, text: str, bits: Any) -> None:
        self.set_vector(text, words.plain(np.asarray(bits).astype(np.uint32), LANES))

    def set_wide(self, text: str, bits: Any) -> None:
        bits = np.asarray(bits).astype(np.uint64)
        halves = [words.plain(bits >> np.uint64(shift) & np.uint64(MASK32), LANES) for shift in (0, 32)]
        self.set_range(text, halves)

    def set_mask(self, text: str, lanes: NDArray[np.bool_]) -> None:
        """Result of a vector comparison: 0 for lanes that are not active."""
        self.set_scalar(text, to_mask(lanes & self.exec_lanes), 2)


__all__ = ["ALL", "LANES", "MASK32", "WaveState", "literal", "register_range", "symbols", "to_lanes", "to_mask"]
