"""Gradient norm, clipping and AdamW executed from their contract entries."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rlkernel.contract.points import SixPoints
from rlkernel.kernels.cpu.optimizer import AdamWScalars
from rlkernel.reference.arith import add, cast, div, fma32, mul, sqrt, sub
from rlkernel.reference.lookup import primitive
from rlkernel.reference.reductions import row_sum, tree

Tensor = torch.Tensor


def sum_of_squares(points: SixPoints, gradient: Tensor) -> Tensor:
    """Sum of squares of a flattened logical tensor: leaves of the entry's size, merged as a tree."""
    flat, size = gradient.reshape(-1), points.split.leaf_size
    if not len(flat):
        return torch.zeros((), device=gradient.device)
    whole = len(flat) // size * size
    sums = []
    if whole:
        rows = flat[:whole].reshape(-1, size)
        sums.append(row_sum(points, rows, rows))
    if whole < len(flat):
        rest = flat[whole:].reshape(1, -1)
        sums.append(row_sum(points, rest, rest))
    leaves = torch.cat(sums)
    width = 1 << max(0, (len(leaves) - 1).bit_length())
    return tree(torch.nn.functional.pad(leaves, (0, width - len(leaves))), 0)


def gradient_norm(points: SixPoints, gradients: Mapping[str, Tensor]) -> Tensor:
    """Norm over logical tensors in name order."""
    plus = primitive(points.primitive("add"))
    total: Tensor | None = None
    for name in sorted(gradients):
        part = sum_of_squares(points, gradients[name])
        total = plus(torch.zeros_like(part) if total is None else total, part)
    assert total is not None
    return sqrt(total)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """max_norm / norm above the limit, else 1."""
    limit = torch.full_like(norm, float(np.float32(max_norm)))
    return torch.where(norm > limit, div(limit, norm), torch.ones_like(norm))


def adamw(
    points: SixPoints, master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, scalars: AdamWScalars
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One update: (master, m, v, model weight), all new tensors of the shape of ``master``."""

    def constant(value: np.float32) -> Tensor:
        return torch.full((), float(value), device=master.device).expand_as(master)

    g = mul(gradient, constant(scalars.clip))
    m = fma32(constant(scalars.beta1), m, mul(constant(scalars.one_minus_beta1), g))
    v = fma32(constant(scalars.beta2), v, mul(constant(scalars.one_minus_beta2), mul(g, g)))
    root = sqrt(mul(v, constant(scalars.correction2)))
    step = div(mul(m, constant(scalars.correction1)), add(root, constant(scalars.eps)))
    decayed = fma32(constant(scalars.weight_decay), master, step)
    master = sub(master, mul(constant(scalars.lr), decayed))
    narrow = points.rounds("model weight")
    return master, m, v, master if narrow is None else cast(master, narrow)
