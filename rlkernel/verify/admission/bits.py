"""Comparison of results as integers: canonical NaN, signed zeros count, never a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CANONICAL_NAN = np.uint32(0x7FC00000)
Results = Mapping[str, NDArray[Any]]
"""Named outputs of one execution: float32 arrays, or unsigned integers (digests)."""


def pattern(values: NDArray[Any]) -> NDArray[Any]:
    """Bits of an array for comparison: float32 as uint32 with every NaN as one pattern, integers as they are."""
    array = np.ascontiguousarray(values)
    if array.dtype == np.float32:
        return np.where(np.isnan(array), CANONICAL_NAN, array.view(np.uint32))
    return array


@dataclass(frozen=True)
class Difference:
    """The first element in which two results differ. ``expected`` and ``found`` are bit patterns in hexadecimal."""

    output: str
    index: tuple[int, ...]
    expected: str
    found: str
    expected_value: str
    found_value: str
    differing: int
    compared: int

    @property
    def misshapen(self) -> bool:
        """Whether the output is absent, or has another shape or dtype."""
        return not self.expected.startswith("0x")

    def sentence(self) -> str:
        """Where, and both patterns."""
        if self.misshapen:
            return f"{self.output} is {self.found}; the contract gives {self.expected}"
        place = ", ".join(str(i) for i in self.index)
        return (
            f"{self.output}[{place}] is {self.found} ({self.found_value}) where the contract gives "
            f"{self.expected} ({self.expected_value}); {self.differing} of {self.compared} outputs differ"
        )


def _text(values: NDArray[Any], index: tuple[int, ...]) -> tuple[str, str]:
    bits = pattern(values)[index]
    value = values[index]
    return f"0x{int(bits):0{2 * bits.dtype.itemsize}X}", f"{float(value):.9g}" if values.dtype == np.float32 else "-"


def compare(expected: Results, found: Results) -> tuple[int, Difference | None]:
    """Number of elements compared, and the first difference (in the order of the outputs), if there is one.

    A missing output, another shape or another dtype is a difference of the whole output.
    """
    compared, differing, first = 0, 0, None
    for name, want in expected.items():
        have = found.get(name)
        if have is None or have.shape != want.shape or have.dtype != want.dtype:
            shown = "absent" if have is None else f"{have.dtype}{list(have.shape)}"
            wanted = f"{want.dtype}{list(want.shape)}"
            return compared + want.size, Difference(name, (), wanted, shown, "-", "-", want.size, want.size)
        compared += want.size
        differs = pattern(want) != pattern(have)
        count = int(np.count_nonzero(differs))
        if count and first is None:
            index = tuple(int(i) for i in np.argwhere(differs)[0])
            first = (name, index, want, have)
        differing += count
    if first is None:
        return compared, None
    name, index, want, have = first
    (expected_bits, expected_value), (found_bits, found_value) = _text(want, index), _text(have, index)
    return compared, Difference(
        name, index, expected_bits, found_bits, expected_value, found_value, differing, compared
    )


def differing_elements(one: Results, other: Results) -> int:
    """How many elements differ; a missing or misshapen output counts whole."""
    total = 0
    for name, want in one.items():
        have = other.get(name)
        if have is None or have.shape != want.shape or have.dtype != want.dtype:
            total += want.size
        else:
            total += int(np.count_nonzero(pattern(want) != pattern(have)))
    return total
