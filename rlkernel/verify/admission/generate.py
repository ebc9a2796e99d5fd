"""Problems of every region but attention: shapes and values where kernels go wrong.

Row classes of values are stacked into one problem, because rows are independent: every class costs a row, not a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlkernel.contract.build import Contract
from rlkernel.verify.admission.generate_attention import attention_problems
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
    Generator,
    generator,
    hazard_rows,
    make,
)

LINEAR = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")


@dataclass(frozen=True)
class Plan:
    """What to generate: of which region, for which kind of case."""

    contract: Contract
    kind: str
    backward: bool
    seed: int = 0

    @property
    def bf16(self) -> bool:
        """Whether values lie on the bfloat16 grid."""
        return self.contract.dtype == "bfloat16"

    def rng(self, *labels: object) -> Generator:
        """A generator of this plan's own for a label."""
        return generator(self.seed, self.kind, self.backward, *labels)

    def normal(self, *shape: int, label: str = "") -> Array:
        """Normal values on the grid."""
        return make("normal", self.rng("normal", label, shape), shape, self.bf16)


def _gradients(plan: Plan, problem: Problem, shapes: list[tuple[int, ...]], hazards: tuple[str, ...] = ()) -> Problem:
    """The problem with gradients of its outputs (one class a row, or normal) and chains that were begun before."""
    rows = len(problem.batch.tokens)
    grads = []
    for i, shape in enumerate(shapes):
        rng = plan.rng("gradient", problem.name, i)
        if hazards:
            grads.append(hazard_rows(hazards, rows // len(hazards), shape, rng, plan.bf16)[0])
        else:
            grads.append(make("normal", rng, (rows, *shape), plan.bf16))
    sizes = problem.config.weight_shapes()
    start = {
        name: plan.rng("start", name).standard_normal(sizes[name]).astype(np.float32) for name in problem.region.weights
    }
    return replace(problem, grads=tuple(grads), start=start)


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
            problem = _gradients(plan, problem, [x.shape[1:] for x in inputs])
        problems.append(problem)
    return [*problems, _specials(plan, problems[0]), *_edges(problems[0])]


def _specials(plan: Plan, like: Problem) -> Problem:
    """NaN and infinities in the inputs, in a problem of their own where rows are summed over."""
    rows = 2 * len(SPECIAL_HAZARDS)
    inputs = tuple(
        hazard_rows(SPECIAL_HAZARDS, 2, x.shape[1:], plan.rng("special", i), plan.bf16)[0]
        for i, x in enumerate(like.inputs)
    )
    labels = tuple(h for h in SPECIAL_HAZARDS for _ in range(2))
    problem = replace(
        like, shape_class="few rows", name=f"{rows} rows", hazards=labels, inputs=inputs, batch=flat_batch(rows),
        alone=(), views=False, grads=tuple(g[:rows] for g in like.grads),
    )  # fmt: skip
    return problem


def _edges(problem: Problem) -> list[Problem]:
    """One row, and no row, of a problem."""
    one = replace(
        problem.take([0]),
        shape_class="one row",
        name=f"1 row, {problem.name}",
        hazards=problem.hazards[:1],
        views=False,
    )
    none = replace(problem.take([]), shape_class="zero rows", name="0 rows", hazards=("normal",), views=False)
    return [one, none]


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


def _linear_problem(
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
    return _gradients(plan, problem, shapes, hazards)


def _linear(plan: Plan) -> list[Problem]:
    tp, head_dim = plan.contract.topology.tp, plan.contract.config.head_dim
    leaf = tp * (head_dim if plan.kind == "o_proj" else 16)
    hazards = FINITE_HAZARDS if plan.backward else HAZARDS
    problems = [
        _linear_problem(plan, "few rows", 0, 53, 70, hazards, 3),
        _linear_problem(plan, "a leaf of one tile", 7, leaf, 64),
        _linear_problem(plan, "a leaf of one element", 2, tp, 66),
        _linear_problem(plan, "one row", 1, 70, 130),
    ]
    if plan.backward:
        problems.append(_linear_problem(plan, "many rows", 530, 20, 24))
        problems.append(_linear_problem(plan, "few rows", 0, 20, 24, SPECIAL_HAZARDS, 2))
        problems.append(_linear_problem(plan, "K not a multiple of the tile", 4, 24, 1030))
    else:
        problems.append(_linear_problem(plan, "many rows", 603, 12, 70))
        problems.append(_linear_problem(plan, "K not a multiple of the tile", 5, 1030, 66))
    return [*problems, _edges(problems[1])[1]]


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
    return problems + _edges(problems[0])


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
    return problems + _edges(problems[0])


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
            problem = _gradients(plan, problem, [(width,)])
            if vocabulary == 3:
                grad, _ = hazard_rows(HAZARDS, 1, (width,), plan.rng("gradient", vocabulary), plan.bf16)
                problem = replace(problem, grads=(grad[:rows],))
        problems.append(problem)
    return problems + _edges(problems[0])


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
        _head_problem(plan, "many rows", 12, 257, 37),
        _head_problem(plan, "K not a multiple of the tile", 70, 66, 3),
        _head_problem(plan, "one row", 16, 1000, 1),
        _head_problem(plan, "one column", 4, 1, 2),
    ]
    problems += [_head_problem(plan, "one row", 1, 300, 0, (hazard,)) for hazard in SPECIAL_HAZARDS]
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
    **dict.fromkeys(LINEAR, _linear),
}


def problems_of(contract: Contract, kind: str, case: str, seed: int = 0) -> list[Problem]:
    """Problems of a region kind in a case, cheapest classes of errors first."""
    plan = Plan(contract, kind, case == "trainer_backward", seed)
    if kind == "attention":
        return attention_problems(plan.contract, case, seed)
    return _MAKERS[kind](plan)
