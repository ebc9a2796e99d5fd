"""What the documentation says of tasks, keys and files is what the code has."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.pipeline.helpers import text
from vime.pipeline.functions import REWARD, SOURCE, UserFunction, load_function
from vime.pipeline.loading import read_text
from vime.pipeline.partial import section_type
from vime.pipeline.prepare import prepare
from vime.pipeline.problems import PipelineError
from vime.pipeline.schema import Pipeline
from vime.tasks import REWARDS, SOURCES

ROOT = Path(__file__).parent.parent
PIPELINE = (ROOT / "docs/pipeline.md").read_text()
REQUIRED: dict[str, dict[str, Any]] = {
    "jsonl": {"train": "x.jsonl"},
    "low_tokens": {"vocabulary": 8, "length": 4},
}
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("pipelines/*.md")])


def documented(header: str) -> dict[str, str]:
    """Task name -> its cell of parameters, from the table whose first column has this header."""
    lines = PIPELINE[PIPELINE.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {name: row[-1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def parameters(function: UserFunction, positional: int) -> dict[str, Any]:
    """Parameter -> default of what a pipeline file may set."""
    found = list(inspect.signature(function.call).parameters.values())[positional:]
    return {item.name: item.default for item in found}


def said(cell: str) -> dict[str, Any]:
    """Parameter -> default, as the table has them."""
    pairs = re.findall(r"`(\w+)` (?:= ('[^']*'|[\d.]+|null)|\((required)\))", cell)
    return {
        name: inspect.Parameter.empty if required else None if value == "null" else eval(value)
        for name, value, required in pairs
    }


@pytest.mark.parametrize(
    ("header", "tasks", "signature"),
    [("`data.source`", SOURCES, SOURCE), ("`stages.reward.function`", REWARDS, REWARD)],
)
def test_the_tables_have_every_task_with_its_parameters(header: str, tasks: dict[str, str], signature: Any) -> None:
    table = documented(header)
    assert set(table) == set(tasks)
    for name in tasks:
        given = REQUIRED.get(name, {})
        function = load_function(name, given, signature, tasks)
        expected = parameters(function, len(signature.positional))
        expected = {**expected, **dict.fromkeys(given, inspect.Parameter.empty)}
        assert said(table[name]) == expected, name


def test_the_list_of_keys_that_change_no_bit_is_the_schemas() -> None:
    def marked(section: type[BaseModel]) -> set[str]:
        found: set[str] = set()
        for name, info in section.model_fields.items():
            inner = section_type(info.annotation)
            extra = info.json_schema_extra
            if isinstance(extra, dict) and extra.get("bits") is False:
                found.add(name)
            elif inner is not None:
                found |= marked(inner)
        return found

    section = PIPELINE[PIPELINE.index("## Keys that change no bit") :]
    sentence = section[section.index("do not depend on") :].split("\n\n")[0].replace("\n", " ")
    names = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", sentence)} - {"rollout", "train"}
    assert names == marked(Pipeline)


def test_the_examples_of_the_command_line_arrive_as_they_are_meant() -> None:
    block = PIPELINE[PIPELINE.index("--set steps=10") :].split("```")[0]
    words = [shlex.split(line) for line in block.strip().splitlines()]
    assert all(option == "--set" and len(line) == 2 for line in words for option in line[:1])
    overrides = [line[1] for line in words]
    pipeline = read_text(text(), "small.yaml", overrides).pipeline
    sampling = pipeline.stages.rollout.sampling
    assert (pipeline.steps, pipeline.threads, pipeline.name) == (10, None, "007")
    assert pipeline.stages.train.optimizer.betas == (0.9, 0.99)
    assert sampling.stop_strings == ("\n", "the end")
    assert pipeline.data.parameters == {"digits": 3, "held_out": 50}
    assert pipeline.stages.reward.function == "my rewards.py:score"
    prepare(read_text(text(), "small.yaml", [item for item in overrides if "my rewards" not in item]))
    with pytest.raises(PipelineError):  # without the quotes it is no text, as the page says
        prepare(read_text(text(), "small.yaml", ["name=7"]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
