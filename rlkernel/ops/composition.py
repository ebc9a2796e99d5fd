"""Which implementation runs a region in a case: built by a function from data, passed down, never a global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlkernel.errors import ContractError
from rlkernel.ops.head import LinearLogprob
from rlkernel.ops.portable import RegionOp, portable_ops

Numerics = Literal["exact", "native"]


@dataclass(frozen=True)
class Composition:
    """One implementation a region kind (every case of this composition uses the same), and the head."""

    numerics: Numerics
    ops: dict[str, RegionOp]
    head: Any

    def implementations(self) -> dict[str, str]:
        """Region kind -> implementation id, for the contract and the evidence."""
        return {**{kind: op.implementation for kind, op in self.ops.items()}, "logprob": self.head.implementation}

    def op(self, kind: str) -> RegionOp:
        """The implementation of a region kind. Raises ContractError if the composition has none."""
        if kind not in self.ops:
            raise ContractError(f"no implementation of region {kind!r}; this composition has {sorted(self.ops)}")
        return self.ops[kind]


def compose(numerics: Numerics) -> Composition:
    """The CPU composition: ``exact`` keeps the portable profile, ``native`` is torch's own kernels."""
    if numerics == "exact":
        return Composition("exact", portable_ops(), LinearLogprob())
    from rlkernel.kernels.torch_native.regions import TorchLinearLogprob, torch_ops

    return Composition("native", torch_ops(), TorchLinearLogprob())
