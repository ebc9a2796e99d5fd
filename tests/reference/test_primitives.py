"""Primitives on torch tensors: the bits of the compiled ones, and the closed set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.primitives_exhaustive import PAIRS, Pair
from rlkernel.contract import constants, profiles
from rlkernel.contract.build import build_contract
from rlkernel.errors import ContractError
from rlkernel.reference import arith, primitives
from rlkernel.reference.primitives import MULTIPLY_ACCUMULATE, PRIMITIVES
from tests.kernels import rowref
from tests.kernels.arith import assert_same_bits, differs
from tests.ops.helpers import config


def _patterns() -> Any:
    """Patterns with every sign and exponent and 64 fractions each, and the neighbourhoods of borders."""
    generator = np.random.default_rng(8)
    exponents = (np.arange(512, dtype=np.uint32) << 23)[:, None]
    spread = exponents | generator.integers(0, 1 << 23, (512, 64), np.uint32)
    borders = np.array([0.0, 1.0, 0.5, 2.0, 126.0, 127.0, 128.0, 150.0, 2.0**-126, 2**-0.5, np.inf, np.nan], np.float32)
    near = borders.view(np.uint32)[:, None] + np.arange(-40, 41).astype(np.uint32)
    return np.concatenate([x.reshape(-1) for x in (spread, near, near ^ np.uint32(1 << 31))]).view(np.float32)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_bits_of_the_compiled_primitive(pair: Pair) -> None:
    x = _patterns()
    operands = [x, np.roll(x, 81), x[::-1].copy()]
    out = np.empty_like(x)
    pair.numba(0, x.size, *operands, out)
    found = pair.torch(*(torch.from_numpy(v) for v in operands[: pair.operands]))
    assert_same_bits(found.numpy(), out)


def test_another_coefficient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-3, 3, 1001)
    right = primitives.exp2_full(x)
    nudged = [*constants.EXP2_FULL]
    nudged[3] = float(np.nextafter(np.float32(nudged[3]), np.float32(1)))
    monkeypatch.setattr(constants, "EXP2_FULL", tuple(nudged))
    assert differs(primitives.exp2_full(x).numpy(), right.numpy())


def test_the_references_of_the_row_kernels_agree() -> None:
    x = _patterns()[::7].copy()
    tensor = torch.from_numpy(x)
    assert_same_bits(primitives.exp2_full(tensor).numpy(), rowref.exp2_full(x))
    assert_same_bits(primitives.log2_full(tensor).numpy(), rowref.log2_full(x))
    assert_same_bits(primitives.sigmoid(tensor).numpy(), rowref.sigmoid(x))


def test_the_closed_set_holds_whatever_entries_name() -> None:
    named = set()
    for model in (config(), config(family="qwen2", qk_norm=False, qkv_bias=True)):
        for profile in profiles.PROFILES:
            for dtype in profile.dtypes:
                contract = build_contract(model, profile=profile.name, dtype=dtype)
                for points in contract.entries.values():
                    named |= {primitive for _, primitive in points.primitives}
    assert named <= set(PRIMITIVES), sorted(named - set(PRIMITIVES))
    assert {profile.mac for profile in profiles.PROFILES} == set(MULTIPLY_ACCUMULATE)
    for profile in profiles.PROFILES:
        unit = MULTIPLY_ACCUMULATE[profile.mac]
        assert unit.step == profile.step and set(profile.dtypes) <= set(unit.inputs)
    with pytest.raises(TypeError):
        PRIMITIVES["mine"] = PRIMITIVES["copy"]  # type: ignore[index]


def test_a_step_of_each_unit_by_its_name() -> None:
    a, b, c = torch.ones(2, 16), torch.full((2, 16), 2.0), torch.ones(2)
    assert PRIMITIVES["mma.bf16.sm90"].function(a, b, c).tolist() == [33.0, 33.0]
    assert PRIMITIVES["mfma.bf16.gfx942"].function(a[:, :8], b[:, :8], c).tolist() == [17.0, 17.0]
    assert PRIMITIVES["ex2.approx.ftz.sm90"].function(-c).tolist() == [0.5, 0.5]
    for name, unit in MULTIPLY_ACCUMULATE.items():
        assert unit.name == name and unit.chain(a, b, c).tolist() == [33.0, 33.0]
    with pytest.raises(ContractError, match=r"mma.bf16.sm90: 32 of 32 operands are no torch.bfloat16 values"):
        MULTIPLY_ACCUMULATE["mma.bf16.sm90"].chain(a * (1 + 2.0**-20), b, c)


def test_masked_weights_are_zero_and_the_largest_is_one() -> None:
    x = torch.tensor([-torch.inf, -1e30, -126.00001, -0.0, 0.0])
    for name in ("exp2.full", "exp2.p3", "ex2.approx.ftz.sm90"):
        assert arith.canonical_bits(PRIMITIVES[name].function(x)).tolist() == [0, 0, 0, 0x3F800000, 0x3F800000]
