"""Claims: conditions under which the contract holds, each with a checker that runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from rlkernel.errors import ContractError
from rlkernel.models.config import ModelConfig

Axis = Literal["tp", "sp", "cp", "ep", "dp", "pp"]
AXES: tuple[Axis, ...] = ("tp", "sp", "cp", "ep", "dp", "pp")
CLAIMABLE: tuple[Axis, ...] = ("tp", "dp")


@dataclass(frozen=True)
class Topology:
    """Largest degree per axis over which the bits are invariant. Each side runs at any power of two up to it."""

    tp: int = 1
    sp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1

    def as_json(self) -> dict[str, int]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class StateClaim:
    """Caches of this kind belong to a weight version; any of these events invalidates them."""

    state: str
    invalidated_by: tuple[str, ...]


STATE_CLAIMS = (
    StateClaim("paged_kv", ("weight_commit", "sleep")),
    StateClaim("prefix_cache", ("weight_commit", "sleep")),
)


def check_topology(topology: Topology, config: ModelConfig) -> list[str]:
    """Every reason why this model cannot keep its bits over these degrees (empty: it can)."""
    problems = []
    for axis in AXES:
        degree = getattr(topology, axis)
        if degree < 1 or degree & (degree - 1):
            problems.append(f"topology.{axis} = {degree}: a claimed degree is a power of two")
        elif degree > 1 and axis not in CLAIMABLE:
            problems.append(f"topology.{axis} = {degree}: only {' and '.join(CLAIMABLE)} can be claimed beyond 1 here")
    tp = topology.tp
    if tp > 1 and not problems:
        dimensions = {
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "intermediate_size": config.intermediate_size,
            "num_heads * head_dim": config.num_heads * config.head_dim,
        }
        problems += [
            f"topology.tp = {tp} cannot cut {name} = {value} into {tp} equal leaves"
            for name, value in dimensions.items()
            if value % tp
        ]
    return problems


def require_topology(topology: Topology, config: ModelConfig) -> None:
    """Raise ContractError with every reason of :func:`check_topology`."""
    problems = check_topology(topology, config)
    if problems:
        raise ContractError("; ".join(problems))


def check_degrees(topology: Topology, degrees: Topology) -> None:
    """Raise ContractError if a side runs at a degree outside the claim."""
    for axis in AXES:
        claimed, actual = getattr(topology, axis), getattr(degrees, axis)
        if actual > claimed or claimed % actual:
            raise ContractError(f"{axis} = {actual} is outside the claim: the contract holds for divisors of {claimed}")
