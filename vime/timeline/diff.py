"""The first difference between two runs: event, array, step, sample, token and bit.

Where the runs were asked for different things (another seed, learning rate, contract), the settings are named, and the
first difference in what was computed follows.

Ignored are exactly: wall times, host, pids and paths (``observed``), deployment fields, scheduling and bookkeeping
events, the order of samples inside a step, and arrays of wall times. Settings that do not decide bits never reach a
compared field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vime.errors import InputError
from vime.store.layout import OBSERVED_ARRAYS, ORDER, Axis, Layout
from vime.store.run_view import RunView
from vime.timeline.event import Event, decode_value
from vime.timeline.events import BatchAssigned, ContractFixed, RunStarted
from vime.timeline.log import Record
from vime.timeline.order import first_difference, in_canonical_order
from vime.types import SampleId

ASKED = (RunStarted, ContractFixed)
"""Events that say what a run was asked to do; all others say what it computed."""


@dataclass(frozen=True)
class ArrayDifference:
    """The first differing element. ``bit`` counts from the least significant; None where a length or dtype differs.

    ``step`` is whose arrays they are, None where the caller knows.
    """

    array: str
    index: tuple[int, ...]
    sample: SampleId | None
    position: int | None
    bit: int | None
    left: str
    right: str
    step: int | None = None

    def sentence(self) -> str:
        """Step, array, sample, token and bit on one line."""
        where = f"array {self.array}{list(self.index)}"
        if self.step is not None:
            where = f"step {self.step}, {where}"
        if self.sample is not None:
            where += f", sample {self.sample}"
        if self.position is not None:
            where += f", position {self.position}"
        bit = "" if self.bit is None else f", first at bit {self.bit}"
        return f"{where}: {self.left} and {self.right}{bit}"


@dataclass(frozen=True)
class Difference:
    """The first event that differs, the field, and the first element of the arrays that differs.

    ``left_seq`` and ``right_seq`` are the event's numbers in both logs; None where one run ends before it.
    ``element`` is that of the event's own step and sample where its arrays differ, else the first of any later step.
    For an event that says what was asked for, ``settings`` are the keys that decide bits and differ, (key, left, right)
    each, and ``consequence`` is the first difference in what was computed.
    """

    event: str
    step: int | None
    left_seq: int | None
    right_seq: int | None
    field: str
    left: Any
    right: Any
    subject: str
    element: ArrayDifference | None = None
    settings: tuple[tuple[str, Any, Any], ...] = ()
    consequence: Difference | None = None

    def sentence(self) -> str:
        """The difference in words."""
        step = "" if self.step is None else f"step {self.step}, "
        text = f"{step}{self.event} {self.subject}(events {self.left_seq} and {self.right_seq}): "
        text += f"{self.field} is {decode_value(self.left)!r} and {decode_value(self.right)!r}"
        if self.settings:
            text += "; settings that differ: "
            text += ", ".join(f"{key} ({left!r} and {right!r})" for key, left, right in self.settings)
        if self.element is not None:
            text += f"; {self.element.sentence()}"
        if self.consequence is not None:
            text += f"; what was computed differs first at {self.consequence.sentence()}"
        return text


def diff_runs(left: Path, right: Path) -> Difference | None:
    """Compare two run directories; None: equal.

    All arrays of both are read and verified first. Raises InputError where there is no run, and InvariantViolation for
    a run whose log or arrays are damaged.
    """
    views = RunView.open(left), RunView.open(right)
    for view in views:
        if not view.records:
            raise InputError(f"the log of {view.path} holds no event: there is nothing to compare")
    for view in views:
        for step, event in view.announced_arrays().items():
            view.arrays.read(step, event.stored, event.metadata)
    steps = _steps_of_samples(views[0]) | _steps_of_samples(views[1])
    asked: Difference | None = None
    for a, b in zip_longest(*(in_canonical_order(view.records) for view in views)):
        if asked is not None and any(r is not None and isinstance(r.event, ASKED) for r in (a, b)):
            continue
        difference = _compare(a, b, steps)
        if difference is None:
            continue
        if any(r is None or not isinstance(r.event, ASKED) for r in (a, b)):
            found = _with_element(difference, views, a if a is not None else b)
            return found if asked is None else replace(asked, consequence=found)
        asked = replace(difference, settings=_settings(*(view.records for view in views)))
    return asked


def _settings(left: Sequence[Record], right: Sequence[Record]) -> tuple[tuple[str, Any, Any], ...]:
    """Settings that decide bits and differ: (key, left, right). A key that a run does not have is None."""
    a, b = (_flat(r[0].event.observed.get("pipeline", {})) if r else {} for r in (left, right))
    return tuple((key, a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key))


def _flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(settings, dict):
        return {prefix.removesuffix("."): settings}
    return {key: value for name, inner in settings.items() for key, value in _flat(inner, f"{prefix}{name}.").items()}


def _steps_of_samples(view: RunView) -> dict[SampleId, int]:
    assigned = (r.event for r in view.records if isinstance(r.event, BatchAssigned))
    return {sample_id: event.step for event in assigned for sample_id in event.sample_ids}


def _compare(a: Record | None, b: Record | None, steps: dict[SampleId, int]) -> Difference | None:
    if a is not None and b is not None and a.event.type == b.event.type:
        found = first_difference(a.event.logical(), b.event.logical())
        if found is None:
            return None
        field, left, right = found
    elif a is not None and b is not None:
        field, left, right = "event", a.event.describe(), b.event.describe()
    else:
        field = "event"
        left, right = ("the run's end" if r is None else r.event.describe() for r in (a, b))
    one = a if a is not None else b
    assert one is not None
    return Difference(
        event=one.event.type,
        step=_step(one.event, steps),
        left_seq=None if a is None else a.seq,
        right_seq=None if b is None else b.seq,
        field=field,
        left=left,
        right=right,
        subject=_subject(one.event),
    )


def _step(event: Event, steps: dict[SampleId, int]) -> int | None:
    sample_id = getattr(event, "sample_id", None)
    return steps.get(sample_id) if sample_id is not None else getattr(event, "step", None)


def _subject(event: Event) -> str:
    sample_id, version = getattr(event, "sample_id", None), getattr(event, "version", None)
    if sample_id is not None:
        return f"of sample {sample_id} "
    return "" if version is None else f"of version {version} "


def _with_element(difference: Difference, views: tuple[RunView, RunView], record: Record | None) -> Difference:
    """Add the first differing element: of the event's own step and sample, else of the steps in order."""
    common = sorted(set(views[0].announced_arrays()) & set(views[1].announced_arrays()))
    sample = None if record is None else getattr(record.event, "sample_id", None)
    first = difference.step
    if first in common:
        element = _element(views, first, sample)
        if element is not None:
            return replace(difference, element=element)
    for step in common:
        if first is None or step >= first:
            element = _element(views, step)
            if element is not None:
                return replace(difference, element=replace(element, step=step))
    return difference


def _element(views: tuple[RunView, RunView], step: int, only: SampleId | None = None) -> ArrayDifference | None:
    left, right = (view.step_arrays(step) for view in views)
    return first_array_difference(left, right, only)


def first_array_difference(
    left: dict[str, NDArray[Any]], right: dict[str, NDArray[Any]], only: SampleId | None = None
) -> ArrayDifference | None:
    """The first differing element of two steps' arrays: by sample, then position, then array; None: equal.

    ``only`` looks at one sample. Arrays that belong to no sample, and different sets of arrays, come last.
    """
    layouts = Layout.of(left), Layout.of(right)
    names = sorted((set(left) & set(right)) - set(OBSERVED_ARRAYS), key=lambda n: (n not in ORDER, _rank(n), n))
    if layouts[0] is not None and layouts[1] is not None:
        found = _first_by_sample(left, right, layouts[0], layouts[1], names, only)
        if found is not None or only is not None:
            return found
        for sample_id in sorted(set(layouts[0].samples) ^ set(layouts[1].samples)):
            present = ("stored", "missing") if sample_id in layouts[0].samples else ("missing", "stored")
            return ArrayDifference("tokens", (), sample_id, None, None, *present)
    for name in names:
        if found := _first_in(name, left[name], right[name], None, None, 0):
            return found
    for name in sorted((set(left) ^ set(right)) - set(OBSERVED_ARRAYS)):
        present = ("stored", "missing") if name in left else ("missing", "stored")
        return ArrayDifference(name, (), None, None, None, *present)
    return None


def _rank(name: str) -> int:
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _first_by_sample(
    left: dict[str, NDArray[Any]],
    right: dict[str, NDArray[Any]],
    a: Layout,
    b: Layout,
    names: list[str],
    only: SampleId | None,
) -> ArrayDifference | None:
    for sample_id in sorted(set(a.samples) & set(b.samples)):
        if only is not None and sample_id != only:
            continue
        i, j = a.samples.index(sample_id), b.samples.index(sample_id)
        best: tuple[int, int, ArrayDifference] | None = None
        for order, name in enumerate(names):
            axis: Axis = a.axis(name, left[name])
            if axis == "none" or axis != b.axis(name, right[name]):
                continue
            rows = a.rows(axis, i)
            found = _first_in(name, left[name][rows], right[name][b.rows(axis, j)], sample_id, (a, axis, i), rows.start)
            if found is not None:
                key = found.position if found.position is not None else 1 << 60
                if best is None or (key, order) < best[:2]:
                    best = (key, order, found)
        if best is not None:
            return best[2]
    return None


def _first_in(
    name: str,
    left: NDArray[Any],
    right: NDArray[Any],
    sample: SampleId | None,
    place: tuple[Layout, Axis, int] | None,
    first_row: int,
) -> ArrayDifference | None:
    def position(row: int) -> int | None:
        return None if place is None else place[0].position(place[1], place[2], row)

    if left.dtype != right.dtype or left.shape[1:] != right.shape[1:]:
        shown = [f"{x.dtype.name}{list(x.shape)}" for x in (left, right)]
        return ArrayDifference(name, (), sample, None, None, shown[0], shown[1])
    count = min(len(left), len(right)) if left.ndim else 0
    bits = [_bits(x[:count] if x.ndim else x) for x in (left, right)]
    differing = np.argwhere(bits[0] != bits[1])
    if len(differing):
        index = tuple(int(n) for n in differing[0])
        x, y = (int(b[index]) for b in bits)
        low = ((x ^ y) & -(x ^ y)).bit_length() - 1
        whole = (first_row + index[0], *index[1:]) if index else index
        values = [_shown(a[index], v, a.dtype.itemsize) for a, v in ((left, x), (right, y))]
        row = index[0] if index else 0
        return ArrayDifference(name, whole, sample, position(row), low, values[0], values[1])
    if left.ndim and len(left) != len(right):
        lengths = [f"{len(x)} elements" for x in (left, right)]
        return ArrayDifference(name, (first_row + count,), sample, position(count), None, lengths[0], lengths[1])
    return None


def _bits(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")


def _shown(value: Any, bits: int, itemsize: int) -> str:
    return f"{value!s} (0x{bits:0{2 * itemsize}x})"
