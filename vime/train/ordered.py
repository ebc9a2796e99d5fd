"""Sums whose order is part of their definition.

``np.sum`` and ``np.mean`` add in blocks whose size is NumPy's, and Python's ``sum`` of floats is compensated since
3.12, so both change with a library. Everything that is reported or trained on is added here: ascending, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def ordered_sum(values: Iterable[float]) -> float:
    """Left-to-right float64 sum from +0."""
    total = 0.0
    for value in values:
        total = total + float(value)
    return total


def ordered_mean(values: list[float]) -> float:
    """:func:`ordered_sum` divided by the count; NaN for nothing."""
    return ordered_sum(values) / len(values) if values else math.nan


def deviation(values: list[float], mean: float, divisor: int) -> float:
    """``sqrt(sum (x - mean)^2 / divisor)``: products and sums in float64, ascending; IEEE square root."""
    return math.sqrt(ordered_sum((value - mean) * (value - mean) for value in values) / divisor)
