"""Random inputs on which two different orders rarely agree: spread exponents, cancellation, subnormals."""

from __future__ import annotations

import numpy as np

from rlkernel.verify.discovery.formats import Array
from rlkernel.verify.discovery.targets import Target


def draw(target: Target, count: int, rng: np.random.Generator) -> Array:
    """``count`` random vectors as carriers [count, n]: normal, spread, cancelling and near values in turn."""
    n = target.n
    wide = 4.0 if target.range_format.name == "float16" else 12.0
    kinds = (np.arange(count) + int(rng.integers(4))) % 4
    normal = rng.standard_normal((count, n))
    spread = np.ldexp(rng.uniform(1, 2, (count, n)), rng.integers(-int(wide), int(wide) + 1, (count, n)))
    near = np.ldexp(rng.uniform(1, 2, (count, n)), rng.integers(-2, 3, (count, n)))
    signs = rng.choice([-1.0, 1.0], (count, n))
    half = np.ldexp(rng.uniform(1, 2, (count, n)), rng.integers(-4, 5, (count, n)))
    mates = rng.permuted(np.broadcast_to(np.arange(n), (count, n)), axis=1)
    cancelling = half - np.take_along_axis(half, mates, axis=1) * (1 + rng.standard_normal((count, n)) * 2.0**-12)
    values = np.choose(kinds[:, None], [normal, spread * signs, cancelling, near * signs])
    if target.positive:
        values = np.abs(values)
    return target.input_format.round(values)


def draw_around(target: Target, count: int, rng: np.random.Generator, exponents: Array) -> Array:
    """``count`` normal vectors [count, n] times 2^exponents; ``exponents`` broadcasts to that shape."""
    values = np.ldexp(rng.standard_normal((count, target.n)), np.broadcast_to(exponents, (count, target.n)))
    return target.input_format.round(np.abs(values) if target.positive else values)
