"""Gradient of the logits in Triton, from logits that are computed again: they never exist as a whole."""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract import constants
from rlkernel.kernels.triton.logprob import divided
from rlkernel.kernels.triton.primitives import constant, exp2_full

_LOG2E = tl.constexpr(constants.LOG2E)


@triton.jit
def _gradient(z, hot, top, log_sum, c):
    """``mul(sub(onehot, p), c)`` of divided logits z [M, N]; ``hot``: bool [M, N]; the rest float32 [M]."""
    p = exp2_full(((z - top[:, None]) - log_sum[:, None]) * _LOG2E)
    one = tl.where(hot, constant(z, 1.0), constant(z, 0.0))
    return (one - p) * c[:, None]


@triton.jit
def _row_values(row, present, maxima, log_sums, targets, coefficients, divisor):
    top = tl.load(maxima + row, mask=present, other=0.0)
    log_sum = tl.load(log_sums + row, mask=present, other=0.0)
    target = tl.load(targets + row, mask=present, other=-1)
    coefficient = tl.load(coefficients + row, mask=present, other=0.0)
    return top, log_sum, target, tl.div_rn(coefficient, tl.zeros_like(coefficient) + divisor)


@triton.jit
def logits_gradient(
    z,
    maxima,
    log_sums,
    targets,
    coefficients,
    dz,
    R,
    columns,
    stride,
    first,
    temperature,
    divisor,
    DIVISION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``dz = cast((onehot - p) * (coefficient / temperature))`` of logits float32 [R, columns] in memory.

    Args:
        first: vocabulary id of column 0; ``temperature`` and DIVISION: of the logits; ``divisor``: the temperature.
        dz: [R, columns], rows ``stride`` apart; its dtype is that of the cast.
        Grid: (blocks of columns, blocks of ROWS rows).
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = row < R
    top, log_sum, target, c = _row_values(row, present, maxima, log_sums, targets, coefficients, divisor)
    inside = present[:, None] & (v < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + v[None, :]
    value = divided(tl.load(z + at, mask=inside, other=0.0), temperature, DIVISION)
    hot = (target - first)[:, None] == v[None, :]
    place = row.to(tl.int64)[:, None] * stride + v[None, :]
    tl.store(dz + place, _gradient(value, hot, top, log_sum, c).to(dz.dtype.element_ty), mask=inside)


@triton.jit
def linear_gradient(
    x,
    w,
    maxima,
    log_sums,
    targets,
    coefficients,
    dz,
    R,
    columns,
    K,
    first,
    temperature,
    divisor,
    zero,
    DIVISION: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """The same from x [R, K] and w [columns, K], rows ``first`` and on of the head: logits are never stored."""
    tiles_m = tl.cdiv(R, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    group_size = min(tiles_m - group * GROUP_M, GROUP_M)
    place = tl.program_id(0) % (GROUP_M * tiles_n)
    row = (group * GROUP_M + place % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    v = (place // group_size) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_rows = x + tl.minimum(row, R - 1).to(tl.int64)[:, None] * K
    w_rows = w + tl.minimum(v, columns - 1).to(tl.int64)[None, :] * K
    acc = tl.full((BLOCK_M, BLOCK_N), zero, tl.float32)
    for start in range(0, K, BLOCK_K):
        index = start + k
        if EVEN:
            a = tl.load(x_rows + index[None, :])
            b = tl.load(w_rows + index[:, None])
        else:
            a = tl.load(x_rows + index[None, :], mask=(index < K)[None, :], other=0.0)
            b = tl.load(w_rows + index[:, None], mask=(index < K)[:, None], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
            if not EVEN:
                # beyond the end a is -0 and b +0: fma(-0, +0, acc) is acc (see gemm)
                sign = tl.where(index < K, 0, -0x80000000).to(tl.int32)
                a = (a.to(tl.int32, bitcast=True) | sign[None, :]).to(tl.float32, bitcast=True)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    present = row < R
    top, log_sum, target, c = _row_values(row, present, maxima, log_sums, targets, coefficients, divisor)
    hot = (target - first)[:, None] == v[None, :]
    value = _gradient(divided(acc, temperature, DIVISION), hot, top, log_sum, c)
    at = row.to(tl.int64)[:, None] * columns + v[None, :]
    tl.store(dz + at, value.to(dz.dtype.element_ty), mask=present[:, None] & (v < columns)[None, :])
