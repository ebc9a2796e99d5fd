"""Problems beyond the sizes of the others: what goes wrong only from some head, leaf, split, share or token on.

They belong to an admission alone; the known-answer vectors are made of the smaller ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlkernel.contract.build import Contract
from rlkernel.verify.admission import overflow
from rlkernel.verify.admission.classes import LINEAR, NEIGHBOURS
from rlkernel.verify.admission.generate import head_problem, problems_of
from rlkernel.verify.admission.generate_attention import paged, whole
from rlkernel.verify.admission.generate_linear import linear_problem
from rlkernel.verify.admission.plan import Plan, with_gradients
from rlkernel.verify.admission.problem import (
    Problem,
    find_region,
    flat_batch,
    probe_config,
    weights_of,
)
from rlkernel.verify.admission.values import Array, make


def apart(items: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """bool: groups of ``items`` (a power of two), a pair for each binary digit of a place: one has it, one has not.

    Of any two places of a group there is a group in which the first is chosen and the second is not.
    """
    places = np.arange(items)
    digits = [(places >> digit & 1).astype(bool) for digit in range(items.bit_length() - 1)]
    return np.concatenate([mask for digit in digits for mask in (digit, ~digit)])


_ROWS, _SEQUENCES = apart(16), apart(4)


def _with_nan(problem: Problem, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Problem:
    """The problem with chosen rows of every input and gradient all NaN."""

    def part(x: Array) -> Array:
        if x.dtype != np.float32:
            return x
        changed = x.copy()
        changed[chosen] = np.nan
        return changed

    return replace(
        problem, shape_class=NEIGHBOURS, hazards=tuple("NaN" if bad else "normal" for bad in chosen), alone=(),
        views=False, bulk=False, inputs=tuple(part(x) for x in problem.inputs),
        grads=tuple(part(g) for g in problem.grads),
    )  # fmt: skip


def _like(plan: Plan, like: Problem, rows: int, shape_class: str) -> Problem:
    """Normal rows in the shape of another problem's."""
    shapes = [x.shape[1:] for x in like.inputs]
    inputs = tuple(make("normal", plan.rng(shape_class, rows, i), (rows, *s), plan.bf16) for i, s in enumerate(shapes))
    positions = plan.rng(shape_class, "positions", rows).integers(0, like.config.max_position, rows)
    problem = replace(
        like, shape_class=shape_class, name=f"{rows} rows", hazards=("normal",), inputs=inputs, start={}, alone=(),
        batch=flat_batch(rows, positions=positions), views=False,
    )  # fmt: skip
    return with_gradients(plan, problem, [g.shape[1:] for g in like.grads]) if plan.backward else problem


def _norm(plan: Plan, first: Problem) -> list[Problem]:
    problems = [_with_nan(_like(plan, first, len(_ROWS), NEIGHBOURS), _ROWS), overflow.norm(plan, first)]
    if plan.kind == "qk_norm" or plan.contract.entries[("trainer_forward", plan.kind)].split.lanes != 256:
        return problems
    width, rows = 4099, 24
    config = probe_config(plan.contract, hidden_size=width)
    region = find_region(config, plan.kind)
    given = {name: plan.normal(width, label=name) for name in region.weights}
    like = replace(
        first, region=region, config=config, inputs=(np.zeros((1, width), np.float32),),
        tensors=weights_of(config, plan.contract.dtype, given),
        grads=(np.zeros((1, width), np.float32),) if plan.backward else (),
    )  # fmt: skip
    return [
        *problems,
        replace(_like(plan, like, rows, "an axis that is no multiple of the lanes"), name=f"{rows} rows x {width}"),
    ]


def _pairwise(plan: Plan, first: Problem) -> list[Problem]:
    width = 35
    axis = "hidden_size" if plan.kind == "residual_add" else "intermediate_size"
    if axis == "intermediate_size":
        width *= plan.contract.topology.tp
    config = probe_config(plan.contract, **{axis: width})
    empty = np.zeros((1, width), np.float32)
    like = replace(
        first, config=config, region=find_region(config, plan.kind), inputs=(empty, empty),
        grads=(empty,) if plan.backward else (), tensors=weights_of(config, plan.contract.dtype, {}),
    )  # fmt: skip
    # odd numbers of elements: a few more than whole vectors, and enough for another thread's share
    odd = [_like(plan, like, rows, "an odd number of elements") for rows in (3, 1001)]
    problems = [_with_nan(_like(plan, like, len(_ROWS), NEIGHBOURS), _ROWS), *odd, overflow.pairwise(plan, like)]
    if plan.kind == "swiglu":
        problems.append(overflow.exponents(plan, like))
    return problems


def _rope(plan: Plan, first: Problem) -> list[Problem]:
    config = probe_config(plan.contract, num_heads=26, num_kv_heads=13)
    depth = config.head_dim
    shapes = tuple(np.zeros((1, heads, depth), np.float32) for heads in (26, 13))
    like = replace(
        first, config=config, region=find_region(config, "rope"), inputs=shapes, grads=shapes if plan.backward else (),
        tensors=weights_of(config, plan.contract.dtype, {}),
    )  # fmt: skip
    nan = _with_nan(_like(plan, first, len(_ROWS), NEIGHBOURS), _ROWS)
    return [nan, _like(plan, like, 65, "many heads"), overflow.rope(plan, first)]


def _embedding(plan: Plan, first: Problem) -> list[Problem]:
    problems = []
    for shape_class, vocabulary, width, rows in ((NEIGHBOURS, len(_ROWS), 5, len(_ROWS)), ("many ids", 3001, 50, 1300)):
        config = probe_config(plan.contract, vocab_size=vocabulary, hidden_size=width)
        region = find_region(config, "embedding")
        table = plan.normal(vocabulary, width, label=shape_class)
        if shape_class == NEIGHBOURS:
            ids = np.arange(rows)
            table[_ROWS] = np.nan
        else:
            ids = plan.rng("ids", vocabulary).integers(0, vocabulary, rows)
            ids[1::3], ids[-1] = ids[0], vocabulary - 1
        problem = Problem(
            shape_class, f"{rows} ids of {vocabulary} x {width}", ("normal",), region, config, flat_batch(rows, ids),
            (ids,), weights_of(config, plan.contract.dtype, {region.weights[0]: table}),
        )  # fmt: skip
        problem = with_gradients(plan, problem, [(width,)]) if plan.backward else problem
        problems.append(_with_nan(problem, _ROWS) if shape_class == NEIGHBOURS else problem)
    return problems


def _linear(plan: Plan) -> list[Problem]:
    near = linear_problem(plan, NEIGHBOURS, len(_ROWS), 40, 70)
    # two rows: tiles of two panels; a chain: over more blocks of the depth than one
    found = [_with_nan(near, _ROWS), linear_problem(plan, "two rows", 2, 601, 600), overflow.linear(plan)]
    if not plan.backward:
        return [*found, linear_problem(plan, "a long chain", 5, 1601, 70)]
    # chains over features and over tokens; a bias has enough of both for the shares of several threads
    features = 1100 if plan.kind == "qkv_proj" and plan.contract.config.qkv_bias else 70
    tokens = linear_problem(plan, "many tokens", 1700, 2, features)
    return [*found, linear_problem(plan, "a long chain", 3, 24, 1601), replace(tokens, alone=())]


def _head(plan: Plan) -> list[Problem]:
    near = head_problem(plan, NEIGHBOURS, 6, 40, len(_ROWS))
    problems = [
        _with_nan(near, _ROWS),
        head_problem(plan, "many rows", 4, 40, 1300),
        head_problem(plan, "many leaves", 6, 128 * 17 + 7, 3),
        head_problem(plan, "a long chain", 1601, 150, 2),
    ]
    return [*problems, overflow.head(plan)] if plan.backward else problems


def _attention(contract: Contract, case: str, seed: int) -> list[Problem]:
    entry = contract.entries[("trainer_forward", "attention")]
    block, split = int(entry.constant("key_block")), entry.split.leaf_size
    backward, sequences = case == "trainer_backward", len(_SEQUENCES)
    nan = np.repeat(_SEQUENCES, 2)
    if case.startswith("trainer"):
        near = whole(contract, NEIGHBOURS, [2] * sequences, ("normal",), 1, seed, backward)
        near = replace(_with_nan(near, nan), name=f"{sequences} sequences of 2", hazards=("NaN",))
        if backward:
            many = whole(contract, "many blocks", [4 * block + 6], ("normal",), 1, seed, True)
            return [near, many, overflow.attention(contract, seed)]
        keys = 3 * split + block + 5
        read = (0, split, 2 * split - 1, 2 * split, 3 * split, keys - 6, keys - 1)
        many = whole(contract, "many splits", [keys], ("normal",), 1, seed, False)
        return [near, replace(many, name=f"{many.name}, {len(read)} rows read", read=read)]
    near = paged(contract, NEIGHBOURS, [0] * sequences, [2] * sequences, 8, 1, seed)
    near = replace(_with_nan(near, nan), name=f"{sequences} sequences of 2", hazards=("NaN",))
    return [near, paged(contract, "many splits", [2 * split - 2, 3 * split + 1], [3, 1], 16, 1, seed)]


def wide_problems(contract: Contract, kind: str, case: str, seed: int = 0) -> list[Problem]:
    """Problems of a region kind in a case that :func:`problems_of` does not have."""
    if kind == "attention":
        return _attention(contract, case, seed)
    plan = Plan(contract, kind, case == "trainer_backward", seed)
    if kind in LINEAR:
        return _linear(plan)
    if kind == "logprob":
        return _head(plan)
    first = problems_of(contract, kind, case, seed)[0]
    if kind == "embedding":
        return _embedding(plan, first)
    if kind == "rope":
        return _rope(plan, first)
    return _pairwise(plan, first) if kind in ("residual_add", "swiglu") else _norm(plan, first)


def admission_problems(contract: Contract, kind: str, case: str, seed: int = 0) -> list[Problem]:
    """All problems that an admission compares, the smaller ones first."""
    return problems_of(contract, kind, case, seed) + wide_problems(contract, kind, case, seed)
