"""Pipeline file -> :class:`Pipeline`: YAML, ``--set`` overrides, validation with places, and back to YAML."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from vime.pipeline.partial import partial_pipeline, section_at
from vime.pipeline.problems import PipelineError, Problem, nearest_name
from vime.pipeline.schema import Pipeline
from vime.pipeline.sentences import sentence
from vime.pipeline.yaml_source import Path as KeyPath
from vime.pipeline.yaml_source import YamlSource, dotted, parse, scalar


@dataclass(frozen=True)
class LoadedPipeline:
    """A pipeline with the places of its keys, so that later checks can point at them.

    ``problems`` is empty for a valid one. Where it is not, ``pipeline`` has holes (see
    :func:`~vime.pipeline.partial.partial_pipeline`) and is good for nothing but finding more that is wrong.
    """

    pipeline: Pipeline
    source: YamlSource
    overrides: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def problem(self, key: str, message: str, nearest: str | None = None) -> Problem:
        """A problem at a dotted key; one that came from ``--set`` is said to stand on the command line."""
        for override in reversed(self.overrides):
            name = override.partition("=")[0]
            if key == name or key.startswith(name + "."):
                return Problem(_place(override), 0, 0, key, message, nearest)
        return self.source.problem(tuple(key.split(".")) if key else (), message, nearest)


def load_pipeline(path: Path | str, overrides: Sequence[str] = ()) -> LoadedPipeline:
    """Read a valid pipeline file.

    Args:
        path: the YAML file.
        overrides: ``a.b=c`` each; ``c`` is YAML.

    Raises:
        PipelineError: everything that is wrong with its form, keys and types.
    """
    return _valid(read_pipeline(path, overrides))


def load_text(text: str, file: str, overrides: Sequence[str] = ()) -> LoadedPipeline:
    """:func:`load_pipeline` on text that was read already."""
    return _valid(read_text(text, file, overrides))


def _valid(loaded: LoadedPipeline) -> LoadedPipeline:
    if loaded.problems:
        raise PipelineError(loaded.problems)
    return loaded


def read_pipeline(path: Path | str, overrides: Sequence[str] = ()) -> LoadedPipeline:
    """Read a pipeline file that may have mistakes, for :func:`~vime.pipeline.prepare.prepare` to find the others.

    Raises:
        PipelineError: nothing can be made of the file: it is not there, not YAML, or no mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PipelineError([Problem(str(path), 0, 0, "", "there is no such file")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError([Problem(str(path), 0, 0, "", f"cannot be read: {error}")]) from error
    return read_text(text, str(path), overrides)


def read_text(text: str, file: str, overrides: Sequence[str] = ()) -> LoadedPipeline:
    """:func:`read_pipeline` on text that was read already."""
    source = parse(text, file)
    if source.data is None or not isinstance(source.data, dict):
        if not source.problems:
            source.problems.append(Problem(file, 1, 1, "", "a pipeline is a mapping of keys to values"))
        raise PipelineError(source.problems)
    problems = list(source.problems)
    for override in overrides:
        problems += _apply_override(source, override)
    wrong = set(source.unusable)
    try:
        pipeline = Pipeline.model_validate(source.data)
    except ValidationError as error:
        found, unusable = _Unvalidated(source, tuple(overrides)).describe(error)
        problems += found
        wrong |= unusable
    if problems:
        pipeline = partial_pipeline(source.data, wrong)
    return LoadedPipeline(pipeline, source, tuple(overrides), tuple(_ordered(problems)))


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


def _is_mapping(section: type[BaseModel], name: str) -> bool:
    info = section.model_fields[name]
    return typing.get_origin(info.annotation) is dict


def _place(override: str) -> str:
    return f"--set {override if len(override) <= 120 else override[:117] + '...'}"


def _apply_override(source: YamlSource, override: str) -> list[Problem]:
    """Set one key in ``source.data``; returns what is wrong with the override."""
    name, equals, value_text = override.partition("=")
    where = _place(override)
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
            choices = "" if near is not None else f"; its keys are {', '.join(section.model_fields)}"
            message = f"there is no key {part!r} in {prefix or 'a pipeline'}{choices}"
            return [Problem(where, 0, 0, name, message, full)]
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

    def describe(self, error: ValidationError) -> tuple[list[Problem], set[KeyPath]]:
        """One problem a wrong key, and the paths of the keys whose value cannot be used."""
        problems: list[Problem] = []
        wrong: set[KeyPath] = set()
        for details in error.errors():
            path = self._real_path(details["loc"])
            if path and isinstance(path[-1], int) and details["type"] == "missing":
                # a list that is too short: pydantic names the item that is not there
                path, items = path[:-1], self._value(path[:-1])
                details = {**details, "type": "too_short", "input": items}
            message, near = sentence(details, path)
            problems.append(self._problem(path, message, near))
            if details["type"] != "extra_forbidden":
                wrong.add(path)
            elif near is not None and near not in self._value(path[:-1]):
                wrong.add((*path[:-1], near))  # that it holds its default is the mistake
        return problems, wrong

    def _problem(self, path: KeyPath, message: str, near: str | None) -> Problem:
        key = dotted(path)
        for override in reversed(self.overrides):
            name = override.partition("=")[0]
            if key == name or key.startswith((name + ".", name + "[")):
                return Problem(_place(override), 0, 0, key, message, near)
        return self.source.problem(path, message, near)

    def _value(self, path: KeyPath) -> Any:
        value = self.source.data
        for part in path:
            value = value[part]
        return value

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


def _ordered(problems: Sequence[Problem]) -> list[Problem]:
    unique = dict.fromkeys(problems)
    return sorted(unique, key=lambda problem: (problem.line, problem.column))
