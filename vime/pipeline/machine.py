"""What a run finds on this machine: a free run directory, enough disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rlkernel.models.config import ModelConfig
from vime.pipeline.loading import LoadedPipeline
from vime.pipeline.problems import Problem
from vime.pipeline.schema import Pipeline

_BYTES_PER_TOKEN = 64  # token, mask, version, both sides' log-probability, entropy and digest, and the log's share
_BYTES_PER_SAMPLE = 4096
_SPARE = 64 * 2**20


def check_run_directory(loaded: LoadedPipeline) -> list[Problem]:
    """The run directory must not exist yet, or be empty, and its parent must be writable."""
    name = loaded.pipeline.run_directory
    path = Path(name)
    key = "run_directory"
    if path.exists() and not path.is_dir():
        return [loaded.problem(key, f"{name!r} is a file; a new folder is needed")]
    if path.is_dir() and any(path.iterdir()):
        message = (
            f"{name!r} holds a run already. Continue it: vime resume {name}. Keep it and start again beside it: "
            "--set run_directory=OTHER. Move it aside and start again: --fresh"
        )
        return [loaded.problem(key, message)]
    parent = _existing(path)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return [loaded.problem(key, f"{name!r} cannot be made: {str(parent)!r} is not a writable folder")]
    return []


def estimated_bytes(pipeline: Pipeline, config: ModelConfig) -> int:
    """Disk that a run may take: checkpoints (one is written before the oldest is removed) and per-token arrays."""
    parameters = sum(_product(shape) for shape in config.weight_shapes().values())
    checkpoint = parameters * (4 + 4 + 4 + 4)  # master, both moments, weights
    rollout = pipeline.stages.rollout
    samples = pipeline.steps * rollout.prompts_per_step * rollout.samples_per_prompt
    per_sample = _BYTES_PER_SAMPLE + _BYTES_PER_TOKEN * rollout.sampling.max_new_tokens
    return checkpoint * (pipeline.checkpoint.keep + 1) + samples * per_sample + _SPARE


def check_machine(loaded: LoadedPipeline, config: ModelConfig | None) -> list[Problem]:
    """Disk space where the run directory will be."""
    if config is None:
        return []
    parent = _existing(Path(loaded.pipeline.run_directory))
    needed, free = estimated_bytes(loaded.pipeline, config), shutil.disk_usage(parent).free
    if free < needed:
        message = f"the run may write {needed / 1e9:.2f} GB, and {str(parent)!r} has {free / 1e9:.2f} GB free"
        return [loaded.problem("run_directory", message)]
    return []


def _existing(path: Path) -> Path:
    """The nearest ancestor that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
