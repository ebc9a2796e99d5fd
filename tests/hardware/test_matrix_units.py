"""Models of the matrix units: against recorded results of MMA-Sim, and against the rules in exact rationals."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardware import matrix
from hardware.cuda import mma
from hardware.rocm import mfma
from tests.kernels import arith as slow
from tests.reference.exact import down, exponent, nearest, toward_zero

VECTORS = Path(__file__).parent / "data" / "mma_vectors.npz"  # written by benchmarks/mma_oracle.py --record
CLASSES = 14


def _groups(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    dot = mfma.dot_k8_fp16 if a.dtype == torch.float16 else mfma.dot_k8_bf16
    return dot(a[:, 8:], b[:, 8:], dot(a[:, :8], b[:, :8], c))


UNITS = {
    "sm_90 wgmma bf16": (torch.bfloat16, mma.dot_k16_bf16),
    "sm_90 wgmma fp16": (torch.float16, mma.dot_k16_fp16),
    "gfx942 mfma bf16": (torch.bfloat16, _groups),
    "gfx942 mfma fp16": (torch.float16, _groups),
    "gfx942 mfma fp32": (torch.float32, mfma.chain_f32_rows),
}


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    with np.load(VECTORS) as data:
        return dict(data)


def _wrong(vectors: dict[str, Any], unit: str) -> int:
    """How many recorded results of a unit the model misses."""
    dtype, model = UNITS[unit]
    wrong = seen = 0
    for key in (key for key in vectors if key.startswith(unit) and key.endswith("/a")):
        a, b, c, d = (torch.from_numpy(vectors[key[:-1] + name].copy()) for name in "abcd")
        found = model(a.view(dtype), b.view(dtype), c.view(torch.float32))
        expected = d.view(torch.float32)
        if dtype == torch.float32:  # an fma's NaN has no pattern of the unit's own
            found, expected = (torch.where(x.isnan(), torch.nan, x) for x in (found, expected))
        wrong += int((found.view(torch.int32) != expected.view(torch.int32)).sum())
        seen += 1
    assert seen == CLASSES
    return wrong


@pytest.mark.parametrize("unit", UNITS)
def test_recorded_results_of_the_oracle(vectors: dict[str, Any], unit: str) -> None:
    assert _wrong(vectors, unit) == 0


@pytest.mark.parametrize(
    ("module", "constant", "other", "unit"),
    [
        (mma, "_FRACTION_BITS", 24, "sm_90 wgmma bf16"),
        (mma, "_FRACTION_BITS", 26, "sm_90 wgmma fp16"),
        (mma, "_ZERO_EXPONENT", -132, "sm_90 wgmma bf16"),
        (mma, "_ZERO_EXPONENT", -134, "sm_90 wgmma bf16"),
        (mma, "NAN_BITS", 0x7FC00000, "sm_90 wgmma bf16"),
        (mfma, "_PRODUCT_BITS", 23, "gfx942 mfma bf16"),
        (mfma, "_SUM_BITS", 31, "gfx942 mfma bf16"),
        (mfma, "_ACCUMULATOR_BITS", 25, "gfx942 mfma bf16"),
        (mfma, "_RESULT_BITS", 30, "gfx942 mfma bf16"),
        (mfma, "_RESULT_BITS", 32, "gfx942 mfma bf16"),
    ],
)
def test_another_constant_is_noticed(
    vectors: dict[str, Any], monkeypatch: pytest.MonkeyPatch, module: Any, constant: str, other: int, unit: str
) -> None:
    monkeypatch.setattr(module, constant, other)
    assert _wrong(vectors, unit) > 0


def test_another_group_or_another_unit_is_noticed(vectors: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNITS, "gfx942 mfma bf16", (torch.bfloat16, mma.dot_k16_bf16))
    assert _wrong(vectors, "gfx942 mfma bf16") > 0

    def in_groups_of_eight(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros_like(a[:, :8])
        for part in (slice(0, 8), slice(8, 16)):
            c = mma.dot_k16_bf16(torch.cat([a[:, part], zero], 1), torch.cat([b[:, part], zero], 1), c)
        return c

    monkeypatch.setitem(UNITS, "sm_90 wgmma bf16", (torch.bfloat16, in_groups_of_eight))
    assert _wrong(vectors, "sm_90 wgmma bf16") > 0


def _terms(a: Any, b: Any) -> list[tuple[Fraction, int]]:
    pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b, strict=True)]
    return [(x * y, exponent(x) + exponent(y)) for x, y in pairs if x * y]


def _sm90(a: Any, b: Any, c: float) -> float:
    terms = _terms(a, b)
    exact_c = Fraction(c)
    exponents = [e for _, e in terms] + ([exponent(exact_c)] if exact_c else [])
    if len(terms) < 16 or not exact_c:
        exponents.append(-133)
    unit = max(exponents) - 25
    total = sum((toward_zero(x, unit) for x in [*(x for x, _ in terms), exact_c]), Fraction(0))
    return float(toward_zero(total, exponent(total) - 23)) if total else 0.0


def _gfx942(a: Any, b: Any, c: float) -> float:
    terms, exact_c = _terms(a, b), Fraction(c)
    e_c = exponent(exact_c) if exact_c else -126
    e_dot = max((e for _, e in terms), default=-900)
    total = sum((toward_zero(x, e_dot - 24) for x, _ in terms), Fraction(0))
    top = max(e_dot, e_c)
    total = down(total, top - 32) + down(exact_c, top - 24)
    if total == 0:
        return 0.0
    return nearest(down(total, exponent(total) - 31))


def _grid(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(x, np.float32)).bfloat16()


@pytest.mark.parametrize("kind", ["normal", "spread", "subnormal", "signed_zeros", "cancellation"])
@pytest.mark.parametrize(("depth", "rule", "model"), [(16, _sm90, mma.dot_k16_bf16), (8, _gfx942, mfma.dot_k8_bf16)])
def test_the_rules_in_exact_rationals(kind: str, depth: int, rule: Any, model: Any) -> None:
    generator = np.random.default_rng(5)
    a, b = (_grid(slow.hazards(generator, (150, depth), kind)) for _ in range(2))
    c = torch.from_numpy(slow.hazards(generator, (150,), kind) * np.float32(2.0**-9 if kind == "spread" else 1))
    found = model(a, b, c)
    for row in range(150):
        expected = rule(a[row].double().tolist(), b[row].double().tolist(), float(c[row]))
        assert float(found[row]) == expected, f"row {row}: {float(found[row])!r}, the rules give {expected!r}"


def _one(model: Any, depth: int, a: list[float], b: list[float], c: float) -> float:
    left, right = (_grid([*x, *[0.0] * (depth - len(x))]) for x in (a, b))
    return float(model(left, right, torch.tensor(c)))


def test_sm90_keeps_25_bits_truncates_and_has_no_negative_zero() -> None:
    dot = mma.dot_k16_bf16
    one_ulp = 2.0**-23
    assert _one(dot, 16, [one_ulp], [0.5], 1.0) == 1.0  # truncated, not rounded
    assert _one(dot, 16, [-(2.0**-25)], [1.0], 1.0) == 1 - 2.0**-24
    assert _one(dot, 16, [-(2.0**-26)], [1.0], 1.0) == 1.0  # below the unit of the largest exponent: gone
    zero = dot(-torch.zeros(16).bfloat16(), torch.ones(16).bfloat16(), torch.tensor(-0.0))
    assert int(zero.view(torch.int32)) == 0
    nan = dot(_grid([math.inf, -math.inf, *[0.0] * 14]), torch.ones(16).bfloat16(), torch.tensor(0.0))
    assert int(nan.view(torch.int32)) == 0x7FFFFFFF
    assert _one(dot, 16, [2.0**127], [2.0], 0.0) == math.inf  # the product is beyond float32, as is the sum
    assert _one(dot, 16, [2.0**127, 2.0**127], [2.0, -1.0], 0.0) == 2.0**127  # the sum is not


def test_gfx942_is_asymmetric_in_sign_and_overflows_a_product() -> None:
    dot = mfma.dot_k8_bf16
    up = _one(dot, 8, [2.0**-25, 2.0**-30], [1.0, 1.0], 1.0)
    assert -_one(dot, 8, [-(2.0**-25), -(2.0**-30)], [1.0, 1.0], -1.0) == up == 1.0
    # c loses bits downward where the products are larger
    low = 1 + 2.0**-21 + 2.0**-23
    assert _one(dot, 8, [2.0**3], [1.0], low) != -_one(dot, 8, [-(2.0**3)], [1.0], -low)
    assert _one(dot, 8, [2.0**127, 2.0**127], [2.0, -1.0], 0.0) == math.inf


def test_chains_are_ascending_steps_with_zeros_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(9)
    a, b = _grid(generator.standard_normal((6, 44))), _grid(generator.standard_normal((5, 44)))
    c = torch.from_numpy(generator.standard_normal((6, 5)).astype(np.float32))
    for module, step, dot in ((mma, 16, mma.dot_k16_bf16), (mfma, 8, mfma.dot_k8_bf16)):
        whole = module.chain_bf16(a, b, c)
        left, right = (torch.nn.functional.pad(x, (0, 48 - 44)) for x in (a, b))
        total = c
        for k in range(0, 48, step):
            total = dot(left[:, None, k : k + step], right[None, :, k : k + step], total)
        assert torch.equal(whole, total)
        rows = torch.cat([module.chain_bf16(a[i : i + 1].float(), b, c[i : i + 1]) for i in range(6)])
        assert torch.equal(rows, whole)
        monkeypatch.setitem(matrix._PRODUCTS_AT_ONCE, "cpu", 1)  # one row at a time
        assert torch.equal(module.chain_bf16(a, b, c), whole)
        monkeypatch.undo()
        backwards = module.chain_bf16(a.flip(1), b.flip(1), c)
        assert not torch.equal(backwards, whole)
    assert torch.equal(mma.chain_bf16(a[:, :0], b[:, :0]), torch.zeros(6, 5))
    assert mma.chain_bf16(a[:0], b).shape == (0, 5)


def test_the_fp32_chain_is_sequential_fma() -> None:
    generator = np.random.default_rng(3)
    a, b = (slow.hazards(generator, (rows, 12), "cancellation") for rows in (4, 3))
    slow.assert_same_bits(mfma.chain_f32(torch.from_numpy(a), torch.from_numpy(b)).numpy(), slow.matmul_chain(a, b))


def test_operands_that_do_not_fit_are_refused() -> None:
    ok = torch.ones(16).bfloat16()
    with pytest.raises(ValueError, match=r"1 of 16 operands are no torch.bfloat16 values, for instance 1.0000"):
        mma.dot_k16_bf16(torch.tensor([1 + 2.0**-20] + [1.0] * 15), ok, torch.tensor(0.0))
    with pytest.raises(ValueError, match="16 products; the operands have 8 and 16"):
        mma.dot_k16_bf16(ok[:8], ok, torch.tensor(0.0))
    with pytest.raises(ValueError, match=r"accumulator has dtype torch.bfloat16"):
        mfma.dot_k8_bf16(ok[:8], ok[:8], torch.tensor(0.0).bfloat16())
    with pytest.raises(ValueError, match=r"dtype torch.float16; the unit takes torch.bfloat16"):
        mma.dot_k16_bf16(ok.half(), ok, torch.tensor(0.0))
    with pytest.raises(ValueError, match="a step of 8 products: bf16 on sm_90 takes 16"):
        mma.chain_bf16(ok[None], ok[None], step=8)
    with pytest.raises(ValueError, match=r"\[M, K\] and \[N, K\] are expected"):
        mma.chain_bf16(ok[None], ok[None, :8])
