"""Launches of the attention kernels that the machines execute whole: the row dot products, and the merge of splits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.reference.arith import add, div, fma32, maximum, sub
from rlkernel.reference.primitives import exp2_full, log2_full
from rlkernel.verify.audit import symbols
from rlkernel.verify.audit.launches import Launch
from rlkernel.verify.audit.memory import Argument


def _normal(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> NDArray[np.float32]:
    data = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if dtype == "bfloat16":
        data = (data.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return data


def row_dots(rows: int, depth: int, dtype: str, blocks: int) -> Launch:
    """``row_dots`` of [rows, depth]: one ascending chain of fma a row, as symbols."""
    a, b = (symbols.element(n, np.arange(rows * depth)).reshape(rows, depth) for n in (0, 1))
    total = np.full(rows, symbols.constant(0)[0])
    for d in range(depth):
        total = symbols.fma(a[:, d], b[:, d], total)
    arguments = (
        Argument("a", dtype=dtype, shape=(rows, depth), data=_normal((rows, depth), 1, dtype)),
        Argument("b", dtype=dtype, shape=(rows, depth), data=_normal((rows, depth), 2, dtype)),
        Argument("out", dtype="float32", shape=(rows,)),
        Argument("count", rows),
    )
    return Launch(f"{rows} rows of {depth}", arguments, blocks, {"out": total}, {})


def split_merge(heads: int, depth: int, splits: int, used: int, split_keys: int, blocks: int) -> Launch:
    """``decode_merge`` of one sequence whose last key lies in split ``used - 1``, compared as bits."""
    part, m, sums = (_normal(shape, 3 + i) for i, shape in enumerate(((splits, heads, depth), *[(splits, heads)] * 2)))
    m, sums = 8 * m, np.abs(sums) + 1
    part[used:], m[used:], sums[used:] = np.nan, np.nan, np.nan  # left over from another sequence
    position = np.array([used * split_keys - 1], dtype=np.int32)
    parts, maxima, row_sums = (torch.from_numpy(x.copy()) for x in (part, m, sums))
    largest = maxima[0]
    for split in range(1, used):
        largest = maximum(largest, maxima[split])
    total, out = torch.zeros(heads), torch.zeros(heads, depth)
    for split in range(used):
        w = exp2_full(sub(maxima[split], largest))
        total = fma32(row_sums[split], w, total)
        out = fma32(parts[split], w[:, None].expand_as(out), out)
    expected = {
        "out": div(out, total[:, None].expand_as(out)).numpy(),
        "lse2": add(largest, log2_full(total)).numpy(),
    }
    arguments = (
        Argument("part", dtype="float32", shape=part.shape, data=part),
        Argument("part_m", dtype="float32", shape=m.shape, data=m),
        Argument("part_l", dtype="float32", shape=sums.shape, data=sums),
        Argument("out", dtype="float32", shape=(heads, depth)),
        Argument("lse2", dtype="float32", shape=(heads,)),
        Argument("positions", dtype="float32", shape=(1,), data=position.view(np.float32)),
        Argument("splits", splits),
    )
    return Launch(f"{used} of {splits} splits, {heads} heads of {depth}", arguments, blocks, {}, expected)
