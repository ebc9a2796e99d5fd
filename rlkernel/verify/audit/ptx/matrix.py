"""The matrix instructions of sm_90."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.listing import Instruction
from rlkernel.verify.audit import symbols, words
from rlkernel.verify.audit.ptx import layouts
from rlkernel.verify.audit.ptx.state import PtxState
from rlkernel.verify.audit.words import MatrixEvent, NotModelled


class PtxMatrix(PtxState):
    """Handlers are found by name: ``_op_`` and the instruction up to its first dot."""

    def _op_wgmma(self, parts: list[str], operands: Sequence[str], active: Any, instruction: Instruction) -> None:
        shape = re.match(r"m64n(\d+)k16$", parts[4]) if len(parts) > 4 else None
        if parts[1] != "mma_async" or shape is None or parts[5:] != ["f32", "bf16", "bf16"] or not active.all():
            raise NotModelled("a wgmma of this shape or type")
        columns = int(shape[1])
        accumulators = self._vector(operands[0])
        keep, numbers = self._predicate(operands[3]), [int(text) for text in operands[4:]]
        in_registers = operands[1].startswith("{")
        if numbers[:2] != [1, 1]:
            raise NotModelled("a wgmma that negates an operand")
        transposed = [bool(n) for n in numbers[2:]]
        if not (keep.all() or not keep.any()):
            raise NotModelled("threads of a warpgroup that scale the accumulator apart")
        before = np.zeros((self._threads // 128, 64, columns), dtype=np.uint64)
        places = layouts.accumulator_places(self._threads, columns)
        fresh = not keep.all()
        if keep.all():
            held = [self._word(name) for name in accumulators]
            fresh = not any(word.has_symbol() for word in held)
            for word, (row, column) in zip(held, places, strict=True):
                before[row // 64, row % 64, column] = word.value()
        else:
            before[:] = symbols.constant(0)
        after = np.zeros_like(before)
        for group in range(self._threads // 128):
            first = 128 * group
            if in_registers:
                a = layouts.fragment_a([self._word(name) for name in self._vector(operands[1])])
                a = a[64 * group : 64 * group + 64]
                transposed_b = transposed[-1]
            else:
                descriptor = self._uniform(self._wide_value(operands[1]), first)
                a = layouts.tile_behind_descriptor(self._shared, descriptor, 64, transposed[0])
                transposed_b = transposed[1]
            descriptor = self._uniform(self._wide_value(operands[2]), first)
            b = layouts.tile_behind_descriptor(self._shared, descriptor, columns, transposed_b)
            after[group] = symbols.unit_step(symbols.unit_products(a, b), before[group], True)
            self.events.append(MatrixEvent(instruction.opcode, instruction.location, a, b, fresh, (self._block, group)))
        zeros = np.zeros(self._threads, dtype=np.float32)
        for name, (row, column) in zip(accumulators, places, strict=True):
            self._registers[name] = words.of_value(zeros, after[row // 64, row % 64, column])

    def _uniform(self, values: NDArray[np.uint64], first: int) -> int:
        part = values[first : first + 128]
        if (part != part[0]).any():
            raise NotModelled("a matrix descriptor that differs inside a warpgroup")
        return int(part[0])

    def _op_mma(self, parts: list[str], operands: Sequence[str], active: Any, instruction: Instruction) -> None:
        expected = ["m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"]
        if parts[-7:] != expected or not active.all():
            raise NotModelled("an mma of this shape or type")
        targets = self._vector(operands[0])
        a = layouts.fragment_a([self._word(name) for name in self._vector(operands[1])])
        b_words = [self._word(name) for name in self._vector(operands[2])]
        held = [self._word(name) for name in self._vector(operands[3])]
        fresh = not any(word.has_symbol() for word in held)
        places = layouts.accumulator_places(self._threads, 8)
        before = np.zeros((self._threads // 32 * 16, 8), dtype=np.uint64)
        for word, (row, column) in zip(held, places, strict=True):
            before[row, column] = word.value()
        after = np.zeros_like(before)
        for warp in range(self._threads // 32):
            rows = slice(16 * warp, 16 * warp + 16)
            b = layouts.fragment_b(b_words, warp)
            after[rows] = symbols.unit_step(symbols.unit_products(a[rows], b), before[rows], True)
            self.events.append(
                MatrixEvent(instruction.opcode, instruction.location, a[rows], b, fresh, (self._block, warp))
            )
        zeros = np.zeros(self._threads, dtype=np.float32)
        for name, (row, column) in zip(targets, places, strict=True):
            self._registers[name] = words.of_value(zeros, after[row, column])
