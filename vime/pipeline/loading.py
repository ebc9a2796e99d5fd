"""Pipeline file -> :class:`Pipeline`: YAML, ``--set`` overrides, validation with places, and back to YAML."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vime.pipeline.problems import PipelineError, Problem, nearest_name
from vime.pipeline.schema import Pipeline
from vime.pipeline.yaml_source import Path as KeyPath
from vime.pipeline.yaml_source import YamlSource, dotted, parse, scalar


@dataclass(frozen=True)
class LoadedPipeline:
    """A valid pipeline with the places of its keys, so that later checks can point at them."""

    pipeline: Pipeline
    source: YamlSource
    overrides: tuple[str, ...] = ()

    def problem(self, key: str, message: str, nearest: str | None = None) -> Problem:
        """A problem at a dotted key; one that came from ``--set`` is said to stand on the command line."""
        for override in reversed(self.overrides):
            name = override.partition("=")[0]
            if key == name or key.startswith(name + "."):
                return Problem(f"--set {override}", 0, 0, key, message, nearest)
        return self.source.problem(tuple(key.split(".")) if key else (), message, nearest)


def load_pipeline(path: Path | str, overrides: Sequence[str] = ()) -> LoadedPipeline:
    """Read a pipeline file.

    Args:
        path: the YAML file.
        overrides: ``a.b=c`` each; ``c`` is YAML.

    Raises:
        PipelineError: everything that is wrong with its form, keys and types.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PipelineError([Problem(str(path), 0, 0, "", "there is no such file")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError([Problem(str(path), 0, 0, "", f"cannot be read: {error}")]) from error
    return load_text(text, str(path), overrides)


def load_text(text: str, file: str, overrides: Sequence[str] = ()) -> LoadedPipeline:
    """:func:`load_pipeline` on text that was read already."""
    source = parse(text, file)
    if source.data is None or not isinstance(source.data, dict):
        if not source.problems:
            source.problems.append(Problem(file, 1, 1, "", "a pipeline is a mapping of keys to values"))
        raise PipelineError(source.problems)
    problems = list(source.problems)
    for override in overrides:
        problems += _apply_override(source, override)
    try:
        pipeline = Pipeline.model_validate(source.data)
    except ValidationError as error:
        loaded = _Unvalidated(source, tuple(overrides))
        problems += [loaded.describe(details) for details in error.errors()]
        raise PipelineError(_ordered(problems)) from None
    if problems:
        raise PipelineError(_ordered(problems))
    return LoadedPipeline(pipeline, source, tuple(overrides))


def resolved_yaml(pipeline: Pipeline) -> str:
    """The pipeline as a file that loads to the same pipeline, every default written out."""
    plain = pipeline.model_dump(mode="json")
    text: str = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes every string that :func:`scalar` would read as something else, and writes floats round-trip exact."""


def _represent_str(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if scalar(value) == value else '"')


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text if "." in text else text.replace("e", ".0e"))


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(float, _represent_float)


def section_at(path: KeyPath) -> type[BaseModel] | None:
    """The schema's section at a path of keys; None where the path leaves the schema."""
    section: type[BaseModel] = Pipeline
    for part in path:
        info = section.model_fields.get(str(part))
        inner = _section_type(info.annotation) if info is not None else None
        if inner is None:
            return None
        section = inner
    return section


def _section_type(annotation: Any) -> type[BaseModel] | None:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = [_section_type(item) for item in typing.get_args(annotation)]
        return next((item for item in found if item is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _is_mapping(section: type[BaseModel], name: str) -> bool:
    info = section.model_fields[name]
    return typing.get_origin(info.annotation) is dict


def _apply_override(source: YamlSource, override: str) -> list[Problem]:
    """Set one key in ``source.data``; returns what is wrong with the override."""
    name, equals, value_text = override.partition("=")
    where = f"--set {override}"
    if not equals or not name:
        return [Problem(where, 0, 0, "", "an override is KEY.KEY=VALUE")]
    value = parse(value_text, where)
    if value.problems and value_text.strip():
        return [Problem(where, 0, 0, name, problem.message) for problem in value.problems]
    parts = name.split(".")
    section: type[BaseModel] | None = Pipeline
    for i, part in enumerate(parts):
        if section is None:
            return [Problem(where, 0, 0, name, f"{'.'.join(parts[:i])!r} has no keys inside")]
        if part not in section.model_fields:
            near = nearest_name(part, section.model_fields)
            prefix = ".".join(parts[:i])
            full = f"{prefix}.{near}" if prefix and near else near
            return [Problem(where, 0, 0, name, f"there is no key {part!r} in {prefix or 'a pipeline'}", full)]
        if _is_mapping(section, part):
            break  # parameters and overrides: free keys inside
        section = section_at(tuple(parts[: i + 1]))
    target = source.data
    for part in parts[:-1]:
        inner = target.get(part)
        if inner is None:
            inner = target[part] = {}
        if not isinstance(inner, dict):
            return [Problem(where, 0, 0, name, f"{part!r} is the value {inner!r} in the file, not a section")]
        target = inner
    target[parts[-1]] = value.data
    return []


@dataclass(frozen=True)
class _Unvalidated:
    """Turns pydantic's errors into problems with places and nearest names."""

    source: YamlSource
    overrides: tuple[str, ...]

    def describe(self, details: ErrorDetails) -> Problem:
        path = self._real_path(details["loc"])
        message, near = self._sentence(details, path)
        key = dotted(path)
        for override in reversed(self.overrides):
            name = override.partition("=")[0]
            if key == name or key.startswith((name + ".", name + "[")):
                return Problem(f"--set {override}", 0, 0, key, message, near)
        return self.source.problem(path, message, near)

    def _real_path(self, location: tuple[str | int, ...]) -> KeyPath:
        """Drop the names of union members that pydantic adds to a location."""
        data: Any = self.source.data
        path: list[str | int] = []
        for i, part in enumerate(location):
            last = i == len(location) - 1
            in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
            if in_list or (isinstance(data, dict) and part in data):
                path.append(part)
                data = data[part]
            elif last and isinstance(data, dict | list):
                path.append(part)
        return tuple(path)

    def _sentence(self, details: ErrorDetails, path: KeyPath) -> tuple[str, str | None]:
        kind, value = details["type"], details["input"]
        context = details.get("ctx", {})
        if kind == "extra_forbidden":
            parent = section_at(path[:-1])
            names = list(parent.model_fields) if parent is not None else []
            near = nearest_name(str(path[-1]), names)
            choices = "" if near is not None else f"; its keys are {', '.join(names)}"
            return f"there is no such key in {dotted(path[:-1]) or 'a pipeline'}{choices}", near
        if kind == "missing":
            return "this key is required and has no default", None
        if kind == "literal_error":
            expected = str(context.get("expected", ""))
            options = [part.strip(" '") for part in expected.replace(" or ", ",").split(",")]
            return f"{value!r} is not possible; {expected} is", nearest_name(str(value), options)
        if kind in ("model_type", "model_attributes_type", "dict_type"):
            return f"{_shown(value)} is not a section: keys and values are expected here", None
        text = details["msg"]
        text = text[0].lower() + text[1:]
        return f"{_shown(value)} is not possible: {text.replace('input should', 'it should')}", None


def _shown(value: Any) -> str:
    if value is None:
        return "an empty value"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _ordered(problems: Sequence[Problem]) -> list[Problem]:
    unique = dict.fromkeys(problems)
    return sorted(unique, key=lambda problem: (problem.line, problem.column))
