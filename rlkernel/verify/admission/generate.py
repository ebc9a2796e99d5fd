"""Problems of every region but attention: shapes and values where kernels go wrong.

Row classes of values are stacked into one problem, because rows are independent: every class costs a row, not a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rlkernel.contract.build import Contract
from rlkernel.verify.admission.generate_attention import attention_problems
from rlkernel.verify.admission.generate_linear import linear_problems
from rlkernel.verify.admission.plan import Plan, bulk, edges, specials, with_gradients
from rlkernel.verify.admission.problem import (
    HeadInputs,
    Problem,
    find_region,
    flat_batch,
    probe_config,
    weights_of,
)
from rlkernel.verify.admission.values import (
    FINITE_HAZARDS,
    HAZARDS,
    SPECIAL_HAZARDS,
    hazard_rows,
    make,
)

LINEAR = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")


def _norm(plan: Plan) -> list[Problem]:
    head = plan.kind == "qk_norm"
    entry = plan.contract.entries[("trainer_forward", plan.kind)]
    lanes = entry.split.lanes
    if head:
        widths = [plan.contract.config.head_dim]
    elif lanes == 256:
        widths = [64, 5, 255, 257, 300, 1031, 1]
    else:
        widths = sorted({lanes, lanes // 2 + 1, max(1, lanes - 3)}, reverse=True)
    hazards = FINITE_HAZARDS if plan.backward else HAZARDS
    problems = []
    for i, width in enumerate(widths):
        config = probe_config(plan.contract, **({} if head else {"hidden_size": width}))
        region = find_region(config, plan.kind)
        stacked = i == 0
        # long rows: a product rounded apart moves the row's sum in few rows only
        rows = 4 * len(hazards) if stacked else 3 if width < 600 else 64
        given = {name: plan.normal(width, label=name) for name in region.weights}
        inputs = []
        for number, port in enumerate(region.inputs):
            shape = (config.num_heads if number == 0 else config.num_kv_heads, width) if head else (width,)
            rng = plan.rng("x", width, port)
            inputs.append(
                hazard_rows(hazards, 4, shape, rng, plan.bf16)[0]
                if stacked
                else make("normal", rng, (rows, *shape), plan.bf16)
            )
        labels = tuple(h for h in hazards for _ in range(4)) if stacked else ("normal",)
        problem = Problem(
            "many rows" if stacked else "an axis that is no multiple of the lanes", f"{rows} rows x {width}", labels,
            region, config, flat_batch(rows), tuple(inputs), weights_of(config, plan.contract.dtype, given),
            alone=(0, rows // 2, rows - 1), views=stacked,
        )  # fmt: skip
        if plan.backward:
            problem = with_gradients(plan, problem, [x.shape[1:] for x in inputs])
        problems.append(problem)
    return [*problems, specials(plan, problems[0]), *edges(problems[0]), bulk(plan, problems[0])]


def _pairwise(plan: Plan) -> list[Problem]:
    """Two arrays of one shape, element by element: residual_add and swiglu."""
    axis = "hidden_size" if plan.kind == "residual_add" else "intermediate_size"
    problems = []
    for width, rows_each in ((33, 6), (1, 2), (700, 2)):
        config = probe_config(plan.contract, **{axis: width})
        region = find_region(config, plan.kind)
        first, labels = hazard_rows(HAZARDS, rows_each, (width,), plan.rng("first", width), plan.bf16)
        # the other operand's classes are the same ones, moved on by one row, so that classes meet
        second, _ = hazard_rows(HAZARDS, rows_each, (width,), plan.rng("second", width), plan.bf16)
        second = np.roll(second, 1, axis=0)
        rows = len(first)
        problem = Problem(
            "many rows" if rows > 20 else "few rows", f"{rows} rows x {width}", labels, region, config,
            flat_batch(rows), (first, np.ascontiguousarray(second)), weights_of(config, plan.contract.dtype, {}),
            alone=(0, rows - 1), views=width == 33,
        )  # fmt: skip
        if plan.backward:
            grad, _ = hazard_rows(HAZARDS, rows_each, (width,), plan.rng("gradient", width), plan.bf16)
            problem = replace(problem, grads=(np.ascontiguousarray(np.roll(grad, 2, axis=0)),))
        problems.append(problem)
    return [*problems, *edges(problems[0]), bulk(plan, problems[0])]


def _rope(plan: Plan) -> list[Problem]:
    head_dim = plan.contract.config.head_dim
    problems = []
    for heads, kv_heads, rows_each in ((4, 2, 3), (1, 1, 2)):
        config = probe_config(plan.contract, num_heads=heads, num_kv_heads=kv_heads)
        region = find_region(config, "rope")
        q, labels = hazard_rows(HAZARDS, rows_each, (heads, head_dim), plan.rng("q", heads), plan.bf16)
        k, _ = hazard_rows(HAZARDS, rows_each, (kv_heads, head_dim), plan.rng("k", heads), plan.bf16)
        rows = len(q)
        positions = plan.rng("positions", heads).integers(0, config.max_position, rows)
        positions[:2] = (0, config.max_position - 1)
        problem = Problem(
            "many rows", f"{rows} rows of {heads} and {kv_heads} heads x {head_dim}", labels, region, config,
            flat_batch(rows, positions=positions), (q, k), weights_of(config, plan.contract.dtype, {}),
            alone=(0, 1, rows - 1), views=heads == 4,
        )  # fmt: skip
        problems.append(replace(problem, grads=(q[::-1].copy(), k)) if plan.backward else problem)
    return [*problems, *edges(problems[0]), bulk(plan, problems[0])]


def _embedding(plan: Plan) -> list[Problem]:
    problems = []
    for vocabulary, width, rows in ((130, 33, 40), (3, 1, 9), (70, 200, 6)):
        config = probe_config(plan.contract, vocab_size=vocabulary, hidden_size=width)
        region = find_region(config, "embedding")
        table = plan.normal(vocabulary, width, label="table")
        special, _ = hazard_rows(HAZARDS, 1, (width,), plan.rng("table", vocabulary), plan.bf16)
        table[: len(special)] = special[:vocabulary]
        ids = plan.rng("ids", vocabulary).integers(0, vocabulary, rows)
        ids[: rows // 3] = ids[0]  # repeated ids: their gradients add in token order
        weights = weights_of(config, plan.contract.dtype, {region.weights[0]: table})
        problem = Problem(
            "many rows" if rows > 20 else "few rows", f"{rows} ids of {vocabulary} x {width}", ("normal",), region,
            config, flat_batch(rows, ids), (ids,), weights, alone=(0, rows - 1),
        )  # fmt: skip
        if plan.backward:
            problem = with_gradients(plan, problem, [(width,)])
            if vocabulary == 3:
                grad, _ = hazard_rows(HAZARDS, 1, (width,), plan.rng("gradient", vocabulary), plan.bf16)
                problem = replace(problem, grads=(grad[:rows],))
        problems.append(problem)
    return problems + edges(problems[0])


def _head_problem(
    plan: Plan, shape_class: str, hidden: int, vocabulary: int, rows: int, hazards: tuple[str, ...] = ()
) -> Problem:
    """With hazards, row i selects column i of the head exactly: its logits are values of class i."""
    config = probe_config(plan.contract, vocab_size=vocabulary, hidden_size=hidden)
    region = find_region(config, "logprob")
    rng = plan.rng("head", shape_class, hidden, vocabulary, hazards)
    if hazards:
        x = np.eye(len(hazards), hidden, dtype=np.float32)
        weight = np.ascontiguousarray(hazard_rows(hazards, 1, (vocabulary,), rng, plan.bf16)[0].T)
        labels = hazards
    else:
        x, weight, labels = make("normal", rng, (rows, hidden), plan.bf16), plan.normal(vocabulary, hidden), ("normal",)
    rows = len(x)
    targets = rng.integers(0, vocabulary, rows)
    targets[-1] = vocabulary - 1
    coefficient = rng.standard_normal(rows).astype(np.float32)
    coefficient[rows // 2] = 0.0
    temperature = float(rng.choice([0.7, 1.0, 1.3]))
    problem = Problem(
        shape_class, f"{rows} rows x {hidden} -> {vocabulary}", labels, region, config,
        flat_batch(rows), (x,), weights_of(config, plan.contract.dtype, {region.weights[0]: weight}),
        head=HeadInputs(targets, temperature, coefficient), alone=(0, rows - 1) if rows > 1 else (),
        views=bool(hazards),
    )  # fmt: skip
    if plan.backward:
        start = plan.rng("start", vocabulary, hidden).standard_normal((vocabulary, hidden)).astype(np.float32)
        problem = replace(problem, grads=(coefficient,), start={region.weights[0]: start})
    return problem


def _head(plan: Plan) -> list[Problem]:
    count = len(FINITE_HAZARDS)
    problems = [
        _head_problem(plan, "few rows", count, 300, 0, FINITE_HAZARDS),
        _head_problem(plan, "padding of the vocabulary", 9, 129, 5),
        _head_problem(plan, "many rows", 12, 257, 601),
        _head_problem(plan, "K not a multiple of the tile", 70, 66, 3),
        _head_problem(plan, "one row", 16, 1000, 1),
        _head_problem(plan, "one column", 4, 1, 2),
    ]
    problems += [_head_problem(plan, "one row", 1, 300, 0, (hazard,)) for hazard in SPECIAL_HAZARDS]
    if plan.backward and plan.bf16:
        problems.append(replace(_head_problem(plan, "many rows", 8, 4000, 256), bulk=True))
    empty = problems[1].take([])
    return [*problems, replace(empty, shape_class="zero rows", name="0 rows", hazards=("normal",), views=False)]


_MAKERS: dict[str, Callable[[Plan], list[Problem]]] = {
    "embedding": _embedding,
    "rms_norm": _norm,
    "final_norm": _norm,
    "qk_norm": _norm,
    "rope": _rope,
    "residual_add": _pairwise,
    "swiglu": _pairwise,
    "logprob": _head,
    **dict.fromkeys(LINEAR, linear_problems),
}


def problems_of(contract: Contract, kind: str, case: str, seed: int = 0) -> list[Problem]:
    """Problems of a region kind in a case, cheapest classes of errors first."""
    plan = Plan(contract, kind, case == "trainer_backward", seed)
    if kind == "attention":
        return attention_problems(plan.contract, case, seed)
    return _MAKERS[kind](plan)
