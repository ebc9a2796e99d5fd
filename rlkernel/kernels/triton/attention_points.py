"""What the attention kernels take from the contract: the entries' six points as a small value, and checks on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlkernel.contract.entries import KEYS, QUERIES
from rlkernel.contract.points import SixPoints
from rlkernel.contract.profiles import EX2_SM90, EXP2, EXP2_P3, FMA, LOG2, MFMA_GFX942, MMA_SM90
from rlkernel.errors import ContractError

_STEPS = {FMA: 1, MMA_SM90: 16, MFMA_GFX942: 8}
_WEIGHTS = (EXP2, EXP2_P3, EX2_SM90)


@dataclass(frozen=True)
class AttentionPoints:
    """The forward entry.

    Attributes:
        mac: primitive of every chain; ``weights_exp2``: exponential of the weights.
        key_block, lanes, split: keys of a block, strided chains of its row sum, keys of a split.
        scale2: float32 value, head_dim^-0.5 * log2 e.
        dtype: ``bfloat16`` or ``float32``, of operands and output; weights are rounded to bfloat16 with the first.
    """

    mac: str
    weights_exp2: str
    key_block: int
    lanes: int
    split: int
    scale2: float
    dtype: str


@dataclass(frozen=True)
class BackwardPoints:
    """The backward entry; attributes as in :class:`AttentionPoints`, and ``scale``, float32, head_dim^-0.5."""

    mac: str
    weights_exp2: str
    scale: float
    scale2: float
    dtype: str


def _constant(points: SixPoints, name: str) -> float:
    bits = int(points.constant(name).removeprefix("f32:"), 16)
    return float(np.array(bits, dtype=np.uint32).view(np.float32))


def _common(points: SixPoints, sites: tuple[str, ...]) -> tuple[str, str, str]:
    mac, weights, dtype = points.primitive("mac"), points.primitive("weights_exp2"), points.precision.inputs
    if _STEPS.get(mac) != points.split.step or weights not in _WEIGHTS or dtype not in ("bfloat16", "float32"):
        raise ContractError(
            f"the attention kernels take one of {', '.join(_STEPS)} with its own step, weights by one of "
            f"{', '.join(_WEIGHTS)}, bfloat16 or float32; the entry has {mac!r} in steps of {points.split.step}, "
            f"{weights!r}, {dtype!r}"
        )
    expected = {site: dtype if site == "output" or dtype == "bfloat16" else None for site in (*sites, "output")}
    found = {site: points.rounds(site) for site in expected}
    if found != expected or {rounding.site for rounding in points.rounding} - set(expected):
        raise ContractError(f"roundings of the attention entry are {points.rounding}; the kernels have {expected}")
    return mac, weights, dtype


def attention_points(points: SixPoints) -> AttentionPoints:
    """The forward kernels' arguments from the ``attention`` entry of a forward case.

    Raises:
        ContractError: the entry says something that the kernels do not do.
    """
    mac, weights, dtype = _common(points, ("weights",))
    block, split, merge = int(points.constant("key_block")), points.split, points.merge
    several = "balanced_tree" if split.lanes > 1 else "none"
    if (merge.leaf, merge.lanes, merge.leaves) != ("ascending_chain", several, "rescale_ascending"):
        raise ContractError(
            f"merges of the attention entry are {merge}; the kernels have chain, tree, rescale_ascending"
        )
    if points.primitive("exp2") != EXP2 or points.primitive("log2") != LOG2:
        raise ContractError(
            f"primitives of the attention entry are {points.primitives}; {EXP2} and {LOG2} are expected"
        )
    if split.leaf_size % block or block % split.lanes or any(n & (n - 1) or n < 1 for n in (block, split.lanes)):
        raise ContractError(
            f"splits of {split.leaf_size} keys in blocks of {block} with {split.lanes} lanes: the kernels take powers "
            "of two, lanes that divide the block, blocks that divide the split"
        )
    if points.dependency.domain != KEYS:
        raise ContractError(f"attention over {points.dependency.domain!r} is not built; {KEYS!r} is")
    return AttentionPoints(mac, weights, block, split.lanes, split.leaf_size, _constant(points, "scale2"), dtype)


def backward_points(points: SixPoints) -> BackwardPoints:
    """The backward kernels' arguments from the ``attention`` entry of ``trainer_backward``.

    Raises:
        ContractError: the entry says something that the kernels do not do.
    """
    mac, weights, dtype = _common(points, ("weights", "score gradients"))
    if points.merge.leaf != "ascending_chain" or points.split.lanes != 1 or points.primitive("fma") != FMA:
        raise ContractError(f"the attention gradient is {points.merge}, {points.split}: the kernels have one chain")
    if KEYS not in points.dependency.domain or QUERIES not in points.dependency.domain:
        raise ContractError(f"the attention gradient over {points.dependency.domain!r} is not built")
    return BackwardPoints(mac, weights, _constant(points, "scale"), _constant(points, "scale2"), dtype)
