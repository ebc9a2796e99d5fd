"""References of attention, forward and backward, and batches to try them on; slow, in NumPy, on the definitions' text.

One sequence at a time. The keyword arguments after ``bf16`` exist for negative twins: other orders and other
constants must give other bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkernel.contract.hostscalars import attention_scales
from rlkernel.kernels.cpu import primitives
from tests.kernels.arith import F32, add32, cast, chain, div32, fma32, hazards, mul32, round_bf16
from tests.kernels.rowref import exp2_full, log2_full


def exp2_p3(x: Any) -> F32:
    """``exp2.p3`` elementwise."""
    value = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        inside = np.minimum(np.maximum(value, np.float32(-126)), np.float32(128))
        n = np.rint(inside)
        r = add32(inside, -n)
        q = fma32(r, primitives._P3, primitives._P2)
        q = fma32(r, fma32(r, q, primitives._P1), np.float32(1))
        scaled = np.ldexp(q.astype(np.float64), np.where(np.isnan(n), 0, n).astype(np.int64)).astype(np.float32)
    scaled = np.where(value < -126, np.float32(0), np.where(value >= 128, np.float32(np.inf), scaled))
    return np.where(np.isnan(value), np.float32(np.nan), scaled).astype(np.float32)


def _by_head(x: F32, group: int) -> F32:
    """[L, KVH, D] -> [QH, L, D], each KV head once for every query head of its group."""
    return np.repeat(x.transpose(1, 0, 2), group, axis=0)


def forward(
    q: F32,
    k: F32,
    v: F32,
    positions: Any,
    bf16: bool,
    *,
    block: int = 64,
    split: int = 512,
    descending: bool = False,
    rounded: bool = True,
) -> tuple[F32, F32]:
    """Rows q[R, QH, D] at ``positions`` over keys k, v [L, KVH, D] of one sequence: ``(out, lse2)``."""
    rows, heads, depth = q.shape
    positions = np.asarray(positions)
    scale2 = attention_scales(depth)[1]
    length = int(positions.max()) + 1
    keys, values = _by_head(k[:length], heads // k.shape[1]), _by_head(v[:length], heads // k.shape[1])
    scores = mul32(chain(q[:, :, None, :], keys[None]), scale2)  # [R, QH, L]
    parts = []
    for begin in range(0, length, split):
        m = np.full((rows, heads), -np.inf, np.float32)
        l = np.zeros((rows, heads), np.float32)  # noqa: E741
        acc = np.zeros((rows, heads, depth), np.float32)
        for start in range(begin, min(begin + split, length), block):
            stop = min(start + block, begin + split, length)
            holds = (positions >= start)[:, None]
            visible = (np.arange(start, stop)[None, :] <= positions[:, None])[:, None, :]
            s = scores[..., start:stop]
            top = np.max(np.where(visible, s, np.float32(-np.inf)), axis=-1)
            with np.errstate(all="ignore"):
                new = np.where(holds, np.maximum(m, top), m)
            alpha = np.where(m == -np.inf, np.float32(0), exp2_full(add32(m, -new)))
            weight = (exp2_p3 if bf16 else exp2_full)(add32(s, -new[..., None]))
            p = cast(weight, bf16 and rounded)
            l = np.where(holds, mul32(l, alpha), l)  # noqa: E741
            acc = np.where(holds[..., None], mul32(acc, alpha[..., None]), acc)
            order = range(stop - start)
            for j in reversed(order) if descending else order:
                seen = visible[..., j]
                l = np.where(seen, add32(l, p[..., j]), l)  # noqa: E741
                acc = np.where(seen[..., None], fma32(p[..., j, None], values[None, :, start + j], acc), acc)
            m = new
        parts.append((positions >= begin, m, l, acc))
    overall = parts[0][1]
    for seen, m, _, _ in parts[1:]:
        with np.errstate(all="ignore"):
            overall = np.where(seen[:, None], np.maximum(overall, m), overall)
    total, result = np.zeros((rows, heads), np.float32), np.zeros((rows, heads, depth), np.float32)
    for seen, m, l, acc in parts:  # noqa: E741
        w = exp2_full(add32(m, -overall))
        total = np.where(seen[:, None], fma32(l, w, total), total)
        result = np.where(seen[:, None, None], fma32(acc, w[..., None], result), result)
    return cast(div32(result, total[..., None]), bf16), add32(overall, log2_full(total))


def backward(
    dout: F32,
    q: F32,
    k: F32,
    v: F32,
    out: F32,
    lse2: F32,
    bf16: bool,
    *,
    rows_descending: bool = False,
    heads_descending: bool = False,
    keys_descending: bool = False,
) -> tuple[F32, F32, F32]:
    """Gradients ``(dq, dk, dv)`` of one whole sequence: dout, q, out [L, QH, D], k, v [L, KVH, D], lse2 [L, QH]."""
    length, heads, depth = q.shape
    group = heads // k.shape[1]
    scale, scale2 = attention_scales(depth)
    keys, values = _by_head(k, group), _by_head(v, group)
    queries, gradients = q.transpose(1, 0, 2), dout.transpose(1, 0, 2)  # [QH, L, D]
    delta = chain(dout, out).T[..., None]
    s = mul32(chain(queries[:, :, None], keys[:, None]), scale2)  # [QH, i, j]
    dp = chain(gradients[:, :, None], values[:, None])
    weight = (exp2_p3 if bf16 else exp2_full)(add32(s, -lse2.T[..., None]))
    p = cast(weight, bf16)
    ds = cast(mul32(weight, add32(dp, -delta)), bf16)
    position = np.arange(length)
    dq = np.zeros((heads, length, depth), np.float32)
    for j in reversed(position) if keys_descending else position:
        dq = np.where((position >= j)[None, :, None], fma32(ds[:, :, j, None], keys[:, None, j], dq), dq)
    dk, dv = np.zeros((2, k.shape[1], length, depth), np.float32)
    for kv_head in range(k.shape[1]):
        members = range(kv_head * group, (kv_head + 1) * group)
        for head in reversed(members) if heads_descending else members:
            for i in reversed(position) if rows_descending else position:
                seen = (position <= i)[:, None]
                dk[kv_head] = np.where(seen, fma32(ds[head, i, :, None], queries[head, i], dk[kv_head]), dk[kv_head])
                dv[kv_head] = np.where(seen, fma32(p[head, i, :, None], gradients[head, i], dv[kv_head]), dv[kv_head])
    dq, dk = mul32(scale, dq), mul32(scale, dk)
    return tuple(cast(x, bf16).transpose(1, 0, 2) for x in (dq, dk, dv))  # type: ignore[return-value]


@dataclass(frozen=True)
class Sequences:
    """Random whole sequences, flat: q, dout [N, QH, D], k, v [N, KVH, D]."""

    q: F32
    k: F32
    v: F32
    dout: F32
    starts: np.ndarray[Any, np.dtype[np.int32]]

    @property
    def positions(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        counts = np.diff(self.starts)
        return (np.arange(len(self.q)) - np.repeat(self.starts[:-1], counts)).astype(np.int32)

    @property
    def scales(self) -> tuple[np.float32, np.float32]:
        return attention_scales(self.q.shape[2])

    def rows(self, s: int) -> slice:
        return slice(int(self.starts[s]), int(self.starts[s + 1]))


def sequences(
    lengths: list[int], heads: int, kv_heads: int, depth: int, bf16: bool, *, kind: str = "normal", seed: int = 0
) -> Sequences:
    """Sequences of the given lengths, values of a hazard class (on the bfloat16 grid if ``bf16``)."""
    generator = np.random.default_rng(seed)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)

    def values(count: int) -> F32:
        drawn = hazards(generator, (int(starts[-1]), count, depth), kind)
        return round_bf16(drawn) if bf16 else drawn

    return Sequences(values(heads), values(kv_heads), values(kv_heads), values(heads), starts)
