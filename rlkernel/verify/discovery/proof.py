"""The proof of a revealed order: its tree, executed, must give the bits of the target on random inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlkernel.verify.discovery.arithmetic import Arithmetic, execute
from rlkernel.verify.discovery.formats import Array, bits_of
from rlkernel.verify.discovery.inputs import draw
from rlkernel.verify.discovery.targets import Target, Trial
from rlkernel.verify.discovery.tree import Tree

_OUTPUTS_A_CALL = 512
_OUTPUTS_A_BATCH = 2048


@dataclass(frozen=True)
class Order:
    """The order of some outputs of one call: all of them, mostly.

    ``checked`` outputs of inputs around 1 were compared with the executed tree, ``differing`` of them had other bits.
    Where some of a call did, it was made once more on the same input: ``unstable`` of its outputs then had other bits
    than before. ``elsewhere`` outputs were compared at other magnitudes; ``parts``: at which of these the tree does not
    hold (empty: at none). ``subnormals``: what sums around the smallest normal number have: ``kept``, ``not kept (what
    is flushed)``, which was executed and compared, ``not reproduced``, or ``not checked``.
    """

    where: str
    outputs: int
    tree: Tree
    arithmetic: Arithmetic
    checked: int = 0
    differing: int = 0
    subnormals: str = "not checked"
    unstable: int = 0
    elsewhere: int = 0
    parts: str = ""

    @property
    def holds(self) -> bool:
        """Whether the executed tree had the bits of every output that was compared."""
        return not self.differing and not self.unstable and not self.parts


def check(
    target: Target, orders: list[Order], labels: npt.NDArray[np.int64], vectors: int, rng: np.random.Generator
) -> tuple[list[Order], int]:
    """Compare the executed trees with the target on random inputs around 1; returns the orders with their counts."""
    calls = max(4, -(-vectors // target.rows))
    counts = compare(target, orders, labels, calls, lambda count: draw(target, count, rng), rng)
    return [
        replace(order, checked=one.checked, differing=one.differing, unstable=one.unstable)
        for order, one in zip(orders, counts, strict=True)
    ], calls * target.rows


@dataclass(frozen=True)
class Counts:
    """Of one order: outputs compared, those that differ, and those that differ between two calls on the same input."""

    checked: int = 0
    differing: int = 0
    unstable: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.checked + other.checked, self.differing + other.differing, self.unstable + other.unstable)


def compare(
    target: Target,
    orders: list[Order],
    labels: npt.NDArray[np.int64],
    calls: int,
    vectors: Callable[[int], Array],
    rng: np.random.Generator,
) -> list[Counts]:
    """What was counted of every order, over so many calls with random operands."""
    counts = [Counts()] * len(orders)
    waiting: list[Seen] = []
    for call in range(calls):
        waiting.append(observe(target, labels, vectors, rng))
        if sum(seen.rows.size for seen in waiting) < _OUTPUTS_A_BATCH and call < calls - 1:
            continue
        for label, order in enumerate(orders):
            counts[label] += count(target, order, [seen.only(labels, label) for seen in waiting])
        waiting = []
    return counts


def observe(
    target: Target, labels: npt.NDArray[np.int64], vectors: Callable[[int], Array], rng: np.random.Generator
) -> Seen:
    """One call with random operands."""
    trial = target.trial(vectors)
    with np.errstate(all="ignore"):
        return Seen(trial, target.outputs(trial), *_places(labels, rng))


@dataclass(frozen=True)
class Seen:
    """Outputs of one call that are compared."""

    trial: Trial
    outputs: Array
    rows: Array
    columns: Array

    def only(self, labels: npt.NDArray[np.int64], label: int) -> Seen:
        """The outputs of one order alone."""
        chosen = labels[self.rows, self.columns] == label
        return replace(self, rows=self.rows[chosen], columns=self.columns[chosen])


def _places(labels: npt.NDArray[np.int64], rng: np.random.Generator) -> tuple[Array, Array]:
    """Rows and columns of the outputs of a call that are compared: all, or a random choice of many in each order."""
    places = []
    for label in range(int(labels.max()) + 1):
        found = np.flatnonzero(labels == label)
        if found.size > _OUTPUTS_A_CALL:
            found = np.unique(np.concatenate([found[[0, -1]], rng.choice(found, _OUTPUTS_A_CALL - 2)]))
        places.append(found)
    rows, columns = np.divmod(np.concatenate(places), labels.shape[1])
    return rows, columns


def count(target: Target, order: Order, batch: list[Seen], *, twice: bool = True) -> Counts:
    """What was counted of one order over these calls; ``twice``: calls that differ are made once more."""
    operands = [target.operands_at(seen.trial, seen.rows, seen.columns) for seen in batch]
    a = np.concatenate([first for first, _ in operands])
    if not a.shape[0]:
        return Counts()
    b = None if operands[0][1] is None else np.concatenate([second for _, second in operands if second is not None])
    sums = execute(order.tree, order.arithmetic, a, b)
    place = wrong = unstable = 0
    for seen in batch:
        own = sums[place : place + seen.rows.size]
        place += seen.rows.size
        with np.errstate(all="ignore"):
            expected = target.finish(own, seen.trial, seen.rows, seen.columns)
        given = bits_of(seen.outputs[seen.rows, seen.columns])
        here = int((bits_of(expected) != given).sum())
        if here and twice:
            # an order that depends on the data gives these bits again; one that depends on nothing known does not
            with np.errstate(all="ignore"):
                again = target.outputs(seen.trial)[seen.rows, seen.columns]
            unstable += int((bits_of(again) != given).sum())
        wrong += here
    return Counts(place, wrong, unstable)
