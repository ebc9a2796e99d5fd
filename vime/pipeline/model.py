"""The model of a pipeline as far as checks need it: dimensions and tokenizer, without reading weights."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rlkernel.errors import RlkernelError
from rlkernel.models.config import ModelConfig
from rlkernel.models.gguf import open_gguf, parse_fields
from rlkernel.models.hf_config import parse_config
from rlkernel.models.loading import read_json
from rlkernel.models.presets import PRESETS, preset_tokenizer
from rlkernel.models.tokenizer import Tokenizer, load_tokenizer
from vime.pipeline.loading import LoadedPipeline
from vime.pipeline.paths import unusable_path
from vime.pipeline.problems import Problem, nearest_name
from vime.pipeline.ranges import Range
from vime.pipeline.schema import Model
from vime.pipeline.sentences import shown

_KINDS = {int: "a whole number", float: "a number with a point", bool: "true or false"}
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class ResolvedModel:
    """Dimensions and tokenizer. ``stop_token_ids``: the ends of sequence that model and tokenizer name."""

    config: ModelConfig
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]


def resolve_model(loaded: LoadedPipeline) -> tuple[ResolvedModel | None, list[Problem]]:
    """Dimensions and tokenizer of ``model``, or what is wrong with it."""
    model = loaded.pipeline.model
    if model.preset is not None:
        config, problems = _preset(loaded, model.preset)
    elif model.path is not None:
        config, problems = _stored(loaded, Path(model.path))
    else:
        return None, []  # reported with the impossible combinations
    if config is None:
        return None, problems
    try:
        if model.tokenizer is not None and (message := unusable_path(model.tokenizer)) is not None:
            return None, [*problems, loaded.problem("model.tokenizer", message)]
        tokenizer = _tokenizer(model, config)
        tokenizer.check_fits(config)
    except RlkernelError as error:
        key = "model.tokenizer" if model.tokenizer is not None else "model"
        return None, [*problems, loaded.problem(key, str(error))]
    stops = tuple(sorted({*config.eos_token_ids, *tokenizer.eos_token_ids}))
    return ResolvedModel(config, tokenizer, stops), problems


def _preset(loaded: LoadedPipeline, name: str) -> tuple[ModelConfig | None, list[Problem]]:
    if name not in PRESETS:
        message = f"there is no preset {name!r}; there are {', '.join(PRESETS)}"
        return None, [loaded.problem("model.preset", message, nearest_name(name, PRESETS))]
    config = PRESETS[name]
    allowed = {item.name: type(getattr(config, item.name)) for item in fields(config)}
    allowed = {key: kind for key, kind in allowed.items() if kind in (int, float, bool)}
    problems = []
    for key, value in loaded.pipeline.model.overrides.items():
        place = f"model.overrides.{key}"
        if key not in allowed:
            message = f"a preset has no dimension {key!r}; it has {', '.join(allowed)}"
            problems.append(loaded.problem(place, message, nearest_name(key, allowed)))
        elif type(value) is not allowed[key]:
            message = f"{shown(value)} is not possible: {_KINDS[allowed[key]]} is needed"
            problems.append(loaded.problem(place, message))
        elif (message := _range(key, value).problem(value) or "") and type(value) is not bool:
            problems.append(loaded.problem(place, message))
    if problems:
        return None, problems
    values: dict[str, Any] = dict(loaded.pipeline.model.overrides)
    try:
        return replace(config, **values), []
    except RlkernelError as error:
        return None, [loaded.problem("model.overrides", str(error))]


def _range(key: str, value: float) -> Range:
    if isinstance(value, float):
        return Range(1e-12, 1.0, "It is added to a mean of squares in float32")
    most = _MOST_LAYERS if key == "num_layers" else 2**31 - 1
    return Range(1, most, "No model has more" if key == "num_layers" else "Kernels count in 32 bits")


def _stored(loaded: LoadedPipeline, path: Path) -> tuple[ModelConfig | None, list[Problem]]:
    """Dimensions from a Hugging Face folder or a GGUF file."""
    message = unusable_path(str(path))
    if message is not None:
        return None, [loaded.problem("model.path", message)]
    try:
        if path.is_dir():
            generation = path / "generation_config.json"
            extra = read_json(generation) if generation.exists() else None
            return parse_config(read_json(path / "config.json"), str(path / "config.json"), extra), []
        if path.is_file() and path.suffix == ".gguf":
            found, tensors = open_gguf(path)
            return parse_fields(found, {tensor.name for tensor in tensors}, str(path)), []
    except RlkernelError as error:
        return None, [loaded.problem("model.path", str(error))]
    what = "is a file that does not end in .gguf" if path.is_file() else "does not exist"
    hint = "; vime model fetch smollm2-135m makes models/smollm2-135m" if not path.exists() else ""
    message = f"{str(path)!r} {what}: a Hugging Face folder or a GGUF file is needed{hint}"
    return None, [loaded.problem("model.path", message)]


def _tokenizer(model: Model, config: ModelConfig) -> Tokenizer:
    path = model.tokenizer or model.path
    return load_tokenizer(Path(path)) if path is not None else preset_tokenizer(config)
