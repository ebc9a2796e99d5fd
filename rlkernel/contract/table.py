"""The contract for readers: one row for each region and set of cases with equal points, and the dtypes in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlkernel.contract.build import FORWARD_CASES, Contract
from rlkernel.contract.canonical import bits_float32, bits_float64, digest
from rlkernel.contract.points import SixPoints
from rlkernel.errors import ContractError
from rlkernel.models.definition import REGION_KINDS, define_model
from rlkernel.names import hint

CASES = (*FORWARD_CASES, "trainer_backward", "optimizer_step")


@dataclass(frozen=True)
class Row:
    """A region and the cases in which it has these points."""

    region: str
    cases: tuple[str, ...]
    points: SixPoints

    @property
    def digest(self) -> str:
        """SHA-256 of the entry's canonical JSON."""
        return digest(self.points.as_json())

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "region": self.region,
            "cases": list(self.cases),
            "points": self.points.as_json(),
            "digest": self.digest,
        }


@dataclass(frozen=True)
class Edge:
    """A boundary between two region kinds: what one writes, another reads, in this dtype."""

    source: str
    target: str
    dtype: str
    cases: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"from": self.source, "to": self.target, "dtype": self.dtype, "cases": list(self.cases)}


def table_rows(contract: Contract, case: str | None = None, region: str | None = None) -> list[Row]:
    """The entries, in the order of the contract; cases in which a region's points are equal share a row.

    Raises ContractError for a case or region that the contract does not have.
    """
    cases, regions = _names(c for c, _ in contract.entries), _names(r for _, r in contract.entries)
    if case is not None and case not in cases:
        raise ContractError(f"the contract has no case {case!r}; it has {', '.join(cases)}{hint(case, cases)}")
    if region is not None and region not in regions:
        raise ContractError(
            f"the contract has no region {region!r}; it has {', '.join(regions)}{hint(region, regions)}"
        )
    if case is not None and region is not None and (case, region) not in contract.entries:
        there = [r for c, r in contract.entries if c == case]
        then = [c for c, r in contract.entries if r == region]
        raise ContractError(
            f"region {region!r} is not computed in case {case!r}: it is in {', '.join(then)}; the case has "
            f"{', '.join(there)}"
        )
    found: dict[tuple[str, SixPoints], list[str]] = {}
    for (entry_case, entry_region), points in contract.entries.items():
        if case in (None, entry_case) and region in (None, entry_region):
            found.setdefault((entry_region, points), []).append(entry_case)
    rows = [Row(name, tuple(in_cases), points) for (name, points), in_cases in found.items()]
    order = (*REGION_KINDS[:-1], "lm_head", REGION_KINDS[-1])
    # forward entries in order of execution; gradients and the optimizer's follow as the contract lists them
    return sorted(rows, key=lambda r: order.index(r.region) if r.cases[0] in FORWARD_CASES else len(order))


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def boundaries(contract: Contract) -> list[Edge]:
    """Every boundary between regions: forward from region to region, and backward the other way.

    Raises ContractError where one region writes another dtype than the next one reads.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for case in CASES[:-1]:
        for source, target in _edges(contract, backward=case == "trainer_backward"):
            if (case, source) not in contract.entries or (case, target) not in contract.entries:
                continue  # recomputation stays inside a layer
            written = contract.entries[case, source].precision.output
            read = contract.entries[case, target].precision.inputs
            if written != read:
                raise ContractError(f"{case}: {source} writes {written}, and {target} reads {read}")
            found.setdefault((source, target, written), []).append(case)
    return [Edge(source, target, dtype, tuple(cases)) for (source, target, dtype), cases in found.items()]


def _edges(contract: Contract, *, backward: bool) -> list[tuple[str, str]]:
    """Pairs of entries, writer first, in order of execution."""
    made: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    for region in define_model(contract.config).regions:
        kind = "lm_head" if region.kind == "logprob" else region.kind  # the head is two entries in a row
        pairs += [(made[port], kind) for port in region.inputs if port in made]
        made.update(dict.fromkeys(region.outputs, kind))
    pairs.append(("lm_head", "logprob"))
    if backward:
        has = {region for case, region in contract.entries if case == "trainer_backward"}
        # the embedding's input are ids: it has its table's gradient alone
        pairs = [(target, source if source in has else f"{source}.wgrad") for source, target in reversed(pairs)]
    return list(dict.fromkeys(pairs))


def describe(points: SixPoints) -> dict[str, str]:
    """The six points in words, and the pinned constants; no point is left out where it is empty."""
    split, merge, precision = points.split, points.merge, points.precision
    reads, domain = ", ".join(points.dependency.inputs), points.dependency.domain
    cut = f"leaves of {split.leaf_size}" if split.leaf_size else _count(split.leaves, "leaf", "leaves")
    return {
        "dependency": f"{reads}; " + ("no reduction" if domain == "none" else f"reduces over {domain}"),
        "split": f"{cut}, {_count(split.lanes, 'lane', 'lanes')}, {_count(split.shards, 'shard', 'shards')}, "
        f"step {split.step}",
        "merge order": ", ".join(
            f"{level}: {getattr(merge, level).replace('_', ' ')}" for level in ("leaf", "lanes", "leaves", "shards")
        ),
        "precision": f"input {precision.inputs}, product {precision.product}, accumulator {precision.accumulator}, "
        f"state {precision.state}, output {precision.output}",
        "rounding": ", ".join(f"{r.site} to {r.to} ({r.mode.replace('_', ' ')})" for r in points.rounding) or "nowhere",
        "primitives": ", ".join(_named(points.primitives)),
        **({"constants": ", ".join(_constants(points.constants))} if points.constants else {}),
    }


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _named(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [value if name == value or value.startswith(f"{name}.") else f"{name} {value}" for name, value in pairs]


def _constants(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{name} {readable(value)}" for name, value in pairs]


def readable(value: str) -> str:
    """A bit pattern with its decimal value beside it; other text as it is."""
    if value.startswith("f32:"):
        return f"{value} ({bits_float32(value):.9g})"
    if value.startswith("f64:"):
        return f"{value} ({bits_float64(value):.17g})"
    return value
