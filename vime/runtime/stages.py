"""What the stages of a step do. Each method takes and returns the values of its stage's ports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from itertools import groupby
from typing import Any

import numpy as np

from rlkernel.errors import NumericsError
from vime.errors import InputError, Interrupted, InvariantViolation
from vime.mismatch.compare import StepComparison, compare_step, nonfinite_tokens, unfounded_entropy
from vime.mismatch.independence import (
    check_evidence,
    check_first_forward,
    check_memory,
    check_shapes,
    check_trained,
    difference_from,
    make_challenge,
    split_challenge,
    verify_prefix,
    with_challenge,
)
from vime.mismatch.redraw import check_redrawn, chosen_sample
from vime.pipeline.prepare import Prepared
from vime.runtime.assembly import Sides
from vime.runtime.diagnosis import Diagnosis, diagnose, judge
from vime.runtime.held_out import prove
from vime.runtime.intake import check_sample
from vime.runtime.observer import Observer
from vime.runtime.publication import Publisher
from vime.runtime.sealing import Seals
from vime.runtime.user_functions import RewardFailure, attempt, call_filter, call_reward
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
    diagnosis: Diagnosis | None = None
    challenge_difference: str | None = None
    redrawn: int | None = None  # tokens that the trainer drew again


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
        self._temperature = self._pipeline.stages.rollout.sampling.temperature
        self.record = StepRecord(-1)
        self._seals = Seals()

    def begin(self, step: int) -> None:
        """Open a step: its record, and a probe of every thread's arithmetic."""
        self.record = StepRecord(step)
        try:
            self.sides.workers.probe()
        except NumericsError as error:
            raise InvariantViolation(f"step {step}: {error}") from error

    def bound(self) -> dict[str, Callable[..., Mapping[str, Any]]]:
        """Stage name -> what it does. Whatever breaks in a stage says in which step and stage it was."""
        stages = (
            self.rollout,
            self.reward,
            self.filter,
            self.advantage,
            self.score,
            self.compare,
            self.train,
            self.sync,
        )
        return {stage.__name__: self._placed(stage) for stage in stages}

    def _placed(self, stage: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
        @wraps(stage)
        def placed(*args: Any, **kwargs: Any) -> Mapping[str, Any]:
            try:
                return stage(*args, **kwargs)
            except (InvariantViolation, NumericsError) as error:
                raise InvariantViolation(f"step {self.record.step}, {stage.__name__}: {error}") from error

        return placed

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
        due = {request.sample_id: request for request in requests}
        self._seals = Seals()
        finished: list[GeneratedSample] = []
        for sample in engine.generate(requests):
            check_sample(
                sample,
                due,
                engine.engine_id,
                vocab_size=self.prepared.config.vocab_size,
                context=self.prepared.longest_sequence,
                detokenize=self.prepared.tokenizer.decode,
            )
            del due[sample.sample_id]
            self.timeline.append(SampleFinished.of(sample))
            self._seals.put(sample)
            finished.append(sample)
            self._observer.progress(len(finished), len(requests))
            if self._observer.stop_requested():
                raise Interrupted("stopped on request during generation")
        if due:
            named = f"{len(due)} of {len(requests)} samples: {', '.join(map(str, sorted(due)[:5]))}"
            raise InvariantViolation(f"engine {engine.engine_id} did not return {named}")
        self._publisher.check_served()
        return sorted(finished, key=lambda sample: sample.sample_id)

    def generate_held_out(self, prompts: Sequence[Prompt], samples_per_prompt: int) -> list[GeneratedSample]:
        """:meth:`generate` for an evaluation, outside of any step."""
        try:
            return self.generate(prompts, "eval", samples_per_prompt)
        except (InvariantViolation, NumericsError) as error:
            raise InvariantViolation(f"evaluation of version {self._publisher.version}: {error}") from error

    def prove_held_out(self, samples: Sequence[GeneratedSample], evaluation: int) -> dict[str, int | None]:
        """What the trainer's own forward and draw say of some samples of an evaluation; see :func:`prove`."""
        if not self.exact or not samples:
            return {}
        version = self._publisher.version
        try:
            return prove(
                samples,
                self.sides.trainer,
                self.prepared.sampling("eval"),
                seed=self._pipeline.seed,
                evaluation=evaluation,
                version=version,
                digest=self._publisher.digest,
                tolerated=self._pipeline.on_mismatch == "continue",
            )
        except (InvariantViolation, NumericsError) as error:
            raise InvariantViolation(f"evaluation of version {version}: {error}") from error

    def give_rewards(
        self, prompts: Sequence[Prompt], samples: Sequence[GeneratedSample], scope: str
    ) -> dict[SampleId, float]:
        """Rewards by sample; a sample whose reward fails is dropped, or stops the run, as the pipeline says."""
        settings = self._pipeline.stages.reward
        who = f"the reward {settings.function!r}"
        by_index = {prompt.prompt_index: prompt for prompt in prompts}
        rewards: dict[SampleId, float] = {}
        for sample in samples:
            prompt = by_index[sample.sample_id.prompt_index]

            def call(sample: GeneratedSample = sample, prompt: Prompt = prompt) -> float:
                self._seals.check([sample], who)
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
                        "resume (a new run with stages.reward.on_error: drop would drop such samples)"
                    ) from failure
                rewards[sample.sample_id] = event.reward
                continue
            outcome = self.timeline.decide("reward", f"{scope}/{sample.sample_id}", lambda call=call: attempt(call))  # type: ignore[misc]
            if outcome["reason"]:
                self._drop(sample.sample_id, f"reward: {outcome['reason']}")
            else:
                given = RewardGiven(
                    sample_id=sample.sample_id, source=settings.function, reward=outcome["reward"], components={}
                )
                rewards[sample.sample_id] = self.timeline.append(given).reward
        self._seals.check(samples, who)
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
        if self.prepared.filter is not None:
            self._seals.check(samples, f"the filter {self.prepared.filter.name!r}")
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
        function = self.prepared.filter
        assert function is not None
        rewards = [self.record.rewards[sample.sample_id] for sample in samples]

        def call() -> list[bool]:
            self._seals.check(samples, f"the filter {function.name!r}")
            return call_filter(function.name, function.call, prompt_index, samples, rewards)

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
            TrainSample.of(sample, float(advantage))
            for sample, advantage in zip(chosen, advantages.values, strict=True)
        ]
        self._seals.check(chosen, "something in this process")
        self.record.samples, self.record.advantages = chosen, advantages
        version, ids = self._publisher.version, tuple(sample.sample_id for sample in chosen)
        self.timeline.append(BatchAssigned(step=self.record.step, policy_version=version, sample_ids=ids))
        return {"advantages": advantages, "batch": batch}

    def score(self, batch: Sequence[TrainSample]) -> Mapping[str, Any]:
        """Stage ``score``: the trainer's own forward, with a challenge among the samples, checked for independence."""
        challenge = make_challenge(batch, self._pipeline.seed, self.record.step, self.prepared.config.vocab_size)
        asked = with_challenge(batch, challenge)
        scores = self.sides.trainer.score(asked)
        check_evidence(asked, scores, self._publisher.digest)
        check_shapes(asked, scores)
        scores, answer = split_challenge(scores, challenge)
        check_memory(self.record.samples, scores)
        if self.exact:
            original = next(score for score in scores.samples if score.sample_id == challenge.original)
            verify_prefix(challenge, answer, original)
            independent = self.sides.engine.score(challenge.sample, self._temperature)
            self.record.challenge_difference = difference_from(challenge, answer, independent)
        return {"scores": scores}

    def compare(self, samples: Sequence[GeneratedSample], scores: ScoreResult) -> Mapping[str, Any]:
        """Stage ``compare``: both sides' log-probabilities and digests; arrays and counts are written and announced."""
        record, version = self.record, self._publisher.version
        self._seals.check(record.samples, "something in this process")
        comparison = compare_step(record.samples, scores, version)
        differs = bool(comparison.mismatch_count or comparison.distribution_mismatch_count)
        if record.challenge_difference is not None and not differs:
            # nothing is logged as equal that was not computed twice
            raise InvariantViolation(record.challenge_difference)
        unfounded = unfounded_entropy(record.samples, scores, version) if self.exact else None
        if unfounded is not None:
            raise InvariantViolation(unfounded)
        if self.exact and not differs:
            self._redraw(version)
        if differs:
            record.diagnosis = self._diagnose(comparison, scores)
            comparison = replace(comparison, diagnosis=record.diagnosis.as_json())
        record.comparison, record.scores = comparison, scores
        self._write_arrays(scores)
        named = ("compared_tokens", "incomparable_tokens", "mismatch_count", "distribution_mismatch_count")
        plain = asdict(comparison)
        metrics = {key: value for key, value in plain.items() if key not in named and key != "worst_token"}
        worst = comparison.worst_token
        metrics["redrawn_tokens"] = record.redrawn
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
        nonfinite = nonfinite_tokens(record.samples, scores)
        record.quarantined = {token.sample_id for token in nonfinite}
        if record.quarantined:
            record.dropped["nonfinite"] += len(record.quarantined)
        judge(comparison, record.diagnosis, nonfinite, self._pipeline.on_mismatch, self._pipeline.on_nonfinite)
        return {"comparison": {**{key: plain[key] for key in named}, **metrics}}

    def _redraw(self, version: int) -> None:
        """Draw the tokens of one sample again, by the trainer; a trainer that has no sampler says so by its absence."""
        draw = getattr(self.sides.trainer, "redraw", None)
        sample = chosen_sample(self.record.samples, self.record.step)
        if draw is None or sample is None:
            return
        drawn = draw(TrainSample.of(sample), self.prepared.sampling("train"), self._pipeline.seed)
        self.record.redrawn = check_redrawn(sample, drawn, version)

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

    def _diagnose(self, comparison: StepComparison, scores: ScoreResult) -> Diagnosis:
        assert comparison.worst_token is not None
        name = comparison.worst_token.sample
        sample = next(s for s in self.record.samples if s.sample_id == name)
        own = next(s for s in scores.samples if s.sample_id == name)
        return diagnose(self.sides.trainer, self.sides.engine, sample, own, self._temperature)

    def train(
        self, batch: Sequence[TrainSample], scores: ScoreResult, comparison: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Stage ``train``: all updates of the step. The first training forward must repeat the scores' bits."""
        trainer, record = self.sides.trainer, self.record
        own = {score.sample_id: score for score in scores.samples}
        chosen = [s for s in batch if s.sample_id not in record.quarantined]
        if not chosen:
            raise InvariantViolation(
                "every sample has a log-probability that is not finite: nothing is left to train on"
            )
        ready = [replace(s, old_logprobs=own[s.sample_id].logprobs) for s in chosen]
        if self._pipeline.stages.train.loss.kl.coefficient > 0:
            reference = self._reference_logprobs(ready)
            ready = [replace(s, reference_logprobs=reference[s.sample_id]) for s in ready]
        trained = trainer.train(record.step, ready)
        check_first_forward(trained.first_forward, scores, self._publisher.digest, exact=self.exact)
        check_trained(ready, trained)
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

    def _reference_logprobs(self, samples: Sequence[TrainSample]) -> dict[SampleId, Any]:
        """Scores of the reference model, from a forward with the weights that version 0 was published with."""
        scores = self.sides.trainer.score(samples, "reference")
        check_shapes(samples, scores)
        check_evidence(samples, scores, self.timeline.state.versions[0].digest)
        found = {score.sample_id: score.logprobs for score in scores.samples}
        missing = [str(s.sample_id) for s in samples if s.sample_id not in found]
        if missing:
            raise InvariantViolation(f"the reference returned no log-probabilities for {', '.join(missing[:5])}")
        return found

    def sync(self, trained: TrainResult) -> Mapping[str, Any]:
        """Stage ``sync``: publish the trained weights and bring the engine to them."""
        return {"served": self._publisher.publish()}
