"""Problems of the projections: tiles, leaves, depth blocks, ragged edges, and sums that cancel exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlkernel.kernels.cpu.convert import as_float32
from rlkernel.verify.admission import double_rounding
from rlkernel.verify.admission.plan import Plan, edges, with_gradients
from rlkernel.verify.admission.problem import (
    Array,
    Problem,
    find_region,
    flat_batch,
    matrix,
    probe_config,
    weights_of,
)
from rlkernel.verify.admission.values import FINITE_HAZARDS, HAZARDS, SPECIAL_HAZARDS, hazard_rows, make


def _linear_dimensions(plan: Plan, depth: int, outputs: int) -> dict[str, int]:
    """Dimensions of a probe whose projection reduces about ``depth`` elements to about ``outputs`` features."""
    tp, head_dim = plan.contract.topology.tp, plan.contract.config.head_dim
    if plan.kind == "qkv_proj":
        groups = max(2, outputs // (4 * tp * head_dim))  # several KV groups: their order is part of the gradient
        return {"hidden_size": depth, "num_heads": 2 * tp * groups, "num_kv_heads": tp * groups}
    if plan.kind == "gate_up_proj":
        return {"hidden_size": depth, "intermediate_size": tp * max(1, outputs // 2 // tp)}
    if plan.kind == "o_proj":
        heads = tp * max(1, depth // (tp * head_dim))
        return {"hidden_size": outputs, "num_heads": heads, "num_kv_heads": heads}
    return {"hidden_size": outputs, "intermediate_size": tp * max(1, depth // tp)}


def linear_problem(
    plan: Plan, shape_class: str, rows: int, depth: int, outputs: int, hazards: tuple[str, ...] = (), each: int = 1
) -> Problem:
    config = probe_config(plan.contract, **_linear_dimensions(plan, depth, outputs))
    region = find_region(config, plan.kind)
    sizes = config.weight_shapes()
    matrices = [name for name in region.weights if name.endswith(".weight")]
    given = {}
    for name in region.weights:
        rng = plan.rng("weight", shape_class, name)
        given[name] = make("normal", rng, sizes[name], plan.bf16)
        if hazards and name in matrices:  # every class of rows meets every class of weights
            for i, hazard in enumerate(hazards):
                given[name][i :: len(hazards)] = make(hazard, rng, given[name][i :: len(hazards)].shape, plan.bf16)
    width = sizes[matrices[0]][1]
    rng = plan.rng("x", shape_class)
    if hazards:
        rows = each * len(hazards)
        x, labels = hazard_rows(hazards, each, (width,), rng, plan.bf16)
    else:
        x, labels = make("normal", rng, (rows, width), plan.bf16), ("normal",)
    if plan.kind == "o_proj":
        x = x.reshape(rows, config.num_heads, config.head_dim)
    features = sum(sizes[name][0] for name in matrices)
    problem = Problem(
        shape_class, f"{rows} rows x {width} -> {features}", labels, region, config, flat_batch(rows), (x,),
        weights_of(config, plan.contract.dtype, given), alone=(0, rows // 2, rows - 1) if rows > 3 else (),
        views=bool(hazards),
    )  # fmt: skip
    if not plan.backward:
        return problem
    shapes: list[tuple[int, ...]] = [(sizes[name][0],) for name in matrices]
    if plan.kind == "qkv_proj":
        shapes = [(sizes[name][0] // config.head_dim, config.head_dim) for name in matrices]
    return with_gradients(plan, problem, shapes, hazards)


def _cancelling(plan: Plan) -> Problem:
    """Sums that are exactly zero: what is left is what the roundings of the chain leave, in any dtype of the output.

    Halves repeat in x and in the gradients and are negated in the weights; the second half of the tokens is negated.
    """
    problem = linear_problem(plan, "few rows", 8, 64, 64)
    matrices = {name for name in problem.region.weights if name.endswith(".weight")}
    given = {}
    for name in problem.region.weights:
        values = as_float32(problem.tensors[name]).copy()
        if name in matrices:
            n, k = values.shape[0] // 2, values.shape[1] // 2
            values[:n, k : 2 * k] = -values[:n, :k]
            values[n : 2 * n, : 2 * k] = -values[:n, : 2 * k]
            values[2 * n :], values[:, 2 * k :] = 0.0, 0.0
        else:
            values[:] = 0.0
        given[name] = values

    def halves(x: Array, negate: bool) -> Array:
        flat = matrix(x).copy()
        half, rows = flat.shape[1] // 2, len(flat) // 2
        flat[:, half : 2 * half] = flat[:, :half]
        flat[rows:] = -flat[:rows] if negate else flat[:rows]
        return flat.reshape(x.shape)

    return replace(
        problem, hazards=("exact cancellation",), tensors=weights_of(problem.config, plan.contract.dtype, given),
        inputs=tuple(halves(x, True) for x in problem.inputs), grads=tuple(halves(g, False) for g in problem.grads),
        start={}, alone=(),
    )  # fmt: skip


def _double_rounding(plan: Plan) -> Problem:
    """Rows with two neighbouring elements, of which a chain gets a tail and then a tie; and normal rows.

    In a backward these neighbours are features, of one weight a row; the row's step of the weight gradient's chain
    starts from a tail and adds a tie.
    """
    tp = plan.contract.topology.tp
    problem = linear_problem(plan, "few rows", 24, 8 * tp, 16 * tp)
    names = [name for name in problem.region.weights if name.endswith(".weight")]
    sizes = problem.config.weight_shapes()
    rng = plan.rng("double rounding")
    given = {name: np.zeros(sizes[name], np.float32) for name in problem.region.weights}
    x = matrix(problem.inputs[0]).copy()
    rows, width = 16, x.shape[1]
    labels = (double_rounding.HAZARD,) * rows + ("normal",) * (len(x) - rows)
    grads = tuple(g.copy() for g in problem.grads)
    start = {name: value.copy() for name, value in problem.start.items()}
    if not plan.backward:
        for name in names:
            given[name][:, 0::2], given[name][:, 1::2] = double_rounding.pairs(rng, (sizes[name][0], width // 2))
        x[:rows] = 0.0
        for row in range(rows):
            place = 2 * (row * (width // 2) // rows)
            x[row, place], x[row, place + 1] = double_rounding.pairs(rng, ())
    else:
        for g in grads:
            g[:rows] = 0.0
        for name in names:
            given[name][0::2], given[name][1::2] = double_rounding.pairs(rng, (sizes[name][0] // 2, width))
        for row in range(rows):
            number = row % len(names)
            half = sizes[names[number]][0] // 2
            place = 2 * ((row // len(names)) * half // -(-rows // len(names))) % (2 * half)
            tails, x[row] = double_rounding.pairs(rng, (width,))
            tail, factor = double_rounding.pairs(rng, ())
            matrix(grads[number])[row, place], matrix(grads[number])[row, place + 1] = tail, factor
            start[names[number]][place + 1] = tail * tails
    return replace(
        problem, hazards=labels, tensors=weights_of(problem.config, plan.contract.dtype, given),
        inputs=(x.reshape(problem.inputs[0].shape),), grads=grads, start=start, alone=(0, 20), views=False,
    )  # fmt: skip


_LONG = ((4099, 96, 1030), (515, 1031, 1024), (2050, 300, 2051), (33, 4099, 4096), (1, 2048, 50000))
"""(rows, depth, features) of problems with millions of outputs: many tiles in every direction, and ragged edges."""


def long_problem(plan: Plan, number: int) -> Problem:
    """A problem with millions of outputs, for comparisons with the plain kernel: shapes by turns, values by number."""
    rows, depth, outputs = _LONG[number % len(_LONG)]
    again = replace(plan, seed=plan.seed + number)
    hazards = (*FINITE_HAZARDS, "normal") if number // len(_LONG) % 2 else ()
    each = -(-rows // len(hazards)) if hazards else 1
    problem = linear_problem(again, "many tiles", rows, depth, outputs, hazards, each)
    return replace(problem, alone=(), views=False)


def linear_problems(plan: Plan) -> list[Problem]:
    """Problems of a projection, cheapest classes of errors first."""
    tp, head_dim = plan.contract.topology.tp, plan.contract.config.head_dim
    leaf = tp * (head_dim if plan.kind == "o_proj" else 16)
    hazards = FINITE_HAZARDS if plan.backward else HAZARDS
    problems = [
        linear_problem(plan, "few rows", 0, 53, 70, hazards, 3),
        linear_problem(plan, "a leaf of one tile", 7, leaf, 64),
        _cancelling(plan),
        linear_problem(plan, "a leaf of one element", 2, tp, 300),
        linear_problem(plan, "one row", 1, 70, 300),
    ]
    if not plan.bf16:
        problems.append(_double_rounding(plan))
    if plan.backward:
        problems.append(linear_problem(plan, "many rows", 530, 20, 24))
        problems.append(linear_problem(plan, "few rows", 0, 20, 24, SPECIAL_HAZARDS, 2))
        problems.append(linear_problem(plan, "K not a multiple of the tile", 4, 24, 1030))
    else:
        problems.append(linear_problem(plan, "many rows", 603, 12, 70))
        problems.append(linear_problem(plan, "K not a multiple of the tile", 5, 1030, 66))
    return [*problems, edges(problems[1])[1]]
