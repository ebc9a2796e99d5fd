"""Sum of squares, gradient norm, clipping and AdamW: bits against the reference, order, accuracy."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.optimizer import AdamWScalars, adamw, clip_factor, gradient_norm, sum_of_squares
from tests.kernels import arith
from tests.kernels.arith import F32, add32, cast, div32, fma32, lane_sum, mul32, tree
from tests.kernels.rowref import FineWorkers

WORKERS = [FineWorkers(1), FineWorkers(2), FineWorkers(3)]


def scalars(step: int = 3, clip: float = 1.0) -> AdamWScalars:
    b1, b2 = 0.9, 0.95
    values = (1e-3, b1, b2, 1 - b1, 1 - b2, 1 / (1 - b1**step), 1 / (1 - b2**step), 1e-8, 0.1, clip)
    return AdamWScalars(*[np.float32(value) for value in values])


def squares(g: F32) -> F32:
    flat = g.reshape(-1)
    leaves = [lane_sum(flat[i : i + 1024], flat[i : i + 1024]) for i in range(0, flat.size, 1024)]
    width = 1
    while width < len(leaves):
        width *= 2
    return tree(np.array([*leaves, *[0] * (width - len(leaves))], np.float32))


def reference(master: F32, m: F32, v: F32, grad: F32, s: AdamWScalars, bf16: bool) -> tuple[F32, F32, F32, F32]:
    g = mul32(grad, s.clip)
    m = fma32(s.beta1, m, mul32(s.one_minus_beta1, g))
    v = fma32(s.beta2, v, mul32(s.one_minus_beta2, mul32(g, g)))
    with np.errstate(all="ignore"):
        root = np.sqrt(mul32(v, s.correction2))
    step = div32(mul32(m, s.correction1), add32(root, s.eps))
    master = add32(master, -mul32(s.lr, fma32(s.weight_decay, master, step)))
    return master, m, v, cast(master, bf16)


@pytest.mark.parametrize("kind", arith.HAZARDS)
@pytest.mark.parametrize("shape", [(1,), (100,), (1024,), (1025,), (3, 700), (9, 1000), (0,), (2, 0)])
def test_sum_of_squares_bits(shape: tuple[int, ...], kind: str) -> None:
    g = arith.hazards(np.random.default_rng(sum(shape)), shape, kind)
    for workers in WORKERS:
        arith.assert_same_bits(sum_of_squares(g, workers), squares(g))


def test_sum_of_squares_by_other_leaves_or_lanes_is_noticed() -> None:
    g = np.random.default_rng(1).standard_normal((64, 5000)).astype(np.float32)
    ours = np.array([sum_of_squares(row, WORKERS[0]) for row in g])
    assert arith.differs(ours, lane_sum(g, g)), "one leaf"
    assert arith.differs(ours, (g * g).sum(axis=1)), "NumPy's sum"
    leaves = [lane_sum(g[:, i : i + 1024], g[:, i : i + 1024]) for i in range(0, 5000, 1024)]
    assert arith.differs(ours, arith.add_chain(np.array(leaves))), "leaves added in a chain"
    assert np.abs(ours / (g.astype(np.float64) ** 2).sum(1) - 1).max() < 1e-6


def test_norm_adds_tensors_by_name_whatever_the_mapping_order() -> None:
    generator = np.random.default_rng(2)
    names = ["model.b", "model.a", "lm_head", "model.layers.10.w", "model.layers.9.w", "Z"]
    gradients = {name: generator.standard_normal((7, 300)).astype(np.float32) * 10**i for i, name in enumerate(names)}
    norm = gradient_norm(gradients, WORKERS[0])
    total: F32 = np.zeros((), np.float32)
    for name in sorted(names):
        total = add32(total, squares(gradients[name]))
    arith.assert_same_bits(norm, np.sqrt(total))
    arith.assert_same_bits(gradient_norm(dict(reversed(gradients.items())), WORKERS[1]), norm)
    orders = np.random.default_rng(3).permuted(np.tile([squares(g) for g in gradients.values()], (200, 1)), axis=1)
    assert arith.differs(arith.add_chain(orders.T), np.broadcast_to(total, 200)), "another order of tensors"
    gradients["Z"][0, 0] = np.nan
    assert np.isnan(gradient_norm(gradients, WORKERS[0]))
    assert gradient_norm({}, WORKERS[0]) == 0


def test_clip_factor() -> None:
    assert clip_factor(np.float32(0.5), 1.0) == 1
    assert clip_factor(np.float32(1.0), 1.0) == 1
    arith.assert_same_bits(clip_factor(np.float32(3.0), 1.0), div32(1, 3))
    assert clip_factor(np.float32(3e38), np.inf) == 1
    assert isinstance(clip_factor(np.float32(3.0), 1.0), np.float32)
    for bad in (0.0, -1.0, np.nan):
        with pytest.raises(ContractError, match="max_norm"):
            clip_factor(np.float32(1), bad)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", arith.HAZARDS)
@pytest.mark.parametrize("shape", [(1,), (33,), (0,), (9, 50)])
def test_adamw_bits_over_two_steps(shape: tuple[int, ...], kind: str, bf16: bool) -> None:
    generator = np.random.default_rng(len(shape))
    master, m, v, grad = (arith.hazards(generator, shape, kind) for _ in range(4))
    v = np.abs(v)
    for workers in WORKERS:
        ours = [a.copy() for a in (master, m, v)]
        want = [master, m, v]
        for step in (1, 2):
            s = scalars(step, clip=0.37)
            weight = adamw(ours[0], ours[1], ours[2], grad, s, workers, bf16)
            *want, weight_expected = reference(want[0], want[1], want[2], grad, s, bf16)
            arith.assert_same_bits(weight, weight_expected)
            for a, b in zip(ours, want, strict=True):
                arith.assert_same_bits(a, b)


def test_adamw_against_float64_and_its_negative_twins() -> None:
    generator = np.random.default_rng(4)
    master, m, grad = (generator.standard_normal(4096).astype(np.float32) for _ in range(3))
    v = np.abs(generator.standard_normal(4096)).astype(np.float32)
    s = scalars()
    ours = [master.copy(), m.copy(), v.copy()]
    adamw(ours[0], ours[1], ours[2], grad, s, WORKERS[0], False)
    lr, b1, b2, k1, k2, c1, c2, eps, decay, _ = (float(value) for value in astuple(s))
    m64 = b1 * m.astype(np.float64) + k1 * grad
    v64 = b2 * v.astype(np.float64) + k2 * grad.astype(np.float64) ** 2
    exact = master - lr * (decay * master.astype(np.float64) + m64 * c1 / (np.sqrt(v64 * c2) + eps))
    assert np.abs(ours[0] - exact).max() < 5e-7
    assert arith.differs(ours[1], add32(mul32(s.beta1, m), mul32(s.one_minus_beta1, grad))), "a missing fma"
    other = reference(master, m, v, grad, replace(s, eps=np.float32(1e-5)), False)
    assert arith.differs(ours[0], other[0]), "another epsilon"


def test_wrong_arguments_are_refused() -> None:
    a = np.zeros((2, 3), np.float32)
    with pytest.raises(ContractError, match="lr of AdamWScalars is a float"):
        AdamWScalars(*[0.1] * 10)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match=r"grad of adamw is float32\[3, 2\]"):
        adamw(a, a.copy(), a.copy(), np.zeros((3, 2), np.float32), scalars(), WORKERS[0], False)
    with pytest.raises(ContractError, match="g of sum_of_squares is float64"):
        sum_of_squares(np.zeros(3), WORKERS[0])  # type: ignore[arg-type]
