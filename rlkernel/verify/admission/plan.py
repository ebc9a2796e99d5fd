"""What to generate problems for, and what problems of several regions have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rlkernel.contract.build import Contract
from rlkernel.verify.admission.problem import Array, Problem, flat_batch
from rlkernel.verify.admission.values import SPECIAL_HAZARDS, Generator, generator, hazard_rows, make

BULK, BULK_BF16 = 1 << 16, 1 << 20  # outputs of a bulk problem


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


def with_gradients(
    plan: Plan, problem: Problem, shapes: list[tuple[int, ...]], hazards: tuple[str, ...] = ()
) -> Problem:
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


def specials(plan: Plan, like: Problem) -> Problem:
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


def bulk(plan: Plan, like: Problem) -> Problem:
    """Many normal rows. A float32 deviation of one unit moves a bfloat16 output about once in 2^16."""
    width = sum(int(np.prod(x.shape[1:])) for x in like.inputs)
    rows = max(1, (BULK_BF16 if plan.bf16 else BULK) // width)
    if plan.backward and like.region.weights:
        rows = min(rows, 512)  # the chain of the weight gradient takes the interpreter a step a row
    shapes = [x.shape[1:] for x in like.inputs]
    inputs = tuple(make("normal", plan.rng("bulk", i), (rows, *shape), plan.bf16) for i, shape in enumerate(shapes))
    outputs = [g.shape[1:] for g in like.grads]
    grads = tuple(make("normal", plan.rng("bulk grad", i), (rows, *s), plan.bf16) for i, s in enumerate(outputs))
    positions = plan.rng("bulk positions").integers(0, like.config.max_position, rows)
    return replace(
        like, shape_class="many rows", name=f"{rows} rows", hazards=("normal",), inputs=inputs, grads=grads,
        batch=flat_batch(rows, positions=positions), alone=(), views=False, bulk=True,
    )  # fmt: skip


def edges(problem: Problem) -> list[Problem]:
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
