"""Gradients of causal attention over whole sequences (docs/numerics.md, section Backward, attention).

P is computed again from lse2, in pairs of 64 query rows and 64 keys of one head. The pairs of a (sequence, KV head)
are walked by head, then query block, then key block, all ascending. That is at once the order of the chains of dq
(keys ascending) and of dk and dv (heads, then rows ascending), so one pass serves the three. Where a batch has too few
sequences and heads for its threads, the pass is cut into pieces that own some rows of dq or some keys of dk and dv.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numba import int64

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.attention_pages import F32, I32, I64, expect
from rlkernel.kernels.cpu.attention_tile import KEY_BLOCK, chain_block, chain_lower, chain_upper, element_address
from rlkernel.kernels.cpu.jit import device_function, kernel
from rlkernel.kernels.cpu.memory import aligned_empty, aligned_scratch
from rlkernel.kernels.cpu.microkernel import LANES
from rlkernel.kernels.cpu.primitives import cast, exp2_full, exp2_p3, fma, round_bf16
from rlkernel.kernels.cpu.threads import Workers

_PIECE = 128  # rows or keys of one piece where a pass is cut: tuning
_WANT_DQ, _WANT_DKV = 1, 2
_DQ_COST, _DKV_COST, _BOTH_COST = 3, 4, 5  # matrix products a pair of blocks


@kernel
def _deltas(first, last, dout, out, depth, delta):
    """``delta[r]`` = chain over d of (dout, out), for rows ``first .. last`` of [rows, D]."""
    r = first
    while r + 4 <= last:  # four chains side by side hide the latency
        a0, a1, a2, a3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for d in range(depth):
            a0 = fma(dout[r, d], out[r, d], a0)
            a1 = fma(dout[r + 1, d], out[r + 1, d], a1)
            a2 = fma(dout[r + 2, d], out[r + 2, d], a2)
            a3 = fma(dout[r + 3, d], out[r + 3, d], a3)
        delta[r], delta[r + 1], delta[r + 2], delta[r + 3] = a0, a1, a2, a3
        r += 4
    while r < last:
        total = np.float32(0)
        for d in range(depth):
            total = fma(dout[r, d], out[r, d], total)
        delta[r] = total
        r += 1


@device_function
def _transpose(x, base, kv_head, start, stop, depth, target):
    """``target`` [blocks, depth, 64]: keys ``start .. stop`` of x[N, KVH, D], transposed in blocks of 64."""
    for j in range(start, stop):
        at = (j - start) // KEY_BLOCK * depth * KEY_BLOCK + (j - start) % KEY_BLOCK
        row = x[base + j, kv_head]
        for d in range(depth):
            target[at + d * KEY_BLOCK] = row[d]


@device_function
def _weights_and_gradients(scores, gradients, lse2, delta, scale2, bf16):
    """One row of a pair, in place: dot products q.k become P (cast), dot products dout.v become ds (cast)."""
    if bf16:
        for j in range(KEY_BLOCK):
            p = exp2_p3(scores[j] * scale2 - lse2)
            gradients[j] = round_bf16(p * (gradients[j] - delta))
            scores[j] = round_bf16(p)
    else:
        for j in range(KEY_BLOCK):
            p = exp2_full(scores[j] * scale2 - lse2)
            gradients[j] = p * (gradients[j] - delta)
            scores[j] = p


@kernel
def _pass(first, last, bounds, items, dout, q, k, v, lse2, delta, depth, scratch, scale, scale2, bf16, dq, dk, dv):
    """Items ``bounds[first] .. bounds[last]``; rows of ``items``: (first row of the sequence, KV head, first key,
    last key, first query row, last query row, what to compute). Arrays are padded to whole vectors past ``depth``."""
    kv_heads, padded = k.shape[1], k.shape[2]
    heads = q.shape[1]
    group = heads // kv_heads
    block = int64(KEY_BLOCK)
    zero, one = int64(0), int64(1)
    memory = scratch[first]
    scores = memory[: block * block]
    gradients = memory[block * block : 2 * block * block]
    dq_sum = memory[2 * block * block : block * (2 * block + padded)]
    at = block * (2 * block + padded)
    for item in range(bounds[first], bounds[last]):
        base, kv_head, want = items[item, 0], items[item, 1], items[item, 6]
        key_from, key_to, row_from, row_to = items[item, 2], items[item, 3], items[item, 4], items[item, 5]
        keys = key_to - key_from
        room = (keys + block - 1) // block * block * depth
        k_blocks = memory[at : at + room]
        v_blocks = memory[at + room : at + 2 * room]
        dk_sum = memory[at + 2 * room : at + 2 * room + keys * padded]
        dv_sum = memory[at + 2 * room + keys * padded : at + 2 * (room + keys * padded)]
        _transpose(k, base, kv_head, key_from, key_to, depth, k_blocks)
        _transpose(v, base, kv_head, key_from, key_to, depth, v_blocks)
        if want & _WANT_DKV:
            dk_sum[:] = np.float32(0)
            dv_sum[:] = np.float32(0)
        for head in range(kv_head * group, (kv_head + 1) * group):
            for i in range(row_from, row_to, block):
                rows = min(block, row_to - i)
                q_address = element_address(q, ((base + i) * heads + head) * padded)
                dout_address = element_address(dout, ((base + i) * heads + head) * padded)
                row_stride = heads * padded
                dq_sum[:] = np.float32(0)
                for j in range(key_from, min(key_to, i + 1), block):
                    columns = min(block, key_to - j)
                    s, g = element_address(scores, zero), element_address(gradients, zero)
                    offset = (j - key_from) * depth
                    chain_block(
                        rows, columns, q_address, row_stride, one, element_address(k_blocks, offset), block,
                        s, block, depth, one,
                    )  # fmt: skip
                    chain_block(
                        rows, columns, dout_address, row_stride, one, element_address(v_blocks, offset), block,
                        g, block, depth, one,
                    )  # fmt: skip
                    for r in range(rows):
                        _weights_and_gradients(
                            scores[r * block : (r + 1) * block], gradients[r * block : (r + 1) * block],
                            lse2[base + i + r, head], delta[base + i + r, head], scale2, bf16,
                        )  # fmt: skip
                    diagonal = i == j
                    if want & _WANT_DQ:
                        # row r of the diagonal pair sees r + 1 keys, any other row all 64
                        chain_lower(
                            rows, one, one if diagonal else block, block, padded, g, block,
                            element_address(k, ((base + j) * kv_heads + kv_head) * padded), kv_heads * padded,
                            element_address(dq_sum, zero), padded,
                        )  # fmt: skip
                    if want & _WANT_DKV:
                        dk_address = element_address(dk_sum, (j - key_from) * padded)
                        dv_address = element_address(dv_sum, (j - key_from) * padded)
                        if diagonal:
                            chain_upper(columns, padded, g, one, block, q_address, row_stride, dk_address, padded, rows)
                            chain_upper(
                                columns, padded, s, one, block, dout_address, row_stride, dv_address, padded, rows
                            )
                        else:
                            chain_block(
                                columns, padded, g, one, block, q_address, row_stride, dk_address, padded, rows, zero
                            )
                            chain_block(
                                columns, padded, s, one, block, dout_address, row_stride, dv_address, padded, rows, zero
                            )
                if want & _WANT_DQ:
                    for r in range(rows):
                        for d in range(depth):
                            dq[base + i + r, head, d] = cast(scale * dq_sum[r * padded + d], bf16)
        if want & _WANT_DKV:
            for j in range(keys):
                for d in range(depth):
                    dk[base + key_from + j, kv_head, d] = cast(scale * dk_sum[j * padded + d], bf16)
                    dv[base + key_from + j, kv_head, d] = cast(dv_sum[j * padded + d], bf16)


def attention_backward(
    dout: F32,
    q: F32,
    k: F32,
    v: F32,
    out: F32,
    lse2: F32,
    starts: I32,
    scale: float | np.float32,
    scale2: float | np.float32,
    workers: Workers,
    bf16: bool,
) -> tuple[F32, F32, F32]:
    """Gradients of :func:`rlkernel.kernels.cpu.attention.attention` over whole sequences from position 0.

    Args:
        dout, q, out: f32[N, QH, D], the gradient of the output, the queries and the output.
        k, v: f32[N, KVH, D], not paged.
        lse2: f32[N, QH] of the forward.
        starts: int32[S + 1], offsets of the sequences' rows.
        scale, scale2: head_dim^-0.5 without and with log2(e), float32
            (``rlkernel.contract.hostscalars.attention_scales``).
        bf16: round as dtype bfloat16 does (P, ds and the results).

    Returns:
        ``(dq f32[N, QH, D], dk f32[N, KVH, D], dv f32[N, KVH, D])``.

    Raises:
        ContractError: shapes that do not fit together.
    """
    dout, q, k, v, out, lse2 = (
        expect(name, array, np.float32)
        for name, array in (("dout", dout), ("q", q), ("k", k), ("v", v), ("out", out), ("lse2", lse2))
    )
    starts = expect("starts", starts, np.int32)
    _check(dout, q, k, v, out, lse2, starts)
    depth = q.shape[2]
    dq, dk, dv = aligned_empty(q.shape), aligned_empty(k.shape), aligned_empty(v.shape)
    if not len(q):
        return dq, dk, dv
    delta = np.empty(q.shape[:2], np.float32)
    flat = q.shape[0] * q.shape[1]
    workers.run(
        _deltas, flat, dout.reshape(flat, depth), out.reshape(flat, depth), depth, delta.reshape(flat), grain=256
    )
    padded = -(-depth // LANES) * LANES
    if padded != depth:  # whole vectors of columns; the chains over d still have length D
        dout, q, k, v = (np.pad(x, ((0, 0), (0, 0), (0, padded - depth))) for x in (dout, q, k, v))
    items, bounds = _plan(starts, k.shape[1], workers.count)
    longest = int((items[:, 3] - items[:, 2]).max())
    room = -(-longest // KEY_BLOCK) * KEY_BLOCK
    scratch = aligned_scratch(workers.count, KEY_BLOCK * (2 * KEY_BLOCK + padded) + 2 * room * (depth + padded))
    workers.run(
        _pass, workers.count, bounds, items, dout, q, k, v, lse2, delta, depth, scratch,
        np.float32(scale), np.float32(scale2), bf16, dq, dk, dv,
    )  # fmt: skip
    return dq, dk, dv


def _check(dout: F32, q: F32, k: F32, v: F32, out: F32, lse2: F32, starts: I32) -> None:
    rows, heads, depth = q.shape
    if dout.shape != q.shape or out.shape != q.shape or lse2.shape != (rows, heads):
        raise ContractError(
            f"dout {dout.shape} and out {out.shape} should have the shape of q {q.shape}, "
            f"lse2 {lse2.shape} its first two"
        )
    if k.shape != v.shape or k.shape[0] != rows or k.shape[2] != depth or heads % k.shape[1]:
        raise ContractError(
            f"k {k.shape} and v {v.shape} do not fit q {q.shape}: the same rows and head dimension, and a number of "
            "heads that divides q's"
        )
    if starts[0] != 0 or starts[-1] != rows or (np.diff(starts) < 0).any():
        raise ContractError(
            f"starts must rise from 0 to the {rows} rows, not from {int(starts[0])} to {int(starts[-1])}"
        )


def _plan(starts: I32, kv_heads: int, parts: int) -> tuple[I64, I64]:
    """Items of :func:`_pass` and int64[parts + 1] bounds: whole passes, or pieces where those would not balance."""
    sequences = [(int(a), int(b - a)) for a, b in pairwise(starts) if b > a]
    both = _WANT_DQ | _WANT_DKV
    whole = [
        (_BOTH_COST * _pairs(length), (base, head, 0, length, 0, length, both))
        for base, length in sequences
        for head in range(kv_heads)
    ]
    total = sum(cost for cost, _ in whole)
    items, bounds, largest = _assign(whole, parts)
    if largest * parts * _BOTH_COST <= total * (_DQ_COST + _DKV_COST):
        return items, bounds
    pieces = []
    for base, length in sequences:
        for head in range(kv_heads):
            for a in range(0, length, _PIECE):
                b = min(length, a + _PIECE)
                dq_pairs, dkv_pairs = _pairs(b) - _pairs(a), _pairs(length - a) - _pairs(length - b)
                pieces.append((_DQ_COST * dq_pairs, (base, head, 0, b, a, b, _WANT_DQ)))
                pieces.append((_DKV_COST * dkv_pairs, (base, head, a, b, a, length, _WANT_DKV)))
    items, bounds, _ = _assign(pieces, parts)
    return items, bounds


def _pairs(length: int) -> int:
    """Block pairs (in units of 64 x 64 products, times two) of a causal square of this length."""
    blocks = -(-length // KEY_BLOCK)
    return blocks * (blocks + 1)


def _assign(work: Sequence[tuple[int, tuple[int, ...]]], parts: int) -> tuple[I64, I64, int]:
    """Longest first to the least loaded part: items grouped by part, bounds, and the largest load."""
    loads = [0] * parts
    chosen: list[list[tuple[int, ...]]] = [[] for _ in range(parts)]
    for cost, item in sorted(work, key=lambda entry: -entry[0]):
        part = loads.index(min(loads))
        loads[part] += cost
        chosen[part].append(item)
    bounds = np.cumsum([0] + [len(part) for part in chosen])
    return np.array([item for part in chosen for item in part], np.int64), bounds.astype(np.int64), max(loads)
