"""AdamW with a float32 master: configuration, state, and one update from gradients to the model's weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.canonical import float64_bits
from rlkernel.contract.schedules import BetaPowers, Schedule
from rlkernel.errors import ContractError, NumericsError
from rlkernel.kernels.cpu.convert import as_float32, from_float32
from rlkernel.kernels.cpu.optimizer import AdamWScalars, adamw, clip_factor, gradient_norm
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.first_use_step import Elements, StepFirstUse, places
from rlkernel.verify.evidence import Evidence
from vime.errors import InputError

Arrays = dict[str, NDArray[np.float32]]
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
OPTIMIZER_IMPLEMENTATIONS = {"gradient_norm": "cpu.gradient_norm", "loss": "cpu.token_losses", "adamw": "cpu.adamw"}
"""Regions of case ``optimizer_step`` and what computes them here."""
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW. ``weight_decay`` applies to every tensor alike; ``max_grad_norm`` may be infinite (no clipping).

    The schedule counts optimizer updates from 0.
    """

    schedule: Schedule
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"optimizer {name} = {getattr(self, name)!r}: a number in [0, 1) is needed")
        if not np.float32(self.eps) > 0:
            raise InputError(f"optimizer eps = {self.eps!r}: a number above 0 in float32 is needed")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise InputError(f"optimizer weight_decay = {self.weight_decay!r}: a finite number, 0 or more, is needed")
        if not np.float32(self.max_grad_norm) > 0:
            raise InputError(f"optimizer max_grad_norm = {self.max_grad_norm!r}: a number above 0 is needed")

    def as_json(self) -> dict[str, Any]:
        """Plain data, numbers as bit patterns: what a checkpoint is compared by."""
        return {
            "kind": "adamw",
            "schedule": self.schedule.as_json(),
            **{n: float64_bits(getattr(self, n)) for n in ("beta1", "beta2", "eps", "weight_decay", "max_grad_norm")},
        }


@dataclass(frozen=True)
class AdamWState:
    """All that the next update depends on, beside the configuration. Arrays float32 by logical name."""

    master: Arrays
    moment1: Arrays
    moment2: Arrays
    powers: BetaPowers


class AdamW:
    """The optimizer of one trainer; the master starts as the exact float32 of the model's weights."""

    implementations: Mapping[str, str] = OPTIMIZER_IMPLEMENTATIONS
    first_use: StepFirstUse | None = None
    """Confirms the first update on live operands, where there is a contract to confirm."""

    def __init__(
        self,
        config: OptimizerConfig,
        tensors: Mapping[str, torch.Tensor],
        dtype: Literal["float32", "bfloat16"],
        workers: Workers,
        evidence: Evidence | None = None,
    ) -> None:
        self.config = config
        self._evidence = evidence if evidence is not None else Evidence("optimizer")
        self._dtype, self._workers = TORCH_DTYPES[dtype], workers
        self._powers = BetaPowers(config.beta1, config.beta2)
        self._start(tensors)

    def _start(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The master of these weights, and moments of zeros."""
        self._master: Arrays = {name: as_float32(tensors[name]).copy() for name in sorted(tensors)}
        self._moment1: Arrays = {name: np.zeros_like(value) for name, value in self._master.items()}
        self._moment2: Arrays = {name: np.zeros_like(value) for name, value in self._master.items()}

    @property
    def updates(self) -> int:
        """Updates done."""
        return self._powers.updates

    def update(self, gradients: Mapping[str, Any]) -> tuple[float, float, dict[str, torch.Tensor]]:
        """One update; returns (gradient norm before clipping, learning rate, the model's new weights).

        Raises:
            ContractError: gradients are missing or belong to no tensor.
            NumericsError: the norm is not finite, naming the first tensor with such a gradient. Nothing is changed.
        """
        if set(gradients) != set(self._master):
            raise ContractError(
                f"gradients are missing for {sorted(set(self._master) - set(gradients))}, and these belong to no "
                f"tensor: {sorted(set(gradients) - set(self._master))}"
            )
        norm, clip = self._norm(gradients)
        self._ran("gradient_norm")
        if not np.isfinite(norm):
            raise NumericsError(f"update {self.updates}: the gradient norm is {norm}; {self._blame(gradients)}")
        due = self.first_use if self.first_use is not None and self.first_use.update_due else None
        if due is not None:
            due.norm({n: _tensor(g) for n, g in gradients.items()}, self.config.max_grad_norm, norm, clip)
        powers = self._powers.advance()
        correction1, correction2 = powers.corrections()
        learning_rate = self.config.schedule.learning_rate(self.updates)
        scalars = AdamWScalars(
            lr=np.float32(learning_rate),
            beta1=np.float32(self.config.beta1),
            beta2=np.float32(self.config.beta2),
            one_minus_beta1=np.float32(1.0 - self.config.beta1),
            one_minus_beta2=np.float32(1.0 - self.config.beta2),
            correction1=np.float32(correction1),
            correction2=np.float32(correction2),
            eps=np.float32(self.config.eps),
            weight_decay=np.float32(self.config.weight_decay),
            clip=clip,
        )
        before = {} if due is None else self._before(gradients)
        weights = self._apply(gradients, scalars)
        if due is not None:
            after = {
                name: (*self._elements(name, given.index), _at(weights[name], given.index).float())
                for name, given in before.items()
            }
            due.adamw(before, scalars, after)
        self._ran("adamw")
        self._powers = powers
        return float(norm), learning_rate, weights

    def _before(self, gradients: Mapping[str, Any]) -> dict[str, Elements]:
        found = {}
        for name, gradient in gradients.items():
            index = places(_tensor(gradient).numel())
            found[name] = Elements(index, *self._elements(name, index), _at(_tensor(gradient), index))
        return found

    def _elements(self, name: str, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Master and moments at flat indices, float32 copies on the CPU."""
        first, second = self._moment1[name], self._moment2[name]
        return _at(_tensor(self._master[name]), index), _at(_tensor(first), index), _at(_tensor(second), index)

    def _norm(self, gradients: Mapping[str, Any]) -> tuple[np.float32, np.float32]:
        """Norm of all gradients, and the factor of clipping."""
        norm = gradient_norm(gradients, self._workers)
        return norm, clip_factor(norm, self.config.max_grad_norm)

    def _apply(self, gradients: Mapping[str, Any], scalars: AdamWScalars) -> dict[str, torch.Tensor]:
        """Change master and moments in place; returns the model's weights."""
        bf16 = self._dtype == torch.bfloat16
        return {
            name: from_float32(
                adamw(master, self._moment1[name], self._moment2[name], gradients[name], scalars, self._workers, bf16),
                self._dtype,
            )
            for name, master in self._master.items()
        }

    def _blame(self, gradients: Mapping[str, Any]) -> str:
        """Which gradient is not finite."""
        return blame(gradients)

    def _ran(self, region: str) -> None:
        self._evidence.ran(region, "optimizer_step", self.implementations[region])

    def check_master(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise NumericsError unless the model's weights are the masters, rounded: bits of either changed otherwise."""
        for name, master in self._master.items():
            due = from_float32(master, self._dtype).view(_INTEGERS[self._dtype])
            differs = (due != tensors[name].view(_INTEGERS[self._dtype])).reshape(-1)
            if differs.any():
                raise NumericsError(
                    f"element {int(differs.nonzero()[0])} of {name} is not its float32 master rounded to the model's "
                    "dtype: a bit of one of them changed since the last update"
                )

    def state(self) -> AdamWState:
        """The state as it is now (the arrays themselves; a writer copies or writes them before the next update)."""
        return AdamWState(self._master, self._moment1, self._moment2, self._powers)

    def restore(self, state: AdamWState) -> None:
        """Take another state. Raises InputError if the powers of the betas are not those of its update count."""
        expected = BetaPowers.at(self.config.beta1, self.config.beta2, state.powers.updates)
        if expected != state.powers:
            raise InputError(
                f"the checkpoint has beta powers {state.powers.power1.hex()} and {state.powers.power2.hex()} after "
                f"{state.powers.updates} updates; they have to be {expected.power1.hex()} and {expected.power2.hex()}"
            )
        self._take(state)
        self._powers = state.powers

    def _take(self, state: AdamWState) -> None:
        """Copies of a state's arrays."""
        self._master = {name: state.master[name].copy() for name in sorted(state.master)}
        self._moment1 = {name: state.moment1[name].copy() for name in self._master}
        self._moment2 = {name: state.moment2[name].copy() for name in self._master}


def _tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(x))


def _at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Elements at flat indices, as a copy on the CPU."""
    return x.detach().reshape(-1)[index.to(x.device)].cpu()


def blame(gradients: Mapping[str, NDArray[np.float32]]) -> str:
    """Which of the gradients is not finite, and where, in words."""
    for name in sorted(gradients):
        bad = np.flatnonzero(~np.isfinite(gradients[name]))
        if len(bad):
            return f"the gradient of {name} is {gradients[name].flat[bad[0]]} at element {int(bad[0])}"
    return "every gradient is finite, but their squares overflow float32"
