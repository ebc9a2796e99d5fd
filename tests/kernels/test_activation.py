"""SwiGLU and its gradients: bits against the reference, special values, accuracy."""

from __future__ import annotations

import numpy as np
import pytest

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.activation import swiglu, swiglu_backward
from tests.kernels import arith
from tests.kernels.arith import F32, add32, cast, fma32, mul32
from tests.kernels.rowref import FineWorkers, sigmoid

WORKERS = [FineWorkers(1), FineWorkers(2), FineWorkers(3)]
ONE = np.float32(1)


def reference(gate: F32, up: F32, bf16: bool) -> F32:
    return cast(mul32(mul32(gate, sigmoid(gate)), up), bf16)


def reference_backward(dy: F32, gate: F32, up: F32, bf16: bool) -> tuple[F32, F32]:
    sg = sigmoid(gate)
    slope = mul32(sg, fma32(gate, add32(ONE, -sg), ONE))
    return cast(mul32(mul32(dy, up), slope), bf16), cast(mul32(dy, mul32(gate, sg)), bf16)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", arith.HAZARDS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (0, 8), (3, 500)])
def test_bits_are_those_of_the_reference(shape: tuple[int, int], kind: str, bf16: bool) -> None:
    generator = np.random.default_rng(shape[1])
    dy, gate, up = (arith.hazards(generator, shape, kind) for _ in range(3))
    gate = gate * np.float32(5) if kind == "normal" else gate
    for workers in WORKERS:
        arith.assert_same_bits(swiglu(gate, up, workers, bf16), reference(gate, up, bf16))
        for ours, expected in zip(
            swiglu_backward(dy, gate, up, workers, bf16), reference_backward(dy, gate, up, bf16), strict=True
        ):
            arith.assert_same_bits(ours, expected)


def test_large_gates_saturate_without_nan() -> None:
    gate = np.array([[-1000.0, -100.0, -88.0, 88.0, 1000.0]], np.float32)
    up = np.ones_like(gate)
    y = swiglu(gate, up, WORKERS[0], False)
    assert np.all(np.isfinite(y)) and y[0, -1] == 1000 and y[0, 0] == 0
    for gradient in swiglu_backward(up, gate, up, WORKERS[0], False):
        assert np.all(np.isfinite(gradient))


def test_accuracy_against_float64() -> None:
    generator = np.random.default_rng(1)
    dy, gate, up = (generator.standard_normal((64, 256)).astype(np.float32) * 3 for _ in range(3))
    g, u, d = (array.astype(np.float64) for array in (gate, up, dy))
    sg = 1 / (1 + np.exp(-g))
    assert np.abs(swiglu(gate, up, WORKERS[0], False) - g * sg * u).max() < 2e-5
    dgate, dup = swiglu_backward(dy, gate, up, WORKERS[0], False)
    assert np.abs(dup - d * g * sg).max() < 2e-5
    assert np.abs(dgate - d * u * sg * (1 + g * (1 - sg))).max() < 5e-5


def test_other_formulas_are_noticed() -> None:
    generator = np.random.default_rng(2)
    dy, gate, up = (generator.standard_normal((64, 256)).astype(np.float32) for _ in range(3))
    ours = swiglu(gate, up, WORKERS[0], False)
    assert arith.differs(ours, mul32(gate, mul32(sigmoid(gate), up))), "another association"
    assert arith.differs(ours, gate / (1 + np.exp(-gate)) * up), "the exponential of NumPy"
    dgate, _ = swiglu_backward(dy, gate, up, WORKERS[0], False)
    sg = sigmoid(gate)
    unfused = mul32(mul32(dy, up), mul32(sg, add32(mul32(gate, add32(ONE, -sg)), ONE)))
    assert arith.differs(dgate, unfused), "a missing fma"


def test_wrong_arrays_are_refused() -> None:
    gate = np.zeros((2, 4), np.float32)
    with pytest.raises(ContractError, match=r"up of swiglu is float32\[2, 3\]; float32\[2, 4\]"):
        swiglu(gate, np.zeros((2, 3), np.float32), WORKERS[0], False)
    with pytest.raises(ContractError, match="not C-contiguous"):
        swiglu(np.zeros((2, 8), np.float32)[:, :4], gate, WORKERS[0], False)
    with pytest.raises(ContractError, match="dy of swiglu_backward is float64"):
        swiglu_backward(gate.astype(np.float64), gate, gate, WORKERS[0], False)  # type: ignore[arg-type]
