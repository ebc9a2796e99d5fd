"""RoPE tables: inverse frequencies and angles in float64, cos and sin rounded once to float32.

The kinds are defined as transformers defines them (``modeling_rope_utils``), but evaluated in float64 by
:mod:`rlkernel.contract.hostmath`: the published formulas, not one library's float32 roundings of them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, get_args

import numpy as np
from numpy.typing import NDArray

from rlkernel.contract import hostmath
from rlkernel.contract.canonical import digest, float64_bits
from rlkernel.errors import ContractError
from rlkernel.models.config import ModelConfig, RopeKind

if TYPE_CHECKING:
    from rlkernel.models.config import RopeConfig

KINDS: tuple[str, ...] = get_args(RopeKind)
_TWO_PI = 2.0 * hostmath.PI
_DIGEST_ROWS = 64


def _base_frequencies(rope: RopeConfig, dim: int) -> NDArray[np.float64]:
    """theta^(-2i/dim) for i < dim/2."""
    return hostmath.rational_power(rope.theta, -np.arange(0, dim, 2, dtype=np.float64), dim)


def _llama3(rope: RopeConfig, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    factor = rope.parameter("factor")
    low, high = rope.parameter("low_freq_factor"), rope.parameter("high_freq_factor")
    original = rope.parameter("original_max_position_embeddings")
    if high <= low:
        raise ContractError(
            f"rope scaling 'llama3' has high_freq_factor = {high}: it must exceed low_freq_factor = {low}"
        )
    wavelength = _TWO_PI / frequencies
    smooth = (original / wavelength - low) / (high - low)
    between = (1.0 - smooth) * frequencies / factor + smooth * frequencies
    result = np.where(wavelength > original / low, frequencies / factor, between)
    return np.where(wavelength < original / high, frequencies, result)


def _yarn(rope: RopeConfig, dim: int) -> NDArray[np.float64]:
    """Between the dimensions of beta_fast and beta_slow rotations, from extrapolation to interpolation."""
    factor, original = rope.parameter("factor"), rope.parameter("original_max_position_embeddings")

    def correction(rotations: float) -> float:
        return float(dim * hostmath.log(original / (rotations * _TWO_PI)) / (2.0 * hostmath.log(rope.theta)))

    low, high = correction(rope.parameter("beta_fast", 32.0)), correction(rope.parameter("beta_slow", 1.0))
    if rope.parameter("truncate", 1.0):
        low, high = float(np.floor(low)), float(np.ceil(high))
    low, high = max(low, 0.0), min(high, dim - 1.0)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    kept = 1.0 - ramp
    wavelengths = hostmath.rational_power(rope.theta, np.arange(0, dim, 2, dtype=np.float64), dim)
    return 1.0 / (factor * wavelengths) * (1.0 - kept) + 1.0 / wavelengths * kept


def inverse_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Angle of one position, float64 ``[head_dim / 2]``. Raises ContractError for an unknown kind."""
    rope = config.rope
    if rope.kind not in KINDS:
        raise ContractError(f"rope of kind {rope.kind!r} is not defined; accepted are {', '.join(KINDS)}")
    if rope.kind == "yarn":
        return _yarn(rope, config.head_dim)
    frequencies = _base_frequencies(rope, config.head_dim)
    if rope.kind == "linear":
        return frequencies / rope.parameter("factor")
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def attention_factor(config: ModelConfig) -> float:
    """What multiplies cos and sin (float64): YaRN's attention factor, else 1."""
    rope = config.rope
    if rope.kind != "yarn":
        return 1.0
    given = dict(rope.parameters).get("attention_factor")
    if given is not None:
        return float(given)
    factor = rope.parameter("factor")

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * float(hostmath.log(factor)) + 1.0

    mscale, all_dimensions = rope.parameter("mscale", 0.0), rope.parameter("mscale_all_dim", 0.0)
    if mscale and all_dimensions:
        return scale(mscale) / scale(all_dimensions)
    return scale(1.0)


def _rows(config: ModelConfig, positions: NDArray[np.float64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    factor = attention_factor(config)
    sine, cosine = hostmath.sin_cos(positions[:, None] * inverse_frequencies(config)[None, :])
    return (cosine * factor).astype(np.float32), (sine * factor).astype(np.float32)


def rope_tables(config: ModelConfig, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """``(cos, sin)``, each float32 ``[positions, head_dim / 2]``, C-contiguous, for positions 0, 1, ...

    Raises ContractError for an unknown kind, or angles beyond 2^22.
    """
    if positions < 1:
        raise ContractError(f"a rope table for {positions} positions is not possible; 1 or more is")
    half = config.head_dim // 2
    cosine, sine = np.empty((positions, half), np.float32), np.empty((positions, half), np.float32)
    block = max(1, 65536 // half)  # keeps the temporaries of the float64 routines in the cache
    for first in range(0, positions, block):
        last = min(first + block, positions)
        cosine[first:last], sine[first:last] = _rows(config, np.arange(first, last, dtype=np.float64))
    return cosine, sine


def rope_digest(config: ModelConfig) -> str:
    """SHA-256 (hex) of what determines the tables, for ``numerical_policy``.

    It covers every parameter, the bits of every inverse frequency and of the attention factor, and the table rows
    of the first positions and of powers of two up to the context, so that a change of the sine shows as well.
    """
    sample = [p for p in range(_DIGEST_ROWS) if p < config.max_position]
    sample += [2**i for i in range(6, 40) if 2**i < config.max_position] + [config.max_position - 1]
    cosine, sine = _rows(config, np.array(sample, dtype=np.float64))
    return digest(
        {
            "kind": config.rope.kind,
            "theta": float64_bits(config.rope.theta),
            "parameters": {name: float64_bits(value) for name, value in config.rope.parameters},
            "head_dim": config.head_dim,
            "max_position": config.max_position,
            "inverse_frequencies": [float64_bits(float(value)) for value in inverse_frequencies(config)],
            "attention_factor": float64_bits(attention_factor(config)),
            "rows": hashlib.sha256(cosine.astype("<f4").tobytes() + sine.astype("<f4").tobytes()).hexdigest(),
        }
    )
