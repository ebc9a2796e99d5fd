"""Host scalars of the optimizer: learning rates and Adam's bias corrections, in float64 by our own routines.

Callers round the results once to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from rlkernel.contract import hostmath
from rlkernel.contract.canonical import digest, float64_bits
from rlkernel.errors import ContractError

ScheduleKind = Literal["constant", "linear", "cosine"]
KINDS: tuple[str, ...] = get_args(ScheduleKind)


@dataclass(frozen=True)
class Schedule:
    """Learning rate by optimizer update.

    The first ``warmup_updates`` updates rise linearly (update i has peak * (i + 1) / warmup_updates). The rest of
    ``total_updates`` stays, or falls to ``peak * final_fraction`` linearly or along half a cosine; the value stays
    there afterwards.
    """

    peak: float
    kind: ScheduleKind = "constant"
    warmup_updates: int = 0
    total_updates: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ContractError(f"schedule {self.kind!r} is not defined; accepted are {', '.join(KINDS)}")
        if not 0.0 <= self.peak < float("inf"):
            raise ContractError(f"a learning rate of {self.peak} is not possible; 0 or more is")
        if self.warmup_updates < 0:
            raise ContractError(f"{self.warmup_updates} warmup updates are not possible; 0 or more are")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ContractError(f"a final fraction of {self.final_fraction} is not possible; 0 to 1 is")
        if self.kind != "constant" and self.total_updates <= self.warmup_updates:
            raise ContractError(
                f"schedule {self.kind!r} needs total_updates above warmup_updates; "
                f"they are {self.total_updates} and {self.warmup_updates}"
            )

    def learning_rate(self, update: int) -> float:
        """Learning rate (float64) of update 0, 1, ... Raises ContractError for a negative one."""
        if update < 0:
            raise ContractError(f"update {update} has no learning rate; updates are counted from 0")
        if update < self.warmup_updates:
            return self.peak * (float(update + 1) / float(self.warmup_updates))
        if self.kind == "constant":
            return self.peak
        span = self.total_updates - self.warmup_updates
        progress = float(min(update - self.warmup_updates, span)) / float(span)
        shape = 1.0 - progress
        if self.kind == "cosine":
            shape = 0.5 * (1.0 + float(hostmath.cos(hostmath.PI * progress)))
        return self.peak * (self.final_fraction + (1.0 - self.final_fraction) * shape)

    def as_json(self) -> dict[str, Any]:
        """Every field, numbers as bit patterns: part of ``numerical_policy``."""
        return {
            "kind": self.kind,
            "peak": float64_bits(self.peak),
            "warmup_updates": self.warmup_updates,
            "total_updates": self.total_updates,
            "final_fraction": float64_bits(self.final_fraction),
        }

    def digest(self) -> str:
        """SHA-256 (hex) of every field."""
        return digest(self.as_json())


@dataclass(frozen=True)
class BetaPowers:
    """Powers of Adam's two betas after ``updates`` updates, by repeated multiplication in float64.

    A value, not a counter: :meth:`advance` returns the next one, and :meth:`at` recomputes it from the start, so
    that a resumed run has the same bits.
    """

    beta1: float
    beta2: float
    updates: int = 0
    power1: float = 1.0
    power2: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ContractError(f"{name} = {getattr(self, name)} is not possible; 0 or more and less than 1 is")

    def advance(self) -> BetaPowers:
        """The powers after one more update."""
        return BetaPowers(self.beta1, self.beta2, self.updates + 1, self.power1 * self.beta1, self.power2 * self.beta2)

    @classmethod
    def at(cls, beta1: float, beta2: float, updates: int) -> BetaPowers:
        """The powers after ``updates`` updates, from the start (time grows with ``updates``: 10 million a second)."""
        if updates < 0:
            raise ContractError(f"{updates} updates are not possible; 0 or more are")
        power1 = power2 = 1.0
        for _ in range(updates):
            power1 *= beta1
            power2 *= beta2
        return cls(beta1, beta2, updates, power1, power2)

    def corrections(self) -> tuple[float, float]:
        """``(1 / (1 - beta1^t), 1 / (1 - beta2^t))`` in float64. Raises ContractError before the first update."""
        if self.updates < 1:
            raise ContractError("bias corrections are defined after the first update; none was made")
        return 1.0 / (1.0 - self.power1), 1.0 / (1.0 - self.power2)
