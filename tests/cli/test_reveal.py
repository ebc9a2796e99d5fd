"""``vime reveal``: what it prints, its exit codes, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pipeline.helpers import text
from vime.cli.main import invoke

Capture = pytest.CaptureFixture[str]
OWN = """
import numpy as np

def chain(x):
    total = np.float32(0)
    for value in x:
        total = total + value
    return total

def kahan(x):
    total, lost = np.float32(0), np.float32(0)
    for value in x:
        term = value - lost
        following = total + term
        lost = (following - total) - term
        total = following
    return total

def dot(a, b):
    return chain(a * b)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return str(file)


def call(*arguments: object) -> int:
    return invoke(["reveal", *(str(item) for item in arguments)])


def test_a_users_function(own: str, capsys: Capture) -> None:
    assert call(f"{own}:chain", "--n", 30, "--inputs", 100) == 0
    out = capsys.readouterr().out
    assert "chain(0..29)" in out and "100 of 100 outputs" in out
    assert call(f"{own}:dot", "--n", 20, "--operands", 2, "--inputs", 100) == 0
    assert "rounded, then added" in capsys.readouterr().out


def test_a_compensated_sum_is_code_1(own: str, capsys: Capture) -> None:
    assert call(f"{own}:kahan", "--n", 30, "--inputs", 100) == 1
    assert "not reproduced by a summation tree" in capsys.readouterr().err


def test_json_drawing_and_dependency(tmp_path: Path, capsys: Capture) -> None:
    drawing = tmp_path / "tree.svg"
    arguments = ("numpy.matmul", "--shape", "3x40x2", "--inputs", 60, "--depends", "--draw", drawing, "--json")
    assert call(*arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["proven"] and data["n"] == 40
    assert data["depends"][0]["pattern"] == "output k depends on input k alone"
    assert drawing.read_text().startswith("<svg")


def test_against_a_contract(tmp_path: Path, capsys: Capture) -> None:
    pipeline = tmp_path / "small.yaml"
    pipeline.write_text(text(tmp_path / "run"))
    options = ("--against", "rms_norm", "--pipeline", pipeline, "--case", "trainer_forward", "--inputs", 100)
    assert call("rlkernel.rms_norm", "--n", 64, *options) == 0
    assert "follows the entry of rms_norm" in capsys.readouterr().out
    assert call("torch.sum", "--n", 64, *options) == 1
    assert "merge order: the entry adds 0 + 1 (2 inputs)" in capsys.readouterr().out
    assert call("rlkernel.rms_norm", "--n", 65, *options) == 2
    assert "reduces the hidden axis, 64 inputs" in capsys.readouterr().err
    assert call("torch.sum", "--n", 64, "--against", "rms_nrm", "--pipeline", pipeline) == 2
    assert "no region 'rms_nrm'" in capsys.readouterr().err
    assert call("torch.sum", "--n", 64, "--against", "rms_norm", "--pipeline", pipeline) == 2
    assert "choose one with --case" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("torch.sum",), "--n"),
        (("torch.sum", "--n", "3", "--shape", "3x4"), "one of the two"),
        (("torch.sum", "--shape", "3xx4"), "MxKxN"),
        (("torch.sum", "--n", "0"), "0"),
        (("torch.smu", "--n", "3"), "has no"),
        (("nowhere", "--n", "3"), "not known"),
        (("nowhere.py:f", "--n", "3"), "no Python file"),
        (("no_such_module:f", "--n", "3"), "cannot be imported"),
        (("numpy.sum", "--n", "3", "--dtype", "bfloat16"), "use torch"),
        (("numpy.sum", "--n", "3", "--takes", "torch"), "numpy arrays"),
        (("torch.sum", "--n", "3", "--dtype", "int8"), "int8"),
        (("torch.sum", "--n", "3", "--device", "warp"), "warp"),
        (("torch.sum", "--n", "3", "--parts", "2"), "parts"),
        (("rlkernel.gemm", "--shape", "2x8x2", "--takes", "torch"), "CPU kernel"),
        (("torch.sum", "--n", "3", "--against", "rms_norm"), "give both"),
        (("torch.linspace", "--n", "3"), "raised"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(arguments: tuple[str, ...], message: str, capsys: Capture) -> None:
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_function_that_exits_is_not_revealed(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "exits.py").write_text("import sys\ndef f(x): sys.exit(0)\n")
    assert invoke(["reveal", f"{tmp_path}/exits.py:f", "--n", "8"]) == 2
    assert "exits.py:f raised SystemExit: 0" in capsys.readouterr().err
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    assert invoke(["reveal", f"{tmp_path}/leaves.py:f", "--n", "8"]) == 2
    assert "leaves.py raised SystemExit: 0" in capsys.readouterr().err
