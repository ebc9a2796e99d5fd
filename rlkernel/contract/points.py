"""The six points: what is observable of a region's arithmetic, as frozen data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rlkernel.contract.decode import decode
from rlkernel.contract.differences import differences
from rlkernel.contract.profiles import PRIMITIVES
from rlkernel.errors import ContractError

CastMode = Literal["nearest_even"]
MergeOrder = Literal["none", "ascending_chain", "balanced_tree", "rescale_ascending"]


@dataclass(frozen=True)
class Dependency:
    """Inputs that one output element may depend on, and the axis that is reduced (``none`` for elementwise)."""

    inputs: tuple[str, ...]
    domain: str


@dataclass(frozen=True)
class Split:
    """How the domain is cut. ``leaves`` is a fixed number, ``leaf_size`` a fixed size (0: not so cut).

    ``lanes``: strided chains that run side by side inside a leaf. ``step``: elements of one multiply-accumulate.
    """

    leaves: int = 1
    leaf_size: int = 0
    lanes: int = 1
    step: int = 1
    shards: int = 1


@dataclass(frozen=True)
class Merge:
    """Order inside a leaf, across a leaf's lanes, across leaves, across shards."""

    leaf: MergeOrder = "none"
    lanes: MergeOrder = "none"
    leaves: MergeOrder = "none"
    shards: MergeOrder = "none"


@dataclass(frozen=True)
class Precision:
    """Dtypes of inputs, products, accumulator, state between blocks, and output."""

    inputs: str
    product: str
    accumulator: str
    state: str
    output: str


@dataclass(frozen=True)
class RoundingSite:
    """A place where a value is narrowed."""

    site: str
    to: str
    mode: CastMode = "nearest_even"


@dataclass(frozen=True)
class SixPoints:
    """One entry of the contract: the arithmetic of one region.

    ``primitives`` are pairs (role, primitive): ``mac`` is what multiplies and accumulates, ``weights_exp2`` the
    exponential of attention weights, ``exp2`` any other, and so on; a role that a region does not have is absent.
    ``constants`` are pairs (name, bit pattern or integer as text).
    """

    dependency: Dependency
    split: Split
    merge: Merge
    precision: Precision
    rounding: tuple[RoundingSite, ...]
    primitives: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, str], ...] = ()

    def primitive(self, role: str) -> str:
        """The primitive of a role. Raises ContractError if the entry has none."""
        for name, primitive in self.primitives:
            if name == role:
                return primitive
        raise ContractError(f"this entry has no primitive for the role {role!r}; it has {dict(self.primitives)}")

    def rounds(self, site: str) -> str | None:
        """The dtype that a value is narrowed to at a site; None where nothing is rounded."""
        return next((rounding.to for rounding in self.rounding if rounding.site == site), None)

    def constant(self, name: str) -> str:
        """A pinned constant. Raises ContractError if the entry has none of this name."""
        for key, value in self.constants:
            if key == name:
                return value
        raise ContractError(f"this entry has no constant {name!r}; it has {dict(self.constants)}")

    def as_json(self) -> dict[str, Any]:
        """Plain data; the inverse is :func:`points_from_json`."""
        return dict(_plain(asdict(self)))

    def differences(self, other: SixPoints) -> list[str]:
        """Paths of the fields that differ, each with both values."""
        return [found.sentence() for found in differences(self.as_json(), other.as_json())]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def points_from_json(data: Any, path: str = "entry") -> SixPoints:
    """Strict inverse of :meth:`SixPoints.as_json`.

    Raises ContractError for unknown or missing fields, other types, raw floats and primitives that are not defined.
    """
    points: SixPoints = decode(SixPoints, data, path)
    for role, primitive in points.primitives:
        if primitive not in PRIMITIVES:
            raise ContractError(
                f"{path}.primitives: {role} is {primitive!r}, which is not defined; there are {', '.join(PRIMITIVES)}"
            )
    return points
