"""The interpreter with one thing changed: how a deviation from the contract is recognised.

A :class:`Variation` changes one of the six points of a region, and says so in words. It is either another entry (the
interpreter is driven by data), or a private copy of the interpreter's modules in which a function or a line is another
one. The product's interpreter is never touched: a copy is made of its source for every variation.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, ModuleType
from typing import Any

from rlkernel.contract.build import Contract
from rlkernel.contract.points import SixPoints
from rlkernel.errors import ContractError
from rlkernel.verify.admission.certificate import entry_names
from rlkernel.verify.admission.step import STEP_REGIONS, ReferenceStep

POINTS = ("dependency", "split", "merge order", "precision", "rounding", "primitives")
_MODULES = ("arith", "primitives", "lookup", "reductions", "attention", "regions", "head", "optimizer", "loss")
FORMULAS = ("reductions", "attention", "regions", "head", "optimizer", "loss")
"""Modules that hold the formulas of regions; the definitions of primitives are not among them."""


@dataclass(frozen=True)
class Line:
    """Text of one of the interpreter's modules that a variation writes differently."""

    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Function:
    """A function that a variation puts in the place of another one, which it gets as its argument."""

    name: str
    make: Callable[[Any], Any]
    modules: tuple[str, ...] = FORMULAS


@dataclass(frozen=True)
class Chain:
    """Another chain of the multiply-accumulate primitive; ``make`` gets the chain of the contract."""

    make: Callable[[Callable[..., Any]], Callable[..., Any]]


Edit = Line | Function | Chain


@dataclass(frozen=True)
class Variation:
    """One point of a region changed.

    Attributes:
        point: which of the six.
        what: what is different, as the end of "the bits are those of ...".
        edits: changes of the interpreter's copy.
        entry: another entry, or None where it does not apply to this one.
        only: names of entries that ``entry`` applies to (empty: all of the region).
    """

    point: str
    what: str
    edits: tuple[Edit, ...] = ()
    entry: Callable[[SixPoints], SixPoints | None] | None = None
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ContractError(f"{self.point!r} is none of the six points {', '.join(POINTS)}")


@cache
def _source(name: str) -> str:
    return inspect.getsource(importlib.import_module(f"rlkernel.reference.{name}"))


@cache
def _code(name: str, lines: tuple[Line, ...]) -> CodeType:
    text = _source(name)
    for line in lines:
        if text.count(line.old) != 1:
            raise ContractError(
                f"a variation changes {line.old!r} in rlkernel/reference/{name}.py, which holds it "
                f"{text.count(line.old)} times; it must stand there once"
            )
        text = text.replace(line.old, line.new)
    return compile(text, f"rlkernel/reference/{name}.py (varied)", "exec")


def copy_interpreter(edits: tuple[Edit, ...]) -> dict[str, ModuleType]:
    """A private copy of the interpreter's modules with the edits, by short name.

    Raises ContractError for an edit that does not fit the interpreter any more.
    """
    originals = {name: importlib.import_module(f"rlkernel.reference.{name}") for name in _MODULES}
    copies: dict[str, ModuleType] = {}
    for name in _MODULES:
        module = ModuleType(originals[name].__name__)
        copies[name] = module
        exec(_code(name, tuple(e for e in edits if isinstance(e, Line) and e.module == name)), module.__dict__)
        # what was imported from another module of the interpreter becomes that module's copy
        for other in copies:
            for key, value in vars(originals[other]).items():
                if module.__dict__.get(key) is value and not key.startswith("__") and not isinstance(value, ModuleType):
                    module.__dict__[key] = copies[other].__dict__[key]
        if "arith" in module.__dict__:
            module.__dict__["arith"] = copies["arith"]
    for edit in edits:
        if isinstance(edit, Function):
            _put(copies, edit)
        elif isinstance(edit, Chain):
            units = copies["primitives"].__dict__["MULTIPLY_ACCUMULATE"]
            changed = {key: replace(unit, chain=edit.make(unit.chain)) for key, unit in units.items()}
            copies["primitives"].__dict__["MULTIPLY_ACCUMULATE"] = changed
            copies["reductions"].__dict__["MULTIPLY_ACCUMULATE"] = changed
    return copies


def _put(copies: dict[str, ModuleType], edit: Function) -> None:
    places = [copies[name] for name in edit.modules if edit.name in copies[name].__dict__]
    if not places:
        raise ContractError(f"a variation replaces {edit.name}, which no module of {', '.join(edit.modules)} has")
    made = edit.make(places[0].__dict__[edit.name])
    for module in places:
        module.__dict__[edit.name] = made


def varied_contract(contract: Contract, region: str, case: str, variation: Variation) -> Contract | None:
    """The contract with the region's entries changed; None if the variation applies to none of them."""
    if variation.entry is None:
        return contract
    cases = {case, "trainer_forward"} if case == "trainer_backward" else {case}
    entries, applied = dict(contract.entries), False
    for one in sorted(cases):
        if one == "trainer_forward" and case == "trainer_backward" and not variation.only:
            continue
        for name in entry_names(contract, region, one):
            if variation.only and name not in variation.only:
                continue
            changed = variation.entry(entries[(one, name)])
            if changed is not None and changed != entries[(one, name)]:
                entries[(one, name)], applied = changed, True
    return replace(contract, entries=entries) if applied else None


def varied_operation(contract: Contract, region: str, case: str, variation: Variation) -> Any | None:
    """The region's operation as the varied interpreter computes it; None where the variation does not apply."""
    changed = varied_contract(contract, region, case, variation)
    if changed is None:
        return None
    copies = copy_interpreter(variation.edits)
    if region in STEP_REGIONS:
        return ReferenceStep(changed, region, copies["optimizer"], copies["loss"])
    interpreter = copies["regions"].Interpreter(changed)
    if region == "logprob":
        return copies["head"].ReferenceLinearLogprob(interpreter)
    return copies["regions"].reference_ops(interpreter)[region]
