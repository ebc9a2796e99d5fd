"""Problems of every region but attention: shapes and values where kernels go wrong.

Row classes of values are stacked into one problem, because rows are independent: every class costs a row, not a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from rlkernel.contract.build import Contract
from rlkernel.contract.constants import LOG2E
from rlkernel.reference.arith import add, div, mul
from rlkernel.reference.lookup import primitive
from rlkernel.verify.admission import double_rounding
from rlkernel.verify.admission.classes import LINEAR
from rlkernel.verify.admission.execute import tables
from rlkernel.verify.admission.generate_attention import attention_problems
from rlkernel.verify.admission.generate_linear import linear_problems
from rlkernel.verify.admission.plan import Plan, bulk, edges, specials, with_gradients
from rlkernel.verify.admission.problem import (
    Array,
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
    found = [*problems, specials(plan, problems[0]), *edges(problems[0]), bulk(plan, problems[0])]
    if not plan.bf16 and (ties := _norm_ties(plan, problems[0], lanes)) is not None:
        found.insert(len(problems), ties)
    return found


def _norm_ties(plan: Plan, like: Problem, lanes: int) -> Problem | None:
    """Fused multiply-adds beside ties, and normal rows; None where a lane has one element (its product is exact)."""
    rng = plan.rng("double rounding")
    hits, normal = 24, 8
    config, region = like.config, like.region
    inputs: list[Array] = []
    grads: list[Array] = []
    start: dict[str, Array] = {}
    if not plan.backward:
        if plan.kind == "qk_norm" or lanes != 256:
            return None
        config = probe_config(plan.contract, hidden_size=2 * lanes)
        region = find_region(config, plan.kind)
        rows = double_rounding.norm_rows(rng, hits, 2 * lanes, lanes)
        inputs = [np.concatenate([rows, make("normal", rng, (normal, 2 * lanes), False)])]
        weight = make("normal", rng, (2 * lanes,), False)
    else:
        width = like.inputs[0].shape[-1]
        if width % 4 or not 8 <= width <= 256:
            return None
        weight = np.ones(width, np.float32)
        for x, name in zip(like.inputs, region.weights, strict=True):
            shape = x.shape[1:]
            each = math.prod(shape[:-1])
            rows, dy, start[name] = double_rounding.norm_gradient_rows(rng, hits * each, width)
            others = [make("normal", rng, (normal, *shape), False) for _ in range(2)]
            inputs.append(np.concatenate([rows.reshape(hits, *shape), others[0]]))
            grads.append(np.concatenate([dy.reshape(hits, *shape), others[1]]))
    labels = (double_rounding.HAZARD,) * hits + ("normal",) * normal
    return Problem(
        "few rows", f"{hits + normal} rows x {len(weight)}, ties", labels, region, config, flat_batch(hits + normal),
        tuple(inputs), weights_of(config, plan.contract.dtype, dict.fromkeys(region.weights, weight)),
        grads=tuple(grads), start=start, alone=(0,),
    )  # fmt: skip


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
    if plan.kind == "swiglu" and plan.bf16 and not plan.backward:
        problems.append(_swiglu_borders(plan, problems[0]))
    return [*problems, *edges(problems[0]), bulk(plan, problems[0])]


def _swiglu_borders(plan: Plan, like: Problem) -> Problem:
    """Every pair of a gate and a significand of up whose float32 result lies within a unit of a border of bfloat16.

    There a float32 that is off by a unit gives another bfloat16. Of normal values one in 2^15 lies there.
    """
    upper = np.arange(0x3980, 0x4180, dtype=np.uint32)  # 2^-12 to 16
    gates = np.concatenate([upper, upper | 0x8000])
    gates = (gates << 16).view(np.float32)
    ups = (np.arange(0x3F80, 0x4000, dtype=np.uint32) << 16).view(np.float32)  # 1 to 2
    gate = torch.from_numpy(gates)
    exp2 = primitive(plan.contract.entries[("trainer_forward", "swiglu")].primitive("exp2"))
    sigmoid = div(torch.ones_like(gate), add(1.0, exp2(mul(-gate, LOG2E))))
    result = mul(mul(gate, sigmoid)[:, None], torch.from_numpy(ups)[None]).numpy()
    off = (result.view(np.uint32) & 0xFFFF).astype(np.int64) - 0x8000
    at_gate, at_up = np.nonzero(np.abs(off) <= 1)
    width = like.inputs[0].shape[1]
    rows = -(-len(at_gate) // width)
    rng = plan.rng("borders of bfloat16")
    first, second = (make("normal", rng, (rows * width,), True) for _ in range(2))
    scale = rng.choice([-1.0, 1.0], len(at_gate)) * 2.0 ** rng.integers(-3, 4, len(at_gate))
    first[: len(at_gate)], second[: len(at_gate)] = gates[at_gate], (ups[at_up] * scale).astype(np.float32)
    inputs = (first.reshape(rows, width), second.reshape(rows, width))
    return replace(
        like, shape_class="few rows", name=f"{rows} rows x {width}", hazards=("borders of bfloat16",), inputs=inputs,
        batch=flat_batch(rows), alone=(), views=False,
    )  # fmt: skip


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
    ties = [] if plan.bf16 else [_rope_ties(plan, problems[0])]
    return [*problems, *ties, *edges(problems[0]), bulk(plan, problems[0])]


def _rope_ties(plan: Plan, like: Problem) -> Problem:
    """Rotations whose fused multiply-add adds a tail to a tie, and normal rows."""
    rng, rows = plan.rng("double rounding"), len(like.batch.tokens)
    hits = rows - 6
    rope = tables(like.config)
    cos, sin = (x[like.batch.positions[:hits]] for x in (rope.cos, rope.sin))
    made = []
    for x in like.inputs:
        values = make("normal", rng, x.shape, False)
        values[:hits] = double_rounding.rotated_rows(rng, x.shape[1], cos, -sin if plan.backward else sin)
        made.append(values)
    labels = (double_rounding.HAZARD,) * hits + ("normal",) * (rows - hits)
    problem = replace(like, name=f"{like.name}, ties", hazards=labels, alone=(2,), views=False)
    return replace(problem, grads=tuple(made)) if plan.backward else replace(problem, inputs=tuple(made))


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
        labels: tuple[str, ...] = ("normal",)
        if vocabulary == 130 and not plan.backward:
            ids[-len(special) :] = np.arange(len(special))
            labels = ("normal",) * (rows - len(special)) + HAZARDS
        weights = weights_of(config, plan.contract.dtype, {region.weights[0]: table})
        problem = Problem(
            "many rows" if rows > 20 else "few rows", f"{rows} ids of {vocabulary} x {width}", labels, region,
            config, flat_batch(rows, ids), (ids,), weights, alone=(0, rows - 1),
        )  # fmt: skip
        if plan.backward:
            problem = with_gradients(plan, problem, [(width,)])
            if vocabulary == 3:
                grad, _ = hazard_rows(HAZARDS, 1, (width,), plan.rng("gradient", vocabulary), plan.bf16)
                problem = replace(problem, grads=(grad[:rows],))
        problems.append(problem)
    return problems + edges(problems[0])


def head_problem(
    plan: Plan, shape_class: str, hidden: int, vocabulary: int, rows: int, hazards: tuple[str, ...] = ()
) -> Problem:
    """With hazards, row i selects column i of the head exactly: its logits are values of class i."""
    config = probe_config(plan.contract, vocab_size=vocabulary, hidden_size=hidden)
    region = find_region(config, "logprob")
    rng = plan.rng("head", shape_class, hidden, vocabulary, hazards)
    labels = hazards or ("normal",)
    if hazards == (double_rounding.HAZARD,):
        x, weight = np.zeros((rows, hidden), np.float32), np.zeros((vocabulary, hidden), np.float32)
        weight[:, 0::2], weight[:, 1::2] = double_rounding.pairs(rng, (vocabulary, hidden // 2), 1)
        for row in range(rows):
            place = 2 * (row % (hidden // 2))
            x[row, place], x[row, place + 1] = double_rounding.pairs(rng, (), 1)
    elif hazards:
        x = np.eye(len(hazards), hidden, dtype=np.float32)
        weight = np.ascontiguousarray(hazard_rows(hazards, 1, (vocabulary,), rng, plan.bf16)[0].T)
    else:
        x, weight = make("normal", rng, (rows, hidden), plan.bf16), plan.normal(vocabulary, hidden)
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
        head_problem(plan, "few rows", count, 300, 0, FINITE_HAZARDS),
        head_problem(plan, "padding of the vocabulary", 9, 129, 5),
        head_problem(plan, "many rows", 12, 257, 601),
        head_problem(plan, "K not a multiple of the tile", 70, 66, 3),
        head_problem(plan, "one row", 16, 1000, 1),
        head_problem(plan, "one column", 4, 1, 2),
    ]
    if not plan.bf16:
        problems.append(head_problem(plan, "few rows", 12, 140, 96, (double_rounding.HAZARD,)))
    problems += [head_problem(plan, "one row", 1, 300, 0, (hazard,)) for hazard in SPECIAL_HAZARDS]
    if plan.backward and plan.bf16:
        problems.append(replace(head_problem(plan, "many rows", 8, 4000, 256), bulk=True))
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
