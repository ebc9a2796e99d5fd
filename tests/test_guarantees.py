"""docs/guarantees.md names only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "guarantees.md"
NAME = re.compile(r"`([\w/]+\.py)::(\w+)`")


def missing(text: str) -> list[str]:
    """Names in the text that are no test function of the file they name."""
    found = []
    for file, name in NAME.findall(text):
        path = TESTS / file
        functions = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
        if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in functions):
            found.append(f"{file}::{name}")
    return found


def test_every_guarantee_names_tests_that_exist():
    text = TABLE.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    headers = {line for line in rows if line.endswith("| tests |")}
    assert len(rows) - len(headers) > 40
    assert [line for line in rows if line not in headers and not NAME.search(line)] == []
    assert missing(text) == []


def test_a_name_that_does_not_exist_is_noticed():
    assert missing("`test_guarantees.py::test_nothing` `nowhere.py::test_x`") == [
        "test_guarantees.py::test_nothing",
        "nowhere.py::test_x",
    ]
