"""Values that provoke differences: one class of numbers a row, from our own seeded generator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlkernel.kernels.cpu.convert import narrow, widen

Array = NDArray[np.float32]
Generator = np.random.Generator

FINITE_HAZARDS = (
    "normal",
    "ties",
    "signed zeros",
    "subnormals",
    "exponent spread",
    "cancellation",
    "large",
)
SPECIAL_HAZARDS = ("infinities", "NaN")
HAZARDS = FINITE_HAZARDS + SPECIAL_HAZARDS


def generator(seed: int, *labels: object) -> Generator:
    """A Philox generator keyed by the seed and the labels: the same numbers wherever and whenever they are drawn."""
    text = "\0".join(str(label) for label in labels)
    key = int.from_bytes(hashlib.sha256(f"{seed}\0{text}".encode()).digest()[:16], "big")
    return np.random.Generator(np.random.Philox(key=key))


def _normal(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return rng.standard_normal(shape)


def _ties(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Few significant bits, equal magnitudes: sums that fall between two neighbours, equal maxima."""
    return rng.integers(-9, 10, shape) * 2.0 ** rng.integers(-9, 1, shape)


def _signed_zeros(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    zeros = np.where(rng.random(shape) < 0.5, 0.0, -0.0)
    return np.where(rng.random(shape) < 0.1, _normal(rng, shape), zeros)


def _subnormals(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return _normal(rng, shape) * 2.0 ** rng.integers(-147, -124, shape)


def _spread(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return _normal(rng, shape) * 2.0 ** rng.integers(-30, 31, shape)


def _cancellation(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Neighbours of opposite sign and almost equal magnitude."""
    base = np.repeat(_normal(rng, (*shape[:-1], -(-shape[-1] // 2))), 2, axis=-1)[..., : shape[-1]]
    sign = np.where(np.arange(shape[-1]) % 2 == 0, 1.0, -1.0)
    return base * sign * (1.0 + rng.integers(-3, 4, shape) * 2.0**-20)


def _large(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return _normal(rng, shape) * 2.0 ** rng.integers(3, 8, shape)


def _scattered(rng: Generator, shape: tuple[int, ...], choices: Sequence[float]) -> NDArray[np.float64]:
    """Normal values with a choice in about every other row, at a random place."""
    values = _normal(rng, shape)
    flat = values.reshape(-1, shape[-1])
    for row in range(0, len(flat), 2):
        if shape[-1]:
            flat[row, rng.integers(0, shape[-1])] = choices[row // 2 % len(choices)]
    return flat.reshape(shape)


def _infinities(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return _scattered(rng, shape, (np.inf, -np.inf))


def _nan(rng: Generator, shape: tuple[int, ...]) -> NDArray[np.float64]:
    return _scattered(rng, shape, (np.nan,))


_MAKERS: dict[str, Callable[[Generator, tuple[int, ...]], NDArray[np.float64]]] = {
    "normal": _normal,
    "ties": _ties,
    "signed zeros": _signed_zeros,
    "subnormals": _subnormals,
    "exponent spread": _spread,
    "cancellation": _cancellation,
    "large": _large,
    "infinities": _infinities,
    "NaN": _nan,
}


def on_grid(values: Array, bf16: bool) -> Array:
    """The values, rounded onto the bfloat16 grid where the dtype is bfloat16 (held in float32)."""
    return widen(narrow(values)) if bf16 else np.ascontiguousarray(values)


def make(hazard: str, rng: Generator, shape: tuple[int, ...], bf16: bool) -> Array:
    """float32 values of one class, on the grid of the dtype."""
    with np.errstate(over="ignore", under="ignore"):
        return on_grid(_MAKERS[hazard](rng, shape).astype(np.float32), bf16)


def hazard_rows(
    hazards: Sequence[str], rows_each: int, shape: tuple[int, ...], rng: Generator, bf16: bool
) -> tuple[Array, tuple[str, ...]]:
    """``[len(hazards) * rows_each, *shape]``: some rows of every class, and the class of each row."""
    parts = [make(hazard, rng, (rows_each, *shape), bf16) for hazard in hazards]
    labels = tuple(hazard for hazard in hazards for _ in range(rows_each))
    return np.concatenate(parts), labels
