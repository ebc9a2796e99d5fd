"""Numerical probes that reveal a summation tree, after the idea of FPRev (Xie et al., arXiv 2411.00442).

**Masks.** Give input i a huge value M, input j -M, all others a unit u. Every u that is added to a partial sum with M
or -M in it vanishes, and so does everything under the node where i and j meet, because M - M = 0. What comes out counts
the leaves outside that node, hence the size of the smallest partial sum that holds both i and j. Those sizes determine
the tree.

**Triples.** Where only sums of positive values can be formed: M at i, half a unit in M's last place at j and k, zeros
elsewhere. More than M comes out exactly when j and k meet before i.

Both recurse: a random pivot's sizes (or order) cut the other leaves into the subtrees that join the pivot's path, and
each is then probed alone: about n log n probes for any tree. All open subtrees share each batch of probes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlkernel.errors import NumericsError
from rlkernel.verify.discovery.formats import Float64
from rlkernel.verify.discovery.targets import PositiveTarget, Target
from rlkernel.verify.discovery.tree import Tree, TreeBuilder

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
        form = prober.target.input_format
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
                raise NotASummation(
                    f"{self._prober.target.name} is not a sum that a tree describes: with {where}, {-masks[k]:g} at "
                    f"input {j} and {units[k]:g} elsewhere it gives {float(found[k][bad][0])!r}, which is no whole "
                    f"number of {units[k]:g}"
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


# A leaf set is cut by a pivot into groups that join the pivot's path, lowest first, and a rest that belongs to other
# children of a fused adder above. Cutters are generators: they yield a list of questions and get the answers.
_Cut = tuple[list[list[int]], list[int]]
_Cutter = Generator[list[Any], list[Any], _Cut]


@dataclass
class _Part:
    """Leaves that form whole children of one node; ``top`` is that node's size (masks only)."""

    members: list[int]
    top: int
    pivot: int = 0
    groups: list[_Part] = field(default_factory=list)
    rest: _Part | None = None


def _cut_by_sizes(part: _Part, name: str) -> _Cutter:
    others = [leaf for leaf in part.members if leaf != part.pivot]
    sizes = yield [(part.pivot, leaf) for leaf in others]
    by_size: dict[int, list[int]] = {}
    for leaf, size in zip(others, sizes, strict=True):
        by_size.setdefault(size, []).append(leaf)
    rest = by_size.pop(part.top, [])
    groups = []
    joined = 0 if part.pivot == INITIAL else 1
    for size in sorted(by_size):
        joined += len(by_size[size])
        if joined != size or size > part.top:
            pivot = "the initial value" if part.pivot == INITIAL else f"input {part.pivot}"
            raise NotASummation(
                f"{name} is not a sum that a tree describes (or its order depends on the data): {pivot} meets input "
                f"{by_size[size][0]} in a partial sum of {size} inputs, but {joined} inputs meet it there or before"
            )
        groups.append(by_size[size])
    return groups, rest


def _cut_by_triples(part: _Part, rng: np.random.Generator) -> _Cutter:
    """Sorts the other leaves by where they meet the pivot: quicksort, all segments of a round in one batch."""
    yield []
    segments: list[tuple[list[int], bool]] = [([leaf for leaf in part.members if leaf != part.pivot], False)]
    while any(not done and len(leaves) > 1 for leaves, done in segments):
        openings = [leaves for leaves, done in segments if not done and len(leaves) > 1]
        middles = [leaves[int(rng.integers(len(leaves)))] for leaves in openings]
        questions = []
        for leaves, middle in zip(openings, middles, strict=True):
            for leaf in leaves:
                if leaf != middle:
                    questions += [(middle, part.pivot, leaf), (leaf, part.pivot, middle)]
        answers = iter((yield questions))
        cuts = iter(zip(openings, middles, strict=True))
        following: list[tuple[list[int], bool]] = []
        for leaves, done in segments:
            if done or len(leaves) <= 1:
                following.append((leaves, done))
                continue
            _, middle = next(cuts)
            same, below, above = [middle], _none(), _none()
            for leaf in leaves:
                if leaf == middle:
                    continue
                first, later = next(answers), next(answers)
                (below if first else above if later else same).append(leaf)
            following += [(below, False), (same, True), (above, False)]
        segments = [(leaves, done) for leaves, done in following if leaves]
    return [leaves for leaves, _ in segments], []


def _none() -> list[int]:
    return []


def reveal_tree(
    oracle: Callable[[list[Any]], list[Any]],
    leaves: int,
    name: str,
    rng: np.random.Generator,
    *,
    triples: bool = False,
    initial: bool = False,
) -> Tree:
    """Ask an oracle until the tree is known.

    Args:
        oracle: :class:`Masks`, or :class:`Triples` with ``triples``.
        leaves: number of inputs.
        name: of what is probed, for messages.
        rng: chooses the pivots; the tree does not depend on them.
        initial: the reduction starts from a constant: it becomes one more leaf, the last.

    Raises:
        NotASummation: the answers contradict each other.
    """
    root = _Part(list(range(leaves)), leaves + 1)
    pending = [root]
    first = initial
    while pending:
        cutters: list[tuple[_Part, _Cutter]] = []
        for part in pending:
            part.pivot = INITIAL if first else part.members[int(rng.integers(len(part.members)))]
            first = False
            if len(part.members) > 1 or part.pivot == INITIAL:
                cutters.append((part, _cut_by_triples(part, rng) if triples else _cut_by_sizes(part, name)))
        pending = _run_cutters(oracle, cutters)
    builder = TreeBuilder(leaves + int(initial))
    return builder.build(builder.join(*_assemble(builder, root, leaves)))


def _run_cutters(oracle: Callable[[list[Any]], list[Any]], cutters: list[tuple[_Part, _Cutter]]) -> list[_Part]:
    """Drive all cutters together; returns the parts that they made."""
    made: list[_Part] = []
    waiting = [(part, cutter, next(cutter)) for part, cutter in cutters]
    while waiting:
        answers = oracle([question for _, _, questions in waiting for question in questions])
        still = []
        place = 0
        for part, cutter, questions in waiting:
            own = answers[place : place + len(questions)]
            place += len(questions)
            try:
                still.append((part, cutter, cutter.send(own)))
            except StopIteration as stop:
                groups, rest = stop.value
                joined = 0 if part.pivot == INITIAL else 1
                for group in groups:
                    joined += len(group)
                    part.groups.append(_Part(group, joined))
                part.rest = _Part(rest, part.top) if rest else None
                made += part.groups + ([part.rest] if part.rest else [])
        waiting = still
    return made


def _assemble(builder: TreeBuilder, part: _Part, leaves: int) -> list[int]:
    """Items that are whole children of the part's node."""
    items = []
    following: _Part | None = part
    while following is not None:
        total = leaves if following.pivot == INITIAL else following.pivot
        for group in following.groups:
            total = builder.join(total, *_assemble(builder, group, leaves))
        items.append(total)
        following = following.rest
    return items
