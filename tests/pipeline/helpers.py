"""A small valid pipeline, and ways to break it."""

from __future__ import annotations

from pathlib import Path

from vime.pipeline.loading import LoadedPipeline, load_text
from vime.pipeline.problems import PipelineError, Problem

TEXT = """\
name: small
seed: 7
run_directory: {directory}
model: {{preset: tiny-qwen3}}
data:
  source: complement_digits
  parameters: {{digits: 2, held_out: 10}}
stages:
  rollout:
    prompts_per_step: 4
    samples_per_prompt: 4
    sampling: {{max_new_tokens: 3}}
  reward: {{function: complement_digits}}
  train:
    optimizer: {{learning_rate: 1e-3}}
  evaluate: {{prompts: 5}}
steps: 2
"""


def text(directory: Path | str = "no-such-run") -> str:
    """The file."""
    return TEXT.format(directory=directory)


def loaded(*overrides: str, directory: Path | str = "no-such-run") -> LoadedPipeline:
    """The file with overrides."""
    return load_text(text(directory), "small.yaml", overrides)


def problems_of(call: object) -> list[Problem]:
    """Problems that a call raises; none if it succeeds."""
    assert callable(call)
    try:
        call()
    except PipelineError as error:
        return list(error.problems)
    return []
