"""Executes launches of compiled kernels and compares every output with the contract's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hardware.listing import Instruction, Listing
from rlkernel.verify.audit import korder
from rlkernel.verify.audit.findings import Violation, at
from rlkernel.verify.audit.gcn.machine import GcnMachine
from rlkernel.verify.audit.launches import Launch
from rlkernel.verify.audit.ptx.machine import PtxMachine
from rlkernel.verify.audit.targets import Compiled
from rlkernel.verify.audit.words import MatrixEvent, NotModelled


@dataclass(frozen=True)
class Proof:
    """What one launch showed: outputs compared, and matrix instructions executed."""

    what: str
    outputs: int
    matrix_instructions: int


def prove(compiled: Compiled, launch: Launch) -> tuple[Proof, list[Violation]]:
    """Execute all blocks of a launch. An instruction without a model is a violation: nothing is proven then."""
    machine_kind = PtxMachine if compiled.target.backend == "cuda" else GcnMachine
    events: list[MatrixEvent] = []
    memory = None
    try:
        for block in range(launch.blocks):
            machine = machine_kind(compiled.assembly, launch.arguments, compiled.threads, block)
            if memory is not None:  # later blocks write into the same buffers
                machine.buffers.memory.bits[:], machine.buffers.memory.symbols[:] = memory
            machine.run()
            memory = (machine.buffers.memory.bits, machine.buffers.memory.symbols)
            events += machine.events
    except NotModelled as problem:
        message = f"{launch.what}: the order of operations is not proven, because {problem}"
        return Proof(launch.what, 0, len(events)), [Violation("not proven", "merge order", message)]
    outputs, violations = 0, []
    for name, expected in launch.symbols.items():
        found = machine.buffers.output(name)[1]
        outputs += found.size
        wrong = int(np.count_nonzero(found != expected))
        if wrong:
            violations += _explain(compiled.assembly, launch, name, wrong, found.size, events)
    for name, values in launch.values.items():
        found_values = machine.buffers.output(name)[0]
        outputs += values.size
        violations += _compare_bits(launch, name, found_values, values)
    return Proof(launch.what, outputs, len(events)), violations


def _explain(
    listing: Listing, launch: Launch, name: str, wrong: int, size: int, events: list[MatrixEvent]
) -> list[Violation]:
    share = f"{wrong} of {size} elements of {name} ({launch.what})"
    if launch.product is not None and events:
        cause = korder.first_fault(launch.product, events)
        if cause is not None:
            message = f"{share}: {cause.message}"
            return [Violation(cause.rule, cause.point, message, cause.instruction, cause.location)]
    message = f"{share} are not the expression that the entry defines"
    suspect = _first_float(listing)
    if suspect is None:
        return [Violation("order", "merge order", message)]
    return [at("order", "merge order", message, suspect)]


def _first_float(listing: Listing) -> Instruction | None:
    marks = ("fma", "v_fma", "v_pk_fma", "add.rn.f32", "v_add_f32", "v_pk_add_f32")
    return next((i for i in listing.instructions if i.opcode.startswith(marks) and i.location.line), None)


def _compare_bits(launch: Launch, name: str, found: np.ndarray, expected: np.ndarray) -> list[Violation]:
    left, right = found.view(np.uint32), expected.view(np.uint32)
    nan_left, nan_right = np.isnan(found), np.isnan(expected)
    differs = np.where(nan_left | nan_right, nan_left != nan_right, left != right)
    if not differs.any():
        return []
    index = int(np.flatnonzero(differs)[0])
    inputs = ", ".join(
        f"{a.data.view(np.uint32).reshape(-1)[index]:#010x}" for a in launch.arguments if a.data is not None
    )
    message = (
        f"{int(differs.sum())} of {differs.size} values of {name} differ from the primitive; "
        f"for {inputs} the code gives {left[index]:#010x}, the contract {right[index]:#010x}"
    )
    return [Violation("bits", "primitives", message)]
