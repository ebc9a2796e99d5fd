"""The order that a contract's entry demands, as a tree, and where a revealed order parts from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlkernel.contract.entries import HEAD_DIM, HIDDEN, KEYS, NONE
from rlkernel.contract.points import SixPoints
from rlkernel.contract.profiles import FMA
from rlkernel.errors import ContractError
from rlkernel.models.config import ModelConfig
from rlkernel.verify.discovery.arithmetic import Arithmetic
from rlkernel.verify.discovery.formats import number_format
from rlkernel.verify.discovery.tree import Tree, TreeBuilder, leaf_ranges, leaves_of_set


@dataclass(frozen=True)
class ExpectedOrder:
    """Tree of an entry over n inputs; ``fused``: leaves whose product an fma adds (None: the entry says nothing)."""

    tree: Tree
    fused: frozenset[int] | None


def expected_order(points: SixPoints, n: int) -> ExpectedOrder:
    """The order that the split and merge of an entry mean for n inputs.

    Shards and leaves are contiguous; lanes are strided inside a leaf; a chain takes ``step`` products at a time.

    Raises:
        ContractError: the entry reduces nothing, describes more than one order, or cannot cut n inputs.
    """
    split, merge = points.split, points.merge
    if points.dependency.domain == NONE or merge.leaf == "none":
        raise ContractError("the entry reduces nothing, so it has no order to compare")
    if points.dependency.domain == KEYS and split.lanes > 1:
        raise ContractError(
            f"the entry describes two sums over keys (weights in {split.lanes} lanes, weighted values in a chain); "
            "its order cannot be compared as one tree"
        )
    builder = _Order(points, n)
    leaf_size = split.leaf_size
    if leaf_size:
        size = -(-n // (leaf_size * split.shards)) * leaf_size
    elif n % (split.leaves * split.shards):
        raise ContractError(f"{n} inputs cannot be cut into {split.leaves * split.shards} equal leaves")
    else:
        size, leaf_size = n // split.shards, n // split.shards // split.leaves
    shards = []
    for start in range(0, n, size):
        end = min(n, start + size)
        leaves = [builder.leaf(first, min(end, first + leaf_size)) for first in range(start, end, leaf_size)]
        shards.append(builder.merge(leaves, merge.leaves))
    return builder.finish(builder.merge(shards, merge.shards))


class _Order:
    def __init__(self, points: SixPoints, n: int) -> None:
        self._points, self._n = points, n
        self._builder = TreeBuilder(n)
        self._fused: set[int] = set()

    def leaf(self, first: int, end: int) -> int:
        lanes, merge = self._points.split.lanes, self._points.merge
        if merge.leaf == "balanced_tree":
            return self._builder.balanced(range(first, end))
        chains = [self._chain(range(lane, end, lanes)) for lane in range(first, min(end, first + lanes))]
        return self.merge(chains, merge.lanes)

    def _chain(self, leaves: Sequence[int]) -> int:
        step = self._points.split.step
        if step == 1:
            self._fused.update(leaves[1:])
            return self._builder.chain(leaves)
        total = self._builder.join(*leaves[:step])
        for start in range(step, len(leaves), step):
            total = self._builder.join(total, *leaves[start : start + step])
        return total

    def merge(self, items: list[int], order: str) -> int:
        if order == "balanced_tree":
            return self._builder.balanced(items)
        if order == "none" and len(items) > 1:
            raise ContractError(f"the entry cuts {self._n} inputs into {len(items)} parts without a merge order")
        return self._builder.chain(items)

    def finish(self, root: int) -> ExpectedOrder:
        roles = dict(self._points.primitives)
        fused = roles.get("mac", roles.get("fma")) == FMA and self._points.merge.leaf == "ascending_chain"
        return ExpectedOrder(self._builder.build(root), frozenset(self._fused) if fused else None)


def domain_size(points: SixPoints, config: ModelConfig) -> int | None:
    """Inputs that the entry reduces in this model; None where that depends on the data."""
    known = {
        HIDDEN: config.hidden_size,
        HEAD_DIM: config.head_dim,
        "heads x head axis": config.num_heads * config.head_dim,
        "intermediate axis": config.intermediate_size,
    }
    return known.get(points.dependency.domain)


def differences(points: SixPoints, n: int, tree: Tree, arithmetic: Arithmetic, subnormals: str) -> list[str]:
    """Sentences on everything in which a revealed order differs from the entry; none where it follows it.

    Raises:
        ContractError: as :func:`expected_order`.
    """
    expected = expected_order(points, n)
    found = []
    if arithmetic.initial is not None:
        return [f"merge order: the reduction starts from {arithmetic.initial!r}, not from +0"]
    if tree != expected.tree:
        found.append(f"merge order: {parting(expected.tree, tree)}")
    wanted = points.precision.accumulator
    if arithmetic.accumulator != wanted:
        found.append(f"precision: sums are kept in {arithmetic.accumulator}, the entry says {wanted}")
    if arithmetic.exceptions:
        node, name = arithmetic.exceptions[0]
        where = leaf_ranges(leaves_of_set(tree.partial_sums[node]))
        found.append(f"precision: the sum of {where} is kept in {name}, the entry says {wanted}")
    if arithmetic.operand_bits < number_format(arithmetic.inputs).bits:
        found.append(f"rounding: inputs are narrowed to {arithmetic.operand_bits} bits before they are used")
    inexact = 2 * arithmetic.operand_bits > number_format(arithmetic.accumulator).bits
    if arithmetic.products and inexact and not tree.fused and tree == expected.tree and expected.fused is not None:
        wrong = sorted(arithmetic.fused ^ expected.fused)
        if wrong:
            did, should = ("fused", "rounded") if wrong[0] in arithmetic.fused else ("rounded", "fused (fma)")
            count = f" ({len(wrong)} inputs in all)" if len(wrong) > 1 else ""
            found.append(f"rounding: the product of input {wrong[0]} is {did}, the entry has it {should}{count}")
    if arithmetic.starts_at_zero is False:
        found.append("merge order: the sum does not start from +0 (a sum of -0 is -0)")
    if subnormals.startswith("not kept"):
        found.append(f"rounding: subnormal numbers are {subnormals}")
    return found


def parting(expected: Tree, revealed: Tree) -> str:
    """Where a revealed tree parts from the expected one: the smallest partial sum that only one of them forms."""
    known = set(revealed.partial_sums)
    missing = [k for k, members in enumerate(expected.partial_sums) if members not in known]
    if not missing:
        return _more(expected, revealed)
    node = min(missing, key=lambda k: (expected.partial_sums[k].bit_count(), k))
    parts = [_members(expected, child) for child in expected.nodes[node]]
    lowest = expected.first_leaves[expected.nodes[node][0]]
    wanted = expected.partial_sums[node]
    item = lowest
    known = set(expected.partial_sums)
    while item >= 0 and (item < revealed.leaves or revealed.partial_sums[item - revealed.leaves] in known):
        item = revealed.parents[item]
    if item < 0:
        # every partial sum around it is the entry's: the callable adds more terms at once
        return (
            f"the entry adds {_joined(parts)} ({wanted.bit_count()} inputs) first; the callable adds more terms at once"
        )
    found = [_members(revealed, child) for child in revealed.children(item)]
    return (
        f"the entry adds {_joined(parts)} ({wanted.bit_count()} inputs); the callable forms no such partial sum: there "
        f"input {lowest} is first in one that the entry does not have where it adds {_joined(found)}"
    )


def _more(expected: Tree, revealed: Tree) -> str:
    """The revealed tree has every expected partial sum and more: it adds one by one what should be added at once."""
    known = set(expected.partial_sums)
    node = next(k for k, members in enumerate(revealed.partial_sums) if members not in known)
    parts = [_members(revealed, child) for child in revealed.nodes[node]]
    return f"the entry adds more terms at once where the callable adds {_joined(parts)} first"


def _members(tree: Tree, item: int) -> str:
    if item < tree.leaves:
        return str(item)
    return f"({leaf_ranges(leaves_of_set(tree.partial_sums[item - tree.leaves]))})"


def _joined(parts: list[str]) -> str:
    if len(parts) > 4:
        parts = [*parts[:3], f"... {len(parts)} terms"]
    return " + ".join(parts)
