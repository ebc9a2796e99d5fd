"""The per-step report: one line of steps.jsonl, with the exact names of the run directory's format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from vime.errors import InputError
from vime.mismatch.compare import StepComparison
from vime.train.estimators import Advantages
from vime.train.interface import TrainResult
from vime.train.ordered import ordered_sum
from vime.types import GeneratedSample

STAGES = ("rollout", "reward", "score", "train", "sync", "total")
TRUNCATED = ("length", "context")


@dataclass(frozen=True)
class StepReport:
    """One step. None means that there was nothing to measure; it is never written as a number.

    Counts: ``num_samples`` and ``num_tokens`` (generated) of the step; ``compared_tokens`` and
    ``incomparable_tokens`` (by reason) add up to the tokens compared or not. ``mismatch_count`` counts tokens whose two
    float32 log-probabilities differ in any bit, ``distribution_mismatch_count`` tokens whose digests over the full
    row of logits differ, ``entropy_mismatch_count`` tokens whose entropies differ; all are None where nothing was
    compared. ``k1``, ``k2``, ``k3``, ``ratio_min`` and
    ``ratio_max`` are between rollout and trainer. ``update_ratio_min`` and ``update_ratio_max`` are the importance
    ratios of the loss, over all updates; ``reference_kl`` is the mean KL term to the reference model. ``diagnosis``
    names the first region whose bits differ, where any token does. ``time_s`` is in seconds, ``entropy`` in nats,
    ``peak_memory_bytes`` that of the process so far.
    """

    step: int
    weight_version: int
    num_samples: int
    num_tokens: int
    compared_tokens: int
    incomparable_tokens: dict[str, int]
    mismatch_count: int | None
    max_abs_diff: float | None
    mean_abs_diff: float | None
    nonfinite_count: int | None
    distribution_mismatch_count: int | None
    worst_token: dict[str, Any] | None
    k1: float | None
    k2: float | None
    k3: float | None
    ratio_min: float | None
    ratio_max: float | None
    clip_fraction: float | None
    entropy: float | None
    reward_mean: float | None
    reward_std: float | None
    zero_variance_groups: int
    response_length_mean: float | None
    truncated_fraction: float | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    tokens_per_s: float | None
    peak_memory_bytes: int
    time_s: dict[str, float]
    abs_diff_percentiles: dict[str, float] | None = None
    update_ratio_min: float | None = None
    update_ratio_max: float | None = None
    reference_kl: float | None = None
    updates: int = 0
    dropped_samples: dict[str, int] = field(default_factory=dict)
    diagnosis: dict[str, Any] | None = None
    entropy_mismatch_count: int | None = None

    def __post_init__(self) -> None:
        if self.compared_tokens == 0 and (
            self.mismatch_count is not None or self.distribution_mismatch_count is not None
        ):
            raise InputError(
                f"step {self.step} compared no token, so its mismatch counts are unknown (None), not "
                f"{self.mismatch_count} and {self.distribution_mismatch_count}"
            )
        if self.compared_tokens > 0 and (self.mismatch_count is None or self.distribution_mismatch_count is None):
            raise InputError(f"step {self.step} compared {self.compared_tokens} tokens but has no mismatch count")
        missing = [stage for stage in STAGES if stage not in self.time_s]
        if missing:
            raise InputError(f"step {self.step}: time_s lacks {', '.join(missing)}; a stage that did not run took 0.0")

    @property
    def other_time_s(self) -> float:
        """Seconds of the step outside of its stages: the comparison, arrays, checks."""
        return max(0.0, self.time_s["total"] - sum(self.time_s[stage] for stage in STAGES if stage != "total"))

    @property
    def equal(self) -> bool:
        """Something was compared, and not one bit differed."""
        return self.compared_tokens > 0 and self.mismatch_count == 0 and self.distribution_mismatch_count == 0

    def as_json(self) -> dict[str, Any]:
        """Plain data; NaN and infinities become null (JSON has none)."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepReport:
        """Inverse of :meth:`as_json`. Raises InputError for a missing or unknown field, naming it."""
        known = {item.name for item in fields(cls)}
        required = {item.name for item in fields(cls)[:_REQUIRED]}
        unknown, missing = sorted(set(data) - known), sorted(required - set(data))
        if unknown or missing:
            raise InputError(
                f"a step report (step {data.get('step', 'unknown')}) has unknown fields {unknown} and lacks {missing}"
            )
        return cls(**{name: data[name] for name in data})


_REQUIRED = 30  # the fields of the format; the rest have defaults


def build_report(
    *,
    step: int,
    weight_version: int,
    samples: Sequence[GeneratedSample],
    comparison: StepComparison,
    advantages: Advantages | None,
    trained: TrainResult | None,
    time_s: Mapping[str, float],
    peak_memory_bytes: int,
    dropped_samples: Mapping[str, int] | None = None,
) -> StepReport:
    """Fold everything that a step measured into its report.

    ``samples`` are those of the step, in sample order; ``entropy`` is the mean over their tokens as the rollout
    computed it. ``tokens_per_s`` is generated tokens over the rollout's time. ``trained`` is None where nothing was
    trained (all samples dropped).
    """
    lengths = [len(sample.token_ids) for sample in samples]
    tokens, count = sum(lengths), len(lengths)
    entropies = [float(value) for sample in samples for value in sample.entropies]
    worst = comparison.worst_token
    rollout_s = time_s.get("rollout", 0.0)
    return StepReport(
        step=step,
        weight_version=weight_version,
        num_samples=count,
        num_tokens=tokens,
        compared_tokens=comparison.compared_tokens,
        incomparable_tokens=dict(comparison.incomparable_tokens),
        mismatch_count=comparison.mismatch_count,
        max_abs_diff=comparison.max_abs_diff,
        mean_abs_diff=comparison.mean_abs_diff,
        nonfinite_count=comparison.nonfinite_count,
        distribution_mismatch_count=comparison.distribution_mismatch_count,
        worst_token=None if worst is None else {"sample": str(worst.sample), "position": worst.position},
        k1=comparison.k1,
        k2=comparison.k2,
        k3=comparison.k3,
        ratio_min=comparison.ratio_min,
        ratio_max=comparison.ratio_max,
        clip_fraction=_known(trained.clip_fraction) if trained else None,
        entropy=_known(ordered_sum(entropies) / tokens) if tokens else None,
        reward_mean=advantages.reward_mean if advantages else None,
        reward_std=advantages.reward_std if advantages else None,
        zero_variance_groups=advantages.zero_variance_groups if advantages else 0,
        response_length_mean=tokens / count if count else None,
        truncated_fraction=sum(s.finish_reason in TRUNCATED for s in samples) / count if count else None,
        loss=_known(trained.loss) if trained else None,
        grad_norm=_known(trained.grad_norm) if trained else None,
        learning_rate=trained.learning_rate if trained else None,
        tokens_per_s=tokens / rollout_s if rollout_s > 0 else None,
        peak_memory_bytes=peak_memory_bytes,
        time_s={stage: float(time_s.get(stage, 0.0)) for stage in (*STAGES, *sorted(set(time_s) - set(STAGES)))},
        abs_diff_percentiles=comparison.abs_diff_percentiles,
        update_ratio_min=_known(trained.ratio_min) if trained else None,
        update_ratio_max=_known(trained.ratio_max) if trained else None,
        reference_kl=_known(trained.facts.get("reference_kl")) if trained else None,
        updates=trained.updates if trained else 0,
        dropped_samples=dict(dropped_samples or {}),
        diagnosis=None if comparison.diagnosis is None else dict(comparison.diagnosis),
        entropy_mismatch_count=comparison.entropy_mismatch_count,
    )


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return _known(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
