"""Reads the K order of a matrix product off the operands of its executed matrix instructions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlkernel.verify.audit import symbols
from rlkernel.verify.audit.findings import Violation
from rlkernel.verify.audit.launches import Sum
from rlkernel.verify.audit.symbols import Symbols
from rlkernel.verify.audit.words import MatrixEvent

_PADDING, _UNKNOWN = -1, -2


class _Elements:
    """Finds the (row, k) of an input element by its symbol."""

    def __init__(self, number: int, rows: int, depth: int) -> None:
        found = symbols.element(number, np.arange(rows * depth))
        order = np.argsort(found)
        self._sorted, self._order, self._depth = found[order], order, depth

    def find(self, wanted: Symbols) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(row, k) of each symbol; -1 for the constant 0, -2 for anything else."""
        place = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        index = self._order[place]
        known = self._sorted[place] == wanted
        padding = (wanted == symbols.constant(0)) | (wanted == symbols.constant(0x80000000))
        missing = np.where(padding, _PADDING, _UNKNOWN)
        return np.where(known, index // self._depth, missing), np.where(known, index % self._depth, missing)


def ranges(ks: Sequence[int]) -> str:
    """``0-3, 8-11`` for a list of numbers, in its order."""
    parts: list[list[int]] = []
    for k in ks:
        if parts and parts[-1][1] + 1 == k:
            parts[-1][1] = k
        else:
            parts.append([k, k])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in parts)


def _fault(rule: str, point: str, message: str, event: MatrixEvent) -> Violation:
    return Violation(rule, point, message, event.opcode, event.location)


def first_fault(product: Sum, events: Sequence[MatrixEvent]) -> Violation | None:
    """The first matrix instruction that breaks the entry's K order, with what it does instead."""
    left = _Elements(0, product.rows, product.depth)
    right = _Elements(1, product.columns, product.depth)
    leaf = product.depth // product.leaves
    reached: dict[tuple[tuple[int, int], int, int], int] = {}
    for event in events:
        (rows, ks), (columns, other) = left.find(event.a), right.find(event.b)
        if (ks == _UNKNOWN).any() or (other == _UNKNOWN).any():  # the target may take b first
            (rows, ks), (columns, other) = left.find(event.b), right.find(event.a)
        if (ks == _UNKNOWN).any() or (other == _UNKNOWN).any():
            return _fault("operand", "precision", "an operand is no element of the inputs", event)
        per_slot = ks.max(axis=0)
        if ((ks != per_slot) & (ks != _PADDING)).any() or ((other != per_slot) & (other != _PADDING)).any():
            return _fault("k order", "merge order", "factors of one product have different k", event)
        if not (rows >= 0).any() or not (columns >= 0).any():
            continue  # a tile beyond the matrix
        start = (event.unit, int(rows[rows >= 0].min()), int(columns[columns >= 0].min()))
        used = [int(k) for k in per_slot]
        step = max(1, product.step)
        for first in range(0, len(used), step):
            group = [k for k in used[first : first + step] if k >= 0]
            if not group:
                continue
            ordered = group if product.step == 1 else sorted(group)
            lowest = min(group)
            if ordered != list(range(lowest, lowest + len(group))):
                message = (
                    f"one step adds k {ranges(sorted(group))}; the entry's steps are {product.step} neighbours in k"
                )
                return _fault("k order", "merge order", message, event)
            expected = reached.get(start)
            border = lowest % leaf == 0
            if event.fresh and first == 0 and not border:
                return _fault("k order", "split", f"a chain starts anew at k {lowest}, inside a leaf", event)
            if not event.fresh and first == 0 and border and lowest > 0:
                message = f"the leaf that starts at k {lowest} continues the chain of the leaf before it"
                return _fault("leaf", "split", message, event)
            if expected is not None and lowest != expected and not border:
                message = f"k {lowest} follows k {expected - 1}: the chain does not ascend step by step"
                return _fault("k order", "merge order", message, event)
            reached[start] = lowest + len(group)
    return None
