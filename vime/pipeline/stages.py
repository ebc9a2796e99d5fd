"""The stages of a step and their ports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime.pipeline.graph import Graph, StageSpec
from vime.pipeline.schema import Pipeline
from vime.rollout.interface import CommittedVersion
from vime.train.estimators import Advantages
from vime.train.interface import ScoreResult, TrainResult, TrainSample
from vime.types import GeneratedSample, Prompt


def step_specs(pipeline: Pipeline) -> tuple[StageSpec, ...]:
    """Declarations of a step's stages, in the order in which a reader expects them.

    ``prompts`` are the step's prompts in order; ``samples`` the finished samples in sample order; ``rewards`` one a
    sample; ``batch`` the samples that train, with advantages; ``scores`` the trainer's own evaluation; ``comparison``
    the mismatch figures of the step's report; ``trained`` what the update did; ``served`` what the engine serves then.
    """
    s = pipeline.stages
    rollout, train = s.rollout, s.train
    sampling = f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt}"
    return (
        StageSpec(
            "rollout",
            {"prompts": Sequence[Prompt]},
            {"samples": Sequence[GeneratedSample]},
            f"{rollout.engine}, {pipeline.numerics.rollout}, {sampling}",
        ),
        StageSpec(
            "reward",
            {"prompts": Sequence[Prompt], "samples": Sequence[GeneratedSample]},
            {"rewards": Sequence[float]},
            s.reward.function,
        ),
        StageSpec(
            "filter",
            {"samples": Sequence[GeneratedSample], "rewards": Sequence[float]},
            {"kept": Sequence[bool]},
            f"{s.filter.function or 'no function'}, zero variance: {s.filter.zero_variance}",
        ),
        StageSpec(
            "advantage",
            {"samples": Sequence[GeneratedSample], "rewards": Sequence[float], "kept": Sequence[bool]},
            {"advantages": Advantages, "batch": Sequence[TrainSample]},
            s.advantage.estimator,
        ),
        StageSpec(
            "score",
            {"batch": Sequence[TrainSample]},
            {"scores": ScoreResult},
            f"{train.trainer}, {pipeline.numerics.trainer}",
        ),
        StageSpec(
            "compare",
            {"samples": Sequence[GeneratedSample], "scores": ScoreResult},
            {"comparison": Mapping[str, Any]},
            f"on mismatch: {pipeline.on_mismatch}",
        ),
        StageSpec(
            "train",
            {"batch": Sequence[TrainSample], "scores": ScoreResult, "comparison": Mapping[str, Any]},
            {"trained": TrainResult},
            f"{train.loss.kind}, {train.updates_per_step} update(s) a step",
        ),
        StageSpec(
            "sync",
            {"trained": TrainResult},
            {"served": CommittedVersion},
            s.sync.transport,
        ),
    )


def step_graph(pipeline: Pipeline) -> Graph:
    """The declared graph of a step; it starts from the step's prompts."""
    return Graph(step_specs(pipeline), {"prompts": Sequence[Prompt]})
