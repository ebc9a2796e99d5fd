"""Problems whose results lie beside the largest finite number, and exponents beside the end of exp2's range.

A float32 above the largest bfloat16 by half a unit or more rounds to infinity; a cast that saturates, or a sum that
does, gives another value only there. Operands are found by solving for one of them: rounded onto the grid, it meets
the half unit often enough.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlkernel.contract.build import Contract
from rlkernel.kernels.cpu.convert import as_float32
from rlkernel.verify.admission.execute import tables
from rlkernel.verify.admission.generate import head_problem
from rlkernel.verify.admission.generate_attention import whole
from rlkernel.verify.admission.generate_linear import linear_problem
from rlkernel.verify.admission.plan import Plan
from rlkernel.verify.admission.problem import Array, Problem, flat_batch, matrix, weights_of
from rlkernel.verify.admission.values import Generator, generator, make, on_grid

HAZARD = "overflow"
_LARGEST = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])  # of bfloat16
_BEYOND = 1.003 * _LARGEST  # between half a unit and a unit above it
_HALF = 2.0**119  # half a unit of it


def _sign(rng: Generator, *shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return rng.choice([-1.0, 1.0], shape)


def _rows(like: Problem, inputs: tuple[Array, ...], grads: tuple[Array, ...] = ()) -> Problem:
    rows = len(inputs[0])
    width = matrix(inputs[0]).shape[1]
    return replace(
        like, shape_class="few rows", name=f"{rows} rows x {width}, {HAZARD}", hazards=(HAZARD,), inputs=inputs,
        grads=grads, batch=flat_batch(rows, positions=like.batch.positions[:1].repeat(rows)), start={}, alone=(),
        views=False, bulk=False,
    )  # fmt: skip


def pairs(rng: Generator, shape: tuple[int, ...], bf16: bool) -> tuple[Array, Array]:
    """Two addends whose sum is the largest bfloat16 and 0.25 to 1.5 half units (every other one beyond float32)."""
    sign = _sign(rng, *shape)
    parts = np.array([0.25, 0.75, 1.0, 1.0078125, 1.5])
    small = _HALF * parts[rng.integers(0, len(parts), shape)]
    small[..., 1::2] = _LARGEST * 0.5
    return tuple(on_grid((sign * x).astype(np.float32), bf16) for x in (np.full(shape, _LARGEST), small))  # type: ignore[return-value]


def norm(plan: Plan, like: Problem) -> Problem:
    """Largest weights (forward), or gradients that are solved for (backward)."""
    rng = plan.rng(HAZARD)
    count = 64 if plan.backward else 256
    inputs = tuple(make("normal", rng, (count, *x.shape[1:]), plan.bf16) * np.float32(0.25) for x in like.inputs)
    weight = np.float32(1.0 if plan.backward else _LARGEST)
    given = {name: np.full(like.inputs[0].shape[-1:], weight) for name in like.region.weights}
    grads = []
    for x in inputs if plan.backward else ():
        wide = x.astype(np.float64)
        r = 1.0 / np.sqrt((wide**2).mean(-1, keepdims=True) + like.config.rms_norm_eps)
        slope = r[..., 0] * (1.0 - (wide[..., 0] * r[..., 0]) ** 2 / x.shape[-1])
        dy = np.zeros(x.shape, np.float32)
        with np.errstate(over="ignore", divide="ignore"):
            solved = np.where(slope > 1.1, _BEYOND / np.maximum(slope, 1.1), 1.0)
        dy[..., 0] = solved * _sign(rng, *solved.shape)
        grads.append(on_grid(dy, plan.bf16))
    problem = _rows(like, inputs, tuple(grads))
    return replace(problem, tensors=weights_of(like.config, plan.contract.dtype, given))


def pairwise(plan: Plan, like: Problem) -> Problem:
    """Sums beside the end; of swiglu a product, of its gradient both results by turns."""
    rng, shape = plan.rng(HAZARD), (30, like.inputs[0].shape[-1])
    if plan.kind == "residual_add":
        inputs = pairs(rng, shape, plan.bf16)
        return _rows(like, inputs, (inputs[0],) if plan.backward else ())
    gate = on_grid(rng.uniform(2.0, 60.0, shape).astype(np.float32), plan.bf16)
    wide = gate.astype(np.float64)
    sigmoid = 1.0 / (1.0 + np.exp(-wide))
    slope = sigmoid * (1.0 + wide * (1.0 - sigmoid))
    silu = wide * sigmoid
    if not plan.backward:
        return _rows(like, (gate, on_grid((_sign(rng, *shape) * _BEYOND / silu).astype(np.float32), plan.bf16)))
    up = np.full(shape, 2.0, np.float32)
    dy = _BEYOND / np.where(np.arange(shape[1]) % 2 == 0, silu, 2.0 * slope) * _sign(rng, *shape)
    return _rows(like, (gate, up), (on_grid(dy.astype(np.float32), plan.bf16),))


def exponents(plan: Plan, like: Problem) -> Problem:
    """Gates at which exp2 of the sigmoid takes arguments of 127.9 to 128.1: below 128 it is finite."""
    rng, shape = plan.rng("exponents"), (30, like.inputs[0].shape[-1])
    exponent = rng.uniform(127.9, 128.02, shape)
    exponent[:15] = rng.uniform(127.99, 128.0, (15, shape[1]))
    gate = on_grid((-exponent * np.log(2.0)).astype(np.float32), plan.bf16)
    up, dy = (make("large", rng, shape, plan.bf16) for _ in range(2))
    problem = _rows(like, (gate, up), (dy,) if plan.backward else ())
    return replace(problem, name=f"{len(gate)} rows x {shape[1]}, exponents beside 128", hazards=("large",))


def rope(plan: Plan, like: Problem) -> Problem:
    """First halves are the largest number, and second halves are solved for."""
    rng, rows = plan.rng(HAZARD), 16
    position = 1
    rotation = tables(like.config)
    cos, sin = (x[position].astype(np.float64) for x in (rotation.cos, rotation.sin))
    sin = -sin if not plan.backward else sin  # first half: x1 * cos + x2 * sin
    made = []
    for x in like.inputs:
        half = x.shape[-1] // 2
        sign = _sign(rng, rows, *x.shape[1:-1], half)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            solved = (_BEYOND - _LARGEST * cos) / sin
        solved = np.where(np.isfinite(solved) & (np.abs(solved) < _LARGEST), solved, 1.0)
        both = np.concatenate([_LARGEST * sign, solved * sign], -1)
        made.append(on_grid(both.astype(np.float32), plan.bf16))
    problem = _rows(like, tuple(made), tuple(made) if plan.backward else ())
    return replace(problem, batch=flat_batch(rows, positions=np.full(rows, position)))


def linear(plan: Plan) -> Problem:
    """Rows that add two columns of the weights (of a backward: two features), whose sums lie beside the end."""
    rng, rows = plan.rng(HAZARD), 3
    tp = plan.contract.topology.tp
    problem = linear_problem(plan, "few rows", rows, 8 * tp, 70)
    names = [name for name in problem.region.weights if name.endswith(".weight")]
    given = {}
    for name in problem.region.weights:
        value = np.zeros_like(as_float32(problem.tensors[name]))
        if name in names:
            side = value if plan.backward else value.T
            side[0], side[1] = pairs(rng, side.shape[1:], plan.bf16)
        given[name] = value

    def picked(x: Array) -> Array:
        flat = np.zeros_like(matrix(x))
        flat[:, :2] = 1.0
        flat[-1, 1] = 0.5
        return flat.reshape(x.shape)

    grads = tuple(picked(g) if i == 0 else np.zeros_like(g) for i, g in enumerate(problem.grads))
    inputs = tuple(make("normal", rng, x.shape, plan.bf16) if plan.backward else picked(x) for x in problem.inputs)
    return replace(
        problem, name=f"{problem.name}, {HAZARD}", hazards=(HAZARD,), inputs=inputs, grads=grads, alone=(), start={},
        tensors=weights_of(problem.config, plan.contract.dtype, given),
    )  # fmt: skip


def head(plan: Plan) -> Problem:
    """Coefficients above the largest bfloat16, and targets of small probability: their gradient is the coefficient."""
    problem = head_problem(plan, "few rows", 9, 1000, 12)
    assert problem.head is not None
    coefficient = (_sign(plan.rng(HAZARD), 12) * _BEYOND).astype(np.float32)
    head = replace(problem.head, temperature=1.0, coefficient=coefficient)
    return replace(
        problem, name=f"{problem.name}, {HAZARD}", hazards=(HAZARD,), head=head, grads=(coefficient,), alone=()
    )


def attention(contract: Contract, seed: int) -> Problem:
    """Gradients of values: row 0 gives the largest number, row 1 a weight's share of a unit more."""
    bf16 = contract.dtype == "bfloat16"
    problem = whole(contract, "few rows", [2] * 4, ("normal",), 1, seed, True)
    rng = generator(seed, "attention", HAZARD)
    grad = np.empty_like(problem.grads[0])
    grad[0::2] = _LARGEST
    grad[1::2] = 2.0 * _HALF
    sign = _sign(rng, len(grad) // 2, *grad.shape[1:]).repeat(2, axis=0)
    return replace(
        problem, name=f"{problem.name}, {HAZARD}", hazards=(HAZARD,),
        grads=(on_grid((grad * sign).astype(np.float32), bf16),),
    )  # fmt: skip
