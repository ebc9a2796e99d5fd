"""Executes an amdgcn listing for one workgroup of gfx942, wave by wave, on bits and on symbols. No GPU.

Waves run one after another from barrier to barrier. Loads take effect where they are issued: what a missing wait or
barrier would break is not seen here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware.listing import Instruction, Listing
from rlkernel.verify.audit import words
from rlkernel.verify.audit.gcn import compare as gcn_compare
from rlkernel.verify.audit.gcn import crosslane
from rlkernel.verify.audit.gcn import matrix as gcn_matrix
from rlkernel.verify.audit.gcn.scalar import IGNORED, execute_scalar
from rlkernel.verify.audit.gcn.state import LANES, MASK32, WaveState, register_range
from rlkernel.verify.audit.gcn.vector import HANDLERS
from rlkernel.verify.audit.memory import Argument, Buffers, Memory
from rlkernel.verify.audit.words import MatrixEvent, NotModelled, Word

_LDS_BYTES = 64 * 1024
_KERNARG = 1 << 20
_WIDTH = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4, "b32": 1, "b64": 2, "b96": 3, "b128": 4}
_HALF = ("ushort", "short", "u16")
_DS = re.compile(r"^ds_(read|write)(2?)(st64)?_(b32|b64|b96|b128|u16|b16|b16_d16_hi|u16_d16|u16_d16_hi)$")


@dataclass
class _Branch:
    target: str


class GcnMachine:
    """One workgroup. Build it, call :meth:`run`, read ``buffers`` and ``events``."""

    def __init__(self, listing: Listing, arguments: Sequence[Argument], threads: int, block: int = 0) -> None:
        if threads % LANES:
            raise NotModelled(f"a workgroup of {threads} threads, not of whole waves of {LANES}")
        self._listing = listing
        self.buffers = Buffers(arguments)
        self.events: list[MatrixEvent] = []
        self._lds = Memory(_LDS_BYTES // 2, 0, "shared")
        self._lds.allowed[:] = True
        self._kernarg = self._pack(arguments)
        self._waves = [self._start(index, block) for index in range(threads // LANES)]

    def _pack(self, arguments: Sequence[Argument]) -> list[int]:
        data = bytearray()
        for a in arguments:
            if a.is_buffer:
                size, value = 8, self.buffers.addresses[a.name]
            elif a.kind == "fp32":
                size, value = 4, int(np.float32(a.value).view(np.uint32))
            else:
                size = 8 if a.kind == "i64" else 4
                value = int(a.value) & (1 << 8 * size) - 1
            data += bytes(-len(data) % size) + value.to_bytes(size, "little")
        declared = int(self._listing.directives.get("amdhsa_kernarg_size", "0"))
        data += bytes(max(0, declared - len(data)) + 64)
        data += bytes(-len(data) % 4)
        return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]

    def _start(self, index: int, block: int) -> WaveState:
        wave, directives = WaveState((block, index)), self._listing.directives
        count = int(directives.get("amdhsa_user_sgpr_count", "2"))
        preloaded = int(directives.get("amdhsa_user_sgpr_kernarg_preload_length", "0"))
        wave.set_scalar("s[0:1]", _KERNARG, 2)
        for i in range(preloaded):
            wave.s[2 + i] = self._kernarg[i]
        wave.s[count] = block
        for axis in "yz":  # the grid of a launch has one axis
            if directives.get(f"amdhsa_system_sgpr_workgroup_id_{axis}") == "1":
                count += 1
                wave.s[count] = 0
        wave.set_bits("v0", np.arange(LANES * index, LANES * (index + 1)))
        return wave

    def run(self, limit: int = 2_000_000) -> None:
        """Run to the end. Raises NotModelled, with the instruction and its source line, where the model ends."""
        running = [self._advance(wave, limit) for wave in self._waves]
        while running:
            alive = [wave for wave in running if next(wave, None) is not None]
            if alive and len(alive) != len(running):
                raise NotModelled("some waves end while others wait at a barrier")
            running = alive

    def _advance(self, wave: WaveState, limit: int) -> Iterator[bool]:
        at = 0
        for _ in range(limit):
            if at >= len(self._listing.instructions):
                return
            instruction = self._listing.instructions[at]
            if instruction.opcode == "s_endpgm":
                return
            if instruction.opcode == "s_barrier":
                yield True
                at += 1
                continue
            try:
                branch = self._execute(wave, instruction)
            except NotModelled as problem:
                raise NotModelled(f"{instruction.text[:160]} at {instruction.location}: {problem}") from problem
            at = self._listing.labels[branch.target] if branch else at + 1
        raise NotModelled(f"a wave did not end within {limit} instructions")

    def _execute(self, w: WaveState, i: Instruction) -> _Branch | None:
        opcode = i.opcode
        if opcode.startswith(IGNORED):
            return None
        if opcode.startswith(("s_branch", "s_cbranch")):
            return _Branch(i.operands[0]) if self._taken(w, opcode) else None
        if opcode.startswith("s_load_dword"):
            self._load_scalar(w, i)
        elif opcode.startswith("s_"):
            if not execute_scalar(w, opcode, i.operands):
                raise NotModelled("this instruction has no model")
        elif opcode.startswith("v_mfma"):
            self._matrix(w, i)
        elif opcode.startswith(("global_load", "global_store", "buffer_load", "buffer_store")):
            self._global(w, i)
        elif opcode.startswith("ds_"):
            self._shared(w, i)
        else:
            self._vector(w, i)
        return None

    @staticmethod
    def _taken(w: WaveState, opcode: str) -> bool:
        kind = opcode.removeprefix("s_cbranch_")
        conditions = {
            "s_branch": True,
            "scc0": not w.special["scc"],
            "scc1": bool(w.special["scc"]),
            "vccz": w.special["vcc"] == 0,
            "vccnz": w.special["vcc"] != 0,
            "execz": w.special["exec"] == 0,
            "execnz": w.special["exec"] != 0,
        }
        if kind not in conditions:
            raise NotModelled("this branch has no model")
        return conditions[kind]

    def _vector(self, w: WaveState, i: Instruction) -> None:
        name, o = i.opcode, i.operands
        for suffix in ("_e32", "_e64", "_sdwa", "_dpp"):
            name = name.removesuffix(suffix)
        if name.startswith("v_cmp_"):
            gcn_compare.compare(w, name, o)
        elif name == "v_cndmask_b32":
            gcn_compare.select(w, o, i)
        elif name == "v_sqrt_f32":
            gcn_compare.approximate_root(w, o)
        elif name in ("v_rcp_f32", "v_rcp_iflag_f32"):
            gcn_compare.approximate_reciprocal(w, o)
        elif name == "v_div_scale_f32":
            gcn_compare.scale(w, o)
        elif name == "v_div_fmas_f32":
            gcn_compare.last_step(w, o)
        elif name == "v_div_fixup_f32":
            gcn_compare.fixup(w, o)
        elif name == "v_add_u32" and gcn_compare.step_unit(w, o):
            pass
        elif name in HANDLERS:
            if i.opcode.endswith("_dpp"):
                crosslane.execute(w, i, HANDLERS[name])
            else:
                HANDLERS[name](w, o, i)
        else:
            raise NotModelled("this instruction has no model")

    def _load_scalar(self, w: WaveState, i: Instruction) -> None:
        target, base, offset = i.operands
        _, first, count = register_range(target)
        address = w.scalar(base, 2) + int(offset, 0)
        index = (address - _KERNARG) // 4
        if 0 <= index <= len(self._kernarg) - count:
            for number in range(count):
                w.s[first + number] = self._kernarg[index + number]
            return
        # a buffer of integers: scalar registers carry no symbols, so that a float read this way proves nothing
        words = self.buffers.memory.load(np.array([address]), count, np.array([True]))
        for number, word in enumerate(words):
            w.s[first + number] = int(word.bits[0])

    # --- memory -------------------------------------------------------------------------------------------------

    def _global(self, w: WaveState, i: Instruction) -> None:
        parts = i.opcode.split("_")
        store, width = parts[1] == "store", "_".join(parts[2:])
        data, rest = (
            (i.operands[1], i.operands[0]) if store and parts[0] == "global" else (i.operands[0], i.operands[1])
        )
        offset = int(i.modifiers.get("offset", "0"), 0)
        active = w.exec_lanes
        if parts[0] == "global":
            base = i.operands[2]
            if base == "off":
                address = w.wide(rest)
            else:
                address = w.vector(rest).bits.astype(np.uint64) + np.uint64(w.scalar(base, 2))
            address = address + np.uint64(offset & (1 << 64) - 1)
        else:
            address, active = self._buffer_address(w, i, offset)
        memory = self.buffers.memory
        if width in _WIDTH:
            count = _WIDTH[width]
            if store:
                memory.store(address, w.vector_range(data, count) if count > 1 else [w.vector(data)], active)
            else:
                w.set_range(data, memory.load(address, count, active))
        elif width in _HALF:
            if store:
                memory.store_half(address, w.vector(data), active)
            else:
                w.set_vector(data, memory.load_half(address, active))
        elif width == "short_d16_hi" and store:
            word = w.vector(data)
            memory.store_half(address, words.pack(word, word, 1, 1), active)
        else:
            raise NotModelled("a memory access of this width")

    @staticmethod
    def _buffer_address(w: WaveState, i: Instruction, offset: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        if "idxen" in i.modifiers or "offen" not in i.modifiers:
            raise NotModelled("a buffer access of this addressing mode")
        resource = w.scalar(i.operands[2], 4)
        base, stride, records = resource & (1 << 48) - 1, resource >> 48 & 0x3FFF, resource >> 64 & MASK32
        if stride:
            raise NotModelled("a buffer access with a stride")
        place = w.vector(i.operands[1]).bits.astype(np.uint64) + np.uint64(offset)
        inside = place < records
        return place + np.uint64(base) + np.uint64(w.scalar(i.operands[3])), w.exec_lanes & inside

    def _shared(self, w: WaveState, i: Instruction) -> None:
        if i.opcode == "ds_bpermute_b32":
            source = (w.vector(i.operands[1]).bits >> np.uint32(2)).astype(np.int64) % LANES
            word = w.vector(i.operands[2])
            w.set_vector(i.operands[0], Word(word.bits[source], word.low[source], word.high[source]))
            return
        found = _DS.match(i.opcode)
        if not found:
            raise NotModelled("this instruction has no model")
        write, two, scaled, kind = found[1] == "write", bool(found[2]), bool(found[3]), found[4]
        base = w.vector(i.operands[0] if write else i.operands[1]).bits.astype(np.int64)
        if kind.startswith(("u16", "b16")):
            self._shared_half(w, i, base + int(i.modifiers.get("offset", "0"), 0), kind)
            return
        count = _WIDTH[kind]
        unit = 4 * count * (64 if scaled else 1)
        names = ("offset0", "offset1") if two else ("offset",)
        addresses = [base + int(i.modifiers.get(name, "0"), 0) * (unit if two else 1) for name in names]
        if write:
            for address, text in zip(addresses, i.operands[1:], strict=True):
                values = w.vector_range(text, count) if count > 1 else [w.vector(text)]
                self._lds.store(address, values, w.exec_lanes)
        else:
            loaded = [word for address in addresses for word in self._lds.load(address, count, w.exec_lanes)]
            w.set_range(i.operands[0], loaded)

    def _shared_half(self, w: WaveState, i: Instruction, address: NDArray[np.int64], kind: str) -> None:
        if i.opcode.startswith("ds_write"):
            word = w.vector(i.operands[1])
            half = words.pack(word, word, 1, 1) if kind.endswith("d16_hi") else word
            self._lds.store_half(address, half, w.exec_lanes)
            return
        loaded = self._lds.load_half(address, w.exec_lanes)
        if "d16" in kind:  # the other half of the register stays
            old = w.vector(i.operands[0])
            loaded = words.pack(old, loaded, 0, 0) if kind.endswith("hi") else words.pack(loaded, old, 0, 1)
        w.set_vector(i.operands[0], loaded)

    # --- matrix instructions ------------------------------------------------------------------------------------

    def _matrix(self, w: WaveState, i: Instruction) -> None:
        shape = gcn_matrix.shape_of(i.opcode)
        if i.modifiers or not w.exec_lanes.all():
            raise NotModelled("a matrix instruction with modifiers or inactive lanes")
        target, left, right, start = i.operands
        count = shape.operand_registers
        a, b = (
            gcn_matrix.operand(shape, w.vector_range(text, count) if count > 1 else [w.vector(text)])
            for text in (left, right)
        )
        held = w.vector_range(start, shape.accumulators)
        before = np.zeros((shape.size, shape.size), dtype=np.uint64)
        places = gcn_matrix.places(shape)
        for word, (row, column) in zip(held, places, strict=True):
            before[row, column] = word.value()
        after = gcn_matrix.step(shape, a, b, before)
        fresh = not any(word.has_symbol() for word in held)
        self.events.append(MatrixEvent(i.opcode, i.location, a, b, fresh, w.unit))
        zeros = np.zeros(LANES, dtype=np.float32)
        w.set_range(target, [words.of_value(zeros, after[row, column]) for row, column in places])
