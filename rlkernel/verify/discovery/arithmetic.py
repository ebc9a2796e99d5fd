"""Executes a summation tree: which precision, which products are fused, what a fused adder truncates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from hardware.rocm import mfma
from rlkernel.errors import ContractError
from rlkernel.verify.discovery.formats import (
    Array,
    Float64,
    Format,
    add_to_float32,
    add_to_odd,
    fma64,
    number_format,
    round_to_bits,
)
from rlkernel.verify.discovery.tree import Tree

Mode = Literal["nearest", "truncate"]


@dataclass(frozen=True)
class FusedAdder:
    """How a node of more than two terms adds: every term is truncated toward zero to a multiple of
    2^(largest exponent - fraction_bits), the sum is exact, and is then rounded to the accumulator.

    ``raw_exponents``: the exponent of a product is the sum of its factors' exponents, not renormalised.
    ``unit``: the name of a matrix unit whose own model is executed instead (see :data:`UNITS`).
    """

    fraction_bits: int
    mode: Mode
    raw_exponents: bool = True
    unit: str = ""

    def describe(self) -> str:
        """In words."""
        if self.unit:
            return f"fused adders of {self.unit}"
        rounding = "round to nearest" if self.mode == "nearest" else "truncate"
        return f"fused adders keep {self.fraction_bits} bits below the largest exponent, then {rounding}"


@dataclass(frozen=True)
class Flush:
    """Which subnormal numbers become zero: operands, results (rounded products and sums), or outputs alone.

    ``signed``: zeros keep the sign of what was flushed. ``started``: leaves that are added to the +0 that the
    sum starts from, so that they are results, too.
    """

    operands: bool = False
    results: bool = False
    outputs: bool = False
    signed: bool = True
    started: frozenset[int] = field(default_factory=frozenset)

    def describe(self) -> str:
        """In words."""
        what = [name for name in ("operands", "results", "outputs") if getattr(self, name)]
        return f"{' and '.join(what)} are flushed to {'zero' if self.signed else '+0'}"

    def apply(self, values: Array, form: Format) -> Array:
        """The values with zeros where they are subnormal in the format."""
        small = np.abs(values) < 2.0**form.smallest_exponent
        zero = np.copysign(np.zeros_like(values), values) if self.signed else np.zeros_like(values)
        return np.where(small, zero, values)


@dataclass(frozen=True)
class Arithmetic:
    """What besides the tree decides the bits.

    ``exceptions``: nodes (by their index) whose sum is rounded to another format than ``accumulator``.
    ``operand_bits``: significand bits that are kept of every factor or summand, rounded by ``operand_mode``.
    ``fused``: leaves whose product enters its addition unrounded. ``starts_at_zero``: a +0 is added somewhere, so that
    a sum of -0 is +0 (None: it cannot be seen). ``initial``: the value of the last leaf, where there is a constant that
    the reduction starts from. ``flush``: which subnormal numbers become zero, if any.
    """

    inputs: str
    accumulator: str
    output: str
    operand_bits: int
    operand_mode: Mode = "nearest"
    products: bool = False
    fused: frozenset[int] = field(default_factory=frozenset)
    starts_at_zero: bool | None = False
    initial: float | None = None
    adder: FusedAdder | None = None
    exceptions: tuple[tuple[int, str], ...] = ()
    flush: Flush | None = None

    def describe(self) -> str:
        """One line of words."""
        others = sorted({name for _, name in self.exceptions})
        sums = f"{self.accumulator} sums"
        if others:
            sums += f" ({len(self.exceptions)} of them {' or '.join(others)})"
        parts = [f"{self.inputs} in, {sums}, {self.output} out"]
        if self.operand_bits < number_format(self.inputs).bits:
            parts.append(f"inputs narrowed to {self.operand_bits} bits ({self.operand_mode})")
        if self.adder is not None:
            parts.append(self.adder.describe())
        if self.starts_at_zero is not None and self.initial is None:
            parts.append("starts from +0" if self.starts_at_zero else "no initial +0")
        if self.initial is not None:
            parts.append(f"starts from the constant {self.initial!r}")
        return "; ".join(parts)

    def products_in_words(self, tree: Tree) -> str:
        """How the products enter."""
        if not self.products:
            return "none: the inputs themselves are added"
        product_bits = 2 * min(self.operand_bits, number_format(self.inputs).bits)
        if product_bits <= number_format(self.accumulator).bits or tree.fused:
            return "exact in the accumulator, so that fused or not makes no difference"
        single = [leaf for leaf in range(tree.leaves) if leaf not in self.fused]
        if not single:
            return "fused (fma), none is rounded"
        if not self.fused:
            return "rounded, then added"
        rounded = f"leaf {single[0]}" if len(single) == 1 else f"{len(single)} leaves"
        return f"{len(self.fused)} fused (fma); rounded first: {rounded}"


def execute(tree: Tree, arithmetic: Arithmetic, a: Array, b: Array | None = None) -> Array:
    """Add in tree order.

    Args:
        a: carriers [P, n]: P rows of n summands, or of first factors.
        b: carriers [P, n] of second factors where the arithmetic has products, else None.

    Returns:
        Carriers [P] of the output's format.

    Raises:
        ContractError: a number of columns other than the tree's leaves, or a combination that is not modelled.
    """
    constants = 0 if arithmetic.initial is None else 1
    if a.shape[1] + constants != tree.leaves or (b is None) == arithmetic.products:
        raise ContractError(
            f"rows of {a.shape[1]} inputs ({'products' if b is not None else 'summands'}) do not fit a tree of "
            f"{tree.leaves - constants} inputs"
        )
    with np.errstate(all="ignore"):
        return _Execution(tree, arithmetic, a, b).run()


class _Execution:
    def __init__(self, tree: Tree, arithmetic: Arithmetic, a: Array, b: Array | None) -> None:
        self._tree, self._arithmetic = tree, arithmetic
        self._accumulator = number_format(arithmetic.accumulator)
        self._exceptions = {node: number_format(name) for node, name in arithmetic.exceptions}
        bits, narrow = number_format(arithmetic.inputs), arithmetic.operand_bits
        self._a = np.asarray(a, dtype=np.float64).T
        self._b = None if b is None else np.asarray(b, dtype=np.float64).T
        if narrow < bits.bits:
            mode = arithmetic.operand_mode
            self._a = round_to_bits(self._a, narrow, bits.smallest_exponent, mode)
            self._b = None if self._b is None else round_to_bits(self._b, narrow, bits.smallest_exponent, mode)
        flush = arithmetic.flush
        if flush is not None and tree.fused:
            raise ContractError("a fused adder that flushes subnormal numbers is not modelled")
        if flush is not None and flush.operands:
            self._a = flush.apply(self._a, bits)
            self._b = None if self._b is None else flush.apply(self._b, bits)
        if tree.fused and "float64" in (arithmetic.accumulator, *(name for _, name in arithmetic.exceptions)):
            raise ContractError("a fused adder with a float64 accumulator is not modelled")

    def _leaf(self, leaf: int) -> Array:
        """The rounded summand."""
        if self._arithmetic.initial is not None and leaf == self._tree.leaves - 1:
            return self._accumulator.round(np.full(self._a.shape[1], self._arithmetic.initial))
        flush = self._arithmetic.flush
        rounded = self._accumulator.round(self._a[leaf] if self._b is None else self._a[leaf] * self._b[leaf])
        if flush is not None and leaf in flush.started:
            return self._result(rounded + rounded.dtype.type(0.0), self._accumulator)
        return rounded if self._b is None else self._result(rounded, self._accumulator)

    def _result(self, values: Array, form: Format) -> Array:
        flush = self._arithmetic.flush
        return flush.apply(values, form) if flush is not None and flush.results else values

    def run(self) -> Array:
        tree = self._tree
        values: dict[int, Array] = {}
        for k, children in enumerate(tree.nodes):
            form = self._exceptions.get(k, self._accumulator)
            values[tree.leaves + k] = self._result(self._node(children, values, form), form)
        total = values[tree.root] if tree.nodes else self._leaf(0)
        output, flush = number_format(self._arithmetic.output), self._arithmetic.flush
        if self._arithmetic.starts_at_zero and not (flush is not None and flush.started):
            total = total + total.dtype.type(0.0)
        rounded = output.round(np.asarray(total, dtype=np.float64))
        return flush.apply(rounded, output) if flush is not None and (flush.results or flush.outputs) else rounded

    def _node(self, children: tuple[int, ...], values: dict[int, Array], form: Format) -> Array:
        if len(children) > 2:
            return self._fused_adder(children, values)
        fused = [child for child in children if child in self._arithmetic.fused]
        plain = [values.pop(c) if c in values else self._leaf(c) for c in children if c not in fused]
        if not fused and form.name == "float32" and all(value.dtype == np.float32 for value in plain):
            result: Array = plain[0] + plain[1]
            return result
        terms = [value.astype(np.float64) for value in plain]
        if fused:
            assert self._b is not None
            if form.name == self._arithmetic.inputs == "float64":
                if len(fused) > 1:
                    raise ContractError("two unrounded float64 products in one addition are not modelled")
                return fma64(self._a[fused[0]], self._b[fused[0]], terms[0])
            terms += [self._a[leaf] * self._b[leaf] for leaf in fused]
        if form.name == "float64":
            return terms[0] + terms[1]
        if form.name == "float32":
            return add_to_float32(terms[0], terms[1])
        return form.round(add_to_odd(terms[0], terms[1]))

    def _unit(self, name: str, children: tuple[int, ...], values: dict[int, Array]) -> Array:
        length, _, step = UNITS[name]
        leaves = [child for child in children if child < self._tree.leaves]
        assert self._b is not None
        a = torch.zeros((self._a.shape[1], length))
        b = torch.zeros_like(a)
        a[:, : len(leaves)] = torch.from_numpy(self._a[leaves].T.astype(np.float32))
        b[:, : len(leaves)] = torch.from_numpy(self._b[leaves].T.astype(np.float32))
        total = next((values.pop(child) for child in children if child not in leaves), np.zeros(a.shape[0], np.float32))
        result: Array = step(a, b, torch.from_numpy(total)).numpy()
        return result

    def _fused_adder(self, children: tuple[int, ...], values: dict[int, Array]) -> Array:
        adder = self._arithmetic.adder
        if adder is None:
            raise ContractError("the tree has fused adders, and the arithmetic does not say how they add")
        if adder.unit:
            return self._unit(adder.unit, children, values)
        terms, exponents = [], []
        for child in children:
            if child in values:
                term = values.pop(child).astype(np.float64)
                exponent = _exponent(term)
            elif self._b is None or (self._arithmetic.initial is not None and child == self._tree.leaves - 1):
                term = self._leaf(child).astype(np.float64)
                exponent = _exponent(term)
            else:
                term = self._a[child] * self._b[child]
                exponent = _exponent(term)
                if adder.raw_exponents:
                    raw = _exponent(self._a[child]) + _exponent(self._b[child])
                    exponent = np.where(term == 0, exponent, raw)
            terms.append(term)
            exponents.append(exponent)
        largest = np.max(np.stack(exponents), axis=0)
        quantum = largest - adder.fraction_bits
        total = np.zeros(self._a.shape[1])
        for term in terms:
            total += np.trunc(np.ldexp(term, -quantum))  # integers far below 2^53: the sum is exact
        total = np.ldexp(total, quantum)
        if adder.mode == "truncate":
            smallest = self._accumulator.smallest_exponent
            return round_to_bits(total, self._accumulator.bits, smallest, "truncate").astype(self._accumulator.carrier)
        return self._accumulator.round(total)


UNITS: dict[str, tuple[int, str, Callable[..., torch.Tensor]]] = {
    "mfma.bf16.gfx942": (8, "bfloat16", mfma.dot_k8_bf16),
    "mfma.fp16.gfx942": (8, "float16", mfma.dot_k8_fp16),
}
"""Matrix units that do not add as :class:`FusedAdder` says: (products of a step, dtype, step(a, b, c))."""


def unit_of(tree: Tree, dtype: str) -> str | None:
    """A unit of :data:`UNITS` whose steps could be the tree's nodes: up to so many products and the sum so far."""
    for name, (length, inputs, _) in UNITS.items():
        plain = all(
            len(children) <= length + 1 and sum(child >= tree.leaves for child in children) <= 1
            for children in tree.nodes
        )
        if inputs == dtype and plain:
            return name
    return None


def _exponent(values: Float64) -> Any:
    _, exponent = np.frexp(values)
    return np.where(values == 0, -(1 << 20), exponent - 1)
