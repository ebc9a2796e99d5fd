"""Reference arithmetic on torch tensors: against exact rationals and against NumPy, signed zeros and NaN included."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.errors import ContractError, NumericsError
from rlkernel.reference import arith
from tests.kernels import arith as slow
from tests.reference.exact import nearest, value

COUNT = 4000


def _tensor(pattern: int) -> torch.Tensor:
    return torch.tensor([pattern], dtype=torch.int64).to(torch.int32).view(torch.float32)


def _hazards(kinds: tuple[str, ...], seed: int) -> list[Any]:
    generator = np.random.default_rng(seed)
    return [slow.hazards(generator, (COUNT,), kind) for kind in kinds]


@pytest.mark.parametrize("second", slow.HAZARDS)
@pytest.mark.parametrize("first", slow.HAZARDS)
def test_every_operation_against_numpy(first: str, second: str) -> None:
    a, b, c = _hazards((first, second, first), 1)
    x, y, z = (torch.from_numpy(v) for v in (a, b, c))
    slow.assert_same_bits(arith.add(x, y).numpy(), slow.add32(a, b))
    slow.assert_same_bits(arith.sub(x, y).numpy(), slow.add32(a, -b))
    slow.assert_same_bits(arith.mul(x, y).numpy(), slow.mul32(a, b))
    slow.assert_same_bits(arith.div(x, y).numpy(), slow.div32(a, b))
    slow.assert_same_bits(arith.fma32(x, y, z).numpy(), slow.fma32(a, b, c))
    slow.assert_same_bits(arith.fma32(z, x, y).numpy(), slow.fma32(c, a, b))
    slow.assert_same_bits(arith.negative(x).numpy(), -a)
    with np.errstate(invalid="ignore"):
        slow.assert_same_bits(arith.sqrt(x).numpy(), np.sqrt(a))
    slow.assert_same_bits(arith.cast_bf16(x).numpy(), slow.round_bf16(a))


FINITE = st.integers(0, 0x7F7FFFFF).flatmap(lambda p: st.sampled_from([p, p | 0x80000000]))
NEAR_ONE = st.integers(0x3F000000, 0x40800000)


@settings(max_examples=150, deadline=None)
@given(st.one_of(FINITE, NEAR_ONE), st.one_of(FINITE, NEAR_ONE), st.one_of(FINITE, NEAR_ONE))
def test_against_exact_rationals(a: int, b: int, c: int) -> None:
    x, y, z = (_tensor(p) for p in (a, b, c))
    one, two, three = (value(p) for p in (a, b, c))
    for found, exact in (
        (arith.fma32(x, y, z), one * two + three),
        (arith.add(x, y), one + two),
        (arith.mul(x, y), one * two),
        *([(arith.div(x, y), one / two)] if two else []),
    ):
        assert float(found) == nearest(exact)


def test_the_fma_that_a_float64_sum_alone_would_round_twice() -> None:
    """2^24 + 1 in float32 units: half a unit and a little more; float64 loses the little, and ties go the wrong way."""
    a, b, c = (torch.tensor([v]) for v in (1.0 + 2.0**-23, 2.0**-24, 1.0))
    little = torch.tensor([2.0**-60])
    twice = (little.double() * little.double() + (1 + 2.0**-24)).float()
    assert float(arith.fma32(little, little, c)) == 1.0
    found = arith.fma32(a, b, c)  # 1 + 2^-24 + 2^-47: above the tie
    assert float(found) == 1 + 2.0**-23 and float(twice) == 1.0
    tie = torch.tensor([1 + 2.0**-12]), torch.tensor([1 + 2.0**-12]), torch.tensor([2.0**-80])
    exact = Fraction(float(tie[0])) ** 2 + Fraction(2) ** -80
    naive = (tie[0].double() * tie[1].double() + tie[2].double()).float()
    assert float(arith.fma32(*tie)) == nearest(exact) != float(naive)  # the square is a tie, the addend breaks it


def test_max_prefers_plus_zero_and_keeps_nan() -> None:
    values = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 2.0**-149]
    a, b = torch.meshgrid(torch.tensor(values), torch.tensor(values), indexing="ij")
    found = arith.maximum(a, b)
    key = lambda v: (v, not np.signbit(v))  # noqa: E731
    for i, x in enumerate(values):
        for j, y in enumerate(values):
            expected = np.float32("nan") if np.isnan(x) or np.isnan(y) else np.float32(max((x, y), key=key))
            slow.assert_same_bits(found[i, j].numpy(), expected)
    generator = np.random.default_rng(4)
    for kind in slow.HAZARDS:
        rows = torch.from_numpy(slow.hazards(generator, (50, 7), kind))
        folded = torch.full((50,), -torch.inf)
        for k in range(7):
            folded = arith.maximum(folded, rows[:, k])
        slow.assert_same_bits(arith.largest(rows).numpy(), folded.numpy())
        slow.assert_same_bits(arith.largest(rows.T, 0).numpy(), folded.numpy())
    assert arith.largest(torch.zeros(3, 0)).tolist() == [-torch.inf] * 3


def test_casts_of_every_kind_of_bfloat16_border() -> None:
    high = torch.arange(0, 1 << 16, 7, dtype=torch.int32) << 16
    pattern = torch.cat([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    x = pattern.view(torch.float32)
    found = arith.cast_bf16(x)
    slow.assert_same_bits(found.numpy(), slow.round_bf16(x.numpy()))
    real = ~x.isnan()
    assert torch.equal(found[real], x[real].bfloat16().float())
    assert bool((found[~real].view(torch.int32) & 0x00400000).bool().all())  # quiet, upper bits kept
    assert torch.equal(arith.cast(x, "bfloat16").view(torch.int32), found.view(torch.int32))
    assert torch.equal(arith.cast(x, "float32").view(torch.int32), pattern)
    with pytest.raises(ContractError, match="'float16' is not defined"):
        arith.cast(x, "float16")


def test_canonical_bits() -> None:
    x = torch.tensor([0x7FC00001, -1, 0x7F800001, 0x7F800000, -0x80000000], dtype=torch.int32).view(torch.float32)
    assert arith.canonical_bits(x).tolist() == [0x7FC00000] * 3 + [0x7F800000, -0x80000000]
    y = torch.tensor([-1, 0x7F80, -0x8000, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    assert arith.canonical_bits(y).tolist() == [0x7FC0, 0x7F80, 0x8000, 0x3F80]
    with pytest.raises(ContractError, match=r"torch.float64 are not compared"):
        arith.canonical_bits(torch.zeros(1, dtype=torch.float64))


def test_operands() -> None:
    one = torch.ones(2)
    assert torch.equal(arith.mul(one.bfloat16(), 2.0), torch.full((2,), 2.0))
    assert torch.equal(arith.add(1.5, one[:, None].expand(2, 3).T), torch.full((3, 2), 2.5))
    with pytest.raises(ContractError, match=r"0.1 is not a float32: round it on purpose"):
        arith.add(one, 0.1)
    with pytest.raises(ContractError, match=r"1e\+40 is not a float32"):
        arith.mul(one, 1e40)
    with pytest.raises(ContractError, match=r"dtype torch.float64; the arithmetic is that of float32"):
        arith.sqrt(one.double())
    with pytest.raises(ContractError, match="operands lie on cpu, meta; tensors of one device are expected"):
        arith.add(one, torch.ones(2, device="meta"))
    with pytest.raises(ContractError, match="operands lie on no device"):
        arith.add(1.0, 2.0)


def test_flushed_subnormals_are_noticed() -> None:
    arith.require_ieee("cpu")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with pytest.raises(NumericsError, match="cpu: a sum of subnormals is flushed to zero"):
            arith.require_ieee("cpu")
    finally:
        torch.set_flush_denormal(False)
    arith.require_ieee("cpu")
