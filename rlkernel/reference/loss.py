"""The policy loss executed from its contract entry: one token at a time, and its derivative.
See docs/numerics.md, Loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlkernel.contract.points import SixPoints
from rlkernel.errors import ContractError
from rlkernel.reference.arith import add, mul, negative, sub
from rlkernel.reference.lookup import primitive
from rlkernel.reference.primitives import LOG2E

Tensor = torch.Tensor
POLICIES = ("ppo_clip", "reinforce")
KL_TERMS = ("none", "k1", "k2", "k3")


@dataclass(frozen=True)
class LossInputs:
    """Per token [T]: log-probabilities (float32), advantage, weight, and which tokens are trained (bool)."""

    new: Tensor
    old: Tensor
    reference: Tensor
    advantage: Tensor
    weight: Tensor
    trained: Tensor


@dataclass(frozen=True)
class LossConstants:
    """``low`` = 1 - clip_low, ``high`` = 1 + clip_high and ``beta`` as values of float32."""

    policy: str
    kl: str
    low: float
    high: float
    beta: float


def _ratio(points: SixPoints, new: Tensor, old: Tensor) -> Tensor:
    return primitive(points.primitive("exp2"))(mul(sub(new, old), LOG2E))


def _policy(constants: LossConstants, inputs: LossInputs, ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a = inputs.advantage
    if constants.policy == "reinforce":
        return negative(mul(inputs.new, a)), negative(a), torch.zeros_like(inputs.trained)
    above, below = (a > 0) & (ratio > constants.high), (a < 0) & (ratio < constants.low)
    plain = negative(mul(ratio, a))
    policy = torch.where(above, negative(mul(constants.high, a)), plain)
    policy = torch.where(below, negative(mul(constants.low, a)), policy)
    clipped = above | below
    return policy, torch.where(clipped, torch.zeros_like(plain), plain), clipped


def _divergence(points: SixPoints, term: str, new: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    x, one = sub(reference, new), torch.ones_like(new)
    if term == "k1":
        return sub(new, reference), one
    if term == "k2":
        return mul(mul(x, x), 0.5), sub(new, reference)
    e = primitive(points.primitive("exp2"))(mul(x, LOG2E))
    return sub(sub(e, one), x), sub(one, e)


def token_losses(points: SixPoints, constants: LossConstants, inputs: LossInputs) -> dict[str, Tensor]:
    """``loss``, ``coefficient`` (d loss / d logprob), ``ratio``, ``kl`` (float32 [T]) and ``clipped`` (bool [T]).

    Raises ContractError for a loss or a KL term that is not defined.
    """
    if constants.policy not in POLICIES or constants.kl not in KL_TERMS:
        raise ContractError(f"the loss {constants.policy!r} with KL term {constants.kl!r} is not defined")
    zero, one = torch.zeros_like(inputs.new), torch.ones_like(inputs.new)
    ratio = _ratio(points, inputs.new, inputs.old)
    policy, slope, clipped = _policy(constants, inputs, ratio)
    kl = zero
    if constants.kl != "none":
        kl, kl_slope = _divergence(points, constants.kl, inputs.new, inputs.reference)
        policy, slope = add(policy, mul(constants.beta, kl)), add(slope, mul(constants.beta, kl_slope))
    trained = inputs.trained
    return {
        "loss": torch.where(trained, policy, zero),
        "coefficient": torch.where(trained, mul(slope, inputs.weight), zero),
        "ratio": torch.where(trained, ratio, one),
        "kl": torch.where(trained, kl, zero),
        "clipped": clipped & trained,
    }
