"""The dataflow graph: order, types, cycles, execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.helpers import loaded
from vime.errors import InputError, VimeError
from vime.pipeline.graph import Graph, GraphError, Stage, StageSpec
from vime.pipeline.stages import step_graph


def stage(name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> StageSpec:
    """A declaration."""
    return StageSpec(name, inputs, outputs)


def test_a_step_is_ordered_and_drawn() -> None:
    graph = step_graph(loaded().pipeline)
    assert [s.name for s in graph.order()] == [
        "rollout", "reward", "filter", "advantage", "score", "compare", "train", "sync",
    ]  # fmt: skip
    assert "<- samples: Sequence[GeneratedSample]  from rollout" in graph.draw()


@given(st.permutations(range(6)))
def test_any_declaration_order_gives_a_valid_execution_order(places: list[int]) -> None:
    chain = [stage(f"s{i}", {f"v{i}": int}, {f"v{i + 1}": int}) for i in range(6)]
    graph = Graph(tuple(chain[i] for i in places), {"v0": int})
    assert [s.name for s in graph.order()] == [f"s{i}" for i in range(6)]


def messages(*stages: Stage, initial: Mapping[str, Any] | None = None) -> str:
    """What is wrong with a graph."""
    with pytest.raises(GraphError) as caught:
        Graph(tuple(stages), initial or {})
    return str(caught.value)


def test_what_cannot_be_a_graph() -> None:
    a = stage("a", {}, {"x": int})
    assert "another stage of this name" in messages(a, stage("a", {}, {"y": int}))
    assert "made by stage 'a' already" in messages(a, stage("b", {}, {"x": int}))
    assert "made by the initial values already" in messages(a, initial={"x": int})
    assert "did you mean 'x'" in messages(a, stage("b", {"X": int}, {}))
    assert "takes str, but a gives int" in messages(a, stage("b", {"x": str}, {}))
    wanted = stage("b", {"x": Sequence[str]}, {})
    assert "takes Sequence[str], but a gives list[int]" in messages(stage("a", {}, {"x": list[int]}), wanted)
    cycle = messages(stage("a", {"y": int}, {"x": int}), stage("b", {"x": int}, {"y": int}))
    assert "wait for each other" in cycle
    several = messages(a, stage("b", {"nothing": int}, {}), stage("c", {"x": str}, {}))
    assert several.count("\n") == 1


def test_execution_passes_values_and_can_be_wrapped() -> None:
    double = stage("double", {"x": int}, {"y": int}).bind(lambda x: {"y": 2 * x})
    add = stage("add", {"x": int, "y": int}, {"z": int}).bind(lambda x, y: {"z": x + y})
    graph = Graph((add, double), {"x": int})
    seen: list[str] = []

    def around(s: Stage, run: Any) -> Mapping[str, Any]:
        seen.append(s.name)
        result: Mapping[str, Any] = run()
        return result

    assert graph.execute({"x": 3}, around) == {"x": 3, "y": 6, "z": 9}
    assert seen == ["double", "add"]


def test_execution_refuses_what_was_not_declared() -> None:
    def graph(function: Any) -> Graph:
        return Graph((stage("s", {"x": int}, {"y": int}).bind(function),), {"x": int})

    with pytest.raises(InputError, match="starts from"):
        graph(lambda x: {"y": 1}).execute({})
    with pytest.raises(InputError, match="it returned"):
        graph(lambda x: {"z": 1}).execute({"x": 1})
    with pytest.raises(VimeError, match="is a str"):
        graph(lambda x: {"y": "1"}).execute({"x": 1})
    with pytest.raises(InputError, match="bound to nothing"):
        Graph((stage("s", {}, {"y": int}),)).execute({})
