"""Which operations the source writes on which line: read from Triton's IR, before it is optimised for a device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hardware.listing import NOWHERE, Location

_KINDS = {
    "arith.addf": "add",
    "arith.subf": "add",
    "arith.mulf": "mul",
    "math.fma": "fma",
    "arith.divf": "div",
    "tt.precise_divf": "div",
    "tt.precise_sqrt": "sqrt",
    "math.sqrt": "sqrt",
    "math.exp": "exp",
    "math.exp2": "exp2",
    "math.log": "log",
    "math.log2": "log2",
    "math.rsqrt": "rsqrt",
    "arith.divsi": "integer division",
    "arith.divui": "integer division",
    "arith.remsi": "integer division",
    "arith.remui": "integer division",
    "tt.dot": "dot",
    "tt.atomic_rmw": "atomic",
    "tt.elementwise_inline_asm": "assembly",
    "tt.extern_elementwise": "library",
}
_NAMED = re.compile(r"^#(loc\d*) = loc\((.*)\)$")
_PLACE = re.compile(r'^"([^"]+)":(\d+):\d+$')
_WRAPPED = re.compile(r'^(?:callsite\()?(?:"[^"]*"\()?#(loc\d*)')
_OPERATION = re.compile(r"^\s*(?:%[\w:, ]+ = )?\"?([a-z_]+\.[a-z_0-9]+)\"?.*loc\(#(loc\d*)\)\s*$")
_SHAPE = re.compile(r"(?:-> |: |, )(?:tensor<([\dx]+)x)?(bf16|f16|f32|f64)[>,) ]")


@dataclass(frozen=True)
class Written:
    """Operations by line.

    Attributes:
        kinds: of operations at a line.
        scalars: scalar operations of each kind in one program, with every loop's body counted once.
        sizes: scalar operations of each single operation, by kind.
        loops: the source has loops.
    """

    kinds: Mapping[Location, frozenset[str]]
    scalars: Mapping[str, int]
    sizes: Mapping[str, tuple[int, ...]]
    loops: bool

    def at(self, location: Location) -> frozenset[str]:
        return self.kinds.get(location, frozenset())

    def everywhere(self) -> frozenset[str]:
        return frozenset().union(*self.kinds.values()) if self.kinds else frozenset()


def read_written(ttir: str) -> Written:
    """Operations of Triton's IR, each at the line where it is written (of the innermost function)."""
    places: dict[str, str] = {}
    for line in ttir.splitlines():
        named = _NAMED.match(line)
        if named:
            places[named[1]] = named[2]
    kinds: dict[Location, set[str]] = {}
    sizes: dict[str, list[int]] = {}
    for line in ttir.splitlines():
        operation = _OPERATION.match(line)
        if operation and operation[1] in _KINDS:
            kind = _KINDS[operation[1]]
            kinds.setdefault(_resolve(places, operation[2]), set()).add(kind)
            sizes.setdefault(kind, []).append(_size(line))
    return Written(
        {place: frozenset(found) for place, found in kinds.items()},
        {kind: sum(found) for kind, found in sizes.items()},
        {kind: tuple(found) for kind, found in sizes.items()},
        "scf.for" in ttir or "scf.while" in ttir,
    )


def _size(line: str) -> int:
    shapes = _SHAPE.findall(line)
    size = 1
    for part in shapes[-1][0].split("x") if shapes and shapes[-1][0] else []:
        size *= int(part)
    return size


def _resolve(places: Mapping[str, str], name: str) -> Location:
    for _ in range(32):
        text = places.get(name, "")
        place = _PLACE.match(text)
        if place:
            return Location(place[1], int(place[2]))
        wrapped = _WRAPPED.match(text)
        if not wrapped:
            return NOWHERE
        name = wrapped[1]
    return NOWHERE
