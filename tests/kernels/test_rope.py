"""RoPE: bits against the reference, the inverse, accuracy, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.rope import rope
from tests.kernels import arith
from tests.kernels.arith import F32, cast, fma32, mul32
from tests.kernels.rowref import FineWorkers

WORKERS = [FineWorkers(1), FineWorkers(2), FineWorkers(3)]


def tables(generator: np.random.Generator, positions: int, half: int) -> tuple[F32, F32]:
    angle = generator.uniform(0, 100, (positions, half))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def reference(x: F32, positions: np.ndarray, cos: F32, sin: F32, bf16: bool) -> F32:
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    x1, x2 = x[..., :half], x[..., half:]
    first = fma32(x1, c, -mul32(x2, s))
    second = fma32(x2, c, mul32(x1, s))
    return cast(np.concatenate([first, second], axis=-1), bf16)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", arith.HAZARDS)
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 64), (5, 2, 30), (0, 2, 64), (4, 9, 128)])
def test_bits_are_those_of_the_reference(shape: tuple[int, int, int], kind: str, bf16: bool) -> None:
    generator = np.random.default_rng(shape[2])
    x = arith.hazards(generator, shape, kind)
    cos, sin = tables(generator, 50, shape[2] // 2)
    cos[3], sin[3] = 1, 0
    positions = generator.integers(0, 50, shape[0]).astype(np.int32)
    for workers in WORKERS:
        forward = rope(x, positions, cos, sin, workers, bf16)
        arith.assert_same_bits(forward, reference(x, positions, cos, sin, bf16))
        back = rope(x, positions, cos, sin, workers, bf16, inverse=True)
        arith.assert_same_bits(back, reference(x, positions, cos, -sin, bf16))


def test_rows_depend_on_their_position_alone() -> None:
    generator = np.random.default_rng(1)
    x = arith.hazards(generator, (6, 2, 64), "normal")
    cos, sin = tables(generator, 20, 32)
    positions = np.array([4, 0, 19, 4, 7, 1], np.int32)
    together = rope(x, positions, cos, sin, WORKERS[1], False)
    for i in range(6):
        arith.assert_same_bits(
            rope(x[i : i + 1].copy(), positions[i : i + 1], cos, sin, WORKERS[0], False)[0], together[i]
        )
    assert arith.differs(together, rope(x, (positions + 1) % 20, cos, sin, WORKERS[0], False))


def test_a_missing_fma_is_noticed() -> None:
    generator = np.random.default_rng(2)
    x = arith.hazards(generator, (32, 2, 64), "normal")
    cos, sin = tables(generator, 32, 32)
    positions = np.arange(32, dtype=np.int32)
    c, s = cos[:, None], sin[:, None]
    x1, x2 = x[..., :32], x[..., 32:]
    unfused = np.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], axis=-1)
    ours = rope(x, positions, cos, sin, WORKERS[0], False)
    assert arith.differs(ours, unfused)
    other_product = np.concatenate([fma32(-x2, s, mul32(x1, c)), fma32(x1, s, mul32(x2, c))], axis=-1)
    assert arith.differs(ours, other_product), "the other product rounded"
    exact = np.concatenate(
        [x1.astype(np.float64) * c - x2.astype(np.float64) * s, x2 * 1.0 * c + x1 * 1.0 * s], axis=-1
    )
    assert np.abs(ours - exact).max() < 1e-6
    restored = rope(ours, positions, cos, sin, WORKERS[0], False, inverse=True)
    assert np.abs(restored - x).max() < 2e-6


def test_bad_arguments_are_refused() -> None:
    x, table = np.zeros((2, 1, 4), np.float32), np.zeros((3, 2), np.float32)
    positions = np.array([0, 2], np.int32)
    with pytest.raises(ContractError, match=r"positions of rope\[1\] is 3; it must be at least 0 and below 3"):
        rope(x, positions + np.int32(1), table, table, WORKERS[0], False)
    with pytest.raises(ContractError, match=r"positions of rope\[0\] is -1"):
        rope(x, positions - np.int32(1), table, table, WORKERS[0], False)
    with pytest.raises(ContractError, match="must be even"):
        rope(np.zeros((2, 1, 3), np.float32), positions, table, table, WORKERS[0], False)
    with pytest.raises(ContractError, match="positions of rope is int64"):
        rope(x, positions.astype(np.int64), table, table, WORKERS[0], False)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="sin of rope"):
        rope(x, positions, table, np.zeros((2, 2), np.float32), WORKERS[0], False)
