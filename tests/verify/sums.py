"""Reductions written in Python for the discovery tests: float32 rows in, one float32 a row out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rlkernel.verify.discovery.arithmetic import Arithmetic, execute
from rlkernel.verify.discovery.tree import Tree, TreeBuilder

Array = npt.NDArray[np.float32]


def build(leaves: int, root: Callable[[TreeBuilder], int]) -> Tree:
    """A tree from what ``root`` joins."""
    builder = TreeBuilder(leaves)
    return builder.build(root(builder))


def sequential(x: Array) -> Array:
    total = np.zeros(x.shape[0], dtype=np.float32)
    for k in range(x.shape[1]):
        total = total + x[:, k]
    return total


def pairwise(x: Array) -> Array:
    """Halves, recursively, down to single inputs."""
    if x.shape[1] == 1:
        return x[:, 0]
    half = x.shape[1] // 2
    return pairwise(x[:, :half]) + pairwise(x[:, half:])


def swapped_pairwise(x: Array) -> Array:
    """As :func:`pairwise`, over an input whose halves are exchanged."""
    half = x.shape[1] // 2
    return pairwise(np.concatenate([x[:, half:], x[:, :half]], axis=1))


def strided(x: Array, lanes: int = 8) -> Array:
    """Lane l adds inputs l, l + 8, ...; lanes are added ascending."""
    lanes = min(lanes, x.shape[1])
    return sequential(np.stack([sequential(x[:, lane::lanes]) for lane in range(lanes)], axis=1))


def blocked(x: Array, size: int = 32) -> Array:
    """Blocks of 32 inputs, each added ascending; blocks are added ascending."""
    blocks = [sequential(x[:, start : start + size]) for start in range(0, x.shape[1], size)]
    return sequential(np.stack(blocks, axis=1))


def tree_of_chains(x: Array, lanes: int = 16) -> Array:
    """Strided lanes merged by a balanced tree."""
    level = [sequential(x[:, lane::lanes]) for lane in range(min(lanes, x.shape[1]))]
    while len(level) > 1:
        level = [level[k] + level[k + 1] if k + 1 < len(level) else level[k] for k in range(0, len(level), 2)]
    return level[0]


def kahan(x: Array) -> Array:
    """Compensated: no summation tree."""
    total = np.zeros(x.shape[0], dtype=np.float32)
    lost = np.zeros_like(total)
    for k in range(x.shape[1]):
        term = x[:, k] - lost
        following = total + term
        lost = (following - total) - term
        total = following
    return total


def by_size(x: Array) -> Array:
    """Ascending by magnitude: the order depends on the data."""
    return sequential(np.take_along_axis(x, np.argsort(np.abs(x), axis=1, kind="stable"), axis=1))


def by_majority(x: Array) -> Array:
    """Backwards where most inputs are negative."""
    return np.where(np.sum(np.sign(x), axis=1) < 0, sequential(x[:, ::-1]), sequential(x))


def executed(tree: Tree, x: Array) -> Array:
    """A tree executed in float32, +0 first."""
    arithmetic = Arithmetic("float32", "float32", "float32", 24, starts_at_zero=True)
    return execute(tree, arithmetic, x)
