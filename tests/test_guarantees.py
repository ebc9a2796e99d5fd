"""docs/guarantees.md names only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "guarantees.md"
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


def entries(text: str) -> list[str]:
    """The entries of the page: list items that begin with a dash, up to the next blank line."""
    return re.findall(r"^- .*(?:\n(?!- ).+)*", text, re.MULTILINE)


def without_tests(text: str) -> list[str]:
    """Entries that name no test at their end."""
    return [entry for entry in entries(text) if not NAME.search(entry.rpartition("Tests: ")[2] * ("Tests: " in entry))]


def test_every_guarantee_names_tests_that_exist():
    text = PAGE.read_text()
    assert len(entries(text)) > 70
    assert without_tests(text) == []
    assert not [line for line in text.splitlines() if line.startswith("|")]  # cells of a table are not looked at here
    assert missing(text) == []


def test_an_entry_without_a_test_is_noticed():
    text = "- A holds.\n  Tests: `a.py::test_a`.\n\n- B holds, see `a.py::test_a`.\n\n- C\n  holds. Tests: none.\n- D\n"
    assert without_tests(text) == ["- B holds, see `a.py::test_a`.", "- C\n  holds. Tests: none.", "- D"]


def test_a_name_that_does_not_exist_is_noticed():
    assert missing("`test_guarantees.py::test_nothing` `nowhere.py::test_x`") == [
        "test_guarantees.py::test_nothing",
        "nowhere.py::test_x",
    ]
