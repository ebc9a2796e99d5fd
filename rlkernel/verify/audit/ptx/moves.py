"""PTX instructions that move, convert and select values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlkernel.verify.audit import words
from rlkernel.verify.audit.memory import Memory
from rlkernel.verify.audit.ptx.state import INTEGERS, PtxState
from rlkernel.verify.audit.words import NotModelled, Word


class PtxMoves(PtxState):
    """Handlers are found by name: ``_op_`` and the instruction up to its first dot."""

    _parameters: dict[str, int]

    def _op_mov(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        target, source = operands
        if parts[1] == "pred":
            self._predicates[target] = self._predicate(source)
        elif source.startswith("%tid"):
            self._set_bits(target, np.arange(self._threads) if source.endswith("x") else 0, active)
        elif source.startswith("%ctaid"):
            self._set_bits(target, self._block if source.endswith("x") else 0, active)
        elif target.startswith("{"):
            low, high = self._vector(target)
            if parts[1] == "b64":
                for name, half in zip((low, high), self._pair(source), strict=True):
                    self._set(name, half, active)
                return
            if parts[1] != "b32":
                raise NotModelled("a move between vectors of this width")
            word = self._word(source)
            none = np.zeros(self._threads, dtype=np.uint64)
            self._set(low, Word(word.bits & np.uint32(0xFFFF), word.low, none), active)
            self._set(high, Word(word.bits >> np.uint32(16), word.high, none), active)
        elif source.startswith("{"):
            low_word, high_word = (self._word(part) for part in self._vector(source))
            if parts[1] == "b64":
                self._set_pair(target, low_word, high_word, active)
            elif parts[1] == "b32":
                self._set(target, words.pack(low_word, high_word, 0, 0), active)
            else:
                raise NotModelled("a move between vectors of this width")
        elif parts[1].endswith("64"):
            self._set_pair(target, *self._pair(source), active)
        else:
            self._set(target, self._word(source), active)

    def _op_ld(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if parts[1] == "param":
            value = self._parameters[operands[1].strip("[] ")]
            if parts[-1].endswith("64"):
                self._set_wide(operands[0], np.full(self._threads, value, dtype=np.uint64), active)
            else:
                self._set_bits(operands[0], np.full(self._threads, value, dtype=np.uint64), active)
            return
        memory = self._space(parts[1])
        targets = self._vector(operands[0])
        address = self._address(operands[1])
        if parts[-1].endswith("16"):
            for number, target in enumerate(targets):
                self._set(target, memory.load_half(address + np.uint64(2 * number), active), active)
        elif parts[-1].endswith("32"):
            for target, word in zip(targets, memory.load(address, len(targets), active), strict=True):
                self._set(target, word, active)
        elif parts[-1].endswith("64"):
            loaded = memory.load(address, 2 * len(targets), active)
            for number, target in enumerate(targets):
                self._set_pair(target, loaded[2 * number], loaded[2 * number + 1], active)
        else:
            raise NotModelled(f"a load of {parts[-1]}")

    def _op_st(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        memory, address = self._space(parts[1]), self._address(operands[0])
        names = self._vector(operands[1])
        if parts[-1].endswith("64"):
            memory.store(address, [half for name in names for half in self._pair(name)], active)
            return
        sources = [self._word(name) for name in names]
        if parts[-1].endswith("16"):
            for number, word in enumerate(sources):
                memory.store_half(address + np.uint64(2 * number), word, active)
        elif parts[-1].endswith("32"):
            memory.store(address, sources, active)
        else:
            raise NotModelled(f"a store of {parts[-1]}")

    def _space(self, name: str) -> Memory:
        if name == "global":
            return self.buffers.memory
        if name.startswith("shared"):
            return self._shared
        raise NotModelled(f"the memory space {name!r}")

    def _op_cp(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        if parts[1] != "async" or "bulk" in parts:
            raise NotModelled("this copy has no model")
        size = int(operands[2], 0)
        limit = self._word(operands[3]).bits if len(operands) > 3 else np.full(self._threads, size, dtype=np.uint32)
        if not np.isin(limit, (0, size)).all():
            raise NotModelled("a copy of a part of its size")
        loaded = self.buffers.memory.load(self._address(operands[1]), size // 4, active & (limit == size))
        self._shared.store(self._address(operands[0]), loaded, active)

    def _op_shfl(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        mode = parts[2]
        target = operands[0].split("|")[0]
        lane = np.arange(self._threads)
        amount = self._word(operands[2]).bits.astype(np.int64)
        if mode == "bfly":
            source = lane ^ amount
        elif mode == "idx" and operands[3] in ("31", "0x1f"):
            source = lane // 32 * 32 + (amount & 31)
        else:
            raise NotModelled("a shuffle of this mode")
        word = self._word(operands[1])
        self._set(target, Word(word.bits[source], word.low[source], word.high[source]), active)

    def _op_ldmatrix(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        self._require_matrix_move(parts, active)
        targets = self._vector(operands[0])
        rows = self._address(operands[1]).astype(np.int64).reshape(-1, 32)
        lane = np.arange(32)
        for number, target in enumerate(targets):
            starts = rows[:, 8 * number : 8 * number + 8]
            if "trans" in parts:
                place = np.stack([starts[:, 2 * (lane % 4) + c] + 2 * (lane // 4) for c in (0, 1)], axis=-1)
            else:
                place = np.stack([starts[:, lane // 4] + 4 * (lane % 4) + 2 * c for c in (0, 1)], axis=-1)
            bits, found = self._shared.gather(place.reshape(-1, 2))
            wide = bits.astype(np.uint32)
            self._set(target, Word(wide[:, 0] | (wide[:, 1] << np.uint32(16)), found[:, 0], found[:, 1]), active)

    def _op_stmatrix(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        self._require_matrix_move(parts, active)
        rows = self._address(operands[0]).astype(np.int64).reshape(-1, 32)
        lane = np.arange(32)
        for number, name in enumerate(self._vector(operands[1])):
            word = self._word(name)
            starts = rows[:, 8 * number : 8 * number + 8]
            for c in (0, 1):
                half = words.pack(word, word, c, c)
                if "trans" in parts:
                    place = starts[:, 2 * (lane % 4) + c] + 2 * (lane // 4)
                else:
                    place = starts[:, lane // 4] + 4 * (lane % 4) + 2 * c
                self._shared.store_half(place.reshape(-1), half, active)

    def _require_matrix_move(self, parts: list[str], active: Any) -> None:
        if "m8n8" not in parts or "b16" not in parts or not active.all():
            raise NotModelled("a matrix move of this shape")

    def _op_selp(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        condition = self._predicate(operands[3])
        if parts[-1].endswith("64"):
            a, b = self._wide_value(operands[1]), self._wide_value(operands[2])
            self._set_wide(operands[0], np.where(condition, a, b), active)
        else:
            a_word, b_word = self._word(operands[1]), self._word(operands[2])
            self._set(operands[0], words.select(condition, a_word, b_word), active)

    def _op_cvt(self, parts: list[str], operands: Sequence[str], active: Any, _: Any) -> None:
        to, source = parts[-2], parts[-1]
        if to == "bf16x2" and source == "f32" and "rn" in parts and "relu" not in parts:
            (high, high_symbol), (low, low_symbol) = (words.narrowed_bf16(self._word(t)) for t in operands[1:3])
            self._set(operands[0], Word(low | (high << np.uint32(16)), low_symbol, high_symbol), active)
        elif to == "bf16" and source == "f32" and "rn" in parts:
            bits, symbol = words.narrowed_bf16(self._word(operands[1]))
            self._set(operands[0], Word(bits, symbol, np.zeros(self._threads, dtype=np.uint64)), active)
        elif to == "f32" and source == "bf16":
            self._set(operands[0], words.widen_low(self._word(operands[1])), active)
        elif to == "f32" and source in ("s32", "u32") and "rn" in parts:
            (x,) = self._integers(source, operands[1:])
            self._set_bits(operands[0], x.astype(np.float32).view(np.uint32), active)
        elif to.endswith("32") and source.endswith("64") and operands[1] in self._pairs:
            self._set(operands[0], self._pairs[operands[1]][0], active)
        elif {to, source} <= INTEGERS.keys():
            self._widen_integer(to, source, operands, active)
        else:
            raise NotModelled("this conversion has no model")

    def _widen_integer(self, to: str, source: str, operands: Sequence[str], active: Any) -> None:
        (x,) = self._integers(source, operands[1:])
        if source in ("u16", "s16"):
            x = (x & 0xFFFF).astype(INTEGERS[source])
        self._result(to, operands[0], x.astype(INTEGERS[to]), active)
