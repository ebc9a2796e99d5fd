"""Loads the policy and its tokenizer as a pipeline names them."""

from __future__ import annotations

from pathlib import Path

from rlkernel.models.loading import LoadedModel, load_model
from rlkernel.models.presets import PRESETS, preset, preset_tokenizer
from rlkernel.models.tokenizer import Tokenizer, load_tokenizer
from vime.pipeline.schema import Pipeline


def load_pipeline_model(pipeline: Pipeline) -> LoadedModel:
    """Weights in the contract's dtype; a preset's are drawn from the run's seed. Raises ModelError."""
    model = pipeline.model
    if model.preset is not None:
        return preset(model.preset, pipeline.seed, pipeline.contract.dtype, **model.overrides)
    assert model.path is not None
    return load_model(Path(model.path), pipeline.contract.dtype)


def load_pipeline_tokenizer(pipeline: Pipeline) -> Tokenizer:
    """The tokenizer: ``model.tokenizer``, else the model folder's or the preset's own. Raises ModelError."""
    model = pipeline.model
    if model.tokenizer is not None:
        return load_tokenizer(Path(model.tokenizer))
    if model.path is not None:
        return load_tokenizer(Path(model.path))
    assert model.preset is not None
    return preset_tokenizer(PRESETS[model.preset])
