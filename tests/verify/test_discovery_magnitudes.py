"""Orders far from 1: those that depend on the magnitude of the inputs, and sums that lose subnormal numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlkernel.errors import ContractError
from rlkernel.verify.discovery.notation import compact
from rlkernel.verify.discovery.probe import NotASummation
from rlkernel.verify.discovery.reveal import reveal
from rlkernel.verify.discovery.targets import function_target
from tests.verify import sums
from tests.verify.sums import Array
from vime.cli.main import invoke

LEAST = np.float32(2.0**-126)


def turned_where(condition: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Backwards in the rows that a condition on their absolute values holds for."""

    def add(x: Array) -> Array:
        turned = condition(np.abs(x)) & (x != 0).all(axis=1)
        return np.where(turned, sums.sequential(x[:, ::-1]), sums.sequential(x))

    return add


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (lambda a: a.max(axis=1) < 1e-30, r"inputs around \de-3[123]:"),
        (lambda a: a.max(axis=1) < 1e-36, r"inputs around \de-3[678]:"),
        (lambda a: a.max(axis=1) < 2e-38, r"inputs around 1e-38, where they are subnormal:"),
        (lambda a: (a.max(axis=1) > 1e25) & (a.max(axis=1) < 1e29), r"inputs around \de\+2[4-8]:"),
        (lambda a: (a.max(axis=1) > 1e5) & (a.max(axis=1) < 1e20), r"inputs around \de\+0[456]:"),
        (
            lambda a: a.max(axis=1) * 1e-35 > a.min(axis=1),
            "inputs of very different magnitudes in one sum:",
        ),
    ],
)
@pytest.mark.parametrize("rows", [1, 64])
def test_an_order_that_depends_on_the_magnitude_is_not_proven(condition: Any, words: str, rows: int) -> None:
    found = reveal(function_target(_vector(turned_where(condition), rows), "turned", n=24, **_rows(rows)))
    assert not found.proven and found.orders[0].differing == 0
    assert "depends on the magnitude of its inputs" in found.reason
    assert re.search(f"the first difference is at {words}", found.reason), found.reason
    assert "not kept" not in found.orders[0].subnormals


def _rows(rows: int) -> dict[str, Any]:
    return {} if rows == 1 else {"rows": rows}


def _vector(function: Callable[[Array], Array], rows: int) -> Callable[[Array], Array]:
    return function if rows > 1 else lambda x: function(x[None])[0]


def test_an_order_that_the_masks_themselves_turn_is_called_one_of_size() -> None:
    found = reveal(function_target(turned_where(lambda a: a.max(axis=1) > 1e20), "turned", n=24, rows=64))
    assert not found.proven and "depends on the size of its inputs" in found.reason


def test_what_holds_everywhere_is_compared_everywhere() -> None:
    for dtype in ("float32", "float64", "float16"):
        found = reveal(function_target(lambda x: _chain(x), "chain", n=24, dtype=dtype))
        assert found.proven and compact(found.orders[0].tree) == "chain(0..23)"
        assert found.orders[0].elsewhere >= 5 * 32 and found.orders[0].subnormals == "kept"


def _chain(x: Any) -> Any:
    total = x.dtype.type(0)
    for value in x:
        total = total + value
    return total


def _flushed(x: Array) -> Array:
    return np.where(np.abs(x) < LEAST, np.copysign(np.float32(0), x), x)


def _flushing(x: Array, operands: bool, results: bool) -> Array:
    total = np.zeros(len(x), np.float32)
    for k in range(x.shape[1]):
        term = _flushed(x[:, k]) if operands else x[:, k]
        total = total + term
        total = _flushed(total) if results else total
    return total


@pytest.mark.parametrize(
    ("operands", "results", "words"),
    [
        (True, False, "operands are flushed to zero"),
        (False, True, "results are flushed to zero"),
        (True, True, "operands and results are flushed to zero"),
    ],
)
def test_what_is_flushed_is_executed_and_named(operands: bool, results: bool, words: str) -> None:
    found = reveal(function_target(lambda x: _flushing(x, operands, results), "flushing", n=24, rows=64))
    assert found.proven, found.reason
    assert found.orders[0].subnormals == f"not kept ({words})"


def test_flushed_outputs_are_told_from_flushed_sums() -> None:
    found = reveal(function_target(lambda x: _flushed(sums.sequential(x)), "flushed", n=24, rows=64))
    assert found.proven and found.orders[0].subnormals == "not kept (outputs are flushed to zero)"


def test_a_flush_that_is_none_of_those_known_is_not_called_one() -> None:
    """Numbers far above the subnormal ones vanish."""

    def coarse(x: Array) -> Array:
        return sums.sequential(np.where(np.abs(x) < 2.0**-122, np.float32(0), x))

    found = reveal(function_target(coarse, "coarse", n=24, rows=64))
    assert not found.proven and "depends on the magnitude" in found.reason
    assert found.orders[0].subnormals == "not reproduced"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("flush", [True, False])
def test_products_of_bfloat16_numbers_may_be_fused_where_they_are_subnormal(fused: bool, flush: bool) -> None:
    """The products are exact in float32, but for subnormal ones."""
    import torch

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = a.float().numpy(), b.float().numpy()
        if flush:
            x, y = _flushed(x), _flushed(y)
        total = np.zeros((len(x), y.shape[1]), np.float32)
        for k in range(x.shape[1]):
            if fused:
                total = (x[:, k, None].astype(np.float64) * y[k] + total).astype(np.float32)
            else:
                term = x[:, k, None] * y[k]
                total = total + (_flushed(term) if flush else term)
            total = _flushed(total) if flush else total
        return torch.from_numpy(total)

    target = function_target(
        product, "product", n=24, rows=8, columns=4, operands=2, dtype="bfloat16", output="float32", library="torch"
    )
    found = reveal(target)
    assert found.proven, found.reason
    words = "not kept (operands and results are flushed to zero)" if flush else "kept"
    assert found.orders[0].subnormals == words


def test_sums_of_absolute_values_and_sorted_sums_are_named() -> None:
    with pytest.raises(NotASummation, match=r"it adds absolute values; -1 at input 0 and 0 elsewhere gives 1.0, as 1"):
        reveal(function_target(lambda x: sums.sequential(np.abs(x)), "absolute", n=24, rows=8))
    found = reveal(function_target(sums.by_size, "by size", n=24, rows=8))
    assert "depends on the data: its bits are those of a chain over its inputs sorted by absolute value, asc" in (
        found.reason
    )

    def largest_first(x: Array) -> Array:
        return sums.sequential(np.take_along_axis(x, np.argsort(-np.abs(x), axis=1, kind="stable"), axis=1))

    with pytest.raises(NotASummation, match="over its inputs sorted by absolute value, descending"):
        reveal(function_target(largest_first, "largest first", n=24, rows=8))


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (lambda x: None, {}, "own returns None; its sum, float32, is needed"),
        (lambda x: "sum", {}, "own returns str; its sum, float32, is needed"),
        (lambda x: 3, {}, "own returns int; its sum"),
        (lambda x: complex(_chain(x)), {}, "own returns complex"),
        (lambda x: np.float16(_chain(x)), {}, "returns float16 where float32 is expected; .* give --output float16"),
        (lambda x: np.float64(_chain(x)), {}, "returns float64 where float32 is expected"),
        (lambda x: x.sum() > 0, {}, "own returns bool; a sum of floating-point numbers returns float32"),
        (lambda x: x.astype(np.float32).sum(), {"dtype": "float16"}, "returns float32 where float16 is expected"),
        (lambda x: float(np.sum(x, dtype=np.float64)), {}, "which float32 does not hold; .* give --output float64"),
    ],
)
def test_what_is_no_output_is_one_clear_sentence(function: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        reveal(function_target(function, "own", n=24, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("output", [None, "float16"])
def test_a_sum_in_float16_is_told_by_its_range(output: str | None) -> None:
    """Of float32 inputs, rounded to float16: the masks of float32 would overflow."""

    def narrow(x: Array) -> Any:
        total = _chain(x.astype(np.float16))
        return total if output else np.float32(total)

    target = function_target(narrow, "narrow", n=24, output=output)
    if output is None:
        with pytest.raises(NotASummation, match=r"it computes in a narrower format. .* as in --dtype float16"):
            reveal(target)
        return
    found = reveal(target)  # its inputs lose bits where they are subnormal in float16
    assert compact(found.orders[0].tree) == "chain(0..23)" and found.orders[0].differing == 0
    assert "the first difference is at inputs around" in found.reason


def test_the_command_says_it_and_ends_with_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import numpy as np\n"
        "def turned(x):\n"
        "    total = np.float32(0)\n"
        "    for value in x[::-1] if np.all(np.abs(x) < 1e-30) else x:\n"
        "        total = total + value\n"
        "    return total\n"
        "def nothing(x):\n"
        "    x.sum()\n"
    )
    assert invoke(["reveal", f"{file}:turned", "--n", "16", "--inputs", "100"]) == 1
    captured = capsys.readouterr()
    assert "depends on the magnitude" in captured.err and "not kept" not in captured.out
    assert invoke(["reveal", f"{file}:nothing", "--n", "16"]) == 2
    assert "nothing returns None" in capsys.readouterr().err
