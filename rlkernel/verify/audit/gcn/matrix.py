"""MFMA of gfx942: which k every lane group supplies, and where results lie (AMD Instinct MI300 ISA, matrix layouts)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rlkernel.verify.audit import symbols
from rlkernel.verify.audit.gcn.state import LANES
from rlkernel.verify.audit.symbols import Symbols
from rlkernel.verify.audit.words import NotModelled, Word

_NAME = re.compile(r"^v_mfma_f32_(\d+)x(\d+)x(\d+)_?(bf16|f32)(?:_1k)?$")
_KNOWN = {("bf16", 32, 8), ("bf16", 16, 16), ("f32", 32, 2), ("f32", 16, 4)}


@dataclass(frozen=True)
class Shape:
    """A matrix instruction: ``size`` x ``size`` outputs over ``depth`` of k, elements of ``dtype``."""

    size: int
    depth: int
    dtype: str

    @property
    def accumulators(self) -> int:
        return self.size * self.size // LANES

    @property
    def operand_registers(self) -> int:
        return 2 if self.dtype == "bf16" else 1


def shape_of(opcode: str) -> Shape:
    """The shape of a matrix instruction. Raises NotModelled for one that has no model here."""
    found = _NAME.match(opcode)
    if not found or found[1] != found[2] or (found[4], int(found[1]), int(found[3])) not in _KNOWN:
        raise NotModelled("a matrix instruction of this shape or type")
    return Shape(int(found[1]), int(found[3]), found[4])


def operand(shape: Shape, registers: list[Word]) -> Symbols:
    """[size, depth] of one operand: lane l holds row ``l % size`` and the k of group ``l // size``."""
    lane = np.arange(LANES)
    out = np.zeros((shape.size, shape.depth), dtype=np.uint64)
    row, group = lane % shape.size, lane // shape.size
    if shape.dtype == "f32":
        out[row, group] = registers[0].value()
        return out
    for number, word in enumerate(registers):
        out[row, 4 * group + 2 * number], out[row, 4 * group + 2 * number + 1] = word.halves()
    return out


def places(shape: Shape) -> list[tuple[np.ndarray, np.ndarray]]:
    """(row, column) of every lane for each accumulator register."""
    lane = np.arange(LANES)
    group = lane // shape.size
    if shape.size == 32:
        return [(8 * (r // 4) + 4 * group + r % 4, lane % 32) for r in range(16)]
    return [(4 * group + r, lane % 16) for r in range(4)]


def step(shape: Shape, a: Symbols, b: Symbols, c: Symbols) -> Symbols:
    """The accumulators after the instruction: bf16 in groups of eight k, each rounded; f32 one fma after another."""
    if shape.dtype == "f32":
        for k in range(shape.depth):
            c = symbols.fma(a[:, k : k + 1], b[None, :, k], c)
        return c
    for k in range(0, shape.depth, 8):
        c = symbols.unit_step(symbols.unit_products(a[:, k : k + 8], b[:, k : k + 8]), c, False)
    return c
