"""Problems of the optimizer step beyond one thread's share and beyond sixteen leaves; of an admission alone."""

from __future__ import annotations

import numpy as np

from rlkernel.verify.admission.step import StepProblem, scalars, step_problems
from rlkernel.verify.admission.values import generator, make

_LEAF = 1024


def _norm_problems(seed: int) -> list[StepProblem]:
    """Many leaves of squares; a tensor of many shares behind a small one. One number a problem: several draws."""
    problems = []
    for draw, leaves in enumerate((17, 33, 40, 67, 129)):
        rng = generator(seed, "gradient_norm", "many leaves", draw)
        sizes = {"b": (leaves * _LEAF + 7,), "a": (5,)}
        gradients = {name: make("normal", rng, shape, False) for name, shape in sizes.items()}
        arguments = {"gradients": gradients, "max_norm": 1.0}
        problems.append(StepProblem("many leaves", f"{leaves} leaves and 7", ("normal",), arguments))
    return problems


def _adamw_problems(seed: int) -> list[StepProblem]:
    """More elements than two threads' shares, an odd number of them."""
    rng, count = generator(seed, "adamw", "many elements"), 5 * 8192 + 13
    master, m, v, gradient = (make("normal", rng, (count,), False) for _ in range(4))
    arguments = {"master": master, "m": m, "v": np.abs(v), "gradient": gradient, "scalars": scalars(rng, 3, 0.37)}
    return [StepProblem("many elements", f"{count} elements, update 3", ("normal",), arguments)]


def admission_step_problems(kind: str, seed: int) -> list[StepProblem]:
    """All problems of ``gradient_norm``, ``adamw`` or ``loss`` that an admission compares, the smaller ones first."""
    wide = {"gradient_norm": _norm_problems, "adamw": _adamw_problems}
    return [*step_problems(kind, seed), *(wide[kind](seed) if kind in wide else [])]
