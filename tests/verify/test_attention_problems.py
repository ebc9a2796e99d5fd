"""Problems of attention: split borders follow the profile, and rows that are not read change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlkernel.contract.build import Contract
from rlkernel.verify.admission.bits import compare
from rlkernel.verify.admission.execute import reference_operation
from rlkernel.verify.admission.generate_attention import attention_problems
from rlkernel.verify.admission.problem import Problem
from rlkernel.verify.vectors.problems import executor_of, model_contract

MODEL = "qk-norm, tp 2"


def _border(contract: Contract) -> Problem:
    (found,) = (p for p in attention_problems(contract, "trainer_forward", 1) if p.shape_class == "split borders")
    return found


@pytest.mark.parametrize(
    ("profile", "split", "whole"), [("portable", 512, True), ("cdna3", 512, True), ("hopper", 2048, False)]
)
def test_a_split_border_of_the_profile_is_crossed(profile: str, split: int, whole: bool) -> None:
    contract = model_contract(MODEL, profile, "bfloat16")
    assert contract.entries[("trainer_forward", "attention")].split.leaf_size == split
    problem = _border(contract)
    read = range(len(problem.batch.tokens)) if problem.read is None else problem.read
    positions = problem.batch.positions[list(read)]
    assert (problem.read is None) == whole
    assert {split - 1, split, split + 1} <= set(positions.tolist())
    for shape_class in ("one row each", "chunks"):
        (paged,) = (p for p in attention_problems(contract, "rollout_decode", 1) if p.shape_class == shape_class)
        assert paged.batch.positions.min() < split <= paged.batch.positions.max()


def test_rows_that_are_read_are_those_of_the_whole() -> None:
    contract = model_contract(MODEL, "hopper", "bfloat16")
    problem = next(p for p in attention_problems(contract, "trainer_forward", 1) if p.shape_class == "few rows")
    executor, operation = executor_of(contract), reference_operation(contract, "attention")
    whole = executor.run(operation, problem, "trainer_forward")
    rows = (0, 3, 6, 7, 9)
    part = executor.run(operation, replace(problem, read=rows), "trainer_forward")
    expected = {name: value[list(rows)] for name, value in whole.items()}
    compared, difference = compare(expected, part)
    assert difference is None
    assert compared == len(rows) * whole["attended"][0].size
    wrong = {name: value.copy() for name, value in part.items()}
    wrong["attended"].view(np.uint32)[3, 1, 5] ^= 1 << 16
    _, difference = compare(expected, wrong)
    assert difference is not None
    assert difference.index == (3, 1, 5)
