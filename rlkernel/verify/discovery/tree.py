"""A summation tree: which partial sums an implementation forms. Leaves are the indices of the inputs.

Addition commutes, so the order of a node's children is not observable; a tree is kept in canonical form (children by
their lowest leaf, nodes in post-order), and two trees are equal exactly when they form the same partial sums.
A node with more than two children is a fused adder: its terms are added at once, as a matrix unit does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlkernel.errors import ContractError


@dataclass(frozen=True)
class Tree:
    """Sum over leaves ``0 .. leaves-1``. ``nodes[k]`` holds the children of item ``leaves + k``; the last is the root.

    Build one with :class:`TreeBuilder`, which brings it into canonical form.
    """

    leaves: int
    nodes: tuple[tuple[int, ...], ...]

    @property
    def root(self) -> int:
        """Item that is the whole sum: the last node, or leaf 0 where there is no node."""
        return self.leaves + len(self.nodes) - 1

    def children(self, item: int) -> tuple[int, ...]:
        """Children of an item; none for a leaf."""
        return self.nodes[item - self.leaves] if item >= self.leaves else ()

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of every item; -1 for the root."""
        result = [-1] * (self.leaves + len(self.nodes))
        for k, children in enumerate(self.nodes):
            for child in children:
                result[child] = self.leaves + k
        return tuple(result)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of leaves under every item."""
        result = [1] * self.leaves
        for children in self.nodes:
            result.append(sum(result[child] for child in children))
        return tuple(result)

    @cached_property
    def heights(self) -> tuple[int, ...]:
        """Longest way from every item down to a leaf."""
        result = [0] * self.leaves
        for children in self.nodes:
            result.append(1 + max(result[child] for child in children))
        return tuple(result)

    @cached_property
    def first_leaves(self) -> tuple[int, ...]:
        """Lowest leaf under every item."""
        result = list(range(self.leaves))
        for children in self.nodes:
            result.append(min(result[child] for child in children))
        return tuple(result)

    @cached_property
    def partial_sums(self) -> tuple[int, ...]:
        """The set of leaves of every node, as an integer with bit k set for leaf k; in the order of ``nodes``."""
        sets = [1 << k for k in range(self.leaves)]
        for children in self.nodes:
            total = 0
            for child in children:
                total |= sets[child]
            sets.append(total)
        return tuple(sets[self.leaves :])

    @cached_property
    def shapes(self) -> tuple[int, ...]:
        """A number for every item; equal numbers mean subtrees of equal form, whatever their leaves are called."""
        known: dict[tuple[int, ...], int] = {}
        result = [0] * self.leaves
        for children in self.nodes:
            form = tuple(sorted(result[child] for child in children))
            result.append(known.setdefault(form, len(known) + 1))
        return tuple(result)

    @property
    def fused(self) -> bool:
        """Whether some node adds more than two terms at once."""
        return any(len(children) > 2 for children in self.nodes)

    def meeting(self, one: int, other: int) -> int:
        """The item in which two leaves meet: the smallest partial sum that holds both."""
        seen = set()
        item = one
        while item >= 0:
            seen.add(item)
            item = self.parents[item]
        item = other
        while item not in seen:
            item = self.parents[item]
        return item

    def sibling_leaf(self, leaf: int) -> int | None:
        """A leaf of another child of the leaf's parent; None where the tree is that one leaf."""
        parent = self.parents[leaf]
        if parent < 0:
            return None
        return next(self.first_leaves[child] for child in self.children(parent) if child != leaf)

    def relabelled(self, names: Sequence[int]) -> Tree:
        """The same form with leaf k called ``names[k]`` (a permutation)."""
        if sorted(names) != list(range(self.leaves)):
            raise ContractError(f"new names of {self.leaves} leaves must be a permutation of 0..{self.leaves - 1}")
        builder = TreeBuilder(self.leaves)
        items = list(names)
        for children in self.nodes:
            items.append(builder.join(*(items[child] for child in children)))
        return builder.build(items[-1])


class TreeBuilder:
    """Joins items into a tree over a fixed number of leaves; items are leaves (by index) and what ``join`` returns."""

    def __init__(self, leaves: int) -> None:
        if leaves < 1:
            raise ContractError(f"a summation tree over {leaves} inputs is not possible; it has 1 or more")
        self.leaves = leaves
        self._nodes: list[tuple[int, ...]] = []

    def join(self, *items: int) -> int:
        """The sum of the items at once (one rounding); a single item is returned as it is."""
        if len(items) == 1:
            return items[0]
        self._nodes.append(items)
        return self.leaves + len(self._nodes) - 1

    def chain(self, items: Iterable[int]) -> int:
        """((i0 + i1) + i2) + ..."""
        rest = iter(items)
        total = next(rest)
        for item in rest:
            total = self.join(total, item)
        return total

    def balanced(self, items: Iterable[int]) -> int:
        """Neighbours pairwise, lower index on the left, until one is left. An odd last one is passed on.

        That is the tree over the next power of two, because a missing item is +0 and adding +0 changes nothing.
        """
        level = list(items)
        while len(level) > 1:
            level = [self.join(*level[k : k + 2]) for k in range(0, len(level), 2)]
        return level[0]

    def build(self, root: int) -> Tree:
        """The canonical tree under ``root``.

        Raises:
            ContractError: a leaf is missing or used twice.
        """
        first = list(range(self.leaves))
        for children in self._nodes:
            first.append(min(first[child] for child in children))
        nodes: list[tuple[int, ...]] = []
        names: dict[int, int] = {}
        used = [0] * self.leaves
        stack = [(root, False)]
        while stack:
            item, ready = stack.pop()
            if item < self.leaves:
                used[item] += 1
                names[item] = item
                continue
            ordered = sorted(self._nodes[item - self.leaves], key=lambda child: first[child])
            if ready:
                nodes.append(tuple(names[child] for child in ordered))
                names[item] = self.leaves + len(nodes) - 1
            else:
                stack.append((item, True))
                stack += [(child, False) for child in reversed(ordered)]
        wrong = [leaf for leaf, count in enumerate(used) if count != 1]
        if wrong:
            raise ContractError(
                f"leaf {wrong[0]} is in the tree {used[wrong[0]]} times; each of the {self.leaves} leaves is in it once"
            )
        return Tree(self.leaves, tuple(nodes))


def leaf_ranges(leaves: Iterable[int], most: int = 6) -> str:
    """Ascending leaves as text: ``0..15``, ``0..56 by 8``, ``3, 7, 20``; cut after so many parts."""
    values = list(leaves)
    parts = []
    k = 0
    while k < len(values):
        step = values[k + 1] - values[k] if k + 1 < len(values) else 1
        end = k
        while end + 1 < len(values) and values[end + 1] - values[end] == step:
            end += 1
        if end - k >= 2:
            parts.append(f"{values[k]}..{values[end]}" + (f" by {step}" if step != 1 else ""))
            k = end + 1
        else:
            parts.append(str(values[k]))
            k += 1
    if len(parts) > most:
        parts = [*parts[: most - 1], f"... ({len(values)} in all)"]
    return ", ".join(parts)


def leaves_of_set(members: int) -> list[int]:
    """Leaves of a partial sum that is given as an integer."""
    return [k for k in range(members.bit_length()) if members >> k & 1]
