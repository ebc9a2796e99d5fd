"""Log-softmax statistics of rows of logits, and their gradient. Definition: docs/numerics.md.

One pass reads a leaf of 128 columns from memory; everything else happens while it is in cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import float32 as f32
from numba import int32 as i32
from numba import uint32, uint64

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.convert import Float32, require, require_range
from rlkernel.kernels.cpu.jit import device_function, kernel
from rlkernel.kernels.cpu.primitives import (
    LN2,
    LOG2E,
    cast,
    digest_first,
    digest_second,
    exp2_full,
    float_bits,
    fma,
    log2_full,
)
from rlkernel.kernels.cpu.reductions import LOWEST_KEY, key_value, order_key, tree
from rlkernel.kernels.cpu.threads import Workers

LEAF = 128
"""Columns of a vocabulary leaf."""


@dataclass(frozen=True)
class RowStatistics:
    """What the head reports of R rows of logits (after division by the temperature).

    ``max``, ``log_sum`` (ln of the sum of exp(z - max)), ``logprob`` (of the target) and ``entropy`` (nats) are
    float32 [R]; ``digest`` is uint64 [R, 2], the two lanes of the distribution digest.
    """

    max: Float32
    log_sum: Float32
    logprob: Float32
    entropy: Float32
    digest: npt.NDArray[np.uint64]


@device_function
def _scale_and_digest(leaf, temperature, index):
    """Divide a leaf by the temperature in place; its max (NaN if any is) and its two digest lanes."""
    key = LOWEST_KEY
    nans = i32(0)
    for j in range(leaf.size):
        z = leaf[j] / temperature
        leaf[j] = z
        nans |= i32(z != z)
        key = max(key, order_key(z))
    first = uint64(0)
    second = uint64(0)
    for j in range(leaf.size):
        z = leaf[j]
        bits = uint64(float_bits(z) if z == z else uint32(0x7FC00000))
        place = uint64(index + j)
        first += digest_first(place, bits)
        second += digest_second(place, bits)
    return (f32(np.nan) if nans != i32(0) else key_value(key)), first, second


@device_function
def _leaf_sums(leaf, m, weights, moments, other):
    """s and u of a leaf with max m; the three buffers have 128 elements."""
    for j in range(LEAF):
        weights[j] = f32(0.0)
        moments[j] = f32(0.0)
    for j in range(leaf.size):
        d = leaf[j] - m
        e = exp2_full(d * LOG2E)
        weights[j] = e
        moments[j] = f32(0.0) if e == f32(0.0) else e * d
    return tree(weights, other, LEAF), tree(moments, other, LEAF)


@device_function
def _shifted_moment(s, u, shift, weight):
    """``fma(s, shift, u)``; u where the weight is +0, because the shift may be -inf there."""
    return u if weight == f32(0.0) else fma(s, shift, u)


@kernel
def _row_statistics(first, last, z, temperature, targets, shards, out, digest):
    columns = z.shape[1]
    leaves = (columns + LEAF * shards - 1) // (LEAF * shards)  # of one shard
    weights = np.empty(LEAF, dtype=np.float32)
    moments = np.empty(LEAF, dtype=np.float32)
    other = np.empty(LEAF, dtype=np.float32)
    leaf_max = np.empty(leaves, dtype=np.float32)
    leaf_s = np.empty(leaves, dtype=np.float32)
    leaf_u = np.empty(leaves, dtype=np.float32)
    shard_max = np.empty(shards, dtype=np.float32)
    shard_s = np.empty(shards, dtype=np.float32)
    shard_u = np.empty(shards, dtype=np.float32)
    level = np.empty(shards, dtype=np.float32)
    for i in range(first, last):
        lane1 = uint64(0)
        lane2 = uint64(0)
        row_key = LOWEST_KEY
        row_nan = False
        for t in range(shards):
            key = LOWEST_KEY
            has_nan = False
            count = 0  # leaves of the shard that hold a column of the real vocabulary
            for n in range(leaves):
                start = (t * leaves + n) * LEAF
                if start >= columns:
                    break
                leaf = z[i, start : min(start + LEAF, columns)]
                m, d1, d2 = _scale_and_digest(leaf, temperature, start)
                lane1 += d1
                lane2 += d2
                leaf_max[n] = m
                leaf_s[n], leaf_u[n] = _leaf_sums(leaf, m, weights, moments, other)
                has_nan |= m != m
                key = max(key, order_key(m))
                count += 1
            top = f32(np.nan) if has_nan else key_value(key)
            total = f32(0.0)
            moment = f32(0.0)
            for n in range(count):
                if leaf_max[n] == f32(-np.inf):
                    continue  # every column of the leaf is -inf: it adds nothing, like a padded leaf
                shift = leaf_max[n] - top
                weight = exp2_full(shift * LOG2E)
                total = fma(leaf_s[n], weight, total)
                moment = fma(_shifted_moment(leaf_s[n], leaf_u[n], shift, weight), weight, moment)
            shard_max[t] = top
            shard_s[t] = total
            shard_u[t] = moment
            row_nan |= has_nan
            row_key = max(row_key, key)
        top = f32(np.nan) if row_nan else key_value(row_key)
        for t in range(shards):
            if shard_max[t] == f32(-np.inf):
                shard_s[t] = f32(0.0)
                shard_u[t] = f32(0.0)
                continue
            shift = shard_max[t] - top
            weight = exp2_full(shift * LOG2E)
            shard_u[t] = _shifted_moment(shard_s[t], shard_u[t], shift, weight) * weight
            shard_s[t] = shard_s[t] * weight
        total = tree(shard_s, level, shards)
        moment = tree(shard_u, level, shards)
        log_sum = log2_full(total) * LN2
        out[0, i] = top
        out[1, i] = log_sum
        out[2, i] = (z[i, targets[i]] - top) - log_sum
        out[3, i] = log_sum - moment / total
        digest[i, 0] = lane1
        digest[i, 1] = lane2


@kernel
def _logits_gradient(first, last, z, row_max, log_sum, targets, coefficient, temperature, dz, bf16):
    for i in range(first, last):
        row = z[i]
        out = dz[i]
        top = row_max[i]
        log_total = log_sum[i]
        c = coefficient[i] / temperature
        at = targets[i]
        target = row[at]  # kept: out may be the same memory as z
        for j in range(row.size):
            p = exp2_full(((row[j] - top) - log_total) * LOG2E)
            out[j] = cast((f32(0.0) - p) * c, bf16)
        p = exp2_full(((target - top) - log_total) * LOG2E)
        out[at] = cast((f32(1.0) - p) * c, bf16)


def _check(what: str, z: Float32, temperature: float | np.float32, targets: npt.NDArray[np.int64]) -> np.float32:
    require(f"z of {what}", z, np.float32, None, None)
    rows, columns = z.shape
    if columns == 0:
        raise ContractError(f"z of {what} has no columns; the vocabulary must have at least one entry")
    require(f"targets of {what}", targets, np.int64, rows)
    require_range(f"targets of {what}", targets, 0, columns)
    rounded = np.float32(temperature)
    if not (np.isfinite(rounded) and rounded > 0):
        raise ContractError(f"the temperature of {what} is {temperature}; it must be positive and finite in float32")
    return rounded


def row_statistics(
    z: Float32, temperature: float | np.float32, targets: npt.NDArray[np.int64], shards: int, workers: Workers
) -> RowStatistics:
    """Log-softmax statistics of each row.

    Args:
        z: float32 [R, V], logits of the real vocabulary; divided by the temperature IN PLACE.
        temperature: rounded once to float32; positive and finite.
        targets: int64 [R], each below V.
        shards: T of the definition, the largest claimed tensor-parallel degree; a power of two.

    Returns:
        RowStatistics of R rows. A row with a NaN (or +inf) logit, or with none above -inf, has NaN logprob and entropy.

    Raises:
        ContractError: an array of another dtype, shape or layout, a target outside the vocabulary, an impossible
            temperature or number of shards.
    """
    rounded = _check("row_statistics", z, temperature, targets)
    if shards < 1 or shards & (shards - 1):
        raise ContractError(f"the vocabulary is cut into {shards} shards; a tree adds them: it must be a power of two")
    rows = z.shape[0]
    out = np.empty((4, rows), dtype=np.float32)
    digest = np.empty((rows, 2), dtype=np.uint64)
    workers.run(_row_statistics, rows, z, rounded, targets, shards, out, digest)
    return RowStatistics(max=out[0], log_sum=out[1], logprob=out[2], entropy=out[3], digest=digest)


def logits_gradient(
    z: Float32,
    statistics: RowStatistics,
    targets: npt.NDArray[np.int64],
    coefficient: Float32,
    temperature: float | np.float32,
    workers: Workers,
    bf16: bool,
    out: Float32 | None = None,
) -> Float32:
    """Gradient with respect to the logits before division by the temperature.

    Args:
        z: float32 [R, V], the logits as :func:`row_statistics` left them (divided).
        statistics: of the same rows.
        targets: int64 [R].
        coefficient: float32 [R], d loss / d logprob; divided by the temperature here.
        temperature: the one that z was divided by.
        bf16: round the gradient to bfloat16.
        out: where to write, float32 [R, V]; may be z itself. A new array without it.

    Returns:
        dz float32 [R, V] (``out`` if given).

    Raises:
        ContractError: as :func:`row_statistics`.
    """
    rounded = _check("logits_gradient", z, temperature, targets)
    rows, columns = z.shape
    require("statistics.max of logits_gradient", statistics.max, np.float32, rows)
    require("statistics.log_sum of logits_gradient", statistics.log_sum, np.float32, rows)
    require("coefficient of logits_gradient", coefficient, np.float32, rows)
    dz = np.empty_like(z) if out is None else out
    require("out of logits_gradient", dz, np.float32, rows, columns)
    parts = (statistics.max, statistics.log_sum, targets, coefficient, rounded, dz)
    workers.run(_logits_gradient, rows, z, *parts, bf16)
    return dz
