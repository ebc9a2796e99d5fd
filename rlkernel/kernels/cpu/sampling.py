"""Counter-based sampling from rows of logits (Gumbel-max). Definition: docs/numerics.md.

A sampled token depends on the logits, the seed and (namespace, prompt, sample, position) alone: not on the batch, the
order of calls or the number of threads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import float32 as f32
from numba import float64 as f64
from numba import int64 as i64
from numba import uint32, uint64

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.convert import Float32, require, require_range
from rlkernel.kernels.cpu.jit import device_function, kernel
from rlkernel.kernels.cpu.philox import philox4x32
from rlkernel.kernels.cpu.primitives import LN2, LOG2E, exp2_full, float_bits, fma, log2_full
from rlkernel.kernels.cpu.reductions import LOWEST_KEY, key_value, order_key
from rlkernel.kernels.cpu.threads import Workers

BLOCK = 128  # columns that are skipped or visited together; no part of the definition
_NOISE_BOUND = np.float32(17.4)  # the noise is at most -ln(2^-25) = 17.33
_STEP = np.float32(2.0**-24)
_HALF_STEP = np.float32(2.0**-25)
_LARGEST_W = np.float32(1 - 2.0**-24)
_THIRD = np.float32(1 / 3)
_SLACK = np.float32(2.0**-19)
_RADIX_BITS = 11
_RADIX = 1 << _RADIX_BITS


@device_function
def score(z, bits):
    """``z`` plus Gumbel noise made of 32 random bits (uint64)."""
    w = min(fma(f32(bits >> uint64(8)), _STEP, _HALF_STEP), _LARGEST_W)
    series = w * fma(w, fma(w, fma(w, f32(0.25), _THIRD), f32(0.5)), f32(1.0))
    logarithm = -log2_full(f32(1.0) - w) * LN2
    exponential = series if w < f32(0.015625) else logarithm
    return z - log2_full(exponential) * LN2


@device_function
def _score_of(z, v, stream):
    """Score of vocabulary id v; ``stream`` holds the row's key (2 words) and the counter's last 3, uint64 each."""
    words = philox4x32(uint64(v) >> uint64(2), stream[2], stream[3], stream[4], stream[0], stream[1])
    lane = v & 3
    bits = words[0]
    bits = words[1] if lane == 1 else bits
    bits = words[2] if lane == 2 else bits
    bits = words[3] if lane == 3 else bits
    return score(z, bits)


@device_function
def _first_equal(row, value):
    """Index of the first element equal to the value, -1 if there is none."""
    for start in range(0, row.size, BLOCK):
        part = row[start : start + BLOCK]
        hits = 0
        for j in range(part.size):
            hits += i64(part[j] == value)
        if hits:
            for j in range(part.size):
                if part[j] == value:
                    return start + j
    return -1


@device_function
def _pruned(row, argmax, stream, words):
    """The winner over all columns of a row of finite maximum, without visiting columns that cannot win.

    ``argmax`` is a column of the largest logit; words is a buffer of uint64 [4, BLOCK / 4].
    """
    best = _score_of(row[argmax], argmax, stream)
    winner = argmax
    c1, c2, c3 = stream[2], stream[3], stream[4]
    for start in range(0, row.size, BLOCK):
        part = row[start : start + BLOCK]
        key = LOWEST_KEY
        for j in range(part.size):
            key = max(key, order_key(part[j]) if part[j] == part[j] else LOWEST_KEY)
        top = key_value(key)
        if top + _NOISE_BOUND < best:
            continue
        least = uint64(0xFFFFFFFF)
        groups = (part.size + 3) // 4
        words0, words1, words2, words3 = words[0, :groups], words[1, :groups], words[2, :groups], words[3, :groups]
        for q in range(groups):
            b0, b1, b2, b3 = philox4x32(uint64((start >> 2) + q), c1, c2, c3, stream[0], stream[1])
            words0[q], words1[q], words2[q], words3[q] = b0, b1, b2, b3
            least = min(least, min(min(b0, b1), min(b2, b3)))
        # -ln(E) >= best - z needs w <= E <= exp(z - best). The slack of 0.01 and 2^-19 |best| in the exponent is far
        # above every rounding of the true score, so that a column left out has a smaller score for certain.
        reach = (top - best) + f32(0.01) + abs(best) * _SLACK
        limit = uint64(min(exp2_full(reach * LOG2E), f32(1.0)) * f32(16777216.0)) + uint64(1)
        if (least >> uint64(8)) > limit:
            continue
        for j in range(part.size):
            bits = words[j & 3, j >> 2]
            if (bits >> uint64(8)) <= limit:
                candidate = score(part[j], bits)
                if candidate > best or (candidate == best and start + j < winner):
                    best = candidate
                    winner = start + j
    return winner


@device_function
def _descending(row, keys, ids, other_keys, other_ids, counts):
    """Fill ids with the columns that are not NaN, by z descending, then id ascending; returns their number.

    A stable radix sort of 32-bit keys, three passes of 11 bits.
    """
    n = 0
    for v in range(row.size):
        z = row[v] + f32(0.0)  # -0 and +0 are equal
        if z == z:
            pattern = float_bits(z)
            # the complement of the usual ascending key
            keys[n] = pattern if pattern >> uint32(31) else uint32(pattern ^ uint32(0x7FFFFFFF))
            ids[n] = v
            n += 1
    for step in range(3):
        shift = uint32(step * _RADIX_BITS)
        counts[:] = 0
        for j in range(n):
            counts[i64((keys[j] >> shift) & uint32(_RADIX - 1))] += 1
        total = 0
        for digit in range(_RADIX):
            count = counts[digit]
            counts[digit] = total
            total += count
        for j in range(n):
            digit = i64((keys[j] >> shift) & uint32(_RADIX - 1))
            place = counts[digit]
            counts[digit] = place + 1
            other_keys[place] = keys[j]
            other_ids[place] = ids[j]
        for j in range(n):
            keys[j] = other_keys[j]
            ids[j] = other_ids[j]
    return n


@device_function
def _kept(row, ids, n, top_k, top_p):
    """How many of the n ordered candidates stay after top-k, then top-p."""
    if 0 < top_k < n:
        n = top_k
    if n == 0 or top_p >= 1.0:
        return n
    top = row[ids[0]]
    total = f64(0.0)
    for j in range(n):
        total += f64(exp2_full((row[ids[j]] - top) * LOG2E))
    bound = top_p * total
    running = f64(0.0)
    for j in range(n):
        running += f64(exp2_full((row[ids[j]] - top) * LOG2E))
        if running >= bound:
            return j + 1
    return n


@kernel
def _sample(first, last, z, row_max, seeds, prompt_index, k, namespace, position, greedy, top_k, top_p, tokens):
    columns = z.shape[1]
    words = np.empty((4, BLOCK // 4), dtype=np.uint64)
    truncates = False
    for i in range(first, last):
        truncates |= (not greedy[i]) and (0 < top_k[i] < columns or top_p[i] < 1.0)
    size = columns if truncates else 0
    keys = np.empty(size, dtype=np.uint32)
    other_keys = np.empty(size, dtype=np.uint32)
    ids = np.empty(size, dtype=np.int64)
    other_ids = np.empty(size, dtype=np.int64)
    counts = np.empty(_RADIX, dtype=np.int64)
    for i in range(first, last):
        row = z[i]
        top = row_max[i]
        if top != top:  # NaN never wins: the maximum of the others
            top = f32(-np.inf)
            for v in range(columns):
                top = row[v] if row[v] > top else top
        if top == f32(-np.inf):
            tokens[i] = 0
            continue
        argmax = _first_equal(row, top)
        if greedy[i] or top == f32(np.inf):
            tokens[i] = argmax  # the score of +inf is +inf, and ties go to the lower id
            continue
        if argmax < 0:
            tokens[i] = -1  # row_max is not of this row: refused by the caller
            continue
        stream = (
            uint64(seeds[i] & uint64(0xFFFFFFFF)),
            uint64(seeds[i] >> uint64(32)),
            uint64(position[i]),
            uint64(prompt_index[i]),
            uint64((namespace[i] << 24) | k[i]),
        )
        if 0 < top_k[i] < columns or top_p[i] < 1.0:
            n = _descending(row, keys, ids, other_keys, other_ids, counts)
            n = _kept(row, ids, n, top_k[i], top_p[i])
            best = f32(-np.inf)
            winner = argmax
            for j in range(n):
                v = ids[j]
                candidate = _score_of(row[v], v, stream)
                if candidate > best or (candidate == best and v < winner):
                    best = candidate
                    winner = v
            tokens[i] = winner
        else:
            tokens[i] = _pruned(row, argmax, stream, words)


def sample(
    z: Float32,
    row_max: Float32,
    seeds: npt.NDArray[np.uint64],
    prompt_index: npt.NDArray[np.int64],
    k: npt.NDArray[np.int64],
    namespace: npt.NDArray[np.int64],
    position: npt.NDArray[np.int64],
    greedy: npt.NDArray[np.bool_],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    workers: Workers,
) -> npt.NDArray[np.int64]:
    """Draw one token a row.

    Args:
        z: float32 [R, V], logits after division by the temperature, as ``row_statistics`` leaves them.
        row_max: float32 [R], ``RowStatistics.max`` of the same rows.
        seeds: uint64 [R], the run's seed.
        prompt_index: int64 [R] below 2^32; ``k``: int64 [R] below 2^24, the sample within its group.
        namespace: int64 [R], 0 training, 1 evaluation (below 256).
        position: int64 [R] below 2^32, absolute index of the token that is drawn, prompt included.
        greedy: bool [R]: the largest logit instead of a draw.
        top_k: int64 [R], 0 is off; ``top_p``: float64 [R] in (0, 1], 1 is off. Top-k applies first.

    Returns:
        int64 [R], vocabulary ids. NaN never wins; a row with nothing above -inf gives id 0. (The log-probability of
        a row with NaN, with +inf or with nothing above -inf is NaN.)

    Raises:
        ContractError: an array of another dtype, shape or layout, a counter out of range, a ``row_max`` that does not
            occur in its row.
    """
    require("z of sample", z, np.float32, None, None)
    rows, columns = z.shape
    if columns == 0:
        raise ContractError("z of sample has no columns; the vocabulary must have at least one entry")
    require("row_max of sample", row_max, np.float32, rows)
    require("seeds of sample", seeds, np.uint64, rows)
    limits = {"prompt_index": 1 << 32, "k": 1 << 24, "namespace": 1 << 8, "position": 1 << 32, "top_k": 1 << 62}
    values = {"prompt_index": prompt_index, "k": k, "namespace": namespace, "position": position, "top_k": top_k}
    for name, limit in limits.items():
        require(f"{name} of sample", values[name], np.int64, rows)
        require_range(f"{name} of sample", values[name], 0, limit)
    require("greedy of sample", greedy, np.bool_, rows)
    require("top_p of sample", top_p, np.float64, rows)
    outside = np.flatnonzero(~((top_p > 0) & (top_p <= 1)))
    if outside.size:
        raise ContractError(f"top_p[{outside[0]}] is {top_p[outside[0]]}; it must be above 0 and at most 1")
    tokens = np.empty(rows, dtype=np.int64)
    keys = (seeds, prompt_index, k, namespace, position)
    workers.run(_sample, rows, z, row_max, *keys, greedy, top_k, top_p, tokens)
    if rows and int(tokens.min()) < 0:
        row = int(np.argmin(tokens))
        raise ContractError(f"row_max[{row}] = {row_max[row]} does not occur in its row of logits")
    return tokens
