"""The six points: what is observable of a region's arithmetic, as frozen data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

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
        return _differences(self.as_json(), other.as_json(), "")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _differences(a: Any, b: Any, path: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        result = []
        for key in sorted(a.keys() | b.keys()):
            result += _differences(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        return result
    return [] if a == b else [f"{path}: {a!r} on one side, {b!r} on the other"]


def _build(kind: Any, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise ContractError(f"{path} is {data!r}: an object with the fields of {kind.__name__} is expected")
    names = {item.name for item in fields(kind)}
    unknown, missing = sorted(set(data) - names), sorted(names - set(data))
    if unknown or missing:
        raise ContractError(
            f"{path}: unknown fields {unknown}, missing fields {missing}; {kind.__name__} has {sorted(names)}"
        )
    return data


def points_from_json(data: Any, path: str = "entry") -> SixPoints:
    """Strict inverse of :meth:`SixPoints.as_json`. Raises ContractError for unknown or missing fields."""
    d = _build(SixPoints, data, path)
    dependency = _build(Dependency, d["dependency"], f"{path}.dependency")
    return SixPoints(
        dependency=Dependency(tuple(dependency["inputs"]), dependency["domain"]),
        split=Split(**_build(Split, d["split"], f"{path}.split")),
        merge=Merge(**_build(Merge, d["merge"], f"{path}.merge")),
        precision=Precision(**_build(Precision, d["precision"], f"{path}.precision")),
        rounding=tuple(RoundingSite(**_build(RoundingSite, r, f"{path}.rounding")) for r in d["rounding"]),
        primitives=tuple((role, primitive) for role, primitive in d["primitives"]),
        constants=tuple((name, value) for name, value in d["constants"]),
    )
