"""RMSNorm, its gradients and the residual addition: bits against the reference, independence, accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.norm import residual_add, rms_norm, rms_norm_backward
from rlkernel.kernels.cpu.threads import Workers
from tests.kernels import arith
from tests.kernels.arith import F32, add32, cast, div32, fma32, lane_sum, mul32
from tests.kernels.rowref import FineWorkers

EPS = np.float32(1e-6)
WORKERS = [FineWorkers(1), FineWorkers(2), FineWorkers(3)]
SHAPES = [(1, 64), (7, 128), (3, 200), (5, 257), (2, 576), (0, 64), (4, 1), (3, 1000)]


def reference(x: F32, w: F32, bf16: bool) -> tuple[F32, F32]:
    mean = div32(lane_sum(x, x), np.float32(x.shape[1]))
    r = div32(np.float32(1), np.sqrt(add32(mean, EPS)))
    return cast(mul32(mul32(x, r[:, None]), w), bf16), r


def reference_backward(dy: F32, x: F32, w: F32, r: F32, dw: F32, bf16: bool) -> tuple[F32, F32]:
    g, xh = mul32(dy, w), mul32(x, r[:, None])
    c = div32(lane_sum(g, xh), np.float32(x.shape[1]))
    dx = cast(mul32(r[:, None], fma32(-xh, c[:, None], g)), bf16)
    for t in range(x.shape[0]):
        dw = fma32(dy[t], xh[t], dw)
    return dx, dw


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", arith.HAZARDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_the_reference(shape: tuple[int, int], kind: str, bf16: bool) -> None:
    generator = np.random.default_rng(shape[1])
    x, dy = (arith.hazards(generator, shape, kind) for _ in range(2))
    w, start = (arith.hazards(generator, shape[1:], kind) for _ in range(2))
    with np.errstate(all="ignore"):
        y_expected, r_expected = reference(x, w, bf16)
        dx_expected, dw_expected = reference_backward(dy, x, w, r_expected, start, bf16)
    for workers in WORKERS:
        y, r = rms_norm(x, w, EPS, workers, bf16)
        arith.assert_same_bits(y, y_expected)
        arith.assert_same_bits(r, r_expected)
        dw = start.copy()
        dx = rms_norm_backward(dy, x, w, r, dw, workers, bf16)
        arith.assert_same_bits(dx, dx_expected)
        arith.assert_same_bits(dw, dw_expected)


def test_a_row_alone_has_the_bits_of_the_row_in_a_batch() -> None:
    generator = np.random.default_rng(1)
    x, dy = (arith.hazards(generator, (9, 576), "spread") for _ in range(2))
    w = arith.hazards(generator, (576,), "normal")
    y, r = rms_norm(x, w, EPS, WORKERS[1], True)
    dw = np.zeros(576, np.float32)
    dx = rms_norm_backward(dy, x, w, r, dw, WORKERS[1], True)
    continued = np.zeros(576, np.float32)
    for i in range(9):
        y_alone, r_alone = rms_norm(x[i : i + 1].copy(), w, EPS, WORKERS[0], True)
        arith.assert_same_bits(y_alone[0], y[i])
        dx_alone = rms_norm_backward(dy[i : i + 1].copy(), x[i : i + 1].copy(), w, r_alone, continued, WORKERS[0], True)
        arith.assert_same_bits(dx_alone[0], dx[i])
    arith.assert_same_bits(continued, dw)


def test_other_reductions_are_noticed() -> None:
    generator = np.random.default_rng(2)
    x, dy = (arith.hazards(generator, (64, 576), "normal") for _ in range(2))
    w = arith.hazards(generator, (576,), "normal")
    y, r = rms_norm(x, w, EPS, WORKERS[0], False)
    chain_r = div32(np.float32(1), np.sqrt(add32(div32(arith.chain(x, x), np.float32(576)), EPS)))
    assert arith.differs(r, chain_r), "a chain instead of lanes"
    numpy_r = 1 / np.sqrt((x * x).mean(axis=1) + EPS)
    assert arith.differs(r, numpy_r), "NumPy's own mean"
    assert arith.differs(y, mul32(x, mul32(r[:, None], w))), "another association of the product"
    dw = np.zeros(576, np.float32)
    rms_norm_backward(dy, x, w, r, dw, WORKERS[0], False)
    xh = mul32(x, r[:, None])
    assert arith.differs(dw, arith.add_chain(mul32(dy, xh))), "a missing fma"
    _, backwards = reference_backward(dy[::-1], x[::-1], w, r[::-1], np.zeros(576, np.float32), False)
    assert arith.differs(dw, backwards), "tokens in another order"


def test_accuracy_against_float64() -> None:
    generator = np.random.default_rng(3)
    x, dy = (generator.standard_normal((32, 576)).astype(np.float32) for _ in range(2))
    w = generator.standard_normal(576).astype(np.float32)
    y, r = rms_norm(x, w, EPS, WORKERS[0], False)
    dw = np.zeros(576, np.float32)
    dx = rms_norm_backward(dy, x, w, r, dw, WORKERS[0], False)
    x64, dy64 = x.astype(np.float64), dy.astype(np.float64)
    r64 = 1 / np.sqrt((x64**2).mean(1, keepdims=True) + float(EPS))
    xh = x64 * r64
    g = dy64 * w
    assert np.abs(y - xh * w).max() < 2e-6
    assert np.abs(dx - r64 * (g - xh * (g * xh).mean(1, keepdims=True))).max() < 2e-6
    assert np.abs(dw - (dy64 * xh).sum(0)).max() < 2e-5


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", arith.HAZARDS)
def test_residual_add(kind: str, bf16: bool) -> None:
    generator = np.random.default_rng(4)
    for shape in ((3, 77), (0, 5), (1,), (2, 3, 5)):
        a, b = (arith.hazards(generator, shape, kind) for _ in range(2))
        for workers in WORKERS:
            arith.assert_same_bits(residual_add(a, b, workers, bf16), cast(add32(a, b), bf16))


def test_bf16_rounding_is_noticed() -> None:
    a = arith.hazards(np.random.default_rng(5), (4, 64), "normal")
    assert arith.differs(residual_add(a, a, WORKERS[0], True), residual_add(a, a, WORKERS[0], False))


def test_wrong_arrays_are_refused() -> None:
    x, w = np.zeros((2, 8), np.float32), np.zeros(8, np.float32)
    workers = Workers(1)
    wrong: list[Any] = [x.astype(np.float64), np.zeros((8, 2), np.float32).T, np.zeros(8, np.float32)]
    for bad in wrong:
        with pytest.raises(ContractError, match="x of rms_norm"):
            rms_norm(bad, w, EPS, workers, False)
    with pytest.raises(ContractError, match=r"w of rms_norm is float32\[7\]; float32\[8\]"):
        rms_norm(x, np.zeros(7, np.float32), EPS, workers, False)
    with pytest.raises(ContractError, match="dw_acc"):
        rms_norm_backward(x, x, w, np.zeros(2, np.float32), np.zeros(8), workers, False)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="b of residual_add"):
        residual_add(x, w, workers, False)
