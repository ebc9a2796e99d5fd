"""The first use of the optimizer step: loss, gradient norm and AdamW of a process are confirmed on live operands.

The norm is computed again over every gradient; AdamW on elements spread over the whole of every tensor, close enough
that every thread's share holds some; the loss on every token of the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlkernel.contract.build import Contract
from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.optimizer import AdamWScalars
from rlkernel.reference import optimizer as reference
from rlkernel.reference.loss import LossConstants, LossInputs
from rlkernel.reference.loss import token_losses as reference_losses
from rlkernel.verify.admission.bits import Results, compare
from rlkernel.verify.admission.first_use import larger
from rlkernel.verify.evidence import Evidence

Tensor = torch.Tensor
CASE = "optimizer_step"
APART = 2039
"""Elements between two that are computed again: a prime, and less than a quarter of the share of a thread."""
UPDATED = ("master", "m", "v", "model weight")


def places(count: int) -> Tensor:
    """Flat indices that are computed again, int64 ascending: every APART-th and the last."""
    found = torch.arange(0, count, APART)
    return torch.unique(torch.cat([found, torch.tensor([count - 1])])) if count else found


@dataclass(frozen=True)
class Elements:
    """Some elements of a tensor before an update: master, moments and gradient, float32 [n] on the CPU."""

    index: Tensor
    master: Tensor
    m: Tensor
    v: Tensor
    gradient: Tensor


class StepFirstUse:
    """Checks of one trainer; what was confirmed stands in its evidence under ``first_use``.

    Raises NumericsError from every method that finds another bit.
    """

    def __init__(self, contract: Contract, evidence: Evidence) -> None:
        self._entries, self._evidence = contract.entries, evidence
        self._losses: tuple[int, ...] | None = None
        self.update_due = True
        """Whether no update of this process was confirmed."""

    def norm(self, gradients: Mapping[str, Tensor], max_norm: float, norm: np.float32, clip: np.float32) -> None:
        """Confirm norm and clipping factor of gradients, float32 on any device."""
        found = reference.gradient_norm(self._entries[(CASE, "gradient_norm")], gradients)
        again = reference.clip_factor(found, max_norm)
        expected = {"norm": _array(found[None]), "clip": _array(again[None])}
        self._confirm("gradient_norm", expected, {"norm": np.array([norm]), "clip": np.array([clip])}, {})

    def adamw(
        self, before: Mapping[str, Elements], scalars: AdamWScalars, after: Mapping[str, tuple[Tensor, ...]]
    ) -> None:
        """Confirm an update: of every tensor its elements, and master, moments and model weight [n] after it."""
        points = self._entries[(CASE, "adamw")]
        expected: dict[str, Any] = {}
        found: dict[str, Any] = {}
        where: dict[str, Tensor] = {}
        for name, given in before.items():
            again = reference.adamw(points, given.master, given.m, given.v, given.gradient, scalars)
            for part, want, have in zip(UPDATED, again, after[name], strict=True):
                key = f"{part} of {name}"
                expected[key], found[key], where[key] = _array(want), _array(have), given.index
        self._confirm("adamw", expected, found, where)
        self.update_due = False

    def losses_due(self, tokens: int) -> bool:
        """Whether a call of so many tokens is the first, or the first of its size."""
        return tokens > 0 and larger((tokens,), self._losses)

    def losses(self, constants: LossConstants, inputs: LossInputs, loss: Any, coefficient: Any) -> None:
        """Confirm loss and coefficient, float32 [T], of every token of a call."""
        again = reference_losses(self._entries[(CASE, "loss")], constants, inputs)
        expected = {name: _array(again[name]) for name in ("loss", "coefficient")}
        self._confirm("loss", expected, {"loss": loss, "coefficient": coefficient}, {})
        self._losses = (len(loss),)

    def _confirm(self, region: str, expected: Results, found: Results, where: Mapping[str, Tensor]) -> None:
        compared, difference = compare(expected, found)
        facts = self._evidence.facts.setdefault("first_use", {})
        before = facts.get(f"{CASE}/{region}", {"calls": 0, "outputs": 0, "differing": 0})
        facts[f"{CASE}/{region}"] = {
            "calls": before["calls"] + 1,
            "outputs": before["outputs"] + compared,
            "differing": before["differing"] + (difference.differing if difference else 0),
        }
        if difference is None:
            return
        at = int(difference.index[0]) if difference.index else 0
        element = int(where[difference.output][at]) if difference.output in where else at
        sentence = (
            f"{region} ({CASE}): element {element} of {difference.output} is {difference.found} where the contract "
            f"gives {difference.expected}; {difference.differing} of {difference.compared} outputs of the first use "
            "differ on live operands"
        )
        self._evidence.refused.append(sentence)
        raise NumericsError(sentence)


def _array(x: Tensor) -> Any:
    return np.ascontiguousarray(x.detach().float().cpu().numpy())
