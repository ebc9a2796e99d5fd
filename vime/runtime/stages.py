"""What the stages of a step do. Each method takes and returns the values of its stage's ports."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from vime.errors import InputError, Interrupted, InvariantViolation, VimeError
from vime.mismatch.compare import StepComparison, canonical_bits, compare_step
from vime.mismatch.independence import (
    check_evidence,
    check_memory,
    make_challenge,
    split_challenge,
    verify_challenge,
    with_challenge,
)
from vime.pipeline.prepare import Prepared
from vime.runtime.assembly import Sides
from vime.runtime.observer import Observer
from vime.runtime.publication import Publisher
from vime.store.layout import OBSERVED_ARRAYS, rollout_arrays, trainer_arrays
from vime.store.run_directory import RunDirectory
from vime.timeline.events import (
    BatchAssigned,
    FilterApplied,
    RewardGiven,
    SampleDropped,
    SampleFinished,
    SampleStarted,
    StepCompared,
    StepTrained,
)
from vime.train.estimators import Advantages, EstimatorConfig, compute_advantages
from vime.train.interface import ScoreResult, TrainResult, TrainSample
from vime.types import GeneratedSample, Namespace, Prompt, RolloutRequest, SampleId


@dataclass
class StepRecord:
    """What a step leaves for its report, its arrays and its checkpoint."""

    step: int
    samples: list[GeneratedSample] = field(default_factory=list)
    rewards: dict[SampleId, float] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    comparison: StepComparison | None = None
    advantages: Advantages | None = None
    scores: ScoreResult | None = None
    trained: TrainResult | None = None
    quarantined: set[SampleId] = field(default_factory=set)


class StepStages:
    """The stages of one run; :meth:`begin` opens a step."""

    def __init__(
        self,
        prepared: Prepared,
        sides: Sides,
        directory: RunDirectory,
        publisher: Publisher,
        observer: Observer,
    ) -> None:
        self.prepared, self.sides, self.timeline = prepared, sides, directory.timeline
        self._directory, self._publisher, self._observer = directory, publisher, observer
        self._pipeline = prepared.pipeline
        self.exact = self._pipeline.numerics.rollout == self._pipeline.numerics.trainer == "exact"
        self.record = StepRecord(-1)

    def begin(self, step: int) -> None:
        """Open a step: its record, and a probe of every thread for flushed subnormals."""
        self.record = StepRecord(step)
        self.sides.workers.probe()

    def bound(self) -> dict[str, Callable[..., Mapping[str, Any]]]:
        """Stage name -> what it does."""
        return {
            "rollout": self.rollout,
            "reward": self.reward,
            "filter": self.filter,
            "advantage": self.advantage,
            "score": self.score,
            "compare": self.compare,
            "train": self.train,
            "sync": self.sync,
        }

    # rollout and reward, for training and evaluation alike

    def generate(
        self, prompts: Sequence[Prompt], namespace: Namespace, samples_per_prompt: int
    ) -> list[GeneratedSample]:
        """Generate ``samples_per_prompt`` samples a prompt; in sample order. Events: started, finished."""
        engine, params = self.sides.engine, self.prepared.sampling(namespace)
        requests = [
            RolloutRequest(SampleId(namespace, prompt.prompt_index, k), prompt.token_ids, params)
            for prompt in prompts
            for k in range(samples_per_prompt)
        ]
        for request in requests:
            self.timeline.append(SampleStarted(sample_id=request.sample_id, engine=engine.engine_id))
        expected = {request.sample_id for request in requests}
        finished: list[GeneratedSample] = []
        for sample in engine.generate(requests):
            if sample.sample_id not in expected:
                raise InvariantViolation(f"engine {engine.engine_id} returned {sample.sample_id}, which is not due")
            expected.remove(sample.sample_id)
            self.timeline.append(SampleFinished.of(sample))
            finished.append(sample)
            self._observer.progress(len(finished), len(requests))
            if self._observer.stop_requested():
                raise Interrupted("stopped on request during generation")
        if expected:
            raise InvariantViolation(
                f"engine {engine.engine_id} did not return samples {sorted(map(str, expected))[:5]}"
            )
        return sorted(finished, key=lambda sample: sample.sample_id)

    def give_rewards(
        self, prompts: Sequence[Prompt], samples: Sequence[GeneratedSample], scope: str
    ) -> dict[SampleId, float]:
        """Rewards by sample; a sample whose reward fails is dropped, or stops the run, as the pipeline says."""
        settings = self._pipeline.stages.reward
        by_index = {prompt.prompt_index: prompt for prompt in prompts}
        rewards: dict[SampleId, float] = {}
        for sample in samples:
            prompt = by_index[sample.sample_id.prompt_index]

            def call(sample: GeneratedSample = sample, prompt: Prompt = prompt) -> float:
                return call_reward(self.prepared.reward.call, prompt, sample, settings.timeout_s)

            if settings.on_error == "stop":
                try:
                    event = self.timeline.give_reward(
                        sample.sample_id,
                        settings.function,
                        lambda call=call: (call(), {}),  # type: ignore[misc]
                    )
                except RewardFailure as failure:
                    raise Interrupted(
                        f"the reward {settings.function!r} of sample {sample.sample_id} failed: {failure}; mend it and "
                        "resume, or set stages.reward.on_error: drop"
                    ) from failure
                rewards[sample.sample_id] = event.reward
                continue
            outcome = self.timeline.decide("reward", f"{scope}/{sample.sample_id}", lambda call=call: _attempt(call))  # type: ignore[misc]
            if outcome["reason"]:
                self._drop(sample.sample_id, f"reward: {outcome['reason']}")
            else:
                given = RewardGiven(
                    sample_id=sample.sample_id, source=settings.function, reward=outcome["reward"], components={}
                )
                rewards[sample.sample_id] = self.timeline.append(given).reward
        return rewards

    def _drop(self, sample_id: SampleId, reason: str) -> None:
        self.timeline.append(SampleDropped(sample_id=sample_id, reason=reason))
        self.record.dropped[reason.partition(":")[0]] += 1

    # the stages

    def rollout(self, prompts: Sequence[Prompt]) -> Mapping[str, Any]:
        """Stage ``rollout``."""
        samples = self.generate(prompts, "train", self._pipeline.stages.rollout.samples_per_prompt)
        return {"samples": samples}

    def reward(self, prompts: Sequence[Prompt], samples: Sequence[GeneratedSample]) -> Mapping[str, Any]:
        """Stage ``reward``: one a sample, NaN for a sample that was dropped."""
        self.record.rewards = self.give_rewards(prompts, samples, f"step {self.record.step}")
        return {"rewards": [self.record.rewards.get(sample.sample_id, math.nan) for sample in samples]}

    def filter(self, samples: Sequence[GeneratedSample], rewards: Sequence[float]) -> Mapping[str, Any]:
        """Stage ``filter``: which samples train. Everything that leaves is dropped with a reason."""
        kept: dict[SampleId, bool] = {s.sample_id: s.sample_id in self.record.rewards for s in samples}
        by_id = {s.sample_id: s for s in samples}
        for prompt_index, members in groupby(samples, lambda s: s.sample_id.prompt_index):
            ids = [s.sample_id for s in members]
            alive = [i for i in ids if kept[i]]
            for sample_id, reason in self._filter_group(prompt_index, ids, alive, by_id).items():
                kept[sample_id] = False
                self._drop(sample_id, reason)
        if not any(kept.values()):
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.record.dropped.items()))
            raise InputError(
                f"step {self.record.step}: all {len(samples)} samples were dropped ({reasons}); nothing is left to "
                "train on. Look at stages.reward and stages.filter"
            )
        return {"kept": [kept[s.sample_id] for s in samples]}

    def _filter_group(
        self, prompt_index: int, ids: list[SampleId], alive: list[SampleId], by_id: Mapping[SampleId, GeneratedSample]
    ) -> dict[SampleId, str]:
        settings = self._pipeline.stages.filter
        reasons: dict[SampleId, str] = {}
        if self.prepared.filter is not None and alive:
            answers = self._user_filter(prompt_index, [by_id[i] for i in alive])
            for sample_id, keep in zip(alive, answers, strict=True):
                reason = "" if keep else f"filter: {settings.function}"
                self.timeline.append(
                    FilterApplied(filter=str(settings.function), subject=str(sample_id), kept=keep, reason=reason)
                )
                if not keep:
                    reasons[sample_id] = reason
        rest = [i for i in alive if i not in reasons]
        if rest and len(rest) < len(ids) and settings.incomplete_group == "drop":
            reasons.update({i: f"incomplete group: {len(rest)} of {len(ids)} samples are left" for i in rest})
            return reasons
        values = {self.record.rewards[i] for i in rest}
        if rest and len(values) == 1 and settings.zero_variance == "drop":
            reasons.update({i: "zero variance: all rewards of the group are equal" for i in rest})
        return reasons

    def _user_filter(self, prompt_index: int, samples: list[GeneratedSample]) -> list[bool]:
        assert self.prepared.filter is not None
        name, function = self.prepared.filter.name, self.prepared.filter.call

        def call() -> list[bool]:
            try:
                answers = function(samples, [self.record.rewards[s.sample_id] for s in samples])
                answers = [bool(answer) for answer in answers]
            except Exception as error:  # a user's function may raise anything
                raise Interrupted(
                    f"the filter {name!r} raised {type(error).__name__} for prompt {prompt_index}: {error}; "
                    "mend it and resume"
                ) from error
            if len(answers) != len(samples):
                raise Interrupted(
                    f"the filter {name!r} gave {len(answers)} answers for {len(samples)} samples of prompt "
                    f"{prompt_index}; one a sample is needed. Mend it and resume"
                )
            return answers

        return list(self.timeline.decide("filter", f"step {self.record.step}/prompt {prompt_index}", call))

    def advantage(
        self, samples: Sequence[GeneratedSample], rewards: Sequence[float], kept: Sequence[bool]
    ) -> Mapping[str, Any]:
        """Stage ``advantage``: advantages and the step's batch, which is assigned here."""
        settings, rollout = self._pipeline.stages.advantage, self._pipeline.stages.rollout
        chosen = [sample for sample, keep in zip(samples, kept, strict=True) if keep]
        values = [reward for reward, keep in zip(rewards, kept, strict=True) if keep]
        config = EstimatorConfig(
            kind=settings.estimator,
            group_size=rollout.samples_per_prompt,
            normalise=settings.normalise,
            epsilon=settings.epsilon,
            baseline=settings.baseline,
            incomplete_groups="keep" if self._pipeline.stages.filter.incomplete_group == "keep" else "error",
        )
        advantages = compute_advantages([sample.sample_id for sample in chosen], values, config)
        batch = [
            TrainSample(
                sample.sample_id,
                sample.prompt_token_ids,
                sample.token_ids,
                np.ones(len(sample.token_ids), np.bool_),
                float(advantage),
            )
            for sample, advantage in zip(chosen, advantages.values, strict=True)
        ]
        self.record.samples, self.record.advantages = chosen, advantages
        version = self._publisher.version
        ids = tuple(sample.sample_id for sample in chosen)
        self.timeline.append(BatchAssigned(step=self.record.step, policy_version=version, sample_ids=ids))
        return {"advantages": advantages, "batch": batch}

    def score(self, batch: Sequence[TrainSample]) -> Mapping[str, Any]:
        """Stage ``score``: the trainer's own forward, with a challenge among the samples, checked for independence."""
        challenge = make_challenge(batch, self._pipeline.seed, self.record.step, self.prepared.config.vocab_size)
        asked = with_challenge(batch, challenge)
        scores = self.sides.trainer.score(asked)
        check_evidence(asked, scores, self._publisher.digest)
        scores, answer = split_challenge(scores, challenge)
        check_memory(self.record.samples, scores)
        if self.exact:
            original = next(score for score in scores.samples if score.sample_id == challenge.original)
            temperature = self._pipeline.stages.rollout.sampling.temperature
            independent = self.sides.engine.score(challenge.sample, temperature)
            verify_challenge(challenge, answer, independent, original)
        return {"scores": scores}

    def compare(self, samples: Sequence[GeneratedSample], scores: ScoreResult) -> Mapping[str, Any]:
        """Stage ``compare``: both sides' log-probabilities and digests; arrays and counts are written and announced."""
        record, version = self.record, self._publisher.version
        comparison = compare_step(record.samples, scores, version)
        record.comparison, record.scores = comparison, scores
        self._write_arrays(scores)
        named = ("compared_tokens", "incomparable_tokens", "mismatch_count", "distribution_mismatch_count")
        plain = asdict(comparison)
        metrics = {key: value for key, value in plain.items() if key not in named and key != "worst_token"}
        worst = comparison.worst_token
        metrics["worst_token"] = None if worst is None else {"sample": str(worst.sample), "position": worst.position}
        self.timeline.append(
            StepCompared(
                step=record.step,
                num_tokens=sum(len(sample.token_ids) for sample in record.samples),
                **{key: plain[key] for key in named},
                case=scores.case,
                forward_tokens=scores.forward_tokens,
                manifest_digest=scores.manifest_digest,
                metrics=metrics,
            )
        )
        self._judge(comparison, scores)
        return {"comparison": {**{key: plain[key] for key in named}, **metrics}}

    def _write_arrays(self, scores: ScoreResult) -> None:
        record = self.record
        assert record.advantages is not None
        own = {score.sample_id: score for score in scores.samples}
        tokens = sum(len(sample.token_ids) for sample in record.samples)
        arrays = {
            **rollout_arrays(record.samples),
            **trainer_arrays([own[sample.sample_id] for sample in record.samples]),
            "loss_mask": np.ones(tokens, np.bool_),
            "rewards": np.array([record.rewards[sample.sample_id] for sample in record.samples], np.float64),
            "advantages": np.asarray(record.advantages.values, np.float64),
        }
        self._directory.write_arrays(record.step, arrays, OBSERVED_ARRAYS)

    def _judge(self, comparison: StepComparison, scores: ScoreResult) -> None:
        step, worst = self.record.step, comparison.worst_token
        if comparison.nonfinite_count:
            self.record.quarantined = nonfinite_samples(self.record.samples, scores)
            named = ", ".join(sorted(map(str, self.record.quarantined))[:5])
            if self._pipeline.on_nonfinite == "stop":
                raise InvariantViolation(
                    f"step {step}: {comparison.nonfinite_count} log-probabilities are not finite (samples {named}); "
                    "nothing was trained on them"
                )
            for _ in self.record.quarantined:
                self.record.dropped["nonfinite"] += 1
        if (
            comparison.mismatch_count or comparison.distribution_mismatch_count
        ) and self._pipeline.on_mismatch == "stop":
            where = "" if worst is None else f"; the worst is sample {worst.sample}, position {worst.position}"
            raise InvariantViolation(
                f"step {step}: {comparison.mismatch_count} of {comparison.compared_tokens} log-probabilities and "
                f"{comparison.distribution_mismatch_count} distributions differ between rollout and trainer{where}"
            )

    def train(
        self, batch: Sequence[TrainSample], scores: ScoreResult, comparison: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Stage ``train``: all updates of the step. The first training forward must repeat the scores' bits."""
        trainer, record = self.sides.trainer, self.record
        own = {score.sample_id: score for score in scores.samples}
        chosen = [s for s in batch if s.sample_id not in record.quarantined]
        if not chosen:
            raise InvariantViolation(f"step {record.step}: every sample has a log-probability that is not finite")
        ready = [replace(s, old_logprobs=own[s.sample_id].logprobs) for s in chosen]
        if self._pipeline.stages.train.loss.kl.coefficient > 0:
            reference = {r.sample_id: r.logprobs for r in trainer.score(ready, "reference").samples}
            ready = [replace(s, reference_logprobs=reference[s.sample_id]) for s in ready]
        trained = trainer.train(record.step, ready)
        if self.exact:
            self._check_first_forward(trained, own)
        record.trained = trained
        self.timeline.append(
            StepTrained(
                step=record.step,
                weights_digest=trainer.manifest_digest(),
                gradient_digest=trained.gradient_digest,
                loss=trained.loss,
                grad_norm=trained.grad_norm,
                learning_rate=trained.learning_rate,
                updates=trained.updates,
                metrics={"clip_fraction": trained.clip_fraction, **trained.facts},
            )
        )
        return {"trained": trained}

    def _check_first_forward(self, trained: TrainResult, own: Mapping[SampleId, Any]) -> None:
        if trained.first_forward is None or not trained.first_forward.samples:
            raise InvariantViolation(f"step {self.record.step}: the trainer shows no training forward")
        for forward in trained.first_forward.samples:
            score = own[forward.sample_id]
            differs = canonical_bits(forward.logprobs) != canonical_bits(score.logprobs)
            differs |= (forward.digests != score.digests).any(axis=1)
            if differs.any():
                raise InvariantViolation(
                    f"step {self.record.step}: the training forward of sample {forward.sample_id} differs from its "
                    f"scoring forward at response token {int(np.flatnonzero(differs)[0])}"
                )

    def sync(self, trained: TrainResult) -> Mapping[str, Any]:
        """Stage ``sync``: publish the trained weights and bring the engine to them."""
        return {"served": self._publisher.publish()}


class RewardFailure(VimeError):
    """A reward function raised, ran out of time, or returned something that is no finite number."""


def call_reward(
    function: Callable[..., Any], prompt: Prompt, sample: GeneratedSample, timeout_s: float | None
) -> float:
    """Call a user's reward. Raises RewardFailure with the reason."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(function(prompt, sample, sample.text))
        except Exception as error:  # a user's function may raise anything
            outcome.append(error)

    if timeout_s is None:
        call()
    else:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not outcome:
            raise RewardFailure(f"no answer within {timeout_s} s")
    value = outcome[0]
    if isinstance(value, Exception):
        raise RewardFailure(f"it raised {type(value).__name__}: {value}") from value
    if isinstance(value, (bool, int, float, np.floating, np.integer)) and math.isfinite(float(value)):
        return float(value)
    raise RewardFailure(f"it returned {value!r}; a finite number is needed")


def _attempt(call: Callable[[], float]) -> dict[str, Any]:
    try:
        return {"reward": call(), "reason": ""}
    except RewardFailure as failure:
        return {"reward": 0.0, "reason": str(failure)}


def nonfinite_samples(samples: Sequence[GeneratedSample], scores: ScoreResult) -> set[SampleId]:
    """Samples with a log-probability that is infinite or NaN on either side."""
    own = {score.sample_id: score for score in scores.samples}
    return {
        s.sample_id
        for s in samples
        if not (np.isfinite(s.logprobs).all() and np.isfinite(own[s.sample_id].logprobs).all())
    }
