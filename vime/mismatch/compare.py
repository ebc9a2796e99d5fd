"""Comparison of both sides of a step: pure functions from arrays to counts.

Bits are compared as integers after every NaN is mapped to one pattern (targets produce different ones); signed zeros
count. A token is *comparable* only if the weights that sampled it, and the weights that made every key and value it
read, are the version that the trainer evaluated. Everything else is counted under its reason. Where nothing was
comparable the counts are None: a step that compared nothing never says that nothing differs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vime.errors import InvariantViolation
from vime.train.interface import ScoredSample, ScoreResult
from vime.train.losses import importance_ratios
from vime.train.ordered import ordered_sum
from vime.types import GeneratedSample, SampleId

Reason = Literal["weight_version", "kv_version", "not_audited"]
REASONS: tuple[Reason, ...] = ("weight_version", "kv_version", "not_audited")
PERCENTILES = (50, 90, 99)
CANONICAL_NAN = np.uint32(0x7FC00000)


@dataclass(frozen=True)
class WorstToken:
    """A token named by its sample and its absolute position (prompt included)."""

    sample: SampleId
    position: int


@dataclass(frozen=True)
class StepComparison:
    """What the comparison of one step found. Statistics are over the compared tokens, None when there are none.

    ``mismatch_count``: tokens whose two float32 log-probabilities differ in any bit. ``distribution_mismatch_count``:
    tokens whose digests over the full row of logits differ. ``entropy_mismatch_count``: tokens whose float32 entropies
    differ in any bit (see also :func:`unfounded_entropy`). ``nonfinite_count``: compared tokens whose log-probability
    is infinite or NaN on either side; they take no part in differences, ratios and k1..k3. With x = rollout - trainer,
    k1 = mean(x), k2 = mean(x^2 / 2), k3 = mean(ratio - 1 + x), ratio = exp(trainer - rollout): estimators of
    KL(rollout || trainer).
    """

    compared_tokens: int
    incomparable_tokens: dict[str, int]
    mismatch_count: int | None = None
    distribution_mismatch_count: int | None = None
    entropy_mismatch_count: int | None = None
    nonfinite_count: int | None = None
    max_abs_diff: float | None = None
    mean_abs_diff: float | None = None
    abs_diff_percentiles: dict[str, float] | None = None
    worst_token: WorstToken | None = None
    k1: float | None = None
    k2: float | None = None
    k3: float | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    diagnosis: Mapping[str, Any] | None = None  # where the sides part, as plain data; only where they differ

    @property
    def equal(self) -> bool:
        """Something was compared, and not one bit differed."""
        return self.compared_tokens > 0 and self.mismatch_count == 0 and self.distribution_mismatch_count == 0


def canonical_bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Bits of float32 values, every NaN as 0x7FC00000."""
    values = np.ascontiguousarray(values)
    if values.dtype != np.float32:
        raise InvariantViolation(f"log-probabilities are {values.dtype}: bits are compared of float32 values only")
    return np.where(np.isnan(values), CANONICAL_NAN, values.view(np.uint32))


def token_reasons(sample: GeneratedSample, version: int) -> list[Reason | None]:
    """Per generated token why it cannot be compared with an evaluation at ``version``; None: it can."""
    reasons: list[Reason | None] = []
    for run in sample.versions:
        reason: Reason | None = None
        if run.version != version:
            reason = "weight_version"
        elif run.kv_oldest != version or run.kv_newest != version:
            reason = "kv_version"
        reasons.extend([reason] * run.count)
    return reasons


def pair_samples(
    rollout: Sequence[GeneratedSample], scores: ScoreResult, unaudited: Collection[SampleId] = ()
) -> list[tuple[GeneratedSample, ScoredSample | None]]:
    """Match both sides by identity, in the rollout's order.

    Raises:
        InvariantViolation: a sample is missing on a side (and not declared as unaudited), appears twice, or has
            arrays of another length.
    """
    scored: dict[SampleId, ScoredSample] = {}
    for score in scores.samples:
        if score.sample_id in scored:
            raise InvariantViolation(f"the trainer returned sample {score.sample_id} twice: once is possible")
        scored[score.sample_id] = score
    pairs: list[tuple[GeneratedSample, ScoredSample | None]] = []
    seen: set[SampleId] = set()
    for sample in rollout:
        if sample.sample_id in seen:
            raise InvariantViolation(f"sample {sample.sample_id} is twice in the step: once is possible")
        seen.add(sample.sample_id)
        own = scored.pop(sample.sample_id, None)
        if own is None and sample.sample_id not in unaudited:
            raise InvariantViolation(
                f"the trainer returned no log-probabilities for sample {sample.sample_id}: a missing array is an "
                "error, never an empty comparison"
            )
        if own is not None:
            _check_lengths(sample, own)
        pairs.append((sample, own))
    if scored:
        raise InvariantViolation(f"the trainer scored samples that the step does not have: {sorted(map(str, scored))}")
    return pairs


def compare_step(
    rollout: Sequence[GeneratedSample],
    scores: ScoreResult,
    version: int,
    unaudited: Collection[SampleId] = (),
) -> StepComparison:
    """Compare the rollout's log-probabilities and digests with the trainer's evaluation at ``version``.

    ``unaudited`` names samples that the pipeline trusts without an evaluation; their tokens are ``not_audited``.

    Raises:
        InvariantViolation: see :func:`pair_samples`.
    """
    incomparable = dict.fromkeys(REASONS, 0)
    left: list[NDArray[np.float32]] = []
    right: list[NDArray[np.float32]] = []
    digests_differ: list[NDArray[np.bool_]] = []
    entropies_differ = 0
    tokens: list[tuple[SampleId, int]] = []
    for sample, own in pair_samples(rollout, scores, unaudited):
        if own is None:
            incomparable["not_audited"] += len(sample.token_ids)
            continue
        reasons = token_reasons(sample, version)
        for reason in reasons:
            if reason is not None:
                incomparable[reason] += 1
        chosen = np.array([reason is None for reason in reasons], dtype=np.bool_)
        left.append(sample.logprobs[chosen])
        right.append(own.logprobs[chosen])
        digests_differ.append((sample.digests[chosen] != own.digests[chosen]).any(axis=1))
        entropies_differ += int(np.count_nonzero(_entropies_differ(sample, own)[chosen]))
        first = len(sample.prompt_token_ids)
        tokens.extend((sample.sample_id, first + int(t)) for t in np.flatnonzero(chosen))
    reasons_found: dict[str, int] = {reason: count for reason, count in incomparable.items() if count}
    if not tokens:
        return StepComparison(0, reasons_found)
    found = _statistics(
        np.concatenate(left), np.concatenate(right), np.concatenate(digests_differ), tokens, reasons_found
    )
    return replace(found, entropy_mismatch_count=entropies_differ)


def _entropies_differ(sample: GeneratedSample, own: ScoredSample) -> NDArray[np.bool_]:
    return canonical_bits(sample.entropies) != canonical_bits(own.entropies)


def unfounded_entropy(rollout: Sequence[GeneratedSample], scores: ScoreResult, version: int) -> str | None:
    """The first comparable token whose distributions have the same bits and whose entropies do not, as a sentence.

    Where both sides keep the contract an entropy is a function of the row of logits: one of the two is not the
    entropy of its own row, whatever made it so. None where there is no such token.
    """
    for sample, own in pair_samples(rollout, scores, {s.sample_id for s in rollout}):
        if own is None:
            continue
        comparable = np.array([reason is None for reason in token_reasons(sample, version)], dtype=np.bool_)
        same_row = (sample.digests == own.digests).all(axis=1)
        for t in np.flatnonzero(comparable & same_row & _entropies_differ(sample, own)).tolist():
            return (
                f"sample {sample.sample_id}, position {len(sample.prompt_token_ids) + t}: rollout and trainer have the "
                f"same distribution, bit for bit, but the entropies {float(sample.entropies[t])} (rollout) and "
                f"{float(own.entropies[t])} (trainer): one of them is not that of its distribution"
            )
    return None


def _statistics(
    rollout: NDArray[np.float32],
    trainer: NDArray[np.float32],
    digest_differs: NDArray[np.bool_],
    tokens: list[tuple[SampleId, int]],
    incomparable: dict[str, int],
) -> StepComparison:
    differs = canonical_bits(rollout) != canonical_bits(trainer)
    finite = np.isfinite(rollout) & np.isfinite(trainer)
    x = [float(a) - float(b) for a, b in zip(rollout[finite], trainer[finite], strict=True)]
    ratios = [float(r) for r in importance_ratios(trainer[finite], rollout[finite])]
    absolute = [abs(value) for value in x]
    count = len(x)
    return StepComparison(
        compared_tokens=len(tokens),
        incomparable_tokens=incomparable,
        mismatch_count=int(np.count_nonzero(differs)),
        distribution_mismatch_count=int(np.count_nonzero(digest_differs)),
        nonfinite_count=int(np.count_nonzero(~finite)),
        max_abs_diff=max(absolute) if count else None,
        mean_abs_diff=ordered_sum(absolute) / count if count else None,
        abs_diff_percentiles=percentiles(absolute) if count else None,
        worst_token=_worst(rollout, trainer, differs, digest_differs, tokens),
        k1=ordered_sum(x) / count if count else None,
        k2=ordered_sum(v * v * 0.5 for v in x) / count if count else None,
        k3=ordered_sum(r - 1.0 + v for r, v in zip(ratios, x, strict=True)) / count if count else None,
        ratio_min=min(ratios) if count else None,
        ratio_max=max(ratios) if count else None,
    )


@dataclass(frozen=True)
class NonfiniteToken:
    """A token with a log-probability that is infinite or NaN on a side; ``trainer`` is None where it was not scored."""

    sample_id: SampleId
    position: int
    rollout: float
    trainer: float | None

    def sentence(self) -> str:
        """The token and both values in words."""
        own = "not evaluated" if self.trainer is None else f"{self.trainer}"
        return f"sample {self.sample_id}, position {self.position} (rollout {self.rollout}, trainer {own})"


def nonfinite_tokens(rollout: Sequence[GeneratedSample], scores: ScoreResult) -> list[NonfiniteToken]:
    """Every token whose log-probability is not finite on either side, comparable or not, in the rollout's order."""
    own = {score.sample_id: score.logprobs for score in scores.samples}
    found = []
    for sample in rollout:
        trainer = own.get(sample.sample_id)
        finite = np.isfinite(sample.logprobs)
        if trainer is not None:
            finite = finite & np.isfinite(trainer)
        for t in np.flatnonzero(~finite).tolist():
            value = None if trainer is None else float(trainer[t])
            position = len(sample.prompt_token_ids) + t
            found.append(NonfiniteToken(sample.sample_id, position, float(sample.logprobs[t]), value))
    return found


def percentiles(values: list[float]) -> dict[str, float]:
    """Nearest-rank percentiles: values that occurred, nothing interpolated."""
    ordered = sorted(values)
    return {f"p{p}": ordered[-(-len(ordered) * p // 100) - 1] for p in PERCENTILES}


def _worst(
    rollout: NDArray[np.float32],
    trainer: NDArray[np.float32],
    differs: NDArray[np.bool_],
    digest_differs: NDArray[np.bool_],
    tokens: list[tuple[SampleId, int]],
) -> WorstToken | None:
    """The first token with the largest difference: non-finite before finite, bits before digests; None if equal."""
    worst: tuple[int, float] | None = None
    index = -1
    for i in np.flatnonzero(differs | digest_differs):
        if not differs[i]:
            rank = (0, 0.0)
        elif np.isfinite(rollout[i]) and np.isfinite(trainer[i]):
            rank = (1, abs(float(rollout[i]) - float(trainer[i])))
        else:
            rank = (2, 0.0)
        if worst is None or rank > worst:
            worst, index = rank, int(i)
    return None if worst is None else WorstToken(*tokens[index])


def _check_lengths(sample: GeneratedSample, own: ScoredSample) -> None:
    count = len(sample.token_ids)
    shapes = {
        "rollout logprobs": (sample.logprobs.shape, (count,)),
        "rollout digests": (sample.digests.shape, (count, 2)),
        "trainer logprobs": (own.logprobs.shape, (count,)),
        "trainer digests": (own.digests.shape, (count, 2)),
        "rollout entropies": (sample.entropies.shape, (count,)),
        "trainer entropies": (own.entropies.shape, (count,)),
    }
    wrong = {name: shape for name, (shape, needed) in shapes.items() if shape != needed}
    if wrong:
        raise InvariantViolation(f"sample {sample.sample_id} has {count} tokens, but these arrays do not: {wrong}")
    for name, digests in (("rollout", sample.digests), ("trainer", own.digests)):
        if digests.dtype != np.uint64:
            raise InvariantViolation(f"sample {sample.sample_id}: {name} digests are {digests.dtype}, not uint64")
