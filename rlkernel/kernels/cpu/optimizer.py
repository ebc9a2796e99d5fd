"""Gradient norm and AdamW. Definitions: docs/numerics.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.convert import Float32, require
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.primitives import cast, fma
from rlkernel.kernels.cpu.reductions import LANES, lane_dot, tree_of_array
from rlkernel.kernels.cpu.threads import Workers

SQUARES_LEAF = 1024
"""Elements of a leaf of the sum of squares."""


@dataclass(frozen=True)
class AdamWScalars:
    """The scalars of one optimizer step, each a ``numpy.float32`` that was rounded once from float64.

    ``correction1`` = 1 / (1 - beta1^t), ``correction2`` = 1 / (1 - beta2^t); ``clip`` multiplies the gradient.
    """

    lr: np.float32
    beta1: np.float32
    beta2: np.float32
    one_minus_beta1: np.float32
    one_minus_beta2: np.float32
    correction1: np.float32
    correction2: np.float32
    eps: np.float32
    weight_decay: np.float32
    clip: np.float32

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, np.float32):
                raise ContractError(f"{name} of AdamWScalars is a {type(value).__name__}; it must be a numpy.float32")


@kernel
def _square_leaves(first, last, values, sums):
    lanes = np.empty(LANES, dtype=np.float32)
    other = np.empty(LANES, dtype=np.float32)
    for i in range(first, last):
        leaf = values[i * SQUARES_LEAF : (i + 1) * SQUARES_LEAF]
        sums[i] = lane_dot(leaf, leaf, lanes, other)


@kernel
def _adamw(first, last, master, m, v, grad, scalars, weight, bf16):
    lr, beta1, beta2 = scalars[0], scalars[1], scalars[2]
    keep1, keep2, correct1, correct2 = scalars[3], scalars[4], scalars[5], scalars[6]
    eps, decay, clip = scalars[7], scalars[8], scalars[9]
    master_part = master[first:last]
    m_part = m[first:last]
    v_part = v[first:last]
    grad_part = grad[first:last]
    weight_part = weight[first:last]
    for j in range(master_part.size):
        g = grad_part[j] * clip
        m_new = fma(beta1, m_part[j], keep1 * g)
        v_new = fma(beta2, v_part[j], keep2 * (g * g))
        step = (m_new * correct1) / (np.sqrt(v_new * correct2) + eps)
        old = master_part[j]
        new = old - lr * fma(decay, old, step)
        m_part[j] = m_new
        v_part[j] = v_new
        master_part[j] = new
        weight_part[j] = cast(new, bf16)


def sum_of_squares(g: Float32, workers: Workers) -> np.float32:
    """Sum of squares of a float32 tensor of any shape, over leaves of 1,024 elements; +0 for an empty one.

    Raises:
        ContractError: another dtype, or not C-contiguous.
    """
    require("g of sum_of_squares", g, np.float32, *g.shape)
    flat = g.reshape(-1)
    sums = np.empty(-(-flat.size // SQUARES_LEAF), dtype=np.float32)
    workers.run(_square_leaves, sums.size, flat, sums, grain=16)
    return tree_of_array(sums)


def gradient_norm(gradients: Mapping[str, Float32], workers: Workers) -> np.float32:
    """Norm over all tensors, added ascending by name (code points), whatever the mapping's order.

    A NaN or infinity anywhere makes it NaN or infinite: the caller decides what follows.
    """
    total = np.float32(0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        for name in sorted(gradients):
            total = np.float32(total + sum_of_squares(gradients[name], workers))
        return np.float32(np.sqrt(total))


def clip_factor(norm: np.float32, max_norm: float) -> np.float32:
    """``norm > max_norm ? div(max_norm, norm) : 1``; ``max_norm`` is rounded once to float32 and must be positive.

    Raises:
        ContractError: ``max_norm`` is not positive (NaN included).
    """
    bound = np.float32(max_norm)
    if not bound > 0:
        raise ContractError(f"max_norm is {max_norm}; it must be positive in float32 (infinity for no clipping)")
    return np.float32(bound / norm) if norm > bound else np.float32(1.0)


def adamw(
    master: Float32, m: Float32, v: Float32, grad: Float32, scalars: AdamWScalars, workers: Workers, bf16: bool
) -> Float32:
    """One AdamW step of a tensor; ``master``, ``m`` and ``v`` (float32, one shape) are updated in place.

    Args:
        grad: float32, same shape, before clipping.
        scalars: of this step.
        bf16: round the model's weight to bfloat16.

    Returns:
        The model's weight, a new float32 array of the same shape.

    Raises:
        ContractError: an array of another dtype, shape or layout.
    """
    for name, array in (("master", master), ("m", m), ("v", v), ("grad", grad)):
        require(f"{name} of adamw", array, np.float32, *master.shape)
    weight = np.empty_like(master)
    flat = [array.reshape(-1) for array in (master, m, v, grad)]
    packed = np.array(astuple(scalars), dtype=np.float32)
    workers.run(_adamw, master.size, *flat, packed, weight.reshape(-1), bf16, grain=1 << 13)
    return weight
