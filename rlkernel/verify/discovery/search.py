"""Decides which probes reveal a tree.

A random pivot's sizes (masks) or order (triples) cut the other leaves into the subtrees that join the pivot's path, and
each is then probed alone: about n log n probes for any tree. All open subtrees share each batch of probes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlkernel.verify.discovery.probe import INITIAL, NotASummation
from rlkernel.verify.discovery.tree import Tree, TreeBuilder

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
                    # the initial value is no input: what it meets first may be a whole partial sum of that size
                    alone = joined == 0
                    joined += len(group)
                    part.groups.append(_Part(group, joined + int(alone)))
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
