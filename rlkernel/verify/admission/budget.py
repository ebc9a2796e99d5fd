"""How much an admission compares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """``rounds`` of all problems with other values, more until ``outputs`` were compared with the interpreter in each
    group of cases (but no more than ``most_rounds``: a norm of gradients has one output a problem).

    ``chained`` outputs more are compared with the plain kernel, where a region has one, after that one was compared
    with the interpreter over ``outputs`` of its own. ``explain_seconds`` is CPU time for explaining a difference.
    """

    name: str
    rounds: int = 1
    outputs: int = 0
    most_rounds: int = 200
    chained: int = 0
    explain_seconds: float = 60.0


QUICK = Budget("quick")
FULL = Budget("full", rounds=3, outputs=1_000_000, chained=100_000_000)
BUDGETS = (QUICK.name, FULL.name)
"""Less first: a certificate of a later one stands for an earlier one as well."""
