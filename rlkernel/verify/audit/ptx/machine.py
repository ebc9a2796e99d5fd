"""Executes a PTX listing for one block of threads, on bits and on symbols. No GPU.

All threads advance together; a branch that they would take apart is not modelled. Asynchronous copies and matrix
instructions take effect where they are issued: what a missing wait or barrier would break is not seen here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hardware.listing import Instruction, Listing
from rlkernel.verify.audit.memory import Argument
from rlkernel.verify.audit.ptx.arithmetic import PtxArithmetic
from rlkernel.verify.audit.ptx.matrix import PtxMatrix
from rlkernel.verify.audit.ptx.moves import PtxMoves
from rlkernel.verify.audit.words import NotModelled

_IGNORED = (
    "bar.sync",
    "bar.warp.sync",
    "barrier.sync",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
    "cp.async.commit_group",
    "cp.async.wait_group",
    "cp.async.wait_all",
    "fence.proxy",
    "griddepcontrol",
)


class PtxMachine(PtxMoves, PtxArithmetic, PtxMatrix):
    """One block of threads. Build it, call :meth:`run`, read ``buffers`` and ``events``."""

    def __init__(self, listing: Listing, arguments: Sequence[Argument], threads: int, block: int = 0) -> None:
        super().__init__(listing, arguments, threads, block)
        self._parameters = self._bind(arguments)

    def _bind(self, arguments: Sequence[Argument]) -> dict[str, int]:
        names = [key.removeprefix("param:") for key in self._listing.directives if key.startswith("param:")]
        kinds = [value for key, value in self._listing.directives.items() if key.startswith("param:")]
        bound = {}
        for position, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            if position >= len(arguments):
                bound[name] = 0  # scratch pointers that Triton appends
                continue
            argument = arguments[position]
            if argument.is_buffer:
                bound[name] = self.buffers.addresses[argument.name]
            elif kind.startswith("f"):
                bound[name] = int(np.float32(argument.value).view(np.uint32))
            else:
                bound[name] = int(argument.value) & ((1 << int(kind[1:])) - 1)
        return bound

    def run(self, limit: int = 2_000_000) -> None:
        """Run to the end. Raises NotModelled, with the instruction and its source line, where the model ends."""
        instructions, labels = self._listing.instructions, self._listing.labels
        at = 0
        for _ in range(limit):
            if at >= len(instructions):
                return
            instruction = instructions[at]
            try:
                target = self._execute(instruction)
            except NotModelled as problem:
                raise NotModelled(f"{instruction.text[:160]} at {instruction.location}: {problem}") from problem
            if target == "":
                at += 1
            elif target == "end":
                return
            else:
                at = labels[target]
        raise NotModelled(f"the kernel did not end within {limit} instructions")

    def _execute(self, instruction: Instruction) -> str:
        opcode, operands = instruction.opcode, instruction.operands
        active = self._predicate(instruction.guard) if instruction.guard else self._all
        if opcode.startswith(_IGNORED):
            return ""
        root = opcode.split(".")[0]
        if root == "ret":
            if active.all():
                return "end"
            if active.any():
                raise NotModelled("some threads end before others")
            return ""
        if root == "bra":
            if active.all():
                return operands[0]
            if active.any():
                raise NotModelled("the threads of a block branch apart")
            return ""
        handler = getattr(self, f"_op_{root}", None)
        if handler is None:
            raise NotModelled("this instruction has no model")
        handler(opcode.split("."), operands, active, instruction)
        return ""
