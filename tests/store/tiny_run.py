"""A whole run in miniature: deterministic, with every kind of event, resumable at any moment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vime.store.layout import OBSERVED_ARRAYS, rollout_arrays, trainer_arrays
from vime.store.run_directory import RunDirectory
from vime.timeline.events import (
    BatchAssigned,
    ContractFixed,
    Evaluated,
    FilterApplied,
    PromptDrawn,
    RunFinished,
    RunStarted,
    SampleFinished,
    SampleStarted,
    StepCompared,
    StepFinished,
    StepTrained,
    SyncCommitted,
    SyncStaged,
    SyncVerified,
    VersionPublished,
)
from vime.train.interface import ScoredSample
from vime.types import GeneratedSample, Prompt, SampleId, VersionRun

STORED = (
    "prompt_index",
    "k",
    "prompt_offsets",
    "response_offsets",
    "tokens",
    "rollout_logprobs",
    "trainer_logprobs",
    "sampled_at",
    "rewards",
)
SIDE = {"semantic": "5" * 64, "numerical_policy": "6" * 64}


def no_hook(where: str) -> None:
    """Do nothing."""


@dataclass
class TinyRun:
    """``order`` seeds the scheduling, ``salt`` changes what is computed, ``hook`` is called between any two actions."""

    path: Path
    steps: int = 3
    order: int = 0
    salt: int = 0
    engines: tuple[str, ...] = ("engine-0",)
    hook: Callable[[str], None] = no_hook
    with_clock: bool = False
    clock_calls: list[str] = field(default_factory=list)
    wrong_reward_at: SampleId | None = None
    keep: int = 2

    def run(self) -> str:
        """Start or resume; returns the run digest."""
        if (self.path / "timeline.jsonl").exists():
            directory = RunDirectory.open_for_resume(self.path, self.keep)
        else:
            directory = RunDirectory.create(self.path, "name: tiny\n", self.keep)
        with directory:
            self._drive(directory)
            return directory.timeline.run_digest()

    def _drive(self, directory: RunDirectory) -> None:
        self.directory, self.timeline = directory, directory.timeline
        append = self.timeline.append
        if directory.resumption.finished:
            return
        checkpoint = directory.resume_checkpoint()
        self.weights = np.arange(4, dtype=np.int64)
        first = 0
        if checkpoint is not None:
            self.weights = np.load(checkpoint.folder / "weights.npy")
            first = checkpoint.step + 1
        else:
            append(RunStarted(run_seed=7, pipeline_digest="p", steps=self.steps, engines=self.engines))
            sides = {name: {**SIDE, "deployment": "7" * 64} for name in ("trainer", *self.engines)}
            append(ContractFixed(trainer=SIDE, rollout=SIDE, sides=sides))
            directory.announce_pipeline()
            self._publish()
        for step in range(first, self.steps):
            self._step(step)
        append(RunFinished(weights_digest=self._digest()))
        self.hook("finished")

    def _digest(self) -> str:
        return hashlib.sha256(self.weights.tobytes()).hexdigest()

    def _publish(self) -> None:
        latest = self.timeline.state.latest_version
        version = 0 if latest is None else latest.version + 1
        parent = None if latest is None else latest.version
        self._do(VersionPublished(version=version, digest=self._digest(), parent=parent))
        for kind in (SyncStaged, SyncVerified, SyncCommitted):
            for engine in self.engines:
                self._do(kind(engine=engine, version=version, digest=self._digest(), observed={"seconds": 0.5}))

    def _do(self, event: Any) -> None:
        self.hook(f"before {event.type}")
        self.timeline.append(event)
        self.hook(f"after {event.type}")

    def _generate(self, sample_id: SampleId, version: int) -> GeneratedSample:
        seed = [sample_id.prompt_index, sample_id.k, int(self.weights.sum()), self.salt, sample_id.namespace == "eval"]
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 5))
        return GeneratedSample(
            sample_id=sample_id,
            prompt_token_ids=(1, 2, sample_id.prompt_index),
            token_ids=tuple(rng.integers(0, 50, n).tolist()),
            logprobs=-rng.random(n, dtype=np.float32),
            digests=rng.integers(0, 1 << 60, (n, 2)).astype(np.uint64),
            entropies=rng.random(n, dtype=np.float32),
            sampled_at=np.random.default_rng().random(n),  # a clock: other values each time
            versions=(VersionRun(n, version, version, version),),
            finish_reason="stop",
            engine_id=self.engines[sample_id.k % len(self.engines)],
            preemptions=int(np.random.default_rng().integers(0, 9)),
        )

    def _rollout(self, namespace: str, prompts: Iterable[int], version: int) -> list[GeneratedSample]:
        samples = []
        for prompt_index in prompts:
            prompt = Prompt(namespace, prompt_index, (1, 2, prompt_index), "", {})  # type: ignore[arg-type]
            self._do(PromptDrawn.of(prompt))
            samples += [SampleId(namespace, prompt_index, k) for k in range(2)]  # type: ignore[arg-type]
        scheduled = np.random.default_rng([self.order, version]).permutation(len(samples))
        for index in scheduled:
            self._do(SampleStarted(sample_id=samples[index]))
        made = {}
        for index in scheduled[::-1]:
            made[samples[index]] = self._generate(samples[index], version)
            self._do(SampleFinished.of(made[samples[index]]))
        for index in scheduled:
            self.hook("before reward")
            self._reward(made[samples[index]])
        return [made[sample_id] for sample_id in samples]

    def _reward(self, sample: GeneratedSample) -> None:
        value = float(sum(sample.token_ids) % 7) / 3 + (sample.sample_id == self.wrong_reward_at)
        self.timeline.give_reward(sample.sample_id, "tiny", lambda: (value, {}))
        if self.with_clock:

            def tick() -> float:
                self.clock_calls.append(str(sample.sample_id))
                return float(np.random.default_rng().random())

            self.timeline.decide("tick", f"{sample.versions[0].version} {sample.sample_id}", tick)

    def _step(self, step: int) -> None:
        state = self.timeline.state
        latest = state.latest_version
        assert latest is not None
        version = latest.version
        cursor = state.cursor["train"]
        samples = self._rollout("train", range(cursor, cursor + 2), version)
        for group in sorted({s.sample_id.prompt_index for s in samples}):
            self._do(FilterApplied(filter="all", subject=str(group), kept=True))
        ids = tuple(s.sample_id for s in samples)
        self._do(BatchAssigned(step=step, policy_version=version, sample_ids=ids))
        tokens = sum(len(s.token_ids) for s in samples)
        compared = StepCompared(
            step=step,
            num_tokens=tokens,
            compared_tokens=tokens,
            incomparable_tokens={},
            mismatch_count=0,
            distribution_mismatch_count=0,
            case="trainer_score",
            forward_tokens=tokens + 12,
            manifest_digest=latest.digest,
        )
        self._do(compared)
        scored = [ScoredSample(s.sample_id, s.logprobs.copy(), s.digests.copy(), s.entropies.copy()) for s in samples]
        rewards = np.asarray([state.samples[i].reward for i in ids], np.float64)
        arrays = {**rollout_arrays(samples), **trainer_arrays(scored), "rewards": rewards}
        arrays = {name: arrays[name] for name in STORED}
        self.hook("before arrays")
        self.directory.write_arrays(step, arrays, OBSERVED_ARRAYS)
        self.hook("after arrays")
        self.weights = self.weights * 3 + int(rewards.sum() * 3) + tokens
        loss = float(rewards.mean()) * 0.1
        self._do(
            StepTrained(
                step=step,
                weights_digest=self._digest(),
                gradient_digest="g",
                loss=loss,
                grad_norm=1.0,
                learning_rate=1e-3,
                updates=1,
            )
        )
        self._publish()
        self._evaluate(step)
        report = {
            "step": step,
            "weight_version": version,
            "num_tokens": tokens,
            "compared_tokens": tokens,
            "incomparable_tokens": {},
            "mismatch_count": 0,
            "distribution_mismatch_count": 0,
            "loss": loss,
            "k1": float("nan"),
            "time_s": {"total": float(np.random.default_rng().random())},
        }
        self._do(StepFinished.of(report))
        if step % 2 == 1:
            self.hook("before checkpoint")
            self.directory.write_checkpoint(step, self._save)
            self.hook("after checkpoint")

    def _evaluate(self, step: int) -> None:
        version = step + 1
        samples = self._rollout("eval", range(1), version)
        self._do(Evaluated(step=step, version=version, num_samples=len(samples), reward_mean=0.5))

    def _save(self, folder: Path) -> dict[str, str]:
        np.save(folder / "weights.npy", self.weights)
        self.hook("inside checkpoint")
        return {"weights.npy": hashlib.sha256((folder / "weights.npy").read_bytes()).hexdigest()}
