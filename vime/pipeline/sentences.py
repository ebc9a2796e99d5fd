"""What pydantic found, as a sentence in the words of the pipeline file."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

from vime.pipeline.partial import section_at
from vime.pipeline.problems import nearest_name
from vime.pipeline.yaml_source import Path as KeyPath
from vime.pipeline.yaml_source import dotted

_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_SIMPLE = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "finite_number": "a finite number",
}
_YES_NO = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
_SECTIONS = ("model_type", "model_attributes_type", "dict_type")


def sentence(details: ErrorDetails, path: KeyPath) -> tuple[str, str | None]:
    """The sentence, and the valid name that is nearest to a wrong one.

    Args:
        details: one of pydantic's errors.
        path: the key that it is about; the list itself where the number of its items is wrong.
    """
    kind, value = details["type"], details["input"]
    context: Mapping[str, Any] = details.get("ctx", {})
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
        return f"{shown(value)} is not possible; {expected} is", nearest_name(str(value), options)
    if kind in _SECTIONS:
        return f"{shown(value)} is not a section: keys and values are expected here", None
    if kind in ("tuple_type", "too_short", "too_long"):
        return f"{shown(value)} is not possible: {_wanted(path)} is needed", None
    if kind == "string_too_short":
        return "an empty text is not possible: at least one character is needed", None
    if kind in _BOUNDS:
        name, word = _BOUNDS[kind]
        return f"{shown(value)} is not possible: it has to be {word} {context[name]}", None
    if kind in _SIMPLE:
        return f"{shown(value)} is not possible: {_SIMPLE[kind]} is needed{_hint(kind, value)}", None
    text = details["msg"]
    return f"{shown(value)} is not possible: {text[0].lower() + text[1:]}", None


def shown(value: Any) -> str:
    """A value of the file, cut where it is long."""
    if value is None:
        return "an empty value"
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _hint(kind: str, value: Any) -> str:
    if kind.startswith("int") and isinstance(value, float):
        whole = value.is_integer() and abs(value) < 2**63
        return f", written without point and exponent: {int(value)}" if whole else ""
    if kind.startswith("bool") and str(value).lower() in _YES_NO:
        return f": {_YES_NO[str(value).lower()]}"
    if kind == "string_type" and isinstance(value, int | float):
        return f"; in quotes it is one: '{shown(value)}'"
    if kind.startswith(("int", "float")) and isinstance(value, str) and value[:1].isdigit() and len(value) < 40:
        return " (in quotes, or with a leading zero, it is a text)"
    return ""


def _wanted(path: KeyPath) -> str:
    """What a key with a list holds, in words."""
    parent = section_at(path[:-1])
    info = parent.model_fields.get(str(path[-1])) if parent is not None else None
    items = typing.get_args(info.annotation) if info is not None else ()
    if not items:
        return "a list"
    kinds = {int: "whole numbers", float: "numbers", str: "texts"}
    what = kinds.get(_plain(items[0]), "values")
    return f"a list of {what}" if items[-1] is Ellipsis else f"a list of {len(items)} {what}"


def _plain(annotation: Any) -> Any:
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _plain(typing.get_args(annotation)[0])
    return annotation
