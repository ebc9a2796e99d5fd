"""The first-use check: the first call of every (region, case) of each size is confirmed on live operands.

A few rows of the very operands that a run computes with are executed once more by the interpreter (its fp32 FMA chains
by the plain kernel, which admission compared with it). A bit that differs is a NumericsError with region, case, row and
both patterns; so is an implementation that writes to what it is given. It happens at the first call in a process, and
again whenever an extent of a call (rows, keys, sequences, ids) is larger by a quarter than that of any confirmed call
of the region and case: beyond the sizes that admission compares, the first use of a size is what is compared. So the
number of confirmed calls grows with the logarithm of the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.build import Contract
from rlkernel.errors import NumericsError
from rlkernel.models.definition import Region
from rlkernel.ops.composition import Composition
from rlkernel.ops.host import Host, TokenBatch
from rlkernel.reference.regions import Interpreter
from rlkernel.verify.admission.bits import Results, compare
from rlkernel.verify.admission.conduct import Misconduct, Untouched
from rlkernel.verify.admission.execute import reference_operation
from rlkernel.verify.admission.first_use_slices import (
    NORMS,
    PlainNorm,
    attention_backward_slice,
    attention_slice,
    embedding_backward_slice,
    head_backward_slice,
    head_slice,
    linear_backward_slice,
    linear_slice,
)
from rlkernel.verify.evidence import Evidence

Array = NDArray[np.float32]
LINEAR = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
Extents = tuple[int, ...]
"""Sizes of a call, its rows first; what each of the others is depends on the region."""


GROWTH = 1.25
"""How many times as large as any confirmed call the next one is, in one of its extents."""


def larger(extents: Extents, confirmed: Extents | None) -> bool:
    """Whether one of the extents is beyond GROWTH times the confirmed one, if any was."""
    return confirmed is None or any(now > GROWTH * before for now, before in zip(extents, confirmed, strict=True))


def joined(extents: Extents, confirmed: Extents | None) -> Extents:
    """The larger of both in each place."""
    return extents if confirmed is None else tuple(map(max, extents, confirmed))


@dataclass
class Kept:
    """What a wrapped forward hands to the backward: the implementation's own, and what the check needs."""

    own: Any
    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()


class LiveWeights:
    """Logical vectors of a side's packed weights as tensors, for the interpreter."""

    def __init__(self, vectors: Mapping[str, Array]) -> None:
        self.tensors = {name: torch.from_numpy(value) for name, value in vectors.items()}


def extents_of(kind: str, batch: TokenBatch) -> Extents:
    """Rows of a batch, and what else may matter: most keys, rows of a sequence and sequences, or the largest id."""
    rows = len(batch.tokens)
    if kind == "embedding":
        return rows, int(batch.tokens.max(initial=-1)) + 1
    if kind == "rope":
        return rows, int(batch.positions.max(initial=-1)) + 1
    if kind == "attention":
        lengths = np.diff(batch.starts)
        keys = int(batch.positions.max(initial=-1)) + 1
        return rows, keys, int(lengths.max(initial=0)), int(np.count_nonzero(lengths))
    return (rows,)


def sample_rows(count: int, threads: int = 1, largest: NDArray[Any] | None = None) -> NDArray[np.int64]:
    """A few of ``count`` rows, int64: at both ends (an even and an odd one), the middle, the first of the last thread's
    share, and the one with the largest of ``largest`` (its position, its id).
    """
    if not count:
        return np.zeros(0, np.int64)
    chosen = [0, 1, count // 2, count * (threads - 1) // threads, count - 2, count - 1]
    if largest is not None:
        chosen.append(int(np.argmax(largest)))
    return np.unique(np.clip(np.array(chosen, np.int64), 0, count - 1))


def ends(count: int) -> NDArray[np.int64]:
    """First and last of ``count`` rows, int64: of the head, where a row is a whole vocabulary."""
    return np.unique(np.array([0, count - 1], np.int64))


def _rows_host(host: Host, rows: NDArray[np.int64]) -> Host:
    batch = TokenBatch(host.batch.tokens[rows], host.batch.positions[rows], np.array([0, len(rows)], np.int32))
    weights: Any = LiveWeights(host.weights.vectors)
    return replace(host, batch=batch, weights=weights, state=None)


class FirstUse:
    """Checks of one side: what was confirmed stands in its evidence under ``first_use``."""

    def __init__(self, contract: Contract, evidence: Evidence) -> None:
        self.contract, self._evidence = contract, evidence
        self._reached: dict[tuple[str, str], Extents] = {}
        self.checked: dict[str, dict[str, Any]] = {}
        evidence.facts["first_use"] = self.checked

    def due(self, region: str, case: str, extents: Extents) -> bool:
        """Whether a call has rows, and is larger than what was confirmed."""
        return extents[0] > 0 and larger(extents, self._reached.get((region, case)))

    def unchanged(self, region: Region, case: str, given: Untouched) -> None:
        """Raises NumericsError where an implementation wrote to its inputs, which other regions read too."""
        try:
            given.confirm()
        except Misconduct as error:
            sentence = f"{region.name} ({region.kind}, {case}): {error}"
            self._evidence.refused.append(sentence)
            raise NumericsError(sentence) from error

    def confirm(
        self, region: Region, case: str, extents: Extents, rows: Sequence[int], expected: Results, found: Results
    ) -> None:
        """Record a comparison of a call. Raises NumericsError where a bit differs; ``rows``: of the first axis."""
        compared, difference = compare(expected, found)
        reached = self._reached[region.kind, case] = joined(extents, self._reached.get((region.kind, case)))
        told = self.checked.setdefault(f"{case}/{region.kind}", {"outputs": 0, "differing": 0, "calls": 0})
        told["largest"] = list(reached)
        told["outputs"] += compared
        told["differing"] += difference.differing if difference else 0
        told["calls"] += 1
        if difference is None:
            return
        index = list(difference.index)
        row = f"row {rows[index[0]]}" if index and index[0] < len(rows) else "a checked element"
        sentence = (
            f"{region.name} ({region.kind}, {case}): {row} of {difference.output} is {difference.found} where the "
            f"contract gives {difference.expected}; {difference.differing} of {difference.compared} outputs of the "
            f"first use of this size ({', '.join(str(n) for n in extents)}) differ on live operands"
        )
        self._evidence.refused.append(sentence)
        raise NumericsError(sentence)


class CheckedOp:
    """An implementation of a region of the body whose first call of each size in each case is confirmed."""

    def __init__(self, op: Any, kind: str, checks: FirstUse) -> None:
        self.implementation: str = op.implementation
        self._op, self._kind, self._checks = op, kind, checks
        self._reference = reference_operation(checks.contract, kind)

    def forward(self, region: Region, inputs: Sequence[Any], host: Host) -> tuple[tuple[Any, ...], Any]:
        """The implementation's forward; see :class:`rlkernel.ops.portable.RegionOp`."""
        extents = extents_of(region.kind, host.batch)
        if self._checks.due(region.kind, host.case, extents):
            given = Untouched({f"its input {name}": x for name, x in zip(region.inputs, inputs, strict=False)})
            outputs, saved = self._op.forward(region, inputs, host)
            self._checks.unchanged(region, host.case, given)
            self._check_forward(region, inputs, outputs, host, extents)
        else:
            outputs, saved = self._op.forward(region, inputs, host)
        keeps = host.case in ("trainer_forward", "trainer_recompute")
        if keeps and self._checks.due(region.kind, "trainer_backward", extents):
            return outputs, Kept(saved, tuple(inputs), tuple(outputs))
        return outputs, Kept(saved)

    def _check_forward(
        self, region: Region, inputs: Sequence[Any], outputs: Sequence[Any], host: Host, extents: Extents
    ) -> None:
        batch = host.batch
        largest = batch.tokens if region.kind == "embedding" else batch.positions
        rows = sample_rows(len(batch.tokens), host.workers.count, largest)
        names = [name.rpartition(".")[2] if name.count(".") > 1 else name for name in region.outputs]
        if region.kind == "attention":
            rows, expected, found = attention_slice(self._checks.contract, region, inputs, outputs, host)
        elif region.kind in LINEAR:
            expected, found = linear_slice(self._checks.contract, region, inputs[0], outputs, rows, host)
        elif region.kind == "embedding":
            expected = {names[0]: host.weights.embed(inputs[0][rows])}
            found = {names[0]: outputs[0][rows]}
        else:
            part = [np.ascontiguousarray(x[rows]) for x in inputs]
            again, _ = self._reference.forward(region, part, _rows_host(host, rows))
            expected = dict(zip(names, again, strict=True))
            found = {name: np.ascontiguousarray(x[rows]) for name, x in zip(names, outputs, strict=True)}
        self._checks.confirm(region, host.case, extents, rows.tolist(), expected, found)

    def backward(self, region: Region, saved: Any, grads: Sequence[Any], host: Host) -> tuple[Any, ...]:
        """The implementation's backward."""
        kept: Kept = saved
        extents = extents_of(region.kind, host.batch)
        if not kept.inputs or not self._checks.due(region.kind, host.case, extents):
            result: tuple[Any, ...] = self._op.backward(region, kept.own, grads, host)
            return result
        return self._check_backward(region, kept, grads, host, extents)

    def _check_backward(
        self, region: Region, kept: Kept, grads: Sequence[Any], host: Host, extents: Extents
    ) -> tuple[Any, ...]:
        contract, rows = self._checks.contract, sample_rows(extents[0], host.workers.count, host.batch.positions)
        if region.kind in LINEAR:
            slices = linear_backward_slice(contract, region, kept.inputs[0], grads, rows, host)
        elif region.kind == "attention":
            slices = attention_backward_slice(contract, kept.inputs, kept.outputs[0], grads[0], host)
        elif region.kind == "embedding":
            slices = embedding_backward_slice(region, kept.inputs[0], grads[0], host)
        else:
            slices = self._row_slice(region, kept, grads, rows, host)
        named = {f"the gradient of its output {name}": x for name, x in zip(region.outputs, grads, strict=False)}
        given = Untouched({**named, **{f"its input {n}": x for n, x in zip(region.inputs, kept.inputs, strict=False)}})
        result: tuple[Any, ...] = self._op.backward(region, kept.own, grads, host)
        self._checks.unchanged(region, host.case, given)
        self._checks.confirm(region, host.case, extents, slices.rows, slices.expected, slices.found(result))
        return result

    def _row_slice(self, region: Region, kept: Kept, grads: Sequence[Any], rows: NDArray[np.int64], host: Host) -> Any:
        """Gradients of some rows, and of a norm's weight over all tokens, by the interpreter."""
        from rlkernel.ops.gradients import Gradients
        from rlkernel.verify.admission.first_use_slices import Slices

        everything = np.arange(len(host.batch.tokens), dtype=np.int64)
        chosen = everything if region.weights else rows
        part = replace(_rows_host(host, chosen), batch=host.batch if region.weights else _rows_host(host, rows).batch)
        gradients = None
        if region.weights and host.gradients is not None:
            gradients = Gradients({name: host.weights.vectors[name].shape for name in region.weights})
            for name in region.weights:
                gradients.buffer(name)[:] = host.gradients.buffer(name)
        part.gradients = gradients
        forward = replace(part, case="trainer_forward")
        reference = PlainNorm(Interpreter(self._checks.contract)) if region.kind in NORMS else self._reference
        _, saved = reference.forward(region, [np.ascontiguousarray(x[chosen]) for x in kept.inputs], forward)
        again = reference.backward(region, saved, [np.ascontiguousarray(g[chosen]) for g in grads], part)
        expected = {f"gradient {i}": np.ascontiguousarray(x) for i, x in enumerate(again)}
        if gradients is not None:
            expected.update({f"gradient of {name}": gradients.buffer(name).copy() for name in region.weights})

        def found(result: Sequence[Any]) -> Results:
            values = {f"gradient {i}": np.ascontiguousarray(x[chosen]) for i, x in enumerate(result)}
            for name in region.weights:
                assert host.gradients is not None
                values[f"gradient of {name}"] = host.gradients.buffer(name).copy()
            return values

        return Slices(chosen.tolist(), expected, found)


class CheckedHead:
    """The model's head, checked like :class:`CheckedOp`."""

    def __init__(self, head: Any, checks: FirstUse) -> None:
        self.implementation: str = head.implementation
        self._head, self._checks = head, checks

    def forward(self, region: Region, x: Array, targets: Any, temperature: float, host: Host) -> Any:
        """Statistics of rows."""
        due = self._checks.due(region.kind, host.case, (len(x),))
        given = Untouched({"its rows": x, "its targets": targets} if due else {})
        found = self._head.forward(region, x, targets, temperature, host)
        self._checks.unchanged(region, host.case, given)
        self._check(region, x, targets, temperature, host, found)
        return found

    def sample(self, region: Region, x: Array, keys: Any, temperature: float, host: Host) -> tuple[Any, Any]:
        """Drawn tokens and their statistics."""
        given = Untouched({"its rows": x} if self._checks.due(region.kind, host.case, (len(x),)) else {})
        drawn, found = self._head.sample(region, x, keys, temperature, host)
        self._checks.unchanged(region, host.case, given)
        self._check(region, x, drawn, temperature, host, found)
        return drawn, found

    def _check(self, region: Region, x: Array, targets: Any, temperature: float, host: Host, found: Any) -> None:
        if not self._checks.due(region.kind, host.case, (len(x),)):
            return
        rows = ends(len(x))
        have = {item.name: np.ascontiguousarray(getattr(found, item.name)[rows]) for item in fields(found)}
        expected = head_slice(self._checks.contract, region, x[rows], targets[rows], temperature, host)
        self._checks.confirm(region, host.case, (len(x),), rows.tolist(), expected, have)

    def backward(
        self, region: Region, x: Array, targets: Any, temperature: float, coefficient: Array, host: Host
    ) -> Any:
        """Gradient of the hidden rows; continues the head's weight gradient."""
        if not self._checks.due(region.kind, host.case, (len(x),)):
            return self._head.backward(region, x, targets, temperature, coefficient, host)
        rows = ends(len(x))
        expected = head_backward_slice(
            self._checks.contract, region, x[rows], targets[rows], temperature, coefficient[rows], host
        )
        given = Untouched({"its rows": x, "its targets": targets, "its coefficients": coefficient})
        found = self._head.backward(region, x, targets, temperature, coefficient, host)
        self._checks.unchanged(region, host.case, given)
        columns = np.arange(expected["gradient of hidden"].shape[1])
        have = {"gradient of hidden": np.ascontiguousarray(found[rows][:, columns])}
        self._checks.confirm(region, host.case, (len(x),), rows.tolist(), expected, have)
        return found


def with_first_use_checks(composition: Composition, contract: Contract, evidence: Evidence) -> Composition:
    """The composition with every implementation's first call of each size in each case confirmed on live operands."""
    checks = FirstUse(contract, evidence)
    ops: dict[str, Any] = {
        kind: CheckedOp(op, kind, checks) for kind, op in composition.ops.items() if _has(contract, kind)
    }
    return replace(composition, ops=ops, head=CheckedHead(composition.head, checks))


def _has(contract: Contract, kind: str) -> bool:
    return any(name == kind for _, name in contract.entries)
