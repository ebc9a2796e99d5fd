"""The point that a refusal names: users' functions with one fault each, and what their sentences have to say."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlkernel.contract.build import build_contract
from rlkernel.models.presets import PRESETS
from rlkernel.verify.admission.admit import admit
from rlkernel.verify.admission.certificate import AdmissionRefused
from rlkernel.verify.admission.explain import Evidence
from rlkernel.verify.admission.symptoms import is_coarse, is_fine, normal_size, special_values
from rlkernel.verify.admission.user import UserOp
from tests.verify import own_faults

CONTRACT = build_contract(PRESETS["tiny-qwen3"])
BIASED = build_contract(replace(PRESETS["tiny-qwen3"], qkv_bias=True))


def refusal(function: Any, region: str, contract: Any = CONTRACT) -> dict[str, Any]:
    own_faults.CALLS[0] = 0
    name = f"tests.verify.own_faults:{function.__name__}"
    candidate = UserOp(name, function, region, "trainer_forward", "float32", "numpy", "cpu")
    with pytest.raises(AdmissionRefused) as refused:
        admit(candidate, region, "trainer_forward", contract)
    return refused.value.report


@pytest.mark.parametrize(
    ("function", "region", "point", "words"), own_faults.FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_the_point_of_a_fault_is_named(function: Any, region: str, point: str | None, words: str) -> None:
    explanation = refusal(function, region, BIASED if region == "qkv_proj" else CONTRACT)["explanation"]
    assert explanation["point"] == point, explanation
    assert re.search(words, explanation["sentence"]), explanation
    assert explanation["certain"] == (not explanation["sentence"].startswith("no single change"))


@pytest.mark.parametrize(
    ("function", "region"),
    [(own_faults.project, "down_proj"), (own_faults.project, "qkv_proj"), (own_faults.silu_and_mul, "swiglu")],
)
def test_without_a_fault_they_are_admitted(function: Any, region: str) -> None:
    """The negative of the test above: it is the fault that is refused."""
    candidate = UserOp("own_faults:right", function, region, "trainer_forward", "float32", "numpy", "cpu")
    admit(candidate, region, "trainer_forward", BIASED if region == "qkv_proj" else CONTRACT)


class _Rows:
    """A problem whose rows are of these classes."""

    def __init__(self, *classes: str) -> None:
        self.hazards = classes

    def hazard(self, index: tuple[int, ...]) -> str:
        return self.hazards[index[0]]


def seen(want: list[list[float]], have: list[list[float]], *classes: str) -> Evidence:
    return Evidence(_Rows(*classes), {"y": np.array(want, np.float32)}, {"y": np.array(have, np.float32)})


def test_special_values_explain_only_what_they_are_in() -> None:
    nan = float("nan")
    assert special_values([seen([[1], [nan]], [[1], [0]], "normal", "NaN")]) is not None
    assert special_values([seen([[1], [nan]], [[2], [0]], "normal", "NaN")]) is None
    assert special_values([seen([[1], [nan]], [[1], [nan]], "normal", "NaN")]) is None


def test_the_size_of_differences_is_that_of_normal_rows() -> None:
    assert normal_size([seen([[1], [1]], [[1], [9]], "normal", "large")]) is None
    size = normal_size([seen([[1], [1]], [[1 + 2**-9], [9]], "normal", "large")])
    assert size == 2**-9 and is_coarse(size) and not is_fine(size)
    size = normal_size([seen([[1]], [[1 + 2**-23]], "normal")])
    assert is_fine(size) and not is_coarse(size)
    assert not is_fine(None) and not is_coarse(None)
