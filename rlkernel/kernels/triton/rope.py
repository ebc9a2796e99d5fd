"""Rotary embedding in Triton, alone and after the norm of every head. Definitions: docs/numerics.md.

``heads`` are read where a fused projection leaves them: GROUPS groups a token, each of SLOTS head rows of DEPTH
elements (the order [its q heads, k head, v head] in which the projection's gradient is reduced). A program takes ROWS
pairs (token, head) of one kind, from slot FIRST on, PER of a group. The other side is plain: [T, GROUPS * PER, DEPTH].
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlkernel.kernels.triton.norm import inverse_root
from rlkernel.kernels.triton.primitives import negative
from rlkernel.kernels.triton.reductions import tree


@triton.jit
def rotate(x1, x2, c, s):
    """``o1 = fma(x1, c, -(x2 * s))``, ``o2 = fma(x2, c, x1 * s)``; backward: with -s."""
    left = x2 * negative(s)  # -(x2 * s): the sign of a product is that of its factors
    right = x1 * s
    return tl.fma(x1, c, left), tl.fma(x2, c, right)


@triton.jit
def _rows(row_count, GROUPS, PER, SLOTS, FIRST, DEPTH: tl.constexpr, ROWS: tl.constexpr):
    """(rows of the plain side, their tokens, places of the grouped side, which exist) of this program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    heads = GROUPS * PER
    token = row // heads
    head = (row % heads).to(tl.int32)
    grouped = (token * GROUPS + head // PER) * SLOTS + FIRST + head % PER
    return row, token, grouped * DEPTH, row < row_count


@triton.jit
def _tables(positions, cos, sin, token, present, half, HALF: tl.constexpr):
    position = tl.load(positions + token, mask=present, other=0).to(tl.int64)
    place = position[:, None] * HALF + half[None, :]
    inside = present[:, None] & (half < HALF)[None, :]
    return tl.load(cos + place, mask=inside, other=0.0), tl.load(sin + place, mask=inside, other=0.0)


@triton.jit
def head_rope(
    heads, w, positions, cos, sin, out, inv_rms, row_count, eps, GROUPS, PER, SLOTS, FIRST,
    HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Rotated head rows, with NORMS after their RMSNorm (rounded to the dtype before the rotation).

    Args:
        heads: grouped (see the module); ``w``: [2 * HALF]; ``out``: [T, GROUPS * PER, 2 * HALF].
        positions: int32 [T], ``cos``, ``sin``: float32 [P, HALF]; ``inv_rms``: float32 [T, GROUPS * PER], with NORMS.
        WIDTH: smallest power of two >= HALF (2 * HALF <= 256).
    """
    row, token, place, present = _rows(row_count, GROUPS, PER, SLOTS, FIRST, 2 * HALF, ROWS)
    half = tl.arange(0, WIDTH)
    inside = present[:, None] & (half < HALF)[None, :]
    x1 = tl.load(heads + place[:, None] + half[None, :], mask=inside, other=0.0)
    x2 = tl.load(heads + place[:, None] + HALF + half[None, :], mask=inside, other=0.0)
    if NORMS:
        tl.static_assert(WIDTH == HALF, "the lanes of a head are its elements: HALF is a power of two")
        a, b = x1.to(tl.float32), x2.to(tl.float32)
        zero = tl.zeros((ROWS, WIDTH), tl.float32)
        # a lane is one element, so the upper half of the tree is that of the upper half of the head
        total = tree(tl.fma(a, a, zero), ROWS, WIDTH) + tree(tl.fma(b, b, zero), ROWS, WIDTH)
        r = inverse_root(total, eps, 2 * HALF, ROWS)
        tl.store(inv_rms + row, r, mask=present)
        scaled1 = a * r[:, None]
        scaled2 = b * r[:, None]
        x1 = (scaled1 * tl.load(w + half).to(tl.float32)[None, :]).to(heads.dtype.element_ty)
        x2 = (scaled2 * tl.load(w + HALF + half).to(tl.float32)[None, :]).to(heads.dtype.element_ty)
    c, s = _tables(positions, cos, sin, token, present, half, HALF)
    o1, o2 = rotate(x1.to(tl.float32), x2.to(tl.float32), c, s)
    target = out + row[:, None] * (2 * HALF) + half[None, :]
    tl.store(target, o1.to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, o2.to(out.dtype.element_ty), mask=inside)


@triton.jit
def decode_heads(
    heads, wq, wk, positions, slots, cos, sin, q, k_cache, v_cache, eps, GROUPS,
    PER: tl.constexpr, SLOTS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, NORMS: tl.constexpr,
    OVERLAPS: tl.constexpr = False,
):  # fmt: skip
    """Heads of a decode step in one pass: q as :func:`head_rope` rotates it, k likewise and v into their pages.

    Args:
        heads: [T, GROUPS, PER + 2, 2 * HALF] (see the module); ``wq``, ``wk``: [2 * HALF], read with NORMS.
        positions: int32 [T], a negative one counts as 0; ``slots``: int64 [T], rows of the caches, not written if < 0.
        q: [T, GROUPS * PER, 2 * HALF]; ``k_cache``, ``v_cache``: rows of [GROUPS, 2 * HALF].
        SLOTS: smallest power of two >= PER + 2; WIDTH: of HALF. The grid is (T, GROUPS).
        OVERLAPS: on sm_90: programs start while the kernel before runs, and wait for it here.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if OVERLAPS:
        gdc_launch_dependents()
    half = tl.arange(0, WIDTH)
    whole = half < HALF
    position = tl.maximum(tl.load(positions + token), 0).to(tl.int64)
    slot = tl.load(slots + token)
    c = tl.load(cos + position * HALF + half, mask=whole, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + half, mask=whole, other=0.0)[None, :]
    member = tl.arange(0, SLOTS)
    inside = (member < PER + 2)[:, None] & whole[None, :]
    place = ((token * GROUPS + group) * (PER + 2) + member)[:, None] * (2 * HALF) + half[None, :]
    of_q = (member < PER)[:, None]
    if NORMS:
        w1 = tl.where(of_q, tl.load(wq + half)[None, :], tl.load(wk + half)[None, :]).to(tl.float32)
        w2 = tl.where(of_q, tl.load(wq + HALF + half)[None, :], tl.load(wk + HALF + half)[None, :]).to(tl.float32)
    if OVERLAPS:
        gdc_wait()
    raw1 = tl.load(heads + place, mask=inside, other=0.0)
    raw2 = tl.load(heads + place + HALF, mask=inside, other=0.0)
    x1, x2 = raw1, raw2
    if NORMS:
        tl.static_assert(WIDTH == HALF, "the lanes of a head are its elements: HALF is a power of two")
        a, b = x1.to(tl.float32), x2.to(tl.float32)
        zero = tl.zeros((SLOTS, WIDTH), tl.float32)
        total = tree(tl.fma(a, a, zero), SLOTS, WIDTH) + tree(tl.fma(b, b, zero), SLOTS, WIDTH)
        r = inverse_root(total, eps, 2 * HALF, SLOTS)
        scaled1 = a * r[:, None]
        scaled2 = b * r[:, None]
        x1 = (scaled1 * w1).to(heads.dtype.element_ty)
        x2 = (scaled2 * w2).to(heads.dtype.element_ty)
    o1, o2 = rotate(x1.to(tl.float32), x2.to(tl.float32), c, s)
    o1, o2 = o1.to(q.dtype.element_ty), o2.to(q.dtype.element_ty)
    target = q + ((token * GROUPS + group) * PER + member)[:, None] * (2 * HALF) + half[None, :]
    own = inside & of_q
    tl.store(target, o1, mask=own)
    tl.store(target + HALF, o2, mask=own)
    there = (slot * GROUPS + group) * (2 * HALF) + tl.zeros((SLOTS, 1), tl.int64) + half[None, :]
    kept = (slot + tl.zeros((SLOTS, 1), tl.int64)) >= 0  # not a scalar: Triton's interpreter takes no such mask
    own = inside & (member == PER)[:, None] & kept
    tl.store(k_cache + there, o1, mask=own)
    tl.store(k_cache + there + HALF, o2, mask=own)
    own = inside & (member == PER + 1)[:, None] & kept
    tl.store(v_cache + there, raw1, mask=own)
    tl.store(v_cache + there + HALF, raw2, mask=own)


@triton.jit
def head_rope_backward(
    dy, heads, w, positions, cos, sin, inv_rms, dheads, dnormed, row_count, GROUPS, PER, SLOTS, FIRST,
    HALF: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Gradients of :func:`head_rope`.

    Args:
        dy: [T, GROUPS * PER, 2 * HALF]; ``dheads``: grouped, gradient of ``heads``.
        dnormed: [T, GROUPS * PER, 2 * HALF], written with NORMS: the gradient between rotation and norm, which the
            norm's weight gradient reads. It may be dy.
    """
    row, token, place, present = _rows(row_count, GROUPS, PER, SLOTS, FIRST, 2 * HALF, ROWS)
    half = tl.arange(0, WIDTH)
    inside = present[:, None] & (half < HALF)[None, :]
    source = row[:, None] * (2 * HALF) + half[None, :]
    d1 = tl.load(dy + source, mask=inside, other=0.0).to(tl.float32)
    d2 = tl.load(dy + source + HALF, mask=inside, other=0.0).to(tl.float32)
    c, s = _tables(positions, cos, sin, token, present, half, HALF)
    o1, o2 = rotate(d1, d2, c, negative(s))
    o1, o2 = o1.to(dheads.dtype.element_ty), o2.to(dheads.dtype.element_ty)
    target = place[:, None] + half[None, :]
    if NORMS:
        tl.store(dnormed + source, o1, mask=inside)
        tl.store(dnormed + source + HALF, o2, mask=inside)
        r = tl.load(inv_rms + row, mask=present, other=0.0)[:, None]
        g1 = o1.to(tl.float32) * tl.load(w + half).to(tl.float32)[None, :]
        g2 = o2.to(tl.float32) * tl.load(w + HALF + half).to(tl.float32)[None, :]
        h1 = tl.load(heads + target, mask=inside, other=0.0).to(tl.float32) * r
        h2 = tl.load(heads + target + HALF, mask=inside, other=0.0).to(tl.float32) * r
        zero = tl.zeros((ROWS, WIDTH), tl.float32)
        total = tree(tl.fma(g1, h1, zero), ROWS, WIDTH) + tree(tl.fma(g2, h2, zero), ROWS, WIDTH)
        mean = tl.div_rn(total, tl.full((ROWS,), 2 * HALF, tl.float32))
        mean = tl.broadcast_to(negative(mean)[:, None], (ROWS, WIDTH))
        inner1, inner2 = tl.fma(h1, mean, g1), tl.fma(h2, mean, g2)
        o1 = (r * inner1).to(dheads.dtype.element_ty)
        o2 = (r * inner2).to(dheads.dtype.element_ty)
    tl.store(dheads + target, o1, mask=inside)
    tl.store(dheads + target + HALF, o2, mask=inside)


@triton.jit
def head_copy(
    plain, grouped, row_count, GROUPS, PER, SLOTS, FIRST,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GATHERS: tl.constexpr,
):  # fmt: skip
    """Head rows out of the groups (GATHERS), or back into them: v, which is neither normed nor rotated."""
    row, _, place, present = _rows(row_count, GROUPS, PER, SLOTS, FIRST, DEPTH, ROWS)
    column = tl.arange(0, WIDTH)
    inside = present[:, None] & (column < DEPTH)[None, :]
    there = plain + row[:, None] * DEPTH + column[None, :]
    here = grouped + place[:, None] + column[None, :]
    if GATHERS:
        tl.store(there, tl.load(here, mask=inside, other=0.0), mask=inside)
    else:
        tl.store(here, tl.load(there, mask=inside, other=0.0), mask=inside)


@triton.jit
def head_norm_dw(
    dnormed, heads, inv_rms, dw, token_count, GROUPS, PER, SLOTS, FIRST,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``dw[i] = fma(dy, x * r, dw[i])`` over tokens, then heads, ascending; dw float32 [DEPTH], continued in place."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < DEPTH
    count = GROUPS * PER
    rows = token_count * count
    acc = tl.load(dw + column, mask=inside, other=0.0)
    whole = rows // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        for t in tl.static_range(BLOCK):
            row = first + t
            acc = _head_step(dnormed, heads, inv_rms, row, column, inside, acc, count, GROUPS, PER, SLOTS, FIRST, DEPTH)
    for row in range(whole, rows):
        acc = _head_step(dnormed, heads, inv_rms, row, column, inside, acc, count, GROUPS, PER, SLOTS, FIRST, DEPTH)
    tl.store(dw + column, acc, mask=inside)


@triton.jit
def _head_step(
    dnormed, heads, inv_rms, row, column, inside, acc, count, GROUPS, PER, SLOTS, FIRST, DEPTH: tl.constexpr
):  # fmt: skip
    token, head = row // count, row % count
    width = tl.full(column.shape, DEPTH, tl.int64)
    place = ((token * GROUPS + head // PER) * SLOTS + FIRST + head % PER) * width + column
    r = tl.load(inv_rms + row)
    xh = tl.load(heads + place, mask=inside, other=0.0).to(tl.float32) * r
    dy = tl.load(dnormed + row * width + column, mask=inside, other=0.0).to(tl.float32)
    return tl.fma(dy, xh, acc)
