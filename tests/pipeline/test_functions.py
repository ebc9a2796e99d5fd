"""User functions: found, imported, signatures checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from vime.pipeline.functions import FILTER, REWARD, SOURCE, FunctionProblem, Signature, load_function

GOOD = """
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from vime.types import GeneratedSample, Prompt

@dataclass
class Unused:
    x: int = 1

def plain(prompt, sample, text): return 1.0
def typed(prompt: Prompt, sample: GeneratedSample, text: str, *, weight: float = 2.0) -> float: return weight
def integer(prompt, sample, text) -> int: return 1
def needs(prompt, sample, text, *, weight): return weight
def free(prompt, sample, text, **parameters): return len(parameters)
def keep(samples: Iterable[GeneratedSample], rewards: Sequence[float]) -> list[bool]: return [True for _ in samples]
def rows(namespace: str, size: int = 3) -> list[dict[str, Any]]: return [{"text": "1"}] * size
"""
BAD = """
from vime.types import Prompt
def few(prompt, sample): return 1.0
def names(prompt, answer, text): return 1.0
def argument(prompt: int, sample, text): return 1.0
def result(prompt, sample, text) -> str: return ""
def keep(samples: list, rewards) -> list[str]: return []
async def waits(prompt, sample, text): return 1.0
def annotated(prompt: "Nothing", sample, text): return 1.0
value = 3
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text(BAD)
    (folder / "raises.py").write_text("raise RuntimeError('at import')")
    (folder / "leaves.py").write_text("import sys; sys.exit('judge is not installed')")
    (folder / "cancelled.py").write_text("import asyncio; raise asyncio.CancelledError('no judge')")
    (folder / "needs.py").write_text("import surely_not_installed")
    return folder


@pytest.mark.parametrize(
    ("name", "signature", "parameters"),
    [
        ("plain", REWARD, {}),
        ("typed", REWARD, {"weight": 0.5}),
        ("integer", REWARD, {}),
        ("needs", REWARD, {"weight": 1}),
        ("free", REWARD, {"anything": 1}),
        ("keep", FILTER, {}),
        ("rows", SOURCE, {"size": 2}),
    ],
)
def test_functions_that_fit(files: Path, name: str, signature: Signature, parameters: dict[str, object]) -> None:
    function = load_function(f"{files}/good.py:{name}", parameters, signature, {})
    assert function.source_file == f"{files}/good.py"
    assert len(function.source_digest) == 64


def test_parameters_are_bound(files: Path) -> None:
    assert load_function(f"{files}/good.py:typed", {"weight": 0.5}, REWARD, {}).call(None, None, "") == 0.5


@pytest.mark.parametrize(
    ("name", "signature", "parameters", "words"),
    [
        ("bad.py:few", REWARD, {}, "takes (prompt: Prompt, sample: GeneratedSample, text: str) -> float"),
        ("bad.py:names", REWARD, {}, "(prompt, answer, text)"),
        ("bad.py:argument", REWARD, {}, "prompt: int"),
        ("bad.py:result", REWARD, {}, "returns str"),
        ("bad.py:keep", FILTER, {}, "samples: list"),
        ("bad.py:waits", REWARD, {}, "async"),
        ("bad.py:annotated", REWARD, {}, "annotation"),
        ("bad.py:value", REWARD, {}, "is a int"),
        ("bad.py:nothing", REWARD, {}, "has no 'nothing'"),
        ("raises.py:x", REWARD, {}, "RuntimeError: at import"),
        ("needs.py:x", REWARD, {}, "surely_not_installed"),
        ("nowhere.py:x", REWARD, {}, "there is no file"),
        ("leaves.py:x", REWARD, {}, "SystemExit: judge is not installed"),
        ("cancelled.py:x", REWARD, {}, "CancelledError: no judge"),
        ("nowhere.py", REWARD, {}, "nowhere.py:NAME"),
        ("good.py", REWARD, {}, "good.py:NAME (it defines plain, typed, integer, needs, free, keep, rows)"),
    ],
)
def test_functions_that_do_not_fit(
    files: Path, name: str, signature: Signature, parameters: dict[str, object], words: str
) -> None:
    with pytest.raises((FunctionProblem, ExceptionGroup)) as caught:
        load_function(f"{files}/{name}", parameters, signature, {})
    found = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else [caught.value]
    assert any(words in str(problem) for problem in found), found


@pytest.mark.parametrize(
    ("name", "signature", "parameters", "due"),
    [
        ("needs", REWARD, {}, {None: "needs the parameter 'weight'"}),
        ("typed", REWARD, {"wieght": 1}, {"wieght": "no parameter 'wieght'"}),
        ("typed", REWARD, {"weight": "two"}, {"weight": "'two' is not possible: a number is needed"}),
        ("rows", SOURCE, {"size": 2.0}, {"size": "2.0 is not possible: a whole number is needed, written without"}),
        ("rows", SOURCE, {"size": True}, {"size": "true is not possible: a whole number is needed"}),
        ("rows", SOURCE, {"size": None}, {"size": "an empty value is not possible: a whole number is needed"}),
        ("rows", SOURCE, {"sise": 1, "size": "x", "y": 2}, {"sise": "no", "size": "whole", "y": "parameter 'y'"}),
    ],
)
def test_every_parameter_that_does_not_fit_is_named(
    files: Path, name: str, signature: Signature, parameters: dict[str, object], due: dict[str | None, str]
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        load_function(f"{files}/good.py:{name}", parameters, signature, {})
    found = {problem.parameter: str(problem) for problem in caught.value.exceptions}  # type: ignore[union-attr]
    assert set(found) == set(due)
    for key, words in due.items():
        assert words in found[key]


def test_parameters_of_declared_types_fit(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "from typing import Literal\n"
        "class Own: pass\n"
        "def f(prompt, sample, text, a: tuple[int, ...] = (), b: float | None = None, c: Literal['x', 'y'] = 'x',\n"
        "      d: dict[str, list[float]] = {}, e: Own = None): return 1.0\n"
    )
    load_function(f"{tmp_path}/f.py:f", {"a": [1, 2], "b": 3, "c": "y", "d": {"k": [1, 2.5]}, "e": 5}, REWARD, {})
    with pytest.raises(ExceptionGroup) as caught:
        load_function(f"{tmp_path}/f.py:f", {"a": [1, "2"], "b": "3", "c": "z", "d": {"k": 1}}, REWARD, {})
    assert [problem.parameter for problem in caught.value.exceptions] == ["a", "b", "c", "d"]  # type: ignore[union-attr]


def test_parameters_come_as_their_types_say(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "import enum\nfrom pathlib import Path\nfrom typing import Union, List, Dict\n"
        "class Kind(enum.Enum):\n    A = 'a'\n"
        "J = Union[int, float, str, None, List['J'], Dict[str, 'J']]\n"
        "class Odd:\n"
        "    @classmethod\n"
        "    def __get_pydantic_core_schema__(cls, *_): raise RuntimeError('no')\n"
        "def f(prompt, sample, text, *, p: Path, k: Kind, n: dict[int, int], j: J = None, o: Odd = None):\n"
        "    return p, k, n, j, o\n"
    )
    given = {"p": "a/b", "k": "a", "n": {"1": 2}, "j": [1], "o": 3}
    function = load_function(f"{tmp_path}/f.py:f", given, REWARD, {})
    path, kind, numbers, alias, odd = function.call(None, None, None)
    assert path == Path("a/b") and kind.value == "a" and numbers == {1: 2} and alias == [1] and odd == 3


def test_everything_that_does_not_fit_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def f(prompt: int, sample: str, text: bytes) -> str: return ''\n")
    with pytest.raises(ExceptionGroup) as caught:
        load_function(f"{tmp_path}/f.py:f", {"x": 1}, REWARD, {})
    said = [str(problem) for problem in caught.value.exceptions]
    for words in ("declares prompt", "declares sample", "declares text", "returns str", "no parameter 'x'"):
        assert any(words in one for one in said), (words, said)


def test_names_and_dotted_paths() -> None:
    tasks = {"short": "vime.tasks.digits.reward"}
    assert load_function("short", {}, REWARD, tasks).call is not None
    assert load_function("vime.tasks.digits:reward", {}, REWARD, {}).source_file.endswith("digits.py")
    with pytest.raises(FunctionProblem) as caught:
        load_function("shrot", {}, REWARD, tasks)
    assert caught.value.nearest == "short"
    with pytest.raises(FunctionProblem, match="no module"):
        load_function("surely_not_installed.x", {}, REWARD, tasks)


def test_the_digest_follows_the_source(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def f(prompt, sample, text): return 1.0\n")
    (tmp_path / "two.py").write_text("def f(prompt, sample, text): return 2.0\n")
    one, two = (load_function(f"{tmp_path}/{name}.py:f", {}, REWARD, {}) for name in ("one", "two"))
    assert one.source_digest != two.source_digest
