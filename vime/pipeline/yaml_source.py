"""YAML to plain data, with the place of every key and without surprises.

Scalars follow YAML 1.2's core schema: ``1e-3`` is a float, ``no`` is a string, ``010`` is a string. A key that
occurs twice, a merge key (``<<``), a tag and an alias that contains itself are refused.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from vime.pipeline.problems import Problem

Path = tuple[str | int, ...]

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)\Z")
_HEX = re.compile(r"0x[0-9a-fA-F][0-9a-fA-F_]*\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_SPECIAL = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
_LONGEST_NUMBER = 400
"""Characters. No key takes more; Python refuses to read or write integers of more than 4,300 digits."""
_DEEPEST = 50
_MOST_NODES = 50_000
"""Values in one file, aliases written out: a few nested aliases can stand for more than any memory holds."""
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}


def dotted(path: Path) -> str:
    """``("a", 0, "b")`` as ``a[0].b``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@dataclass(frozen=True)
class Place:
    """Line and column, counted from 1."""

    line: int
    column: int


@dataclass
class YamlSource:
    """A parsed file: its data, the place of every key, and what was wrong with its form.

    ``unusable`` are the paths of keys whose value is in doubt (they stand there twice, say).
    """

    file: str
    data: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unusable: set[Path] = field(default_factory=set)
    nodes: int = 0

    def place(self, path: Path) -> Place:
        """Place of a key, or of the nearest enclosing key that stands in the file."""
        for length in range(len(path), -1, -1):
            found = self.places.get(path[:length])
            if found is not None:
                return found
        return Place(1, 1)

    def problem(self, path: Path, message: str, nearest: str | None = None) -> Problem:
        """A problem at a key."""
        place = self.place(path)
        return Problem(self.file, place.line, place.column, dotted(path), message, nearest)


def scalar(text: str) -> Any:
    """Value of a plain (unquoted) scalar. Digits without end are a text."""
    if len(text) > _LONGEST_NUMBER:
        return text
    lowered = text.lower()
    if lowered in _WORDS and text in (lowered, lowered.upper(), lowered.capitalize()):
        return _WORDS[lowered]
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _HEX.match(text):
        return int(text.replace("_", ""), 16)
    if _FLOAT.match(text):
        # "010" and "00.5" are neither: YAML versions disagree about a leading zero.
        return text if re.match(r"[-+]?0[0-9]", text) else float(text)
    return _SPECIAL.get(lowered, text)


def parse(text: str, file: str) -> YamlSource:
    """Parse one YAML document. Errors of form land in ``problems`` (then ``data`` may be incomplete)."""
    source = YamlSource(file)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            source.problems.append(Problem(file, 1, 1, "", "the file is empty"))
            return source
        source.data = _build(node, (), source, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)
        source.problems.append(Problem(file, line, column, "", f"not YAML: {error.problem or error.context}"))
    except yaml.YAMLError as error:
        source.problems.append(Problem(file, 0, 0, "", f"not YAML: {str(error).splitlines()[0]}"))
    except RecursionError:
        message = f"brackets or sections are nested more than {_DEEPEST} deep; a pipeline's own keys need six"
        source.problems.append(Problem(file, 0, 0, "", message))
        source.data = None
    except _TooLarge:
        message = f"the file stands for more than {_MOST_NODES:,} values (aliases count each time that they are used)"
        source.problems.append(Problem(file, 0, 0, "", message))
        source.data = None
    return source


class _TooLarge(Exception):
    """More values than a pipeline can have."""


def _build(node: yaml.Node, path: Path, source: YamlSource, parents: tuple[int, ...]) -> Any:
    source.nodes += 1
    if source.nodes > _MOST_NODES:
        raise _TooLarge
    if len(parents) > _DEEPEST:
        raise RecursionError
    source.places.setdefault(path, Place(node.start_mark.line + 1, node.start_mark.column + 1))
    if id(node) in parents:
        source.problems.append(source.problem(path, "this alias contains itself"))
        source.unusable.add(path)
        return None
    parents = (*parents, id(node))
    if isinstance(node, yaml.ScalarNode):
        if not node.tag.startswith("tag:yaml.org,2002:"):
            source.problems.append(source.problem(path, f"tag {node.tag!r} is not supported"))
            source.unusable.add(path)
        return scalar(node.value) if node.style is None else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, i), source, parents) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        raise TypeError(f"PyYAML composed a {type(node).__name__}")
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        here = Place(key_node.start_mark.line + 1, key_node.start_mark.column + 1)
        if not isinstance(key_node, yaml.ScalarNode):
            source.problems.append(Problem(source.file, here.line, here.column, dotted(path), "a key must be a name"))
            continue
        key = key_node.value
        if key == "<<" and key_node.style is None:
            message = "merge keys (<<) are not supported: write the keys out"
            source.problems.append(Problem(source.file, here.line, here.column, dotted(path), message))
            continue
        child = (*path, key)
        if key in result:
            first = source.places[child]
            message = f"this key stands here a second time; the first is on line {first.line}"
            source.problems.append(Problem(source.file, here.line, here.column, dotted(child), message))
            source.unusable.add(child)
            continue
        source.places[child] = here
        result[key] = _build(value_node, child, source, parents)
    return result
