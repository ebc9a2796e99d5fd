"""What a report shows of a run: data in, no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vime.errors import InputError
from vime.mismatch.report import StepReport
from vime.train.ordered import ordered_mean

Status = Literal["finished", "running", "stopped"]
Tone = Literal["good", "bad", "unknown"]


@dataclass(frozen=True)
class Evaluation:
    """Mean reward on held-out prompts with the weights after ``step`` training steps; None: no sample has a reward."""

    step: int
    reward_mean: float | None
    num_samples: int = 0
    weight_version: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The sentence at the top: a figure, what it says, and what qualifies it."""

    tone: Tone
    headline: str
    details: tuple[str, ...]


@dataclass(frozen=True)
class RunSummary:
    """Everything that a report shows.

    ``identities`` maps a side (``trainer``, an engine's name) to its three digests; ``evidence`` maps an owner to
    what its counters hold (``calls``, ``facts``, ``refused``); ``contract`` is what contract.json holds; ``facts`` are
    plain pairs that are shown as they are (model, seed, threads). ``native`` names the sides (``rollout``, ``trainer``)
    whose kernels keep no contract: what such a run shows was measured, and proves nothing.
    """

    name: str
    steps: tuple[StepReport, ...]
    evaluations: tuple[Evaluation, ...] = ()
    status: Status = "finished"
    reason: str = ""
    identities: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    contract: Mapping[str, Any] = field(default_factory=dict)
    evidence: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    native: tuple[str, ...] = ()

    @classmethod
    def from_data(
        cls,
        name: str,
        steps: Iterable[Mapping[str, Any]],
        evaluations: Iterable[Mapping[str, Any]] = (),
        contract: Mapping[str, Any] | None = None,
        evidence: Mapping[str, Mapping[str, Any]] | None = None,
        identities: Mapping[str, Mapping[str, str]] | None = None,
        status: Status = "finished",
        reason: str = "",
        facts: Mapping[str, str] | None = None,
        native: Iterable[str] = (),
    ) -> RunSummary:
        """Build from the run directory's plain data. Raises InputError for a step or evaluation that lacks a field."""
        evaluated = []
        for item in evaluations:
            if "step" not in item or "reward_mean" not in item:
                raise InputError(f"an evaluation needs step and reward_mean; this one has {sorted(item)}")
            evaluated.append(
                Evaluation(item["step"], item["reward_mean"], item.get("num_samples", 0), item.get("weight_version"))
            )
        return cls(
            name,
            tuple(StepReport.from_json(step) for step in steps),
            tuple(evaluated),
            status,
            reason,
            identities or {},
            contract or {},
            evidence or {},
            facts or {},
            tuple(native),
        )

    @property
    def compared_tokens(self) -> int:
        """Tokens compared in all steps."""
        return sum(step.compared_tokens for step in self.steps)

    @property
    def mismatches(self) -> int:
        """Tokens with differing log-probabilities, in steps that compared something."""
        return sum(step.mismatch_count or 0 for step in self.steps)

    @property
    def distribution_mismatches(self) -> int:
        """Tokens with differing distributions, in steps that compared something."""
        return sum(step.distribution_mismatch_count or 0 for step in self.steps)

    @property
    def incomparable(self) -> dict[str, int]:
        """Tokens that could not be compared, by reason, over all steps."""
        total: dict[str, int] = {}
        for step in self.steps:
            for reason, count in step.incomparable_tokens.items():
                total[reason] = total.get(reason, 0) + count
        return dict(sorted(total.items()))

    @property
    def identity_differences(self) -> tuple[str, ...]:
        """Names of the identities that have to be one value on all sides, and are not."""
        return tuple(
            name
            for name in ("semantic", *(() if self.native else ("numerical_policy",)))
            if len({side.get(name, "missing") for side in self.identities.values()}) > 1
        )

    @staticmethod
    def reward_of(steps: Sequence[StepReport]) -> float | None:
        """Mean of the steps' mean rewards; None where there are none."""
        values = [step.reward_mean for step in steps if step.reward_mean is not None]
        return ordered_mean(values) if values else None

    @property
    def heading(self) -> str:
        """How the run stands, in a few words; a run that keeps no contract does not look like one that proved it."""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.status}{', native kernels' if self.native else ''}{reason}"

    def edges(self) -> tuple[Sequence[StepReport], Sequence[StepReport]]:
        """The first and the last steps of the run: at most five each, and never a step in both, save the only one."""
        few = max(1, min(5, len(self.steps) // 2))
        return self.steps[:few], self.steps[-few:]

    def verdict(self) -> Verdict:
        """What the run proved, and what it did not."""
        details: list[str] = []
        if self.native:
            who = " and the ".join(self.native)
            details.append(
                f"the {who} ran native kernels, which keep no contract: this was measured and proves nothing"
            )
        silent = [step.step for step in self.steps if step.compared_tokens == 0]
        if silent:
            details.append(f"{_steps(silent)} compared nothing")
        for evaluation in self.evaluations:
            if evaluation.reward_mean is None:
                details.append(f"the evaluation after {_counted(evaluation.step, 'step', 'steps')} evaluated nothing")
        for reason, count in self.incomparable.items():
            what = "token was" if count == 1 else "tokens were"
            details.append(f"{count:,} {what} not comparable: {REASON_TEXT.get(reason, reason)}")
        nonfinite = sum(step.nonfinite_count or 0 for step in self.steps)
        if nonfinite:
            what = "log-probability was" if nonfinite == 1 else "log-probabilities were"
            details.append(f"{nonfinite:,} compared {what} infinite or NaN")
        if self.identity_differences:
            details.append(f"the sides do not share {' and '.join(self.identity_differences)}")
        if not self.compared_tokens:
            return Verdict("unknown", "Nothing was compared", tuple(details))
        bad = self.mismatches or self.distribution_mismatches
        if bad:
            broken = [step.step for step in self.steps if step.compared_tokens and not step.equal]
            details.insert(
                0,
                f"{_counted(self.mismatches, 'log-probability', 'log-probabilities')} and "
                f"{_counted(self.distribution_mismatches, 'distribution', 'distributions')} differ, "
                f"in {_steps(broken)}",
            )
            found = next((step for step in self.steps if step.diagnosis is not None), None)
            if found is not None and found.diagnosis is not None:
                details.insert(
                    1, f"step {found.step}, sample {found.diagnosis['sample']}: {found.diagnosis['sentence']}"
                )
            most = max(self.mismatches, self.distribution_mismatches)
            return Verdict("bad", f"{_tokens(self.compared_tokens)} compared, {most:,} differing", tuple(details))
        details.insert(0, "every log-probability and every distribution has the same bits on both sides")
        tone: Tone = "unknown" if silent or nonfinite or self.identity_differences or self.native else "good"
        return Verdict(tone, f"{_tokens(self.compared_tokens)} compared, 0 differing", tuple(details))


REASON_TEXT = {
    "weight_version": "sampled with other weights than the trainer evaluated",
    "kv_version": "read keys and values of other weights",
    "not_audited": "the trainer evaluates only a share of the samples",
}


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _tokens(count: int) -> str:
    return _counted(count, "token", "tokens")


def _steps(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    shown = ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
    return f"{len(numbers)} steps ({shown})"
