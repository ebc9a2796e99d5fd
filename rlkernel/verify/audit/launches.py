"""Launches that the machines execute, and what the contract expects of every output: as symbols, or as bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkernel.contract.points import SixPoints
from rlkernel.errors import ContractError
from rlkernel.verify.audit import symbols
from rlkernel.verify.audit.memory import Argument
from rlkernel.verify.audit.symbols import Symbols


@dataclass(frozen=True)
class Sum:
    """A matrix product whose K order is explained when it is wrong: shapes, leaves of K, step of the unit."""

    rows: int
    columns: int
    depth: int
    leaves: int
    step: int


@dataclass(frozen=True)
class Launch:
    """Arguments of one launch, the blocks to execute, and what is expected.

    ``symbols``: output -> expected symbols of all its elements. ``values``: output -> expected bits (float32).
    """

    what: str
    arguments: tuple[Argument, ...]
    blocks: int
    symbols: Mapping[str, Symbols]
    values: Mapping[str, NDArray[np.float32]]
    product: Sum | None = None


def random_values(shape: tuple[int, ...], dtype: str, seed: int) -> NDArray[np.float32]:
    """Normal values of the dtype, held in float32."""
    data = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if dtype == "bfloat16":
        data = (data.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return data


def elements(number: int, shape: tuple[int, ...]) -> Symbols:
    """Symbols of all elements of argument ``number``."""
    return symbols.element(number, np.arange(int(np.prod(shape)))).reshape(shape)


def zero(shape: tuple[int, ...]) -> Symbols:
    """The constant +0."""
    return np.full(shape, symbols.constant(0)[0])


def as_output(value: Symbols, dtype: str) -> Symbols:
    """Rounded to the dtype."""
    return symbols.cast_bf16(value) if dtype == "bfloat16" else value


def matrix_product(entry: SixPoints, m: int, n: int, k: int, dtype: str, tiles: int) -> Launch:
    """``gemm`` with a [m, k], b [n, k]: the entry's leaves, steps, chains and tree as symbols.

    Raises:
        ContractError: an entry that is no chain or balanced tree of chains, or leaves that do not divide k.
    """
    leaves, step = entry.split.leaves, entry.split.step
    if entry.merge.leaf != "ascending_chain" or (leaves > 1 and entry.merge.leaves != "balanced_tree") or k % leaves:
        raise ContractError(f"the entry ({entry.split}, {entry.merge}) with K = {k} is no tree of ascending chains")
    a, b = elements(0, (m, k)), elements(1, (n, k))
    parts = []
    for leaf in range(leaves):
        acc = zero((m, n))
        for first in range(leaf * k // leaves, (leaf + 1) * k // leaves, step):
            last = min(first + step, (leaf + 1) * k // leaves)
            if dict(entry.primitives)["mac"] == "fma.rn.f32":
                acc = symbols.fma(a[:, first:last], b[None, :, first], acc)
            else:
                acc = symbols.unit_step(symbols.unit_products(a[:, first:last], b[:, first:last]), acc, False)
        parts.append(acc)
    arguments = (
        Argument("a", dtype=dtype, shape=(m, k), data=random_values((m, k), dtype, 1)),
        Argument("b", dtype=dtype, shape=(n, k), data=random_values((n, k), dtype, 2)),
        Argument("c", dtype=entry.precision.output, shape=(m, n)),
        Argument("bias", dtype=dtype, shape=(n,)),
        Argument("grad", dtype="float32", shape=(m, n)),
        Argument("M", m),
        Argument("N", n),
        Argument("K", k),
        Argument("zero", 0.0, "fp32"),
    )
    expected = as_output(symbols.tree(np.stack(parts)), entry.precision.output)
    what = f"{m}x{n}x{k}" + (f" in {leaves} leaves" if leaves > 1 else "")
    return Launch(what, arguments, tiles, {"c": expected}, {}, Sum(m, n, k, leaves, step))


def lane_sum(a: Symbols, b: Symbols, lanes: int) -> Symbols:
    """``lane_sum`` of every row: strided chains, merged as a tree."""
    rows, n = a.shape
    width = min(lanes, 1 << max(0, n - 1).bit_length())
    acc = zero((rows, width))
    for first in range(0, n, width):
        used = min(width, n - first)
        acc[:, :used] = symbols.fma(a[:, first : first + used], b[:, first : first + used], acc[:, :used])
    return symbols.tree(acc.T)


def row_sum(entry: SixPoints, rows: int, n: int, dtype: str, blocks: int) -> Launch:
    """``row_reduction``: lane_sum of every row."""
    shape = (rows, n)
    expected = lane_sum(elements(0, shape), elements(1, shape), entry.split.lanes)
    arguments = (
        Argument("a", dtype=dtype, shape=shape, data=random_values(shape, dtype, 3)),
        Argument("b", dtype=dtype, shape=shape, data=random_values(shape, dtype, 4)),
        Argument("out", dtype="float32", shape=(rows,)),
        Argument("row_count", rows),
    )
    return Launch(f"{rows} rows of {n}", arguments, blocks, {"out": expected}, {})


def root_mean_square_norm(entry: SixPoints, rows: int, n: int, dtype: str, blocks: int) -> Launch:
    """``rms_norm``: docs/numerics.md as symbols."""
    shape, eps = (rows, n), np.uint32(int(entry.constant("eps").removeprefix("f32:"), 16)).view(np.float32)

    def constant(value: float) -> Symbols:
        return np.full(rows, symbols.constant(np.float32(value).view(np.uint32))[0])

    x, w = elements(0, shape), elements(2, (n,))
    total, width = lane_sum(x, x, entry.split.lanes), np.full(rows, np.float32(n)).view(np.uint32)
    mean = symbols.div(total, constant(float(n)), width, True)
    root = symbols.operation("sqrt.rn.f32", symbols.add(mean, constant(float(eps))))
    r = symbols.operation("div.rn.f32", constant(1.0), root)
    y = as_output(symbols.mul(symbols.mul(x, r[:, None]), w[None, :]), entry.precision.output)
    arguments = (
        Argument("x", dtype=dtype, shape=shape, data=random_values(shape, dtype, 5)),
        Argument("branch", dtype=dtype, shape=shape),
        Argument("w", dtype=dtype, shape=(n,), data=random_values((n,), dtype, 6)),
        Argument("stream", dtype=dtype, shape=shape),
        Argument("y", dtype=entry.precision.output, shape=shape),
        Argument("inv_rms", dtype="float32", shape=(rows,)),
        Argument("row_count", rows),
        Argument("eps", float(eps), "fp32"),
    )
    return Launch(f"{rows} rows of {n}", arguments, blocks, {"y": y, "inv_rms": r}, {})


def special_values(count: int, seed: int, sign: str = "any") -> NDArray[np.float32]:
    """float32 inputs of every kind: zeros, subnormals, ties of exponents, infinities, NaN, and random bits."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    near = (generator.standard_normal(count // 2) * 40).astype(np.float32).view(np.uint32)
    bits[: len(near)] = near
    fixed = [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000]
    fixed += [0x7FC00000, 0xC2FC0000, 0xC2FC0001, 0x43000000, 0x42FFFFFF, 0x3F3504F3, 0x3F3504F4, 0x7F7FFFFF]
    bits[: len(fixed)] = fixed
    if sign == "not positive":
        bits |= np.uint32(0x80000000)
    return bits.view(np.float32)


def elementwise(function: Callable[..., NDArray[np.float32]], operands: int, count: int, sign: str = "any") -> Launch:
    """One scalar primitive over special and random values, compared as bits."""
    inputs = [special_values(count, 10 + i, sign) for i in range(operands)]
    if operands == 2:
        inputs[1] = np.roll(inputs[1], 7)  # so that special values meet each other and others
    names = ["x"] if operands == 1 else ["a", "b"]
    arguments = [
        Argument(name, dtype="float32", shape=(count,), data=data) for name, data in zip(names, inputs, strict=True)
    ]
    arguments += [Argument("out", dtype="float32", shape=(count,)), Argument("count", count)]
    return Launch(f"{count} values", tuple(arguments), 1, {}, {"out": function(*inputs)})
