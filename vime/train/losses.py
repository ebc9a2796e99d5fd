"""The policy loss, token by token, and its derivative with respect to each token's log-probability.

All values are float32 and every operation is one of the contract's primitives (docs/numerics.md, "Loss"). With
``new`` the log-probability of the forward that is trained on, ``old`` that of the policy that the step started from,
``ref`` that of the reference model, ``A`` the sample's advantage rounded once to float32::

    ratio   = exp2.full(mul(sub(new, old), LOG2E))            exactly 1 where new and old have the same bits
    ppo_clip:   clipped = A > 0 and ratio > hi, or A < 0 and ratio < lo;  lo = 1 - clip_low, hi = 1 + clip_high
                policy = -mul(clipped ? bound : ratio, A)     d policy / d new = clipped ? +0 : -mul(ratio, A)
    reinforce:  policy = -mul(new, A)                         d policy / d new = -A
    x = sub(ref, new)
    k1:     kl = sub(new, ref)                                d kl / d new = 1
    k2:     kl = mul(mul(x, x), 0.5)                          d kl / d new = sub(new, ref)
    k3:     e = exp2.full(mul(x, LOG2E)); kl = sub(sub(e, 1), x)      d kl / d new = sub(1, e)
    loss    = add(policy, mul(beta, kl)),   without a KL term: policy
    g       = mul(add(d policy, mul(beta, d kl)), weight)

``weight`` normalises over the whole *step*, never over a micro-batch or an update: ``token_mean`` 1 / (trained
tokens of the step), ``sequence_mean`` 1 / (samples with trained tokens * trained tokens of the sample); float64,
rounded once. The updates of a step therefore add up to the step's mean. Tokens that are not trained have g = +0.

As a loss term, k1 has an expected gradient of zero on the policy's own samples; k2 has the gradient of the reverse KL
and k3 that of the forward KL (Schulman, "Approximating KL divergence", 2020, discusses them as estimators).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numba import float32 as f32
from numpy.typing import NDArray

from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.primitives import LOG2E, exp2_full
from rlkernel.reference.loss import LossConstants
from vime.errors import InputError
from vime.train.ordered import ordered_sum

PolicyLoss = Literal["ppo_clip", "reinforce"]
KLTerm = Literal["none", "k1", "k2", "k3"]
Normalisation = Literal["token_mean", "sequence_mean"]
POLICY_LOSSES: tuple[PolicyLoss, ...] = ("ppo_clip", "reinforce")
KL_TERMS: tuple[KLTerm, ...] = ("none", "k1", "k2", "k3")
NORMALISATIONS: tuple[Normalisation, ...] = ("token_mean", "sequence_mean")


@dataclass(frozen=True)
class LossConfig:
    """The loss of one pipeline; numbers are rounded once to float32 where they are used."""

    policy: PolicyLoss = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: KLTerm = "none"
    kl_coefficient: float = 0.0
    normalise: Normalisation = "token_mean"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("policy", self.policy, POLICY_LOSSES),
            ("kl", self.kl, KL_TERMS),
            ("normalise", self.normalise, NORMALISATIONS),
        ):
            if value not in known:
                raise InputError(f"loss {name} is {value!r}; possible are {', '.join(known)}")
        if not 0.0 <= self.clip_low < 1.0:
            raise InputError(f"clip_low = {self.clip_low!r}: a number in [0, 1) is needed (the lower bound is 1 - it)")
        if not (math.isfinite(self.clip_high) and self.clip_high >= 0.0):
            raise InputError(f"clip_high = {self.clip_high!r}: a finite number, 0 or more, is needed")
        if not (math.isfinite(self.kl_coefficient) and self.kl_coefficient >= 0.0):
            raise InputError(f"kl_coefficient = {self.kl_coefficient!r}: a finite number, 0 or more, is needed")
        if (self.kl == "none") != (self.kl_coefficient == 0.0):
            raise InputError(
                f"kl: {self.kl} and kl_coefficient = {self.kl_coefficient!r} contradict each other: "
                "a KL term needs a coefficient above 0, and no term needs none"
            )

    @property
    def needs_old(self) -> bool:
        """Whether the loss is made of importance ratios."""
        return self.policy == "ppo_clip"

    @property
    def needs_reference(self) -> bool:
        """Whether log-probabilities of the reference model are needed."""
        return self.kl != "none"

    def constants(self) -> LossConstants:
        """As the contract's interpreter takes them."""
        low, high = float(np.float32(1.0 - self.clip_low)), float(np.float32(1.0 + self.clip_high))
        return LossConstants(self.policy, self.kl, low, high, float(np.float32(self.kl_coefficient)))


@dataclass(frozen=True)
class TokenLosses:
    """Per response token, T of them, in sample order. Untrained tokens: loss and coefficient +0, ratio 1."""

    loss: NDArray[np.float32]
    coefficient: NDArray[np.float32]  # d (step's loss) / d logprob
    ratio: NDArray[np.float32]
    clipped: NDArray[np.bool_]
    kl: NDArray[np.float32]  # to the reference
    trained: NDArray[np.bool_]
    weight: NDArray[np.float32]


@dataclass(frozen=True)
class LossSummary:
    """Float64 totals in token order. ``loss`` is the sum of weighted token losses: the step's mean when all are in.

    ``ratio_min`` and ``ratio_max`` are NaN where the loss has no ratio; ``reference_kl`` where it has no KL term.
    """

    loss: float
    trained_tokens: int
    clip_fraction: float
    ratio_min: float
    ratio_max: float
    reference_kl: float


@kernel
def _token_losses(  # type: ignore[no-untyped-def]
    first, last, new, old, reference, trained, advantage, weight,
    use_ratio, use_clip, kl_term, low, high, beta,
    loss, coefficient, ratio, clipped, kl,
):  # fmt: skip
    for t in range(first, last):
        loss[t] = f32(0.0)
        coefficient[t] = f32(0.0)
        ratio[t] = f32(1.0)
        clipped[t] = False
        kl[t] = f32(0.0)
        if not trained[t]:
            continue
        a = advantage[t]
        if use_ratio:
            ratio[t] = exp2_full((new[t] - old[t]) * LOG2E)
        if use_clip:
            r = ratio[t]
            if a > f32(0.0) and r > high:
                clipped[t] = True
                policy = -(high * a)
                slope = f32(0.0)
            elif a < f32(0.0) and r < low:
                clipped[t] = True
                policy = -(low * a)
                slope = f32(0.0)
            else:
                policy = -(r * a)
                slope = policy
        else:
            policy = -(new[t] * a)
            slope = -a
        if kl_term > 0:
            x = reference[t] - new[t]
            if kl_term == 1:
                kl[t] = new[t] - reference[t]
                kl_slope = f32(1.0)
            elif kl_term == 2:
                kl[t] = (x * x) * f32(0.5)
                kl_slope = new[t] - reference[t]
            else:
                e = exp2_full(x * LOG2E)
                kl[t] = (e - f32(1.0)) - x
                kl_slope = f32(1.0) - e
            policy = policy + beta * kl[t]
            slope = slope + beta * kl_slope
        loss[t] = policy
        coefficient[t] = slope * weight[t]


@kernel
def _ratios(first, last, new, old, ratio):  # type: ignore[no-untyped-def]
    for t in range(first, last):
        ratio[t] = exp2_full((new[t] - old[t]) * LOG2E)


def importance_ratios(new: NDArray[np.float32], old: NDArray[np.float32]) -> NDArray[np.float32]:
    """``exp2.full(mul(sub(new, old), LOG2E))`` for float32 [T]: exactly 1 where both have the same bits."""
    new, old = _float32("new", new), _float32("old", old)
    _same_length(len(new), old=old)
    ratio = np.empty(len(new), dtype=np.float32)
    _ratios(0, len(new), new, old, ratio)
    return ratio


def step_weights(masks: Sequence[NDArray[np.bool_]], normalise: Normalisation) -> list[np.float32]:
    """The weight of each trained token of every sample of the step (one float32 a sample).

    Raises InputError when the step has no trained token.
    """
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    total = sum(counts)
    if total == 0:
        raise InputError(f"none of the step's {len(counts)} samples has a token to train on: every loss mask is empty")
    if normalise == "token_mean":
        return [np.float32(1.0 / total)] * len(counts)
    samples = sum(1 for count in counts if count)
    return [np.float32(1.0 / (samples * count)) if count else np.float32(0.0) for count in counts]


def token_losses(
    config: LossConfig,
    new: NDArray[np.float32],
    trained: NDArray[np.bool_],
    advantage: NDArray[np.float32],
    weight: NDArray[np.float32],
    old: NDArray[np.float32] | None = None,
    reference: NDArray[np.float32] | None = None,
) -> TokenLosses:
    """Losses and coefficients of the tokens of some samples; all arrays [T]. Each token is computed alone.

    Raises InputError for arrays of other lengths or dtypes, and for ``old`` or ``reference`` missing where needed.
    """
    count = len(new)
    if config.needs_old and old is None:
        raise InputError("loss ppo_clip needs the old log-probabilities of every token, and got none")
    if config.needs_reference and reference is None:
        raise InputError(f"kl: {config.kl} needs the reference log-probabilities of every token, and got none")
    new, advantage, weight = _float32("new", new), _float32("advantage", advantage), _float32("weight", weight)
    old_values = _float32("old", old) if old is not None else new
    reference_values = _float32("reference", reference) if config.needs_reference and reference is not None else new
    mask = np.ascontiguousarray(trained, dtype=np.bool_)
    _same_length(count, old=old_values, reference=reference_values, trained=mask, advantage=advantage, weight=weight)
    loss, coefficient, ratio, kl = (np.empty(count, dtype=np.float32) for _ in range(4))
    clipped = np.empty(count, dtype=np.bool_)
    _token_losses(
        0, count, new, old_values, reference_values, mask, advantage, weight,
        old is not None, config.policy == "ppo_clip", KL_TERMS.index(config.kl),
        np.float32(1.0 - config.clip_low), np.float32(1.0 + config.clip_high), np.float32(config.kl_coefficient),
        loss, coefficient, ratio, clipped, kl,
    )  # fmt: skip
    return TokenLosses(loss, coefficient, ratio, clipped, kl, mask, weight)


def summarise(parts: Sequence[TokenLosses], *, has_ratio: bool, has_reference: bool) -> LossSummary:
    """Totals of micro-batches in order: the same numbers however the tokens were cut into parts."""

    def joined(name: str) -> list[float]:
        return [float(v) for part in parts for v in getattr(part, name)[part.trained]]

    losses, weights, ratios = joined("loss"), joined("weight"), joined("ratio")
    tokens = len(losses)
    clipped = sum(int(np.count_nonzero(part.clipped)) for part in parts)
    return LossSummary(
        loss=ordered_sum(value * weight for value, weight in zip(losses, weights, strict=True)),
        trained_tokens=tokens,
        clip_fraction=clipped / tokens if tokens else math.nan,
        ratio_min=_extreme(ratios, min) if has_ratio else math.nan,
        ratio_max=_extreme(ratios, max) if has_ratio else math.nan,
        reference_kl=ordered_sum(joined("kl")) / tokens if has_reference and tokens else math.nan,
    )


def first_nonfinite(values: NDArray[np.float32]) -> int | None:
    """Index of the first infinity or NaN, or None."""
    bad = np.flatnonzero(~np.isfinite(values))
    return int(bad[0]) if len(bad) else None


def _extreme(values: list[float], choose: Callable[[list[float]], float]) -> float:
    if not values or any(value != value for value in values):
        return math.nan
    return choose(values)


def _float32(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    if values.dtype != np.float32:
        raise InputError(f"{name} is {values.dtype}: the loss is defined on float32, and nothing is cast silently")
    return np.ascontiguousarray(values)


def _same_length(count: int, **arrays: NDArray[Any]) -> None:
    wrong = {name: values.shape for name, values in arrays.items() if values.shape != (count,)}
    if wrong:
        raise InputError(f"{count} new log-probabilities met arrays of other shapes: {wrong}")
