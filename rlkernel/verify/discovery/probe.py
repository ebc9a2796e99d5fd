"""Numerical probes that reveal a summation tree, after the idea of FPRev (Xie et al., arXiv 2411.00442).

**Masks.** Give input i a huge value M, input j -M, all others a unit u. Every u that is added to a partial sum with M
or -M in it vanishes, and so does everything under the node where i and j meet, because M - M = 0. What comes out counts
the leaves outside that node, hence the size of the smallest partial sum that holds both i and j. Those sizes determine
the tree.

**Triples.** Where only sums of positive values can be formed: M at i, half a unit in M's last place at j and k, zeros
elsewhere. More than M comes out exactly when j and k meet before i.

:mod:`rlkernel.verify.discovery.search` decides what to ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlkernel.errors import NumericsError
from rlkernel.verify.discovery.formats import Float64
from rlkernel.verify.discovery.targets import PositiveTarget, Target

INITIAL = -1
"""Stands for the initial constant where a pair is asked for."""


class NotASummation(NumericsError):
    """What was probed forms no summation tree, or none that reproduces it."""


@dataclass(frozen=True)
class Slots:
    """Outputs of one call that are known to add in one order: these rows, read at this column."""

    rows: tuple[int, ...]
    column: int = 0


class Prober:
    """Runs probes: lists of rows of terms, as many in one call as there are slots. Counts them."""

    def __init__(self, target: Target, slots: Slots) -> None:
        self.target, self.slots = target, slots
        self.probes = 0
        self.calls = 0

    def sums(self, count: int, fill: Callable[[Float64, int], None], factor: float = 1.0) -> Float64:
        """Sums of ``count`` rows of terms.

        Args:
            count: how many.
            fill: ``fill(row, k)`` writes the terms of probe k into ``row`` [n], which is all zeros before.
            factor: the second factor, where the target adds products.

        Returns:
            float64 [count].
        """
        rows = self.slots.rows
        result = np.empty(count)
        for start in range(0, count, len(rows)):
            part = min(len(rows), count - start)
            terms = np.zeros((self.target.rows, self.target.n))
            for k in range(part):
                fill(terms[rows[k]], start + k)
            with np.errstate(all="ignore"):
                sums = self.target.sums(terms, factor)
            result[start : start + part] = sums[list(rows[:part]), self.slots.column]
            self.calls += 1
        self.probes += count
        return result

    def sums_of(self, rows: Sequence[dict[int, float]], others: float = 0.0, factor: float = 1.0) -> Float64:
        """Sums of rows that are given as {leaf: term}, with one value everywhere else."""

        def fill(row: Float64, k: int) -> None:
            row[:] = others
            for leaf, value in rows[k].items():
                row[leaf] = value

        return self.sums(len(rows), fill, factor)

    def exceeding(self, rows: Sequence[dict[int, float]], base: float) -> list[bool]:
        """Whether sums are above ``base``; rows are given as {leaf: operand}. Only for positive targets."""
        target = self.target
        assert isinstance(target, PositiveTarget)
        result: list[bool] = []
        for start in range(0, len(rows), target.rows):
            part = rows[start : start + target.rows]
            operands = np.full((target.rows, target.n), target.zero)
            operands[:, 0] = target.large  # rows without a probe have a sum, too
            for k, row in enumerate(part):
                operands[k] = target.zero
                for leaf, value in row.items():
                    operands[k, leaf] = value
            with np.errstate(all="ignore"):
                result += [bool(value) for value in target.exceeds(operands, base)[: len(part)]]
            self.calls += 1
        self.probes += len(rows)
        return result


class Masks:
    """Answers ``size(i, j)``: the number of inputs under the node where i and j meet."""

    def __init__(
        self, prober: Prober, countable: int, initial: float = 0.0, *, scale: float = 1.0, flipped: bool = False
    ) -> None:
        form = prober.target.range_format
        self._prober, self._initial = prober, initial
        self._mask = form.mask * scale * (-1.0 if flipped else 1.0)
        self._unit = form.unit * scale * (-1.0 if flipped else 1.0)
        self._countable = countable
        if initial:
            # the constant must be small beside a unit and may not pass for one
            self._unit = 2.0 ** (np.ceil(np.log2(abs(initial))) + 2)

    def __call__(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        n = self._prober.target.n
        blocks = [(first, min(n, first + self._countable)) for first in range(0, n, self._countable)]
        units = np.empty(len(pairs))
        masks = np.empty(len(pairs))
        for k, (i, _) in enumerate(pairs):
            masks[k] = self._mask if i != INITIAL else self._initial
            units[k] = self._unit if i != INITIAL else 2.0 ** (np.floor(np.log2(abs(self._initial))) - 70)

        def fill(row: Float64, k: int) -> None:
            pair, (first, last) = divmod(k, len(blocks))[0], blocks[k % len(blocks)]
            i, j = pairs[pair]
            row[first:last] = units[pair]
            if i != INITIAL:
                row[i] = masks[pair]
            row[j] = -masks[pair]

        found = self._prober.sums(len(pairs) * len(blocks), fill).reshape(len(pairs), len(blocks))
        counts = found / units[:, None]
        whole = np.rint(counts)
        tolerance = 0.3 if self._initial else self._prober.target.noise
        for k, (i, j) in enumerate(pairs):
            bad = ~(np.abs(counts[k] - whole[k]) <= tolerance)
            if bad.any():
                where = "the initial value" if i == INITIAL else f"{masks[k]:g} at input {i}"
                if not np.isfinite(found[k][bad]).all():
                    raise NotASummation(
                        f"{self._prober.target.name} does not give a finite number with {where}, {-masks[k]:g} at "
                        f"input {j} and {units[k]:g} elsewhere, all of which {self._prober.target.dtype} holds: it "
                        "computes in a narrower format. Where that is its input's or output's, name it with --dtype or "
                        "--output, as in --dtype float16"
                    )
                raise NotASummation(
                    f"{self._prober.target.name} is not a sum that a tree describes: with {where}, {-masks[k]:g} at "
                    f"input {j} and {units[k]:g} elsewhere it gives {float(found[k][bad][0])!r}, which is no whole "
                    f"number of {units[k]:g}"
                )
            for block, (first, last) in enumerate(blocks):
                most = last - first - sum(first <= leaf < last for leaf in (i, j))
                if not 0 <= whole[k, block] <= most:
                    where = "the initial value" if i == INITIAL else f"{masks[k]:g} at input {i}"
                    among = "elsewhere" if len(blocks) == 1 else f"at the others of inputs {first}..{last - 1}"
                    raise NotASummation(
                        f"{self._prober.target.name} is no plain sum: with {where}, {-masks[k]:g} at input {j} and "
                        f"{units[k]:g} {among} it gives {float(found[k, block])!r}; a sum gives 0 to {most} times "
                        f"{units[k]:g}"
                    )
        return [n - int(total) for total in whole.sum(axis=1)]


class Triples:
    """Answers ``meets_first(i, j, k)``: whether j and k meet before i. Needs no negative terms."""

    def __init__(self, prober: Prober) -> None:
        self._prober = prober

    def __call__(self, triples: Sequence[tuple[int, int, int]]) -> list[bool]:
        target = self._prober.target
        assert isinstance(target, PositiveTarget)
        rows = [{i: target.large, j: target.small, k: target.small} for i, j, k in triples]
        return self._prober.exceeding(rows, 1.0)
