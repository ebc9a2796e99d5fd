"""A step as a typed dataflow graph: stages are nodes, named values with types run between their ports.

An output port ``samples`` feeds every input port ``samples``. ``graphlib`` orders the stages; what cannot be ordered,
fed or typed is found when the graph is built, before anything runs.
"""

from __future__ import annotations

import graphlib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vime.errors import InputError, VimeError
from vime.pipeline.functions import accepts, type_name
from vime.pipeline.problems import nearest_name


class Stage(Protocol):
    """A node. ``run`` takes one keyword argument an input port and returns one value an output port."""

    @property
    def name(self) -> str: ...

    @property
    def inputs(self) -> Mapping[str, Any]: ...

    @property
    def outputs(self) -> Mapping[str, Any]: ...

    def run(self, **inputs: Any) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class StageSpec:
    """The ports of a stage without what it does; ``detail`` says how it is configured, for people."""

    name: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    detail: str = ""

    def run(self, **inputs: Any) -> Mapping[str, Any]:
        """Only declared: raises InputError. :meth:`bind` gives it something to do."""
        raise InputError(f"stage {self.name!r} is declared but bound to nothing, so it cannot run")

    def bind(self, function: Callable[..., Mapping[str, Any]]) -> BoundStage:
        """The same stage with an implementation."""
        return BoundStage(self.name, self.inputs, self.outputs, function, self.detail)


@dataclass(frozen=True)
class BoundStage:
    """A stage that calls a function."""

    name: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    function: Callable[..., Mapping[str, Any]]
    detail: str = ""

    def run(self, **inputs: Any) -> Mapping[str, Any]:
        """Call the function."""
        return self.function(**inputs)


@dataclass(frozen=True)
class GraphProblem:
    """What is wrong at one stage's port (``port`` may be empty)."""

    stage: str
    port: str
    message: str
    nearest: str | None = None

    def __str__(self) -> str:
        where = f"stage {self.stage!r}" + (f", port {self.port!r}" if self.port else "")
        return f"{where}: {self.message}" + (f" (did you mean {self.nearest!r}?)" if self.nearest else "")


class GraphError(InputError):
    """Stages that do not form a graph; ``problems`` has everything that was found."""

    def __init__(self, problems: Sequence[GraphProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True)
class Graph:
    """Stages and the values that are there before the first one runs (name -> type).

    Raises:
        GraphError: a repeated stage or output, an input that nothing feeds, an edge between different types, a cycle.
    """

    stages: tuple[Stage, ...]
    initial: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = self._check()
        if problems:
            raise GraphError(problems)

    def producers(self) -> dict[str, tuple[str, Any]]:
        """Value name -> (stage that makes it, or '' for an initial value; type)."""
        found: dict[str, tuple[str, Any]] = {name: ("", kind) for name, kind in self.initial.items()}
        for stage in self.stages:
            for name, kind in stage.outputs.items():
                found.setdefault(name, (stage.name, kind))
        return found

    def _check(self) -> list[GraphProblem]:
        problems: list[GraphProblem] = []
        seen: dict[str, str] = dict.fromkeys(self.initial, "the initial values")
        names: set[str] = set()
        for stage in self.stages:
            if stage.name in names:
                problems.append(GraphProblem(stage.name, "", "there is another stage of this name"))
            names.add(stage.name)
            for port in stage.outputs:
                if port in seen:
                    problems.append(GraphProblem(stage.name, port, f"this value is made by {seen[port]} already"))
                seen.setdefault(port, f"stage {stage.name!r}")
        producers = self.producers()
        for stage in self.stages:
            for port, kind in stage.inputs.items():
                if port not in producers:
                    near = nearest_name(port, producers)
                    problems.append(GraphProblem(stage.name, port, "no stage makes this value", near))
                    continue
                source, given = producers[port]
                if not accepts(kind, given):
                    message = f"takes {type_name(kind)}, but {source or 'the start'} gives {type_name(given)}"
                    problems.append(GraphProblem(stage.name, port, message))
        if not problems:
            try:
                self._sorted()
            except graphlib.CycleError as error:
                cycle = " -> ".join(error.args[1])
                problems.append(GraphProblem(error.args[1][0], "", f"the stages wait for each other: {cycle}"))
        return problems

    def _sorted(self) -> tuple[str, ...]:
        """Stage names in order; among stages that are ready at once, as they were given."""
        producers = self.producers()
        rank = {stage.name: i for i, stage in enumerate(self.stages)}
        sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
        for stage in self.stages:
            sorter.add(stage.name, *(producers[port][0] for port in stage.inputs if producers[port][0]))
        sorter.prepare()
        ready: list[str] = []
        result: list[str] = []
        while sorter.is_active():
            ready = sorted([*ready, *sorter.get_ready()], key=rank.__getitem__)
            result.append(ready.pop(0))
            sorter.done(result[-1])
        return tuple(result)

    def order(self) -> tuple[Stage, ...]:
        """Stages in an order in which every input is made before it is taken; always the same one."""
        by_name = {stage.name: stage for stage in self.stages}
        return tuple(by_name[name] for name in self._sorted())

    def execute(
        self,
        initial: Mapping[str, Any],
        around: Callable[[Stage, Callable[[], Mapping[str, Any]]], Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Run every stage once; returns all values by name.

        Args:
            initial: the initial values, exactly those declared.
            around: called as ``around(stage, run)`` for each stage and returns ``run()``: the place for timing.

        Raises:
            InputError: initial values are missing or unknown, or a stage returns other values than it declares.
        """
        if set(initial) != set(self.initial):
            raise InputError(f"the graph starts from {sorted(self.initial)}; it was given {sorted(initial)}")
        values = dict(initial)
        for stage in self.order():
            arguments = {port: values[port] for port in stage.inputs}
            made = around(stage, _Call(stage, arguments)) if around is not None else stage.run(**arguments)
            if set(made) != set(stage.outputs):
                raise InputError(f"stage {stage.name!r} declares {sorted(stage.outputs)}; it returned {sorted(made)}")
            for port, value in made.items():
                check_value(f"stage {stage.name!r}, port {port!r}", value, stage.outputs[port])
            values.update(made)
        return values

    def draw(self) -> str:
        """The graph as text: stages in order, with what each takes and makes."""
        producers = self.producers()
        lines = []
        if self.initial:
            lines.append("start")
            lines += [f"    -> {name}: {type_name(kind)}" for name, kind in self.initial.items()]
        for stage in self.order():
            detail = getattr(stage, "detail", "")
            lines.append(f"{stage.name}" + (f"  [{detail}]" if detail else ""))
            for port, kind in stage.inputs.items():
                lines.append(f"    <- {port}: {type_name(kind)}  from {producers[port][0] or 'start'}")
            lines += [f"    -> {port}: {type_name(kind)}" for port, kind in stage.outputs.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Call:
    """A stage with its arguments, waiting to run."""

    stage: Stage
    arguments: Mapping[str, Any]

    def __call__(self) -> Mapping[str, Any]:
        return self.stage.run(**self.arguments)


def check_value(where: str, value: Any, kind: Any) -> None:
    """Check the outer type of a value that a stage returned (not of what it contains). Raises VimeError."""
    outer = typing.get_origin(kind) or kind
    if isinstance(outer, type) and not isinstance(value, outer):
        raise VimeError(f"{where}: {type_name(kind)} is declared, but the value is a {type(value).__name__}")
