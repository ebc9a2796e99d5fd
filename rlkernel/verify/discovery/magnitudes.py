"""Whether a revealed tree holds at every magnitude: subnormals, 1e-30, 1e30, rows and inputs of mixed magnitudes.

An order may depend on how large its inputs are, where inputs around 1 do not show it. And sums that lose subnormal
numbers look like that, too: what is flushed is found by executing the tree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import numpy.typing as npt

from rlkernel.verify.discovery.arithmetic import Arithmetic, Flush
from rlkernel.verify.discovery.formats import Array, number_format
from rlkernel.verify.discovery.inputs import draw_around
from rlkernel.verify.discovery.proof import Order, compare, count, observe
from rlkernel.verify.discovery.targets import Target

_VECTORS = 32
_SCAN_VECTORS = 8
_SCAN_STEP = 4
_SUBNORMAL_BINADES = 3

Labels = npt.NDArray[np.int64]
Draw = Callable[[int], Array]


@dataclass(frozen=True)
class _Group:
    """Inputs of one kind of magnitude; ``direction``: where the first difference is looked for (0: both ways)."""

    words: str
    vectors: Draw
    direction: int


def check_magnitudes(target: Target, orders: list[Order], labels: Labels, rng: np.random.Generator) -> list[Order]:
    """Compare the executed trees with the target far from 1; returns the orders with what was found.

    Orders that do not hold around 1 are left as they are: nothing that they do elsewhere explains them.
    """
    if not all(order.holds for order in orders):
        return orders
    orders = _subnormals(target, orders, labels, rng)
    for group in _groups(target, orders, rng):
        calls = -(-_VECTORS // target.rows)
        counts = compare(target, orders, labels, calls, group.vectors, rng)
        for label, one in enumerate(counts):
            order = orders[label]
            parts = order.parts
            if one.differing and not parts:
                where = _first(target, label, orders, labels, group.direction, rng) or group.words
                parts = _parts(where, one.differing, one.checked)
            orders[label] = replace(
                order,
                elsewhere=order.elsewhere + one.checked,
                unstable=order.unstable + one.unstable,
                parts=parts,
            )
    return orders


def _parts(where: str, differing: int, checked: int) -> str:
    return f"{where}: {differing:,} of {checked:,} outputs have other bits there"


def _reaches(target: Target, orders: list[Order]) -> tuple[int, int]:
    """Exponents of operands, small and large, at which nothing over- or underflows on its way to the sum."""
    names = {target.dtype, target.output, *(order.arithmetic.accumulator for order in orders)}
    names.update(name for order in orders for _, name in order.arithmetic.exceptions)
    smallest = max(number_format(name).smallest_exponent for name in names)
    growth = int(np.ceil(np.log2(target.n))) + 3
    low, high = (-8, max(0, 15 - growth)) if smallest == -14 else (-100, 100) if smallest == -126 else (-900, 900)
    return (low // 2, high // 2) if target.operands == 2 else (low, high)


def _words(target: Target, exponent: int) -> str:
    if target.operands == 2:
        return f"products around {2.0 ** (2 * exponent):.0e}"
    return f"inputs around {2.0**exponent:.0e}"


def _groups(target: Target, orders: list[Order], rng: np.random.Generator) -> Iterator[_Group]:
    low, high = _reaches(target, orders)

    def at(make: Callable[[int], Array]) -> Draw:
        return lambda rows: draw_around(target, rows, rng, make(rows))

    places = [(low, -1), (high, 1)]
    if not any(order.tree.fused for order in orders):
        places.insert(1, (low + low * 3 // 20, -1))  # about 1e-35: one more between small and subnormal
    for exponent, direction in places:
        around = at(lambda rows, exponent=exponent: np.array(exponent))  # type: ignore[misc]
        yield _Group(_words(target, exponent), around, direction)
    by_row = at(lambda rows: rng.integers(low, high + 1, (rows, 1)))
    yield _Group("rows of different magnitudes", by_row, 0)
    mixed = at(lambda rows: rng.integers(low, high + 1, (rows, target.n)))
    yield _Group("inputs of very different magnitudes in one sum", mixed, 0)


def _first(
    target: Target, label: int, orders: list[Order], labels: Labels, direction: int, rng: np.random.Generator
) -> str:
    """The magnitude nearest to 1 at which an order's outputs have other bits; empty where none alone shows it."""
    low, high = _reaches(target, orders)
    smallest = number_format(target.output).smallest_exponent
    low = min(low, (smallest + 2) // (2 if target.operands == 2 else 1))
    step = _SCAN_STEP // (2 if target.operands == 2 else 1)
    places: list[int] = []
    if direction <= 0:
        places += range(-step, low - 1, -step)
    if direction >= 0:
        places += range(step, high + 1, step)
    for exponent in sorted(places, key=abs):
        calls = -(-_SCAN_VECTORS // target.rows)
        around = np.array(exponent)
        counts = compare(target, orders, labels, calls, lambda rows, e=around: draw_around(target, rows, rng, e), rng)  # type: ignore[misc]
        if counts[label].differing:
            return _words(target, exponent)
    return ""


def _subnormals(target: Target, orders: list[Order], labels: Labels, rng: np.random.Generator) -> list[Order]:
    """Sums (or products, or operands) around the smallest normal number, and what is flushed where they part."""
    double = target.dtype == "float64" and target.operands == 2  # the model of their fma ends above subnormal numbers
    if target.positive or double or any(order.tree.fused for order in orders):
        return orders
    smallest = number_format(target.output).smallest_exponent
    smallest = max(smallest, target.input_format.smallest_exponent)
    calls = -(-_VECTORS // target.rows)
    seen = [observe(target, labels, vectors, rng) for vectors in _tiny(target, smallest, rng) for _ in range(calls)]
    result = []
    for label, order in enumerate(orders):
        own = [one.only(labels, label) for one in seen]
        plain = count(target, order, own)
        found = replace(order, elsewhere=plain.checked, unstable=plain.unstable)
        if not plain.differing:
            result.append(replace(found, subnormals="kept"))
            continue
        for arithmetic in _explanations(order):
            if not count(target, replace(order, arithmetic=arithmetic), own, twice=False).differing:
                flush = arithmetic.flush
                words = "kept" if flush is None else f"not kept ({flush.describe()})"
                result.append(replace(found, subnormals=words, arithmetic=arithmetic))
                break
        else:
            where = _first(target, label, orders, labels, -1, rng)
            if not where:
                where = _words(target, smallest // (2 if target.operands == 2 else 1)) + ", where they are subnormal"
            parts = _parts(where, plain.differing, plain.checked)
            result.append(replace(found, parts=parts, subnormals="not reproduced"))
    return result


def _tiny(target: Target, smallest: int, rng: np.random.Generator) -> list[Draw]:
    """Vectors whose sums are subnormal; of products once for both operands small, once for one that is subnormal."""

    def around(exponent: int) -> Draw:
        def draw(rows: int) -> Array:
            exponents = rng.integers(exponent - _SUBNORMAL_BINADES, exponent + 1, (rows, target.n))
            return draw_around(target, rows, rng, exponents)

        return draw

    if target.operands == 1:
        return [around(smallest)]
    pairs = ((smallest // 2, smallest // 2), (smallest, 0), (0, smallest))

    def alternating(first: int, second: int) -> Draw:
        turns = cycle((around(first), around(second)))
        return lambda rows: next(turns)(rows)

    return [alternating(*pair) for pair in pairs]


def _explanations(order: Order) -> Iterator[Arithmetic]:
    """The order's arithmetic with other fused products, where only subnormal numbers tell, and with what may flush."""
    flushes: list[Flush | None] = [None]
    for signed in (True, False):
        flushes += [
            *(Flush(False, True, signed=signed, started=leaves) for leaves in _started(order)),
            Flush(outputs=True, signed=signed),
            Flush(operands=True, signed=signed),
            *(Flush(True, True, signed=signed, started=leaves) for leaves in _started(order)),
            Flush(operands=True, outputs=True, signed=signed),
        ]
    for flush in flushes:
        for fused in _fused(order):
            yield replace(order.arithmetic, flush=flush, fused=fused)


def _pairs(order: Order) -> list[list[int]]:
    """Leaves that meet each other first."""
    return [sorted(node) for node in order.tree.nodes if all(child < order.tree.leaves for child in node)]


def _started(order: Order) -> list[frozenset[int]]:
    """Which leaves may be added to a +0 first: none, or one of each pair, or every leaf of a pair."""
    if not order.arithmetic.starts_at_zero:
        return [frozenset()]
    pairs = _pairs(order)
    first, second = frozenset(pair[0] for pair in pairs), frozenset(pair[1] for pair in pairs)
    return [frozenset(), first, second, first | second]


def _fused(order: Order) -> list[frozenset[int]]:
    """Which products may be fused: what was found, or all that could be where they are exact in the accumulator."""
    arithmetic, tree = order.arithmetic, order.tree
    exact = 2 * arithmetic.operand_bits <= number_format(arithmetic.accumulator).bits
    if not arithmetic.products or not exact or arithmetic.initial is not None or not tree.nodes:
        return [arithmetic.fused]
    pairs, every = _pairs(order), frozenset(range(tree.leaves))
    return [
        arithmetic.fused,
        every - {pair[0] for pair in pairs},
        every - {pair[1] for pair in pairs},
        every,
    ]
