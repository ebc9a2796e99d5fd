"""The dependency probe: which rows of the outputs change when an input is changed, candidate against interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkernel.kernels.cpu.convert import as_float32, from_float32
from rlkernel.verify.admission.bits import Results, differing_elements, pattern
from rlkernel.verify.admission.problem import Array, Problem
from rlkernel.verify.admission.values import on_grid

Run = Callable[[Problem], Results]
_ROW_WIDTH = 8  # of narrower rows a share says little: rounding may hide what a single element does
_GOOD_SHARE, _LITTLE = 0.5, 0.25  # of a row: what has to change with an input, and the part of it that is too little
_FEWEST = 16  # outputs with fewer elements may be noise throughout (a norm over one element)
_OFFSETS = (9.5, -37.0, 150.0)  # a finding has to hold for changes of several sizes: one alone may be rounded away


def _places(length: int) -> list[int]:
    return sorted({0, length // 2, length - 1}) if length else []


def _moved(values: Array, bf16: bool, offset: float) -> Array:
    """Other finite values of a size that shows."""
    finite = np.where(np.isfinite(values), values, np.float32(0.0))
    return on_grid((np.float32(offset) - np.float32(2.0) * finite).astype(np.float32), bf16)


def _changed_arrays(
    arrays: tuple[Any, ...], what: str, bf16: bool, columns: bool, offset: float
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for number, array in enumerate(arrays):
        if array.dtype != np.float32 or not array.size:
            continue
        for axis, name in ((0, "row"), (array.ndim - 1, "column")):
            if name == "column" and (axis == 0 or not columns):
                continue
            for place in _places(array.shape[axis]):
                index = (slice(None),) * axis + (place,)
                changed = array.copy()
                changed[index] = _moved(array[index], bf16, offset)
                yield f"{name} {place} of {what} {number}", (*arrays[:number], changed, *arrays[number + 1 :])


def perturbed(problem: Problem, bf16: bool, offset: float = _OFFSETS[0]) -> Iterator[tuple[str, Problem]]:
    """Problems that differ in one row or one column of one input, gradient or weight, or in stale slots of pages."""
    if problem.pages is not None:
        pages = problem.pages
        k = np.where(np.isnan(pages.k_pages), np.float32(3.0), pages.k_pages)
        v = np.where(np.isnan(pages.v_pages), np.float32(-3.0), pages.v_pages)
        yield (
            "slots of pages that hold no key of the sequence",
            replace(problem, pages=replace(pages, k_pages=k, v_pages=v)),
        )
    # in a row of large or cancelling values, a change of one column may be rounded away: it proves nothing
    normal = set(problem.hazards) == {"normal"}
    for label, inputs in _changed_arrays(problem.inputs, "input", bf16, normal, offset):
        yield label, replace(problem, inputs=inputs)
    if problem.head is None:
        for label, grads in _changed_arrays(problem.grads, "gradient", bf16, normal, offset):
            yield label, replace(problem, grads=grads)
    for name in problem.region.weights:
        tensor = problem.tensors[name]
        values = as_float32(tensor)
        if not values.size or not normal:
            continue
        if values.ndim == 1:  # one element of a bias, or of a norm's weight, is too little of a row
            tensors = {**problem.tensors, name: from_float32(_moved(values, bf16, offset), tensor.dtype)}
            yield name, replace(problem, tensors=tensors)
        for place in _places(values.shape[-1]):
            changed = values.copy()
            changed[..., place] = _moved(values[..., place], bf16, offset)
            tensors = {**problem.tensors, name: from_float32(changed, tensor.dtype)}
            yield f"column {place} of {name}", replace(problem, tensors=tensors)
    if problem.region.kind == "embedding" and len(problem.inputs[0]):
        name, row = problem.region.weights[0], int(problem.inputs[0][0])
        changed = as_float32(problem.tensors[name]).copy()
        changed[row] = _moved(changed[row], bf16, offset)
        tensors = {**problem.tensors, name: from_float32(changed, problem.tensors[name].dtype)}
        yield f"row {row} of {name}", replace(problem, tensors=tensors)


def _shares(differs: NDArray[np.bool_]) -> Array:
    """Which share of each row (index of the first axis) is marked; of the whole where rows are narrow."""
    rows = len(differs) if differs.ndim and differs.size >= _ROW_WIDTH * len(differs) else 1
    shares = differs.reshape(rows, differs.size // max(1, rows))
    return shares.mean(axis=1, dtype=np.float32) if shares.size else np.zeros(0, np.float32)


def _rows(one: Results, other: Results) -> dict[str, Array]:
    """Per output, which share of each row changed."""
    return {name: _shares(pattern(value) != pattern(other[name])) for name, value in one.items()}


def _poisoned(base: Results, changed: Results) -> dict[str, Array]:
    """Per output, to which share of each row NaN arrived (an integer, such as a digest, has changed)."""
    return {
        name: _shares(np.isnan(value) & ~np.isnan(base[name]) if value.dtype == np.float32 else value != base[name])
        for name, value in changed.items()
    }


def dependency_difference(candidate: Run, interpreter: Run, problem: Problem, bf16: bool) -> str | None:
    """The first input on which an output depends in one of the two only, as a sentence; None if there is none."""
    # chains from +0: what they continue may swallow small gradients whole, in one of the two only
    problem = _finite(replace(problem, start={}))
    try:
        base = interpreter(problem), candidate(problem)
    except Exception:  # the candidate fails here for another reason, which the caller reports
        return None
    for number, (label, other) in enumerate(perturbed(problem, bf16)):
        found = _suspects(base, (interpreter(other), candidate(other)), problem)
        for offset in _OFFSETS[1:]:
            if not found:
                break
            _, again = next(islice(perturbed(problem, bf16, offset), number, None))
            found &= _suspects(base, (interpreter(again), candidate(again)), problem)
        if found:
            _, poisoned = next(islice(perturbed(problem, bf16, float("nan")), number, None))
            found = _not_only_rounded_away(found, base, interpreter(poisoned), candidate(poisoned))
        if found:
            return _sentence(found, label)
    return None


def _sentence(found: set[tuple[str, int, bool]], label: str) -> str:
    """Which output misses the input, and which one has it though it may not."""

    def place(name: str, row: int) -> str:
        return f"{'an element' if row < 0 else f'row {row}'} of {name}"

    missing = min((item for item in found if not item[2]), default=None)
    extra = min((item for item in found if item[2]), default=None)
    if missing is None:
        assert extra is not None
        return f"{place(*extra[:2])} changes with {label}, on which it may not depend"
    words = f"{place(*missing[:2])} does not change with {label}, on which it has to depend"
    return words if extra is None else f"{words}; {place(*extra[:2])} does, and may not"


def _finite(problem: Problem) -> Problem:
    """The problem with finite values: where NaN is already, no change of an input shows."""

    def finite(values: Any) -> Any:
        if values.dtype != np.float32 or np.isfinite(values).all():
            return values
        return np.where(np.isfinite(values), values, np.float32(1.5))

    tensors = dict(problem.tensors)
    for name in problem.region.weights:
        values = as_float32(tensors[name])
        if not np.isfinite(values).all():
            tensors[name] = from_float32(finite(values), tensors[name].dtype)
    inputs = tuple(finite(x) for x in problem.inputs)
    return replace(problem, inputs=inputs, grads=tuple(finite(g) for g in problem.grads), tensors=tensors)


def nan_leak(candidate: Run, interpreter: Run, problem: Problem) -> str | None:
    """The first output that changes where NaN stands in an input that it may not depend on, as a sentence."""
    problem = _finite(replace(problem, start={}))
    try:
        base = interpreter(problem), candidate(problem)
        for label, inputs in _changed_arrays(problem.inputs, "input", False, True, float("nan")):
            other = replace(problem, inputs=inputs)
            want, have = interpreter(other), candidate(other)
            for name, value in want.items():
                if have[name].shape != value.shape or base[1][name].shape != value.shape:
                    continue
                kept = pattern(value) == pattern(base[0][name])
                wrong = kept & (pattern(have[name]) != pattern(base[1][name]))
                if wrong.any():
                    place = ", ".join(str(int(i)) for i in np.argwhere(wrong)[0])
                    return f"{name}[{place}] changes where {label} is NaN, on which it may not depend"
    except Exception:  # the candidate fails here for another reason, which the caller reports
        return None
    return None


def _suspects(
    base: tuple[Results, Results], changed: tuple[Results, Results], problem: Problem
) -> set[tuple[str, int, bool]]:
    """(output, row or -1, whether the candidate depends on too much): where only one of the two changed."""
    want = _rows(base[0], changed[0])
    if any(name not in changed[1] or changed[1][name].shape != value.shape for name, value in changed[0].items()):
        return set()
    have = _rows(base[1], changed[1])
    found = set()
    for name, rows in want.items():
        if have[name].shape != rows.shape or base[0][name].size < _FEWEST:
            continue
        if set(problem.hazards) != {"normal"} and name.endswith((".weight", ".bias")):
            continue  # rows of all classes are added up there: the large ones hide what the others do
        # rounding may hide a change of single elements: what has to change is a good share of a row
        extra = np.flatnonzero((have[name] > 0) & (rows == 0))
        missing = np.flatnonzero((rows >= _GOOD_SHARE) & (have[name] < _LITTLE * rows))
        narrow = len(rows) == 1
        found |= {(name, -1 if narrow else int(row), True) for row in extra}
        found |= {(name, -1 if narrow else int(row), False) for row in missing}
    return found


def _not_only_rounded_away(
    found: set[tuple[str, int, bool]], base: tuple[Results, Results], want: Results, have: Results
) -> set[tuple[str, int, bool]]:
    """The findings that NaN in the place of the change confirms.

    A change may be rounded away, or underflow, in one of the two only; NaN never is. An output depends on too much only
    where NaN does not reach the interpreter's, and on too little only where it does not reach the candidate's.
    """
    want_reached, have_reached = _poisoned(base[0], want), _poisoned(base[1], have)

    def confirmed(name: str, row: int, extra: bool) -> bool:
        place = max(row, 0)
        due, seen = float(want_reached[name][place]), float(have_reached[name][place])
        return due == 0.0 if extra else due >= _GOOD_SHARE and seen < _LITTLE * due

    return {item for item in found if confirmed(*item)}


_SUMS = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj", "rms_norm", "final_norm", "qk_norm")


def right_on_exact_sums(candidate: Run, interpreter: Run, problem: Problem) -> bool | None:
    """Whether the candidate's bits are the interpreter's on small integers, whose sums are exact in any order.

    None for regions that are no plain sums of products.
    """
    if problem.region.kind not in _SUMS:
        return None

    def small(values: Array) -> Array:
        finite = np.where(np.isfinite(values), values, np.float32(0.0))
        return np.rint(np.clip(finite, -3.0, 3.0)).astype(np.float32)

    tensors = {
        name: from_float32(small(as_float32(tensor)), tensor.dtype) if name in problem.region.weights else tensor
        for name, tensor in problem.tensors.items()
    }
    start = {name: small(value) for name, value in problem.start.items()}
    grads = tuple(small(g) for g in problem.grads)
    exact = replace(problem, inputs=tuple(small(x) for x in problem.inputs), grads=grads, tensors=tensors, start=start)
    return differing_elements(interpreter(exact), candidate(exact)) == 0
