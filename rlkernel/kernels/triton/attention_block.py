"""One key block of attention as Triton device functions: weights, row sum, and the chain over the block's keys.

The order of every sum is written out. A row sum runs in ``LANES`` strided chains that merge as a tree of neighbours;
each level of the tree reduces pairs, and a sum of two has one meaning whatever the layout. The maximum may be taken in
any order: the contract's ``max`` is associative and commutative. A masked weight is +0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.contract import profiles
from rlkernel.kernels.triton.primitives import exp2_full, exp2_p3, maximum

FMA: tl.constexpr = tl.constexpr(profiles.FMA)
EXP2: tl.constexpr = tl.constexpr(profiles.EXP2)
EXP2_P3: tl.constexpr = tl.constexpr(profiles.EXP2_P3)
EX2_SM90: tl.constexpr = tl.constexpr(profiles.EX2_SM90)


@triton.jit
def _largest_instruction(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger(a, b, KIND: tl.constexpr):
    """The contract's ``max`` of a and b. sm_90 has it as an instruction: NaN if either is NaN, +0 above -0."""
    if KIND == EX2_SM90:  # noqa: SIM108
        result = _largest_instruction(a, b)
    else:
        result = maximum(a, b)
    return result


@triton.jit
def row_maximum(x, KIND: tl.constexpr):
    """The contract's ``max`` of each row of x [rows, columns]; its order is free."""
    if KIND == EX2_SM90:  # noqa: SIM108
        result = tl.reduce(x, 1, _largest_instruction)
    else:
        result = tl.reduce(x, 1, maximum)
    return result


@triton.jit
def sum_of_two(a, b):
    return a + b


@triton.jit
def weight_exp2(x, KIND: tl.constexpr):
    """The exponential of attention weights that the entry names, of x <= 0; +0 at -inf."""
    if KIND == EX2_SM90:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    elif KIND == EXP2_P3:
        power = exp2_p3(x)
    else:
        tl.static_assert(KIND == EXP2, "the exponential of weights is exp2.full, exp2.p3 or ex2.approx.ftz.sm90")
        power = exp2_full(x)
    return power


@triton.jit
def _chain_of_groups(
    values, total, CONTINUED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr
):
    # values [ROWS, GROUPS * LANES]: groups are added to total [ROWS, LANES] one after the other
    if GROUPS == 1:
        if CONTINUED:  # noqa: SIM108
            result = total + values
        else:
            result = values
    else:
        halves = tl.permute(tl.reshape(values, (ROWS, 2, GROUPS // 2 * LANES)), (0, 2, 1))
        low, high = tl.split(halves)
        result = _chain_of_groups(low, total, CONTINUED, ROWS, GROUPS // 2, LANES)
        result = _chain_of_groups(high, result, True, ROWS, GROUPS // 2, LANES)
    return result


@triton.jit
def lane_total(weights, ROWS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr):
    """Row sums of ``weights`` [ROWS, KEYS]: lane i adds keys i, i + LANES, ... ascending; then a tree."""
    values = _chain_of_groups(weights, weights, False, ROWS, KEYS // LANES, LANES)
    LEVELS: tl.constexpr = LANES.bit_length() - 1
    for level in tl.static_range(LEVELS):
        values = tl.reduce(tl.reshape(values, (ROWS, LANES >> (level + 1), 2)), 2, sum_of_two)
    return tl.reshape(values, (ROWS,))


@triton.jit
def chained_total(weights, start, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """``total = add(total, p_j)`` for j ascending from ``start`` [ROWS], as fma(p_j, 1, total)."""
    wide = tl.broadcast_to(start[:, None], (ROWS, 16))
    wide = tl.dot(weights, tl.full((KEYS, 16), 1.0, tl.float32), wide, input_precision="ieee")
    return tl.reduce(wide, 1, maximum)  # all columns are equal


@triton.jit
def operand(x, MAC: tl.constexpr):
    """An operand of a chain: widened to float32 for a chain of fma."""
    if MAC == FMA:
        x = x.to(tl.float32)
    return x


@triton.jit
def depth_operand(x, d, D: tl.constexpr, BLOCK_D: tl.constexpr, MAC: tl.constexpr):
    """The left operand [rows, BLOCK_D] of a chain over the head axis, zero beyond D.

    A chain of fma gets -0 there, because fma(-0, +0, acc) is acc whatever acc is. The sign is set by an integer
    operation: the compiler folds a selection into the load and drops the sign there.
    """
    x = operand(x, MAC)
    if MAC == FMA and D < BLOCK_D:
        sign = tl.where(d < D, 0, -0x80000000).to(tl.int32)
        x = (x.to(tl.int32, bitcast=True) | sign[None, :]).to(tl.float32, bitcast=True)
    return x


@triton.jit
def scores(q, k, scale2):
    """Scaled scores [rows, keys] of operands q [rows, BLOCK_D] and k [keys, BLOCK_D]."""
    return tl.dot(q, tl.trans(k), input_precision="ieee") * scale2


@triton.jit
def online_weights(
    s, visible, m, sums, MASKED: tl.constexpr, KIND: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One block of the online softmax.

    Args:
        s: scores [ROWS, KEYS]; ``visible``: bool of that shape, used where MASKED.
        m, sums: running maximum and row sum [ROWS].

    Returns:
        weights (+0 where masked), the new maximum, the factor of what was accumulated, the new row sum. A row that sees
        no key of the block keeps maximum and sum, its factor is 1 (or there is nothing accumulated yet).
    """
    hidden = s
    if MASKED:
        hidden = tl.where(visible, s, float("-inf"))
    new = larger(m, row_maximum(hidden, KIND), KIND)
    alpha = exp2_full(m - new)
    alpha = tl.where(m == float("-inf"), tl.where(new == new, 0.0, new), alpha)
    x = s - new[:, None]
    if MASKED:
        x = tl.where(visible, x, float("-inf"))
    p = weight_exp2(x, KIND)
    if NARROW:
        p = p.to(tl.bfloat16)
    wide = p.to(tl.float32)
    if LANES == 1:
        total = chained_total(wide, sums * alpha, ROWS, KEYS)
    else:
        total = tl.fma(sums, alpha, lane_total(wide, ROWS, KEYS, LANES))
    return p, new, alpha, total


@triton.jit
def column(x, j, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Column j of float32 x [ROWS, COLUMNS], its bits unchanged."""
    bits = tl.where((tl.arange(0, COLUMNS) == j)[None, :], x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, 1).to(tl.float32, bitcast=True)
