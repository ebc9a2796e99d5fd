"""What the Triton attention kernels read from the contract, and entries that they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.contract.points import RoundingSite, SixPoints
from rlkernel.contract.profiles import EX2_SM90, EXP2, EXP2_P3, FMA, MFMA_GFX942, MMA_SM90
from rlkernel.errors import ContractError
from rlkernel.kernels.triton.attention_points import (
    AttentionPoints,
    BackwardPoints,
    attention_points,
    backward_points,
)
from rlkernel.models.config import ModelConfig

MODEL = ModelConfig(
    family="llama",
    vocab_size=256,
    hidden_size=512,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    max_position=64,
)
SCALE2 = 0.12751743  # 128^-0.5 * log2(e)


def entry(profile: str, dtype: str = "bfloat16", case: str = "trainer_forward") -> SixPoints:
    return build_contract(MODEL, profile=profile, dtype=dtype, topology=Topology()).entries[(case, "attention")]


@pytest.mark.parametrize(
    ("profile", "dtype", "expected"),
    [
        ("hopper", "bfloat16", (MMA_SM90, EX2_SM90, 128, 8, 2048)),
        ("cdna3", "bfloat16", (MFMA_GFX942, EXP2_P3, 64, 8, 512)),
        ("portable", "bfloat16", (FMA, EXP2_P3, 64, 1, 512)),
        ("portable", "float32", (FMA, EXP2, 64, 1, 512)),
    ],
)
def test_profiles(profile: str, dtype: str, expected: tuple[str, str, int, int, int]) -> None:
    points = attention_points(entry(profile, dtype))
    assert points == AttentionPoints(*expected, points.scale2, dtype)
    assert points.scale2 == pytest.approx(SCALE2, rel=1e-7)
    backward = backward_points(entry(profile, dtype, "trainer_backward"))
    assert backward == BackwardPoints(*expected[:2], backward.scale, points.scale2, dtype)
    assert backward.scale**2 == pytest.approx(1 / 128, rel=1e-6)


FORWARD = entry("hopper")
BACKWARD = entry("hopper", case="trainer_backward")


def _primitive(points: SixPoints, role: str, name: str) -> SixPoints:
    return replace(points, primitives=tuple((r, name if r == role else n) for r, n in points.primitives))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (replace(FORWARD, split=replace(FORWARD.split, step=8)), "steps of 8"),
        (replace(FORWARD, split=replace(FORWARD.split, leaf_size=192)), "192"),
        (replace(FORWARD, split=replace(FORWARD.split, lanes=3)), "3 lanes"),
        (replace(FORWARD, merge=replace(FORWARD.merge, lanes="none")), "merges"),
        (replace(FORWARD, merge=replace(FORWARD.merge, leaves="balanced_tree")), "merges"),
        (replace(FORWARD, rounding=()), "roundings"),
        (replace(FORWARD, rounding=(*FORWARD.rounding, RoundingSite("scores", "bfloat16"))), "roundings"),
        (replace(FORWARD, precision=replace(FORWARD.precision, inputs="float16")), "float16"),
        (_primitive(FORWARD, "weights_exp2", "log2.full"), "log2.full"),
        (_primitive(FORWARD, "exp2", EXP2_P3), "exp2.p3"),
        (_primitive(FORWARD, "mac", "mul.rn.f32"), "mul.rn.f32"),
        (replace(FORWARD, dependency=replace(FORWARD.dependency, domain="all keys")), "all keys"),
    ],
)
def test_forward_entries_that_are_not_built(changed: SixPoints, named: str) -> None:
    attention_points(FORWARD)
    with pytest.raises(ContractError, match=named):
        attention_points(changed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (replace(BACKWARD, split=replace(BACKWARD.split, lanes=8)), "one chain"),
        (replace(BACKWARD, rounding=BACKWARD.rounding[1:]), "roundings"),
        (_primitive(BACKWARD, "fma", "mul.rn.f32"), "one chain"),
        (replace(BACKWARD, dependency=replace(BACKWARD.dependency, domain="tokens")), "tokens"),
    ],
)
def test_backward_entries_that_are_not_built(changed: SixPoints, named: str) -> None:
    backward_points(BACKWARD)
    with pytest.raises(ContractError, match=named):
        backward_points(changed)
