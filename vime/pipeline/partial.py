"""The pipeline of a file with mistakes: every section with the keys that are right, and holes for the others."""

from __future__ import annotations

import types
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, TypeAdapter

from vime.pipeline.schema import Pipeline
from vime.pipeline.yaml_source import Path as KeyPath

Kind = TypeVar("Kind", bound=BaseModel)


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds; None for a value or free keys."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = [section_type(item) for item in typing.get_args(annotation)]
        return next((item for item in found if item is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def section_at(path: KeyPath) -> type[BaseModel] | None:
    """The schema's section at a path of keys; None where the path leaves the schema."""
    section: type[BaseModel] = Pipeline
    for part in path:
        info = section.model_fields.get(str(part))
        inner = section_type(info.annotation) if info is not None else None
        if inner is None:
            return None
        section = inner
    return section


def partial_pipeline(data: Mapping[str, Any], wrong: Collection[KeyPath]) -> Pipeline:
    """A pipeline without the keys at ``wrong``; reading one of those raises :class:`MissingValue`.

    Args:
        data: the file as plain data.
        wrong: paths of every value that did not validate, and of every required key that is not there.
    """
    return _section(Pipeline, data, (), frozenset(wrong))


def _section(kind: type[Kind], data: Mapping[str, Any], path: KeyPath, wrong: frozenset[KeyPath]) -> Kind:
    values: dict[str, Any] = {}
    for name, info in kind.model_fields.items():
        here = (*path, name)
        inner = section_type(info.annotation)
        inside = any(item[: len(here)] == here for item in wrong)
        if here in wrong or (inside and inner is None):
            continue
        if inner is not None and (inside or name in data):
            values[name] = _section(inner, data.get(name) or {}, here, wrong)
        elif name in data:
            field: Any = Annotated[info.annotation, info]
            values[name] = TypeAdapter(field).validate_python(data[name])
        elif not info.is_required():
            values[name] = info.get_default(call_default_factory=True)
    section = kind.model_construct(**values)
    for name in set(kind.model_fields) - set(values):
        section.__dict__.pop(name, None)  # a default that pydantic put there
    return section
