"""Which inputs reach an output: change one input (or one slice of inputs) and see which outputs change a bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlkernel.errors import ContractError, NumericsError
from rlkernel.verify.discovery.formats import Array

_DRAWS = 2


@dataclass(frozen=True)
class Reach:
    """``matrix[i, o]``: whether some change of input i changed output o."""

    matrix: npt.NDArray[np.bool_]

    def inputs_of(self, output: int) -> list[int]:
        """Inputs that reach an output."""
        return [int(k) for k in np.flatnonzero(self.matrix[:, output])]

    def outputs_of(self, one: int) -> list[int]:
        """Outputs that an input reaches."""
        return [int(k) for k in np.flatnonzero(self.matrix[one])]

    def describe(self) -> str:
        """The pattern in words."""
        inputs, outputs = self.matrix.shape
        row, column = np.indices((inputs, outputs))
        patterns = [
            ("every output depends on every input", np.ones((inputs, outputs), dtype=bool)),
            ("no output depends on any input", np.zeros((inputs, outputs), dtype=bool)),
            ("output k depends on input k alone", row == column),
            ("output k depends on inputs 0..k", row <= column),
            ("output k depends on inputs k and above", row >= column),
        ]
        pairs = f"{int(self.matrix.sum()):,} of {inputs * outputs:,} pairs depend"
        text = next((words for words, pattern in patterns if np.array_equal(self.matrix, pattern)), pairs)
        if not self.matrix.any():
            return text
        silent = np.flatnonzero(~self.matrix.any(axis=1))
        idle = np.flatnonzero(~self.matrix.any(axis=0))
        if silent.size:
            text += f"; inputs {_listed(silent)} reach no output"
        if idle.size:
            text += f"; outputs {_listed(idle)} depend on no input"
        return text


def _listed(indices: npt.NDArray[np.intp]) -> str:
    from rlkernel.verify.discovery.tree import leaf_ranges

    return leaf_ranges(int(k) for k in indices)


def probe_dependency(
    function: Callable[..., Any],
    arrays: Sequence[Array],
    which: int,
    *,
    input_axis: int | None = None,
    output_axis: int | None = None,
    seed: int = 0,
) -> Reach:
    """Find out which inputs reach which outputs of a function.

    Each input is replaced by NaN (which sums and products cannot hide, but a comparison may) and by other finite values
    (which rounding may hide); an output that changes a bit under any of them depends on it.

    Args:
        function: of the arrays; returns one array.
        arrays: floating-point arrays; those other than ``which`` stay as they are.
        which: the array whose elements are changed.
        input_axis: change whole slices along this axis; single elements (flattened) without it.
        output_axis: look at whole slices along this axis; single elements without it.
        seed: of the values that are put in.

    Returns:
        A matrix of inputs and outputs.

    Raises:
        NumericsError: two calls on the same arrays differ.
        ContractError: the array that is to be changed is not floating-point.
    """
    base = [np.array(array, copy=True) for array in arrays]
    changed = base[which]
    if changed.dtype.kind != "f":
        raise ContractError(f"array {which} has dtype {changed.dtype}; floating-point inputs can be probed")
    rng = np.random.default_rng(seed)
    # beyond every other value, so that a maximum or minimum notices, too
    beyond = 8.0 * float(np.max(np.abs(changed[np.isfinite(changed)]), initial=1.0))

    def outputs() -> Array:
        with np.errstate(all="ignore"):
            result = np.array(function(*base), copy=True)
        bits = result.view(f"u{result.dtype.itemsize}")
        return bits.reshape(-1, 1) if output_axis is None else np.moveaxis(bits, output_axis, 0).reshape(
            bits.shape[output_axis], -1
        )  # fmt: skip

    before = outputs()
    if not np.array_equal(before, outputs()):
        raise NumericsError("the function is not deterministic: two calls on the same arrays differ")
    places = changed.reshape(-1, 1) if input_axis is None else np.moveaxis(changed, input_axis, 0)
    if not np.shares_memory(places, changed):
        raise ContractError(f"array {which} cannot be changed in place along axis {input_axis}")
    matrix = np.zeros((places.shape[0], before.shape[0]), dtype=bool)
    for k in range(places.shape[0]):
        kept = places[k].copy()
        values = [np.full(kept.shape, value) for value in (np.nan, beyond, -beyond)]
        values += [_other(kept, rng) for _ in range(_DRAWS)]
        for value in values:
            places[k] = value
            matrix[k] |= (outputs() != before).any(axis=1)
        places[k] = kept
    return Reach(matrix)


def _other(kept: Array, rng: np.random.Generator) -> Array:
    """Values of the same size or larger, none equal to the one that it replaces."""
    scale = np.where(kept == 0, 1.0, np.abs(kept))
    result: Array = -np.copysign(scale, kept) * rng.uniform(1.5, 3.0, kept.shape)
    return result
