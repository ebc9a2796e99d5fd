"""User functions by name: found, imported, and their signatures checked before anything starts.

Three spellings: a task's name (``reverse_digits``), a dotted path to something installed (``package.module.name``),
and a file (``rewards.py:name``, relative to the current directory).
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vime.pipeline.problems import nearest_name
from vime.pipeline.sentences import sentence
from vime.types import GeneratedSample, Namespace, Prompt


@dataclass(frozen=True)
class Signature:
    """What a user function takes by position, and returns. Further parameters come from the pipeline file."""

    kind: str
    positional: tuple[tuple[str, Any], ...]
    returns: tuple[Any, ...]

    def __str__(self) -> str:
        inner = ", ".join(f"{name}: {type_name(kind)}" for name, kind in self.positional)
        return f"({inner}) -> {type_name(self.returns[0])}"


SOURCE = Signature(
    "data source",
    (("namespace", Namespace),),
    (collections.abc.Sequence[Mapping[str, Any]],),
)
REWARD = Signature(
    "reward",
    (("prompt", Prompt), ("sample", GeneratedSample), ("text", str)),
    (float, int, bool),
)
FILTER = Signature(
    "filter",
    (
        ("samples", collections.abc.Sequence[GeneratedSample]),
        ("rewards", collections.abc.Sequence[float]),
    ),
    (collections.abc.Sequence[bool],),
)


class FunctionProblem(Exception):
    """A function that cannot be used; ``nearest`` is a valid name close to a wrong one.

    ``parameter`` names the key of ``parameters`` that is at fault, if one is.
    """

    def __init__(self, message: str, nearest: str | None = None, parameter: str | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest
        self.parameter = parameter


@dataclass(frozen=True)
class UserFunction:
    """A checked function with its parameters bound.

    ``source_file`` and ``source_digest`` (SHA-256, hex) identify the module that defines it; they enter the run's
    deployment identity.
    """

    name: str
    call: Callable[..., Any]
    source_file: str
    source_digest: str


def load_function(
    name: str, parameters: Mapping[str, Any], signature: Signature, tasks: Mapping[str, str]
) -> UserFunction:
    """Find a function, check its signature, and bind the parameters of the pipeline file.

    Args:
        name: as written in the pipeline.
        parameters: keyword arguments.
        signature: what is expected.
        tasks: short name -> dotted path of what vime ships.

    Raises:
        FunctionProblem: it cannot be found, imported or compared with what is expected.
        ExceptionGroup: of one FunctionProblem for everything that does not fit.
    """
    function, module = _find(name, signature, tasks)
    if not callable(function):
        raise FunctionProblem(f"{name!r} is a {type(function).__name__}, not a function {signature}")
    if inspect.iscoroutinefunction(function):
        raise FunctionProblem(f"{name!r} is an async function; a {signature.kind} is a plain function {signature}")
    bound: dict[str, Any] = {}
    problems = list(_signature_problems(name, function, parameters, signature, bound))
    if problems:
        raise ExceptionGroup(f"what does not fit of {name!r}", problems)
    file = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isroutine(function) else None
    file = file or getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        raise FunctionProblem(f"{name!r} has no source file; its digest is part of the run's identity")
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return UserFunction(name, functools.partial(function, **bound), file, digest)


def raised_in(error: BaseException, function: Callable[..., Any]) -> str:
    """`` (FILE:LINE)`` of the innermost frame in the user's code: the file of ``function``, or one beside or below it.

    Empty where there is none. Only the file's name, so that a logged reason is the same in every folder.
    """
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    folder = Path(code.co_filename).resolve().parent
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename).resolve()
        if file.is_relative_to(folder) and ("site-packages" in folder.parts or "site-packages" not in file.parts):
            place = f" ({file.name}:{frame.lineno})"
    return place


def _find(name: str, signature: Signature, tasks: Mapping[str, str]) -> tuple[Any, ModuleType]:
    if "." not in name and ":" not in name:
        if name not in tasks:
            known = ", ".join(sorted(tasks))
            message = (
                f"there is no {signature.kind} {name!r}; vime ships {known}, and a function of your own is written "
                "package.module.name or FILE.py:name"
            )
            raise FunctionProblem(message, nearest_name(name, tasks))
        name = tasks[name]
    if name.endswith(".py"):
        raise FunctionProblem(f"{name!r} names a file and no function in it: write {name}:NAME{_defined_in(name)}")
    place, colon, attribute = name.rpartition(":")
    if not colon:
        place, _, attribute = name.rpartition(".")
    if not place or not attribute:
        raise FunctionProblem(f"{name!r} names no function: write package.module.name or FILE.py:name")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place, name)
    try:
        return getattr(module, attribute), module
    except AttributeError:
        names = [item for item in vars(module) if not item.startswith("_")]
        raise FunctionProblem(f"{place} has no {attribute!r}", nearest_name(attribute, names)) from None


def _defined_in(file: str) -> str:
    """The functions that a file defines, found without running it, as the end of a sentence."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return ""
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return f" (it defines {', '.join(names)})" if names else ""


def _import_module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            message = f"there is no module {place!r} (for a file of your own write FILE.py:{name.rpartition('.')[2]})"
            raise FunctionProblem(message) from None
        raise FunctionProblem(f"importing {place} needs the module {error.name!r}, which is not installed") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise FunctionProblem(f"importing {place} raised {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    try:
        full = path.resolve()
        found = full.is_file()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise FunctionProblem(f"{str(path)[:80]!r} cannot be a file here: {why}") from error
    if not found:
        raise FunctionProblem(f"there is no file {full}")
    module_name = f"vime_user_{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, full)
    if spec is None or spec.loader is None:
        raise FunctionProblem(f"{full} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        del sys.modules[module_name]
        raise FunctionProblem(f"importing {full} raised {type(error).__name__}: {error}") from error
    return module


def _signature_problems(
    name: str, function: Any, parameters: Mapping[str, Any], expected: Signature, bound: dict[str, Any]
) -> Iterator[FunctionProblem]:
    """Everything that does not fit; ``bound`` gets the parameters as the function declares them.

    Raises FunctionProblem where nothing can be compared.
    """
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise FunctionProblem(f"{name!r} has no readable signature; {expected} is needed") from error
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise FunctionProblem(f"an annotation of {name!r} cannot be read: {error}") from error
    items = list(found.parameters.values())
    wanted = expected.positional
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [item.name for item in items if item.kind in by_position]
    if names[: len(wanted)] != [item for item, _ in wanted]:
        raise FunctionProblem(
            f"{name!r} takes {found}; a {expected.kind} takes {expected} and its parameters after that"
        )
    for argument, kind in wanted:
        if argument in hints and not accepts(hints[argument], kind):
            got = type_name(hints[argument])
            yield FunctionProblem(f"{name!r} declares {argument}: {got}; it is given {type_name(kind)}")
    if "return" in hints and not any(accepts(kind, hints["return"]) for kind in expected.returns):
        got = type_name(hints["return"])
        yield FunctionProblem(f"{name!r} declares that it returns {got}; {type_name(expected.returns[0])} is needed")
    yield from _parameter_problems(name, items[len(wanted) :], parameters, hints, bound)


def _parameter_problems(
    name: str,
    items: list[inspect.Parameter],
    parameters: Mapping[str, Any],
    hints: Mapping[str, Any],
    bound: dict[str, Any],
) -> Iterator[FunctionProblem]:
    free = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in items)
    bindable = {
        item.name: item
        for item in items
        if item.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    for key, value in parameters.items():
        bound[key] = value
        if key in bindable:
            bound[key], wrong = _fitted(value, hints[key], key) if key in hints else (value, None)
            if wrong is not None:
                yield FunctionProblem(wrong, parameter=key)
        elif not free:
            choices = f"its parameters are {', '.join(bindable)}" if bindable else "it has none"
            yield FunctionProblem(f"{name!r} has no parameter {key!r}; {choices}", nearest_name(key, bindable), key)
    for key, item in bindable.items():
        if item.default is inspect.Parameter.empty and key not in parameters:
            yield FunctionProblem(f"{name!r} needs the parameter {key!r}, which has no default")


def _fitted(value: Any, declared: Any, key: str) -> tuple[Any, str | None]:
    """A value of the pipeline file as the declared type has it (a list as a tuple, a text as a Path), and what is wrong
    with it, as a sentence; None: nothing. Types that pydantic does not know are the function's own affair."""
    try:
        return TypeAdapter(declared).validate_json(json.dumps(value), strict=True), None
    except ValidationError as error:
        return value, sentence(error.errors()[0], ("parameters", key))[0]
    except Exception:  # not a type that pydantic knows, or one whose own validation fails
        return value, None


def accepts(declared: Any, given: Any) -> bool:
    """Whether a place declared with one type takes values of another."""
    if declared is Any or given is Any or declared is object or declared == given:
        return True
    if declared is float and given in (int, bool):
        return True
    if typing.get_origin(given) is typing.Literal:
        values = typing.get_args(given)
        if typing.get_origin(declared) is typing.Literal:
            return set(values) <= set(typing.get_args(declared))
        return all(accepts(declared, type(value)) for value in values)
    origin, given_origin = typing.get_origin(declared) or declared, typing.get_origin(given) or given
    if not (isinstance(origin, type) and isinstance(given_origin, type) and issubclass(given_origin, origin)):
        return False
    arguments, given_arguments = typing.get_args(declared), typing.get_args(given)
    if not arguments or not given_arguments:
        return True
    given_arguments = tuple(item for item in given_arguments if item is not Ellipsis)
    if len(arguments) != len(given_arguments):
        return False
    return all(accepts(mine, theirs) for mine, theirs in zip(arguments, given_arguments, strict=True))


def type_name(kind: Any) -> str:
    """A type as people write it, without the modules it comes from."""
    text = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return re.sub(r"\b[a-z_]+(\.[a-z_]+)*\.(?=[A-Z])", "", text)
