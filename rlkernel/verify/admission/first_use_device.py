"""The first-use check on a device: the first call of every (region, case) is confirmed on its live operands.

As :mod:`rlkernel.verify.admission.first_use` does it for the CPU: a few rows are executed once more by the interpreter,
on the device, and a bit that differs ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from rlkernel.contract.build import Contract
from rlkernel.models.definition import Region
from rlkernel.ops.composition import Composition
from rlkernel.verify.admission import first_use_device_slices as slices
from rlkernel.verify.admission.first_use import LINEAR, Extents, FirstUse, Kept
from rlkernel.verify.evidence import Evidence

Tensor = torch.Tensor


def extents_of(kind: str, batch: Any) -> Extents:
    """Rows of a batch and what else the host knows of it: keys, and sequences of attention. Nothing is asked of the
    device.
    """
    rows = len(batch.tokens)
    if kind == "rope":
        return rows, batch.last_position + 1
    if kind == "attention":
        return rows, batch.last_position + 1, max(batch.lengths, default=0), sum(n > 0 for n in batch.lengths)
    return (rows,)


class _Checks(FirstUse):
    """Nothing is due while a graph is captured: the operands are not there yet, and nothing may wait for the device."""

    def due(self, region: str, case: str, extents: Extents) -> bool:
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return not captured and super().due(region, case, extents)


class DeviceCheckedOp:
    """An implementation of a region of the body whose first call of each size in each case is confirmed."""

    def __init__(self, op: Any, checks: FirstUse, interpreter: slices.LiveInterpreter) -> None:
        self.implementation: str = op.implementation
        self._op, self._checks, self._interpreter = op, checks, interpreter

    def forward(self, region: Region, inputs: Sequence[Tensor], host: Any) -> tuple[tuple[Tensor, ...], Any]:
        """The implementation's forward."""
        outputs, saved = self._op.forward(region, inputs, host)
        extents = extents_of(region.kind, host.batch)
        if self._checks.due(region.kind, host.case, extents):
            if region.kind == "attention":
                part = slices.attention_slice(self._interpreter, region, inputs, host)
            elif region.kind in LINEAR:
                part = slices.linear_slice(self._interpreter, region, inputs[0], host)
            else:
                part = slices.row_slice(self._interpreter, region, inputs, host)
            self._checks.confirm(region, host.case, extents, part.rows, part.expected, part.found(outputs))
        keeps = host.case in ("trainer_forward", "trainer_recompute")
        if keeps and self._checks.due(region.kind, "trainer_backward", extents):
            return outputs, Kept(saved, tuple(inputs), tuple(outputs))
        return outputs, Kept(saved)

    def backward(self, region: Region, saved: Any, grads: Sequence[Tensor], host: Any) -> tuple[Tensor, ...]:
        """The implementation's backward."""
        kept: Kept = saved
        extents = extents_of(region.kind, host.batch)
        if not kept.inputs or not self._checks.due(region.kind, host.case, extents):
            plain: tuple[Tensor, ...] = self._op.backward(region, kept.own, grads, host)
            return plain
        if region.kind in LINEAR:
            part = slices.linear_backward_slice(self._interpreter, region, kept.inputs[0], grads, host)
        elif region.kind == "attention":
            part = slices.attention_backward_slice(self._interpreter, kept.inputs, kept.outputs[0], grads[0], host)
        elif region.kind == "embedding":
            part = slices.embedding_backward_slice(region, kept.inputs[0], grads, host)
        else:
            part = slices.row_backward_slice(self._interpreter, region, kept.inputs, grads, host)
        result: tuple[Tensor, ...] = self._op.backward(region, kept.own, grads, host)
        self._checks.confirm(region, host.case, extents, part.rows, part.expected, part.found(result))
        return result


class DeviceCheckedHead:
    """The model's head, likewise."""

    def __init__(self, head: Any, checks: FirstUse, interpreter: slices.LiveInterpreter) -> None:
        self.implementation: str = head.implementation
        self._head, self._checks, self._interpreter = head, checks, interpreter

    def forward(self, region: Region, x: Tensor, targets: Tensor, temperature: float, host: Any) -> Any:
        """Statistics of rows."""
        found = self._head.forward(region, x, targets, temperature, host)
        self._check(region, x, targets, temperature, host, found)
        return found

    def sample(
        self, region: Region, x: Tensor, keys: Any, temperature: float, host: Any, truncation: bool
    ) -> tuple[Tensor, Any]:
        """Drawn tokens and their statistics."""
        drawn, found = self._head.sample(region, x, keys, temperature, host, truncation)
        self._check(region, x, drawn, temperature, host, found)
        return drawn, found

    def _check(self, region: Region, x: Tensor, targets: Tensor, temperature: float, host: Any, found: Any) -> None:
        if not self._checks.due(region.kind, host.case, (len(x),)):
            return
        rows = sorted({0, len(x) - 1})
        expected = slices.head_slice(self._interpreter, region, x[rows], targets[rows], temperature, host)
        have = {f.name: slices.home(getattr(found, f.name)[rows]) for f in fields(found)}
        have["digest"] = have["digest"].view("uint64")
        self._checks.confirm(region, host.case, (len(x),), rows, expected, have)

    def backward(
        self, region: Region, x: Tensor, targets: Tensor, temperature: float, coefficient: Tensor, host: Any,
        statistics: Any = None,
    ) -> Tensor:  # fmt: skip
        """Gradient of the hidden rows; continues the head's weight gradient."""
        given = (region, x, targets, temperature, coefficient, host)
        if not self._checks.due(region.kind, host.case, (len(x),)):
            plain: Tensor = self._head.backward(*given, statistics)
            return plain
        expected = slices.head_backward_slice(self._interpreter, *given)
        found: Tensor = self._head.backward(*given, statistics)
        have = {"gradient of hidden": slices.home(found[-1:, : slices.CORNER])}
        self._checks.confirm(region, host.case, (len(x),), [len(x) - 1], expected, have)
        return found


def with_device_first_use_checks(
    composition: Composition, contract: Contract, evidence: Evidence, device: torch.device
) -> Composition:
    """The composition with every implementation's first call in each case confirmed on live operands."""
    checks, interpreter = _Checks(contract, evidence), slices.LiveInterpreter(contract, str(device))
    known = {name for _, name in contract.entries}
    ops: dict[str, Any] = {
        kind: DeviceCheckedOp(op, checks, interpreter) for kind, op in composition.ops.items() if kind in known
    }
    return replace(composition, ops=ops, head=DeviceCheckedHead(composition.head, checks, interpreter))
