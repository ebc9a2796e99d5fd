"""Keys that are each possible but impossible together. Pure: looks at nothing but the pipeline."""

from __future__ import annotations

from collections.abc import Iterator

from vime.pipeline.loading import LoadedPipeline
from vime.pipeline.problems import Problem
from vime.pipeline.schema import Pipeline


def check_combinations(loaded: LoadedPipeline) -> list[Problem]:
    """Everything that contradicts something else; each message names both keys."""
    p = loaded.pipeline
    found = [*_model(p), *_topology(p), *_sides(p), *_rollout(p), *_training(p), *_evaluation(p)]
    return [loaded.problem(key, message) for key, message in found]


Found = Iterator[tuple[str, str]]


def _model(p: Pipeline) -> Found:
    if (p.model.preset is None) == (p.model.path is None):
        both = "both are set" if p.model.preset is not None else "neither is set"
        yield "model", f"a model comes from model.preset or from model.path, exactly one of them; {both}"
    if p.model.path is not None and p.model.overrides:
        names = ", ".join(p.model.overrides)
        yield (
            "model.overrides",
            f"model.path = {p.model.path!r} has dimensions of its own; {names} can only be preset's",
        )


def _topology(p: Pipeline) -> Found:
    for axis in ("tp", "dp"):
        degree = getattr(p.contract.topology, axis)
        if degree & (degree - 1):
            yield f"contract.topology.{axis}", f"{degree} is not a power of two: claimed degrees form a balanced tree"
    for axis in ("sp", "cp", "ep", "pp"):
        degree = getattr(p.contract.topology, axis)
        if degree != 1:
            yield f"contract.topology.{axis}", f"{degree} cannot be claimed yet: only 1 is implemented for this axis"
    dp = p.contract.topology.dp
    samples = p.stages.rollout.prompts_per_step * p.stages.rollout.samples_per_prompt
    if samples % dp:
        yield (
            "contract.topology.dp",
            f"{dp} does not divide the step's {samples} samples (stages.rollout.prompts_per_step x "
            "samples_per_prompt): gradients reduce over that many equal blocks",
        )


def _sides(p: Pipeline) -> Found:
    if p.placement == "split" and p.stages.sync.transport == "memory":
        yield (
            "stages.sync.transport",
            "'memory' cannot reach an engine in another process (placement: split); 'shm' or 'disk' can",
        )
    native = [side for side in ("rollout", "trainer") if getattr(p.numerics, side) == "native"]
    if native and p.on_mismatch == "stop":
        yield (
            f"numerics.{native[0]}",
            "'native' kernels do not keep the contract, and on_mismatch: stop would end the run at its first step; "
            "on_mismatch: continue measures the mismatch",
        )
    if p.max_staleness:
        yield "max_staleness", f"{p.max_staleness} is not implemented: steps train on samples of their own version (0)"


def _rollout(p: Pipeline) -> Found:
    rollout, sampling = p.stages.rollout, p.stages.rollout.sampling
    if p.stages.train.require_full_distribution:
        for key, off in (("top_p", 1.0), ("top_k", 0)):
            value = getattr(sampling, key)
            if value != off:
                yield (
                    f"stages.rollout.sampling.{key}",
                    f"{value} removes candidates, so importance ratios would not be those of the sampler, and "
                    f"stages.train.require_full_distribution is true; set {key}: {off} or that key to false",
                )
    if rollout.num_blocks is not None and rollout.kv_memory_bytes is not None:
        yield "stages.rollout.num_blocks", "num_blocks and kv_memory_bytes both size the KV cache: set one of them"
    if rollout.block_size % 8:
        yield "stages.rollout.block_size", f"{rollout.block_size} is not a multiple of 8"
    duplicates = [text for text in dict.fromkeys(sampling.stop_strings) if sampling.stop_strings.count(text) > 1]
    if duplicates:
        yield "stages.rollout.sampling.stop_strings", f"{duplicates} stand there more than once"


def _training(p: Pipeline) -> Found:
    rollout, train, advantage = p.stages.rollout, p.stages.train, p.stages.advantage
    over_group = advantage.estimator == "grpo" or advantage.baseline != "step_mean"
    if over_group and rollout.samples_per_prompt < 2:
        yield (
            "stages.rollout.samples_per_prompt",
            f"stages.advantage.estimator = {advantage.estimator!r} compares the samples of one prompt: at least 2",
        )
    if rollout.prompts_per_step % train.updates_per_step:
        yield (
            "stages.train.updates_per_step",
            f"{train.updates_per_step} does not divide stages.rollout.prompts_per_step = {rollout.prompts_per_step}: "
            "an update takes whole groups, the same number each",
        )
    kl = train.loss.kl
    if kl.coefficient > 0 and kl.reference is None:
        yield (
            "stages.train.loss.kl.coefficient",
            f"{kl.coefficient} needs a reference: set stages.train.loss.kl.reference: initial",
        )
    if kl.coefficient == 0 and kl.reference is not None:
        yield (
            "stages.train.loss.kl.reference",
            f"{kl.reference!r} is of no use while stages.train.loss.kl.coefficient is 0",
        )
    updates = p.steps * train.updates_per_step
    if train.optimizer.warmup_updates >= updates:
        yield (
            "stages.train.optimizer.warmup_updates",
            f"{train.optimizer.warmup_updates} is not below the run's {updates} updates (steps x updates_per_step): "
            "the learning rate would never be reached",
        )


def _evaluation(p: Pipeline) -> Found:
    evaluate = p.stages.evaluate
    if evaluate.every and not evaluate.prompts:
        yield (
            "stages.evaluate.every",
            f"{evaluate.every}, but stages.evaluate.prompts is 0: there is nothing to evaluate",
        )
    if evaluate.greedy and evaluate.samples_per_prompt > 1:
        yield (
            "stages.evaluate.samples_per_prompt",
            f"{evaluate.samples_per_prompt} samples would be equal while stages.evaluate.greedy is true",
        )
