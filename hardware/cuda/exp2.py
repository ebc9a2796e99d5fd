"""``ex2.approx.ftz.f32`` of sm_90, for every input that is not positive: a table that was read on an H200.

All 1,123,811,329 inputs from -126 to -0 were compared there with this model; none differed.

For x <= 0 let a = |x| (subnormals count as 0), n = floor(a), k = floor((a - n) * 2^23): the magnitude is truncated to
23 fraction bits. The result is ``T[k] * 2^-n``; results below 2^-126 become +0, and so does everything below -126.
NaN gives NaN. ``T[k]`` is the float32 nearest to 2^(-k/2^23) plus a residual of -2 to +1 units in the last place; the
residuals are package data. Positive inputs were not measured and are refused.

The nearest float32 is computed here from float64 additions and products alone: an unevaluated sum of two float64, about
2^-100 from the exact value, so that the table is the same on every machine. Both tables are checked by SHA-256.
"""

from __future__ import annotations

import hashlib
import zlib
from functools import cache
from importlib.resources import files
from math import isqrt

import numpy as np
import torch
from numpy.typing import NDArray

STEPS = 1 << 23
RESIDUAL_SHA256 = "6d4bbf957e352804bf6d7e0c7d4f8adeefb9708aac49e42e321d310999704721"
TABLE_SHA256 = "e1751ad2a8f73e05cc12f8f29cc7a984aa6f879435613d4cb3d04ce2b84d58cc"
_FILE = "data/ex2_approx_ftz_sm90_residual.i8.zlib"
_PRECISION = 200  # bits of the fixed-point numbers below
_LOW_STEPS = 1 << 11
_SPLIT = 134217729.0  # 2^27 + 1

Floats = NDArray[np.float64]


def _as_pair(numbers: list[int]) -> tuple[Floats, Floats]:
    """Fixed-point numbers as unevaluated sums of two float64."""
    high = [number / (1 << _PRECISION) for number in numbers]  # division of integers is correctly rounded
    rest = [x - int(h * 2.0**60) * (1 << (_PRECISION - 60)) for x, h in zip(numbers, high, strict=True)]
    return np.array(high), np.array([x / (1 << _PRECISION) for x in rest])


def _powers(base: int, count: int) -> tuple[Floats, Floats]:
    numbers = [1 << _PRECISION]
    while len(numbers) < count:
        numbers.append((numbers[-1] * base) >> _PRECISION)
    return _as_pair(numbers)


def _halves(x: Floats) -> tuple[Floats, Floats]:
    scaled = x * _SPLIT
    upper = scaled - (scaled - x)
    return upper, x - upper


def _nearest_powers() -> NDArray[np.float32]:
    """The float32 nearest to 2^(-k/2^23) for k = 0 .. 2^23, as products of two short tables."""
    root = 1 << (_PRECISION - 1)
    for _ in range(23):
        root = isqrt(root << _PRECISION)
    (low, low_rest), step = _powers(root, _LOW_STEPS), 1 << _PRECISION
    for _ in range(_LOW_STEPS):
        step = (step * root) >> _PRECISION
    high, high_rest = (part[:, None] for part in _powers(step, STEPS // _LOW_STEPS))
    product = high * low
    (h1, h2), (l1, l2) = _halves(high), _halves(low)  # Dekker: product + error is exact
    error = ((h1 * l1 - product) + h1 * l2 + h2 * l1) + h2 * l2
    error += high * low_rest + high_rest * low
    # rounded to odd in 53 bits, so that the conversion to float32 rounds the sum once
    pattern = product.view(np.int64) - (error < 0)
    pattern |= error != 0
    return np.append(pattern.view(np.float64).astype(np.float32).reshape(-1), np.float32(0.5))


@cache
def table() -> NDArray[np.float32]:
    """``T``: float32 [2^23 + 1], read-only.

    Raises:
        ValueError: the residuals that came with the package, or the table rebuilt from them, have another SHA-256.
    """
    raw = zlib.decompress(files("hardware.cuda").joinpath(_FILE).read_bytes())
    _require_digest(raw, RESIDUAL_SHA256, f"the residuals of hardware/cuda/{_FILE}")
    nearest = _nearest_powers()
    # positive floats of neighbouring patterns are one unit apart
    rebuilt = (nearest.view(np.int32) + np.frombuffer(raw, np.int8)).view(np.float32)
    _require_digest(rebuilt.astype("<f4").tobytes(), TABLE_SHA256, "the table of ex2.approx.ftz rebuilt from them")
    rebuilt.setflags(write=False)
    return rebuilt


def _require_digest(data: bytes, expected: str, what: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise ValueError(f"{what} have SHA-256 {found}; what was measured on an H200 has {expected}")


@cache
def _table_on(device: str) -> torch.Tensor:
    return torch.from_numpy(table().copy()).to(device)


def ex2_approx_ftz_sm90(x: torch.Tensor) -> torch.Tensor:
    """2^x as the instruction computes it, elementwise: float32 -> float32, on the device of ``x``.

    Raises:
        ValueError: another dtype, or a positive input (not measured, so not modelled).
    """
    if x.dtype != torch.float32:
        raise ValueError(f"ex2.approx.ftz.f32 takes float32, not {x.dtype}")
    positive = x > 0
    if bool(positive.any()):
        count, example = int(positive.sum()), float(x[positive].reshape(-1)[0])
        raise ValueError(
            f"{count} inputs of ex2.approx.ftz are positive, for instance {example!r}; it was measured for x <= 0 alone"
        )
    magnitude = x.abs().clamp(max=127.0)
    magnitude = torch.where(magnitude >= 2.0**-126, magnitude, 0.0)  # subnormals and NaN as 0
    whole = torch.floor(magnitude)
    k = ((magnitude - whole) * float(STEPS)).to(torch.int64)  # exact, then truncated
    value = _table_on(str(x.device))[k]
    result = (value.view(torch.int32) - (whole.to(torch.int32) << 23)).view(torch.float32)
    # value lies in [1/2, 1], so that the exponent cannot leave the normal range above x = -126
    result = torch.where(x < -126.0, 0.0, result)
    return torch.where(torch.isnan(x), x, result)
