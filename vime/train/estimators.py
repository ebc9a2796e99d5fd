"""Advantages: pure functions of rewards, in float64 and in sample order.

``grpo`` (group-relative policy optimisation, Shao et al. 2024, arXiv 2402.03300), within one group of n rewards::

    mean  = (r_0 + r_1 + ... + r_{n-1}) / n                                added ascending
    std   = sqrt(((r_0 - mean)^2 + ...) / (n - 1))                         added ascending
    A_i   = (r_i - mean) / (std + epsilon)                                 normalise: std
    A_i   = r_i - mean                                                     normalise: none

``reinforce_baseline``::

    A_i   = r_i - mean of the step's rewards                               baseline: step_mean
    A_i   = r_i - (sum of the other rewards, ascending) / (n - 1)          baseline: leave_one_out
    A_i   = r_i - mean of the group's rewards                              baseline: group_mean

divided by (std + epsilon) of the same set (the step or the group) where ``normalise: std``.

A set whose rewards are all equal has no preference: its advantages are exactly 0. The formulas alone would not give
that (three times 0.1 has a mean that is not 0.1, and the rest would be divided by epsilon).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vime.errors import InputError, InvariantViolation
from vime.train.ordered import deviation, ordered_mean, ordered_sum
from vime.types import SampleId

Estimator = Literal["grpo", "reinforce_baseline"]
ESTIMATORS: tuple[Estimator, ...] = ("grpo", "reinforce_baseline")


@dataclass(frozen=True)
class EstimatorConfig:
    """How advantages are made from rewards.

    ``baseline`` belongs to ``reinforce_baseline``. ``group_size`` is the number of samples of a prompt;
    ``incomplete_groups: keep`` declares that smaller groups may be used as they are; a sample that is left alone has
    nothing to be compared with, and so an advantage of 0.
    """

    kind: Estimator = "grpo"
    group_size: int = 8
    normalise: Literal["std", "none"] = "std"
    epsilon: float = 1e-6
    baseline: Literal["step_mean", "leave_one_out", "group_mean"] = "leave_one_out"
    incomplete_groups: Literal["error", "keep"] = "error"

    def __post_init__(self) -> None:
        if self.kind not in ESTIMATORS:
            raise InputError(f"estimator {self.kind!r} is unknown; known are {', '.join(ESTIMATORS)}")
        for name, value, known in (
            ("normalise", self.normalise, ("std", "none")),
            ("baseline", self.baseline, ("step_mean", "leave_one_out", "group_mean")),
            ("incomplete_groups", self.incomplete_groups, ("error", "keep")),
        ):
            if value not in known:
                raise InputError(f"advantage {name} is {value!r}; possible are {', '.join(known)}")
        if self.group_size < self.smallest_group:
            raise InputError(
                f"group_size = {self.group_size} gives {self.kind} nothing to compare a sample with: "
                f"at least {self.smallest_group} samples a prompt are needed"
            )
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise InputError(f"advantage epsilon = {self.epsilon!r}: a finite number above 0 is needed")

    @property
    def smallest_group(self) -> int:
        """The smallest group that the formulas can be applied to."""
        return 1 if self.over_step else 2

    @property
    def over_step(self) -> bool:
        """Whether a sample is compared with all samples of the step, not with those of its group."""
        return self.kind == "reinforce_baseline" and self.baseline == "step_mean"


@dataclass(frozen=True)
class Advantages:
    """``values`` [S] float64, in the order of the samples; statistics of the rewards of all samples."""

    values: NDArray[np.float64]
    groups: int
    zero_variance_groups: int
    reward_mean: float
    reward_std: float  # population: divided by the number of samples


def sample_groups(sample_ids: Sequence[SampleId]) -> list[range]:
    """Index ranges of the groups (one prompt each) in a batch that is in sample order.

    Raises:
        InvariantViolation: the batch is not strictly ascending by sample identity.
    """
    for before, after in pairwise(sample_ids):
        if not before < after:
            raise InvariantViolation(
                f"sample {after} follows {before}: a batch is in sample order (namespace, prompt, k), each sample once"
            )
    groups: list[range] = []
    for _, members in groupby(range(len(sample_ids)), lambda i: (sample_ids[i].namespace, sample_ids[i].prompt_index)):
        indices = list(members)
        groups.append(range(indices[0], indices[-1] + 1))
    return groups


def compute_advantages(sample_ids: Sequence[SampleId], rewards: Sequence[float], config: EstimatorConfig) -> Advantages:
    """Advantages of one step's batch.

    Raises:
        InputError: lengths differ, a reward is not finite, a group is incomplete (and that was not declared).
        InvariantViolation: the samples are not in sample order.
    """
    if len(sample_ids) != len(rewards):
        raise InputError(f"{len(sample_ids)} samples came with {len(rewards)} rewards: one reward a sample is needed")
    if not sample_ids:
        raise InputError("advantages of an empty batch do not exist: at least one group is needed")
    exact = [float(reward) for reward in rewards]
    for sample_id, reward in zip(sample_ids, exact, strict=True):
        if not math.isfinite(reward):
            raise InputError(f"the reward of sample {sample_id} is {reward}: a finite number is needed")
    groups = sample_groups(sample_ids)
    for group in groups:
        _check_size(sample_ids, group, config)
    values = np.zeros(len(exact), dtype=np.float64)
    for members in [range(len(exact))] if config.over_step else groups:
        values[members.start : members.stop] = _estimate([exact[i] for i in members], config)
    zero_variance = sum(1 for group in groups if all(exact[i] == exact[group.start] for i in group))
    mean = ordered_mean(exact)
    return Advantages(values, len(groups), zero_variance, mean, deviation(exact, mean, len(exact)))


def _estimate(rewards: list[float], config: EstimatorConfig) -> list[float]:
    """Advantages of one set of rewards that are compared with each other."""
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    mean = ordered_mean(rewards)
    if config.kind == "reinforce_baseline" and config.baseline == "leave_one_out":
        others = len(rewards) - 1
        centred = [
            reward - ordered_sum(other for j, other in enumerate(rewards) if j != i) / others
            for i, reward in enumerate(rewards)
        ]
    else:
        centred = [reward - mean for reward in rewards]
    if config.normalise == "none":
        return centred
    scale = deviation(rewards, mean, len(rewards) - 1) + config.epsilon
    return [value / scale for value in centred]


def _check_size(sample_ids: Sequence[SampleId], group: range, config: EstimatorConfig) -> None:
    first = sample_ids[group[0]]
    where = f"group {first.namespace}/{first.prompt_index}"
    if len(group) > config.group_size:
        raise InputError(f"{where} has {len(group)} samples, more than group_size = {config.group_size}")
    if len(group) == config.group_size:
        return
    present = [sample_ids[i].k for i in group]
    if config.incomplete_groups == "error":
        raise InputError(
            f"{where} has {len(group)} of {config.group_size} samples (k = {present}): wait for the others, drop the "
            "group with a reason, or declare incomplete_groups: keep"
        )
