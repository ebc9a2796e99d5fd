"""References of the row kernels, built on :mod:`tests.kernels.arith`: slow, in NumPy, sharing no code with the kernels.

Only the polynomials' coefficients are taken from the product: they are the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlkernel.kernels.cpu import primitives
from rlkernel.kernels.cpu.threads import Workers
from tests.kernels.arith import F32, add32, cast, div32, fma32, mul32, tree

LOG2E = np.uint32(0x3FB8AA3B).view(np.float32)
LN2 = np.uint32(0x3F317218).view(np.float32)
_ONE = np.float32(1)


class FineWorkers(Workers):
    """Workers that cut even the smallest work: ranges of one item, odd borders."""

    def run(self, kernel: Callable[..., Any], items: int, *arguments: Any, grain: int = 1) -> None:
        super().run(kernel, items, *arguments, grain=1)


def exp2_full(x: Any) -> F32:
    """``exp2.full`` elementwise."""
    value = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        inside = np.minimum(np.maximum(value, np.float32(-126)), np.float32(128))
        n = np.rint(inside)
        r = add32(inside, -n)
        q = fma32(r, primitives._E6, primitives._E5)
        for coefficient in (primitives._E4, primitives._E3, primitives._E2, primitives._E1, _ONE):
            q = fma32(r, q, coefficient)
        scaled = np.ldexp(q.astype(np.float64), np.where(np.isnan(n), 0, n).astype(np.int64)).astype(np.float32)
        scaled = np.where(value < -126, np.float32(0), np.where(value >= 128, np.float32(np.inf), scaled))
        return np.where(np.isnan(value), np.float32(np.nan), scaled).astype(np.float32)


def log2_full(x: Any) -> F32:
    """``log2.full`` elementwise."""
    p = primitives
    value = np.asarray(x, np.float32)
    usable = np.where((value > 0) & np.isfinite(value), value, _ONE)
    mantissa, exponent = np.frexp(usable.astype(np.float64))  # in [1/2, 1)
    root = float(np.uint32(0x3F3504F3).view(np.float32))
    below = mantissa < root
    m = np.where(below, 2 * mantissa, mantissa).astype(np.float32)
    e = np.where(below, exponent - 1, exponent).astype(np.float32)
    f = add32(m, np.float32(-1))
    q = fma32(f, p._L9, p._L8)
    for coefficient in (p._L7, p._L6, p._L5, p._L4, p._L3, p._L2, p._L1, p._L0):
        q = fma32(f, q, coefficient)
    low = mul32(f, fma32(f, q, p._L_LOW))
    y = add32(e, fma32(f, LOG2E, low))
    y = np.where(value == 0, np.float32(-np.inf), np.where(value == np.inf, np.float32(np.inf), y))
    return np.where((value < 0) | np.isnan(value), np.float32(np.nan), y).astype(np.float32)


def sigmoid(x: Any) -> F32:
    """``div(1, add(1, exp2.full(mul(-x, LOG2E))))``."""
    return div32(_ONE, add32(_ONE, exp2_full(mul32(-np.asarray(x, np.float32), LOG2E))))


def largest(values: F32) -> np.float32:
    """``max`` over a vector: NaN if any is, +0 above -0, -inf for none."""
    if np.isnan(values).any():
        return np.float32(np.nan)
    top = np.float32(max(values.tolist(), default=-np.inf))
    if top == 0:
        return np.float32(-0.0) if np.signbit(values[values == 0]).all() else np.float32(0.0)
    return top


def digest_lanes(row: F32) -> tuple[int, int]:
    """The two lanes of the distribution digest of one row, in Python integers."""
    mask = (1 << 64) - 1
    lanes = [0, 0]
    steps = (
        (0x9E3779B97F4A7C15, (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)),
        (0xD1B54A32D192ED03, (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)),
    )
    for i, value in enumerate(row):
        pattern = 0x7FC00000 if np.isnan(value) else int(value.view(np.uint32))
        for lane, (multiplier, (s1, m1, s2, m2, s3)) in enumerate(steps):
            h = ((i + 1) * multiplier + pattern) & mask
            h = ((h ^ (h >> s1)) * m1) & mask
            h = ((h ^ (h >> s2)) * m2) & mask
            lanes[lane] = (lanes[lane] + (h ^ (h >> s3))) & mask
    return lanes[0], lanes[1]


def row_statistics(row: F32, temperature: Any, target: int, shards: int, leaf: int = 128) -> dict[str, Any]:
    """All statistics of one row of undivided logits; ``z`` is the divided row."""
    z = div32(row, np.float32(temperature))
    columns = z.size
    leaves = -(-columns // (leaf * shards))
    shard_max, shard_s, shard_u = (np.zeros(shards, np.float32) for _ in range(3))
    for t in range(shards):
        parts = [z[(t * leaves + n) * leaf : (t * leaves + n + 1) * leaf] for n in range(leaves)]
        tops = [largest(part) for part in parts]
        top = largest(np.array(tops, np.float32))
        total: F32 = np.zeros((), np.float32)
        moment: F32 = np.zeros((), np.float32)
        for part, m in zip(parts, tops, strict=True):
            if m == -np.inf:
                continue
            d = add32(part, -m)
            e, terms = np.zeros(leaf, np.float32), np.zeros(leaf, np.float32)
            e[: part.size] = exp2_full(mul32(d, LOG2E))
            terms[: part.size] = np.where(e[: part.size] == 0, np.float32(0), mul32(e[: part.size], d))
            s, u = tree(e), tree(terms)
            shift = add32(m, -top)
            w = exp2_full(mul32(shift, LOG2E))
            total = fma32(s, w, total)
            moment = fma32(u if w == 0 else fma32(s, shift, u), w, moment)
        shard_max[t], shard_s[t], shard_u[t] = top, total, moment
    top = largest(shard_max)
    for t in range(shards):
        if shard_max[t] == -np.inf:
            shard_s[t] = shard_u[t] = 0
            continue
        shift = add32(shard_max[t], -top)
        w = exp2_full(mul32(shift, LOG2E))
        shard_u[t] = mul32(shard_u[t] if w == 0 else fma32(shard_s[t], shift, shard_u[t]), w)
        shard_s[t] = mul32(shard_s[t], w)
    total, moment = tree(shard_s), tree(shard_u)
    log_sum = mul32(log2_full(total), LN2)
    return {
        "z": z,
        "max": top,
        "log_sum": log_sum,
        "logprob": add32(add32(z[target], -top), -log_sum),
        "entropy": add32(log_sum, -div32(moment, total)),
        "digest": digest_lanes(z),
    }


def logits_gradient(z: F32, top: Any, log_sum: Any, target: int, g: Any, temperature: Any, bf16: bool) -> F32:
    """Gradient of one row of divided logits."""
    c = div32(g, np.float32(temperature))
    p = exp2_full(mul32(add32(add32(z, -np.float32(top)), -np.float32(log_sum)), LOG2E))
    onehot = np.zeros(z.size, np.float32)
    onehot[target] = 1
    return cast(mul32(add32(onehot, -p), c), bf16)


def philox(counter: list[Any], key: list[int]) -> list[Any]:
    """Philox4x32-10 as its authors describe it, in Python integers or uint64 arrays."""
    c, k = list(counter), list(key)
    for step in range(10):
        if step:
            k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k[0], right & 0xFFFFFFFF, (left >> 32) ^ c[3] ^ k[1], left & 0xFFFFFFFF]
    return c


def gumbel_scores(z: F32, seed: int, prompt_index: int, k: int, namespace: int, position: int) -> F32:
    """Scores of every vocabulary id of one row."""
    groups = np.arange(-(-z.size // 4), dtype=np.uint64)
    words = philox([groups, position, prompt_index, namespace << 24 | k], [seed & 0xFFFFFFFF, seed >> 32])
    return score(z, np.stack(words, axis=1).reshape(-1)[: z.size])


def score(z: F32, pattern: Any) -> F32:
    """``z`` plus the Gumbel noise of 32-bit patterns (uint64)."""
    w = fma32((pattern >> np.uint64(8)).astype(np.float32), np.float32(2**-24), np.float32(2**-25))
    w = np.minimum(w, np.float32(1 - 2**-24))
    series = fma32(w, np.float32(1 / 4), np.float32(1 / 3))
    series = fma32(w, series, np.float32(1 / 2))
    series = mul32(w, fma32(w, series, _ONE))
    logarithm = mul32(-log2_full(add32(_ONE, -w)), LN2)
    e = np.where(w < np.float32(2**-6), series, logarithm)
    return add32(z, -mul32(log2_full(e), LN2))


def winner(z: F32, scores: F32, top_k: int, top_p: float) -> int:
    """The sampled id of a row with a finite maximum, by sorting everything."""
    order = [v for v in sorted(range(z.size), key=lambda v: (-float(z[v]), v)) if not np.isnan(z[v])]
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        weights = exp2_full(mul32(add32(z[order], -z[order[0]]), LOG2E)).astype(np.float64)
        running = np.cumsum(weights)  # in order, one addition at a time
        order = order[: int(np.argmax(running >= top_p * running[-1])) + 1]
    return min(order, key=lambda v: (-float(scores[v]), v))
