"""Launches of the kernels of a dense model: products in every layout, gradients of norms, elementwise regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from rlkernel.contract.points import SixPoints
from rlkernel.verify.audit import symbols
from rlkernel.verify.audit.launches import (
    Launch,
    Sum,
    as_output,
    elements,
    lane_sum,
    random_values,
    special_values,
    zero,
)
from rlkernel.verify.audit.memory import Argument
from rlkernel.verify.audit.symbols import Symbols

Floats = NDArray[np.float32]


def _chain(entry: SixPoints, a: Symbols, b: Symbols, acc: Symbols) -> Symbols:
    """Chains of the entry over the last axis of a [M, K] and b [N, K], from acc [M, N]."""
    for first in range(0, a.shape[1], entry.split.step):
        last = min(first + entry.split.step, a.shape[1])
        if dict(entry.primitives)["mac"] == "fma.rn.f32":
            acc = symbols.fma(a[:, first:last], b[None, :, first], acc)
        else:
            acc = symbols.unit_step(symbols.unit_products(a[:, first:last], b[:, first:last]), acc, False)
    return acc


def product(
    entry: SixPoints,
    shape: tuple[int, int, int],
    dtype: str,
    *,
    depth_first: tuple[bool, bool],
    biased: bool = False,
    continued: bool = False,
) -> Launch:
    """``gemm`` in one tile and one chain: operands stored as said, a bias after the chain, or a start before it."""
    m, n, k = shape
    stored = ((k, m) if depth_first[0] else (m, k), (k, n) if depth_first[1] else (n, k))
    a, b = (elements(i, s) for i, s in enumerate(stored))
    a, b = a.T if depth_first[0] else a, b.T if depth_first[1] else b
    start = elements(4, (m, n)) if continued else zero((m, n))
    total = _chain(entry, a, b, start)
    if biased:
        total = symbols.add(total, elements(3, (n,))[None, :])
    out = entry.precision.output
    arguments = (
        Argument("a", dtype=dtype, shape=stored[0], data=random_values(stored[0], dtype, 1)),
        Argument("b", dtype=dtype, shape=stored[1], data=random_values(stored[1], dtype, 2)),
        Argument("c", dtype=out, shape=(m, n)),
        Argument("bias", dtype=dtype, shape=(n,), data=random_values((n,), dtype, 3)),
        Argument("grad", dtype="float32", shape=(m, n), data=random_values((m, n), "float32", 4)),
        *(Argument(name, size) for name, size in zip("MNK", shape, strict=True)),
        Argument("zero", 0.0, "fp32"),
    )  # fmt: skip
    what = f"{m}x{n}x{k}, depth first {depth_first}" + (" with a bias" if biased else " continued" if continued else "")
    return Launch(what, arguments, 1, {"c": as_output(total, out)}, {}, Sum(m, n, k, 1, entry.split.step))


def norm_after_sum(entry: SixPoints, rows: int, n: int, dtype: str, blocks: int) -> Launch:
    """``rms_norm`` of a residual addition: the stream is rounded before it is normed."""
    shape, eps = (rows, n), np.uint32(int(entry.constant("eps").removeprefix("f32:"), 16)).view(np.float32)
    stream = as_output(symbols.add(elements(0, shape), elements(1, shape)), dtype)
    total, width = lane_sum(stream, stream, entry.split.lanes), np.full(rows, np.float32(n)).view(np.uint32)

    def constant(value: float) -> Symbols:
        return np.full(rows, symbols.constant(np.float32(value).view(np.uint32))[0])

    mean = symbols.div(total, constant(float(n)), width, True)
    root = symbols.operation("sqrt.rn.f32", symbols.add(mean, constant(float(eps))))
    r = symbols.operation("div.rn.f32", constant(1.0), root)
    y = as_output(symbols.mul(symbols.mul(stream, r[:, None]), elements(2, (n,))[None, :]), entry.precision.output)
    arguments = (
        Argument("x", dtype=dtype, shape=shape, data=random_values(shape, dtype, 5)),
        Argument("branch", dtype=dtype, shape=shape, data=random_values(shape, dtype, 6)),
        Argument("w", dtype=dtype, shape=(n,), data=random_values((n,), dtype, 7)),
        Argument("stream", dtype=dtype, shape=shape),
        Argument("y", dtype=entry.precision.output, shape=shape),
        Argument("inv_rms", dtype="float32", shape=(rows,)),
        Argument("row_count", rows),
        Argument("eps", float(eps), "fp32"),
    )
    return Launch(f"{rows} rows of {n}", arguments, blocks, {"stream": stream, "y": y, "inv_rms": r}, {})


def norm_gradient(entry: SixPoints, rows: int, n: int, dtype: str, blocks: int) -> Launch:
    """``rms_norm_dx``: docs/numerics.md as symbols."""
    shape = (rows, n)
    dy, x, w, r = elements(0, shape), elements(1, shape), elements(2, (n,)), elements(3, (rows,))[:, None]
    g, xh = symbols.mul(dy, w[None, :]), symbols.mul(x, r)
    width = np.full(rows, np.float32(n)).view(np.uint32)
    divisor = np.full(rows, symbols.constant(np.float32(n).view(np.uint32))[0])
    c = symbols.div(lane_sum(g, xh, entry.split.lanes), divisor, width, True)[:, None]
    inner = symbols.fma(symbols.negative(xh), np.broadcast_to(c, shape), g)
    arguments = (
        Argument("dy", dtype=dtype, shape=shape, data=random_values(shape, dtype, 1)),
        Argument("x", dtype=dtype, shape=shape, data=random_values(shape, dtype, 2)),
        Argument("w", dtype=dtype, shape=(n,), data=random_values((n,), dtype, 3)),
        Argument("inv_rms", dtype="float32", shape=(rows,), data=random_values((rows,), "float32", 4)),
        Argument("dx", dtype=entry.precision.output, shape=shape),
        Argument("row_count", rows),
    )
    expected = as_output(symbols.mul(np.broadcast_to(r, shape), inner), entry.precision.output)
    return Launch(f"{rows} rows of {n}", arguments, blocks, {"dx": expected}, {})


def norm_weight_gradient(rows: int, n: int, dtype: str, blocks: int) -> Launch:
    """``rms_norm_dw``: one chain a column over all rows, from what the buffer holds."""
    shape = (rows, n)
    dy, x, r, total = elements(0, shape), elements(1, shape), elements(2, (rows,)), elements(3, (n,))
    for t in range(rows):
        total = symbols.fma(dy[t], symbols.mul(x[t], np.broadcast_to(r[t], (n,))), total)
    arguments = (
        Argument("dy", dtype=dtype, shape=shape, data=random_values(shape, dtype, 1)),
        Argument("x", dtype=dtype, shape=shape, data=random_values(shape, dtype, 2)),
        Argument("inv_rms", dtype="float32", shape=(rows,), data=random_values((rows,), "float32", 3)),
        Argument("dw", dtype="float32", shape=(n,), data=random_values((n,), "float32", 4)),
        Argument("row_count", rows),
        Argument("N", n),
    )
    return Launch(f"{rows} rows of {n}", arguments, blocks, {"dw": total}, {})


def column_sum(rows: int, n: int, dtype: str, blocks: int) -> Launch:
    """``column_sum``: ascending additions a column, from what the buffer holds."""
    dy, total = elements(0, (rows, n)), elements(1, (n,))
    for t in range(rows):
        total = symbols.add(total, dy[t])
    arguments = (
        Argument("dy", dtype=dtype, shape=(rows, n), data=random_values((rows, n), dtype, 1)),
        Argument("total", dtype="float32", shape=(n,), data=random_values((n,), "float32", 2)),
        Argument("row_count", rows),
        Argument("N", n),
    )
    return Launch(f"{rows} rows of {n}", arguments, blocks, {"total": total}, {})


def values(
    buffers: tuple[tuple[str, str, int], ...],
    reference: Callable[..., tuple[Floats, ...]],
    scalars: Mapping[str, int] | None = None,
    given: Mapping[str, Floats] | None = None,
) -> Launch:
    """Elementwise work on special and random float32 values, compared as bits with the interpreter's.

    Args:
        buffers: name, role (``in``, ``out``, ``in out``) and elements of every buffer, in the kernel's order.
        reference: from all inputs, in order, to all outputs, in order.
        scalars: the kernel's integers, after its buffers; ``given``: inputs that have values of their own.
    """
    arguments, inputs = [], []
    for i, (name, role, size) in enumerate(buffers):
        data = (given or {}).get(name)
        if data is None and "in" in role.split():
            data = np.roll(special_values(size, 20 + i), 7 * i)
        inputs += [] if data is None else [data]
        arguments.append(Argument(name, dtype="float32", shape=(size,), data=data))
    arguments += [Argument(name, value) for name, value in (scalars or {}).items()]
    with np.errstate(all="ignore"):
        expected = reference(*(x.copy() for x in inputs))
    outputs = [name for name, role, _ in buffers if "out" in role.split()]
    return Launch(f"{buffers[0][2]} values", tuple(arguments), 1, {}, dict(zip(outputs, expected, strict=True)))
