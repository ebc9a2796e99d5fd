"""Reductions that are driven by the six points: split, merge order and multiply-accumulate primitive are read as data.

A sum over k of ``a[..., k] * b[..., k]`` is cut by ``points.split``:

* ``leaves`` equal parts of the axis (or parts with given borders), or parts of ``leaf_size`` elements, the last short;
* a leaf is one ascending chain of the multiply-accumulate primitive from +0, ``step`` products at a time, padded with
  zeros to whole steps; with ``lanes`` W > 1 it is W strided chains (never more than the smallest power of two that is
  not less than the leaf's length), merged by ``merge.lanes``;
* the leaves are merged by ``merge.leaves``: ``balanced_tree`` (neighbours, lower index on the left; a number of leaves
  that is no power of two is filled up with +0), or ``ascending_chain`` (the first leaf, then each next one added).

Merges that rescale (attention, log-sum-exp) and shards belong to their regions. Whatever the data leaves open is a
ContractError. Tensors may lie on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from rlkernel.contract.points import MergeOrder, SixPoints
from rlkernel.contract.profiles import ADD
from rlkernel.errors import ContractError
from rlkernel.reference.arith import add, float32
from rlkernel.reference.primitives import MULTIPLY_ACCUMULATE, MultiplyAccumulate


def multiply_accumulate(points: SixPoints) -> MultiplyAccumulate:
    """The primitive that the entry's chains are made of: that of its role ``mac``, or else ``fma``.

    Raises:
        ContractError: neither role, a primitive that does not accumulate, a split whose step is not the primitive's, or
            inputs or an accumulator that it does not have.
    """
    roles = dict(points.primitives)
    name = roles.get("mac", roles.get("fma", ""))
    if name not in MULTIPLY_ACCUMULATE:
        raise ContractError(
            f"the entry's primitives {roles} name no multiply-accumulate: "
            f"the role 'mac' (or 'fma') must be one of {', '.join(MULTIPLY_ACCUMULATE)}"
        )
    primitive = MULTIPLY_ACCUMULATE[name]
    if points.split.step != primitive.step:
        raise ContractError(
            f"split.step is {points.split.step}, but {primitive.name} adds {primitive.step} products at a time"
        )
    if points.precision.inputs not in primitive.inputs:
        accepted = " or ".join(primitive.inputs)
        raise ContractError(f"precision.inputs is {points.precision.inputs!r}, but {primitive.name} takes {accepted}")
    if points.precision.accumulator != "float32":
        raise ContractError(
            f"precision.accumulator is {points.precision.accumulator!r}; {primitive.name} accumulates in float32"
        )
    return primitive


def chain(points: SixPoints, a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """One ascending chain of the entry's multiply-accumulate over the last axis of ``a`` and ``b`` (broadcast).

    It ignores the entry's cuts and merges: for an axis that the entry does not cut because its split is that of another
    one (the head axis in attention), and for a leaf that the caller cuts.

    Args:
        a, b: ``[..., K]``, float32 (bfloat16 values, where the primitive is a matrix unit's) or bfloat16.
        start: float32 ``[...]`` that the chain continues; +0 without it.

    Returns:
        float32 ``[...]``.
    """
    return _chain(multiply_accumulate(points), a, b, start)


def _chain(primitive: MultiplyAccumulate, a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    if a.shape[-1] != b.shape[-1]:
        raise ContractError(f"the reduced axes have {a.shape[-1]} and {b.shape[-1]} elements; they must be equal")
    shape = torch.Size(np.broadcast_shapes(a.shape[:-1], b.shape[:-1]))  # torch's own is slow
    if start is None:
        start = torch.zeros(shape, dtype=torch.float32, device=a.device)
    elif start.shape != shape or start.dtype != torch.float32:
        raise ContractError(f"the start of a chain is float32 {list(shape)}; it is {start.dtype} {list(start.shape)}")
    return primitive.chain(a, b, start)


def add_chain(values: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    """``acc = add(acc, v)`` over the first axis, ascending, from ``start`` (+0): ``[K, ...]`` -> float32 ``[...]``."""
    (terms,) = float32(values)
    total = torch.zeros_like(terms[0]) if start is None and len(terms) else start
    if total is None:
        total = torch.zeros(terms.shape[1:], dtype=torch.float32, device=terms.device)
    for term in terms:
        total = total + term
    return total


def tree(values: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Balanced binary tree of ``add.rn.f32`` over an axis: neighbours first, lower index on the left.

    A number of values that is no power of two is filled up with +0 to the next one; no values give +0.
    """
    (level,) = float32(values)
    level = level.movedim(dim, 0)
    width = 1 << max(0, len(level) - 1).bit_length()
    if width > len(level):
        fill = torch.zeros((width - len(level), *level.shape[1:]), dtype=torch.float32, device=level.device)
        level = torch.cat([level, fill])
    while len(level) > 1:
        level = level[0::2] + level[1::2]
    return level[0]


def merge(order: MergeOrder, parts: torch.Tensor, what: str = "merge.leaves") -> torch.Tensor:
    """Merge float32 parts ``[L, ...]`` in an order of the contract -> ``[...]``.

    Raises:
        ContractError: several parts without an order, or one that rescales.
    """
    if order == "balanced_tree":
        return tree(parts, 0)
    if order == "ascending_chain" and len(parts):
        return add_chain(parts[1:], parts[0])
    if order == "none" and len(parts) == 1:
        return parts[0]
    raise ContractError(
        f"{what} is {order!r} for {len(parts)} parts; "
        "defined here are 'balanced_tree', 'ascending_chain', and 'none' for a single part"
    )


def leaf_borders(points: SixPoints, length: int) -> list[int]:
    """Where the leaves of an axis of ``length`` elements begin, and where the last one ends.

    Raises:
        ContractError: both or neither of ``leaves`` and ``leaf_size``, or leaves that do not divide the axis.
    """
    split = points.split
    if split.shards != 1:
        raise ContractError(
            f"split.shards is {split.shards}: shards are merged by their region, not by a plain reduction"
        )
    if split.leaf_size > 0 and split.leaves == 0:
        return [*range(0, length, split.leaf_size), length] if length else [0, 0]
    if split.leaf_size != 0 or split.leaves < 1:
        raise ContractError(
            f"split.leaves is {split.leaves} and split.leaf_size {split.leaf_size}: "
            "either a number of leaves (at least 1, with leaf_size 0), or a leaf size (with leaves 0) is expected"
        )
    if length % split.leaves:
        raise ContractError(
            f"an axis of {length} elements cannot be cut into {split.leaves} equal leaves: "
            f"{length % split.leaves} would be left over"
        )
    return [length // split.leaves * leaf for leaf in range(split.leaves + 1)]


def _leaf(points: SixPoints, primitive: MultiplyAccumulate, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    length = a.shape[-1]
    if points.merge.leaf != "ascending_chain":
        raise ContractError(f"merge.leaf is {points.merge.leaf!r}; a leaf over an axis is an 'ascending_chain'")
    lanes = min(points.split.lanes, 1 << max(0, length - 1).bit_length())
    if points.split.lanes == 1:
        return _chain(primitive, a, b, None)
    if primitive.step != 1 or points.split.lanes < 1:
        raise ContractError(
            f"split.lanes is {points.split.lanes} with {primitive.name}; "
            "lanes are a positive number of strided chains of fma.rn.f32"
        )
    whole = length - length % lanes
    # lane l takes elements l, l + lanes, ...: [..., whole] seen as [..., lanes, whole / lanes]
    left, right = (x[..., :whole].unflatten(-1, (-1, lanes)).transpose(-1, -2) for x in (a, b))
    total = _chain(primitive, left, right, None)
    if whole < length:
        rest = length - whole
        tail = _chain(primitive, a[..., whole:, None], b[..., whole:, None], total[..., :rest])
        total = torch.cat([tail, total[..., rest:]], dim=-1)
    return merge(points.merge.lanes, total.movedim(-1, 0), "merge.lanes")


def dot(points: SixPoints, a: torch.Tensor, b: torch.Tensor, *, borders: Sequence[int] | None = None) -> torch.Tensor:
    """``sum over k of a[..., k] * b[..., k]`` as the entry says, before the output's cast.

    Args:
        a, b: ``[..., K]``, broadcast against each other.
        borders: where the leaves lie, for a domain that is cut by meaning (samples of a step) rather than in equal
            parts: ascending, from 0 to K, one more than ``split.leaves``.

    Returns:
        float32 ``[...]``.

    Raises:
        ContractError: the entry does not define this sum, or shapes, dtypes or values do not fit it.
    """
    primitive = multiply_accumulate(points)
    length = a.shape[-1]
    if length != b.shape[-1]:
        raise ContractError(f"the reduced axes have {length} and {b.shape[-1]} elements; they must be equal")
    cuts = leaf_borders(points, length) if borders is None else list(borders)
    if borders is not None and (
        len(cuts) != points.split.leaves + 1 or cuts[0] != 0 or cuts[-1] != length or cuts != sorted(cuts)
    ):
        raise ContractError(
            f"leaf borders {cuts} do not cut an axis of {length} elements into {points.split.leaves} leaves: "
            f"{points.split.leaves + 1} ascending numbers from 0 to {length} are expected"
        )
    parts = [_leaf(points, primitive, a[..., first:last], b[..., first:last]) for first, last in pairwise(cuts)]
    return merge(points.merge.leaves, torch.stack(parts)) if len(parts) > 1 else parts[0]


def matmul(
    points: SixPoints,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    start: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    borders: Sequence[int] | None = None,
) -> torch.Tensor:
    """``a[M, K] @ b[N, K].T`` as the entry says: the float32 accumulator ``[M, N]``, before the output's cast.

    Args:
        start: float32 ``[M, N]`` that the chain continues; only for entries of one leaf and one lane.
        bias: ``[N]``, added (``add.rn.f32``) after the last merge.
        borders: as for :func:`dot`.

    Raises:
        ContractError: the entry does not define this sum, or shapes, dtypes or values do not fit it.
    """
    if a.ndim != 2 or b.ndim != 2:
        raise ContractError(f"operands [M, K] and [N, K] are expected, not {list(a.shape)} and {list(b.shape)}")
    left, right = a[:, None, :], b[None, :, :]
    if start is None:
        total = dot(points, left, right, borders=borders)
    elif len(leaf_borders(points, a.shape[1])) == 2 and points.split.lanes == 1:
        total = chain(points, left, right, start)
    else:
        raise ContractError(
            f"a start was given for {points.split.leaves} leaves and {points.split.lanes} lanes; "
            "only a single chain can be continued: continue each leaf with chain() and merge them"
        )
    if bias is None:
        return total
    if points.primitive("add") != ADD:
        raise ContractError(f"the bias is added by {points.primitive('add')!r}; {ADD} is expected")
    return add(total, bias)


def row_sum(points: SixPoints, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``sum over k of a[r, k] * b[r, k]`` for rows ``[R, K]`` -> float32 ``[R]``; otherwise as :func:`dot`."""
    if a.ndim != 2 or a.shape != b.shape:
        raise ContractError(f"rows of one shape [R, K] are expected, not {list(a.shape)} and {list(b.shape)}")
    return dot(points, a, b)
