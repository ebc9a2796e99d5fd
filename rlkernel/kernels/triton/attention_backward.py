"""Gradients of causal attention in Triton over whole packed sequences. Definition: docs/numerics.md, section Backward.

Three kernels: the row dot products ``delta``; dq, a chain over the keys; dk and dv, chains over the query heads of the
group and then the queries. Scores and weights are computed again, with the bits of the forward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rlkernel.kernels.triton.attention_block import FMA, column, depth_operand, operand, scores, weight_exp2


@triton.jit
def _fma_columns(a, b, total, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # one chain over the columns of a and b [ROWS, COLUMNS], ascending
    if COLUMNS == 1:
        result = tl.fma(tl.reshape(a, (ROWS,)), tl.reshape(b, (ROWS,)), total)
    else:
        a_low, a_high = tl.split(tl.permute(tl.reshape(a, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        b_low, b_high = tl.split(tl.permute(tl.reshape(b, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        result = _fma_columns(a_low, b_low, total, ROWS, COLUMNS // 2)
        result = _fma_columns(a_high, b_high, result, ROWS, COLUMNS // 2)
    return result


@triton.jit
def _row_chain(a, b, rows, present, D: tl.constexpr, ROWS: tl.constexpr):
    # one ascending chain of fma over each of the rows of a and b, D a multiple of 8
    i = tl.arange(0, 8)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, D, 8):
        places = rows[:, None] * D + first + i[None, :]
        x = tl.load(a + places, mask=present[:, None], other=0.0).to(tl.float32)
        y = tl.load(b + places, mask=present[:, None], other=0.0).to(tl.float32)
        total = _fma_columns(x, y, total, ROWS, 8)
    return total


@triton.jit(do_not_specialize=["count"])
def row_dots(a, b, out, count, D: tl.constexpr, ROWS: tl.constexpr):
    """``out[i]`` = one ascending chain of fma over row i of a and b: [count, D], D a multiple of 8 -> float32."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = rows < count
    tl.store(out + rows, _row_chain(a, b, rows, present, D, ROWS), mask=present)


@triton.jit(do_not_specialize=["length"])
def row_statistics(dout, out, lse2, lse, delta, starts, length, QH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """lse2 [N, QH] and the row dots of dout and out [N, QH, D], a head's rows side by side: lse, delta [QH, length].

    Row i of sequence s goes to column ``4 * ceil((starts[s] + 3 * s) / 4) + i``: sequences begin at multiples of 16
    bytes, as TMA reads them. The grid is (tiles of ROWS rows, QH, sequences).
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = i < count
    rows = (begin.to(tl.int64) + i) * QH + head
    place = head * length + (begin + 3 * sequence + 3) // 4 * 4 + i
    tl.store(lse + place, tl.load(lse2 + rows, mask=present, other=0.0), mask=present)
    tl.store(delta + place, _row_chain(dout, out, rows, present, D, ROWS), mask=present)


@triton.jit
def _gradients(s, dp, lse, delta, visible, MASKED: tl.constexpr, KIND: tl.constexpr, NARROW: tl.constexpr):
    # weights and score gradients of a tile, rounded; +0 where masked
    x = s - lse
    if MASKED:
        x = tl.where(visible, x, float("-inf"))
    p = weight_exp2(x, KIND)
    ds = p * (dp - delta)
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    if NARROW:
        p = p.to(tl.bfloat16)
        ds = ds.to(tl.bfloat16)
    return p, ds


@triton.jit
def _query_block(
    q, dout, k, v, lse, delta, dq, first, count, position, d, begin, scale2, MASKED: tl.constexpr, STEP: tl.constexpr,
    D: tl.constexpr, MAC: tl.constexpr, KIND: tl.constexpr, NARROW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    j = first + tl.arange(0, BLOCK_N)
    places = (begin.to(tl.int64) + j)[:, None] * STEP + d[None, :]
    inside = (d < D)[None, :]
    if MASKED:
        inside = inside & (j < count)[:, None]
    k_block = operand(tl.load(k + places, mask=inside, other=0.0), MAC)
    v_block = operand(tl.load(v + places, mask=inside, other=0.0), MAC)
    s = scores(q, k_block, scale2)
    dp = tl.dot(dout, tl.trans(v_block), input_precision="ieee")
    visible = j[None, :] <= position[:, None]
    _, ds = _gradients(s, dp, lse[:, None], delta[:, None], visible, MASKED, KIND, NARROW)
    if MAC == FMA and MASKED:
        for i in range(0, min(BLOCK_N, count - first)):
            row = tl.load(k + (begin.to(tl.int64) + first + i) * STEP + d, mask=d < D, other=0.0).to(tl.float32)
            factor = column(ds.to(tl.float32), i, BLOCK_M, BLOCK_N)
            continued = tl.fma(tl.broadcast_to(factor[:, None], dq.shape), tl.broadcast_to(row[None, :], dq.shape), dq)
            dq = tl.where((first + i <= position)[:, None], continued, dq)
    else:
        dq = tl.dot(ds.to(k_block.dtype), k_block, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["sequences"])
def query_gradient(
    dout,
    q,
    k,
    v,
    lse2,
    delta,
    dq,
    starts,
    sequences,
    scale,
    scale2,
    QH: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAC: tl.constexpr,
    KIND: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``dq`` of BLOCK_M query rows of one head: dout, q, dq [N, QH, D]; k, v [N, KVH, D]; lse2, delta float32 [N, QH].

    The grid is (sequences * QH, tiles of the longest sequence).
    """
    d = tl.arange(0, BLOCK_D)
    local = tl.arange(0, BLOCK_M)
    sequence, head = tl.program_id(0) // QH, tl.program_id(0) % QH
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    if first_row < count:
        position = first_row + local
        rows = (begin.to(tl.int64) + position) * QH + head
        present = position < count
        inside = present[:, None] & (d < D)[None, :]
        places = rows[:, None] * D + d[None, :]
        q_tile = depth_operand(tl.load(q + places, mask=inside, other=0.0), d, D, BLOCK_D, MAC)
        dout_tile = depth_operand(tl.load(dout + places, mask=inside, other=0.0), d, D, BLOCK_D, MAC)
        lse = tl.load(lse2 + rows, mask=present, other=0.0)
        row_delta = tl.load(delta + rows, mask=present, other=0.0)
        head_k, head_v = k + (head // (QH // KVH)) * D, v + (head // (QH // KVH)) * D
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        middle = (first_row + 1) // BLOCK_N * BLOCK_N
        for first in range(0, middle, BLOCK_N):
            acc = _query_block(
                q_tile, dout_tile, head_k, head_v, lse, row_delta, acc, first, count, position, d, begin, scale2,
                False, KVH * D, D, MAC, KIND, NARROW, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        for first in range(middle, min(first_row + BLOCK_M, count), BLOCK_N):
            acc = _query_block(
                q_tile, dout_tile, head_k, head_v, lse, row_delta, acc, first, count, position, d, begin, scale2,
                True, KVH * D, D, MAC, KIND, NARROW, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        tl.store(dq + places, (acc * scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _key_block(
    q, dout, lse2, delta, k, v, dk, dv, first, count, key, d, begin, head, scale2, MASKED: tl.constexpr,
    QH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MAC: tl.constexpr, KIND: tl.constexpr,
    NARROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    i = first + tl.arange(0, BLOCK_M)
    rows = (begin.to(tl.int64) + i) * QH + head
    present = i < count
    inside = (d < D)[None, :]
    if MASKED:
        inside = inside & present[:, None]
        lse = tl.load(lse2 + rows, mask=present, other=0.0)
        row_delta = tl.load(delta + rows, mask=present, other=0.0)
    else:
        lse = tl.load(lse2 + rows)
        row_delta = tl.load(delta + rows)
    places = rows[:, None] * D + d[None, :]
    q_block = operand(tl.load(q + places, mask=inside, other=0.0), MAC)
    dout_block = operand(tl.load(dout + places, mask=inside, other=0.0), MAC)
    s = scores(k, q_block, scale2)
    dp = tl.dot(v, tl.trans(dout_block), input_precision="ieee")
    visible = (key[:, None] <= i[None, :]) & present[None, :]
    p, ds = _gradients(s, dp, lse[None, :], row_delta[None, :], visible, MASKED, KIND, NARROW)
    if MAC == FMA and MASKED:
        for r in range(0, min(BLOCK_M, count - first)):
            row = ((begin.to(tl.int64) + first + r) * QH + head) * D + d
            q_row = tl.load(q + row, mask=d < D, other=0.0).to(tl.float32)
            dout_row = tl.load(dout + row, mask=d < D, other=0.0).to(tl.float32)
            seen = (key <= first + r)[:, None]
            factor = column(ds.to(tl.float32), r, BLOCK_N, BLOCK_M)
            continued = tl.fma(
                tl.broadcast_to(factor[:, None], dk.shape), tl.broadcast_to(q_row[None, :], dk.shape), dk
            )
            dk = tl.where(seen, continued, dk)
            factor = column(p.to(tl.float32), r, BLOCK_N, BLOCK_M)
            continued = tl.fma(
                tl.broadcast_to(factor[:, None], dv.shape), tl.broadcast_to(dout_row[None, :], dv.shape), dv
            )
            dv = tl.where(seen, continued, dv)
    else:
        dv = tl.dot(p.to(dout_block.dtype), dout_block, dv, input_precision="ieee")
        dk = tl.dot(ds.to(q_block.dtype), q_block, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def key_gradients(
    dout,
    q,
    k,
    v,
    lse2,
    delta,
    dk,
    dv,
    starts,
    scale,
    scale2,
    QH: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAC: tl.constexpr,
    KIND: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``dk`` and ``dv`` [N, KVH, D] of BLOCK_N keys of one KV head; operands as in :func:`query_gradient`.

    The grid is (sequences * KVH, tiles of the longest sequence). The first keys see the most queries and come first.
    """
    GROUP: tl.constexpr = QH // KVH
    d = tl.arange(0, BLOCK_D)
    sequence, kv_head = tl.program_id(0) // KVH, tl.program_id(0) % KVH
    first_key = tl.program_id(1) * BLOCK_N
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    if first_key < count:
        key = first_key + tl.arange(0, BLOCK_N)
        places = ((begin.to(tl.int64) + key) * KVH + kv_head)[:, None] * D + d[None, :]
        inside = (key < count)[:, None] & (d < D)[None, :]
        k_tile = depth_operand(tl.load(k + places, mask=inside, other=0.0), d, D, BLOCK_D, MAC)
        v_tile = depth_operand(tl.load(v + places, mask=inside, other=0.0), d, D, BLOCK_D, MAC)
        dk_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        low = first_key // BLOCK_M * BLOCK_M
        seen_by_all = tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M
        middle = min(seen_by_all, tl.cdiv(count, BLOCK_M) * BLOCK_M)
        high = max(middle, count // BLOCK_M * BLOCK_M)
        for member in range(0, GROUP):
            head = kv_head * GROUP + member
            for first in range(low, middle, BLOCK_M):
                dk_acc, dv_acc = _key_block(
                    q, dout, lse2, delta, k_tile, v_tile, dk_acc, dv_acc, first, count, key, d, begin, head, scale2,
                    True, QH, D, BLOCK_D, MAC, KIND, NARROW, BLOCK_M, BLOCK_N,
                )  # fmt: skip
            for first in range(middle, high, BLOCK_M):
                dk_acc, dv_acc = _key_block(
                    q, dout, lse2, delta, k_tile, v_tile, dk_acc, dv_acc, first, count, key, d, begin, head, scale2,
                    False, QH, D, BLOCK_D, MAC, KIND, NARROW, BLOCK_M, BLOCK_N,
                )  # fmt: skip
            for first in range(high, count, BLOCK_M):
                dk_acc, dv_acc = _key_block(
                    q, dout, lse2, delta, k_tile, v_tile, dk_acc, dv_acc, first, count, key, d, begin, head, scale2,
                    True, QH, D, BLOCK_D, MAC, KIND, NARROW, BLOCK_M, BLOCK_N,
                )  # fmt: skip
        tl.store(dk + places, (dk_acc * scale).to(dk.dtype.element_ty), mask=inside)
        tl.store(dv + places, dv_acc.to(dv.dtype.element_ty), mask=inside)
