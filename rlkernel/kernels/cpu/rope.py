"""Rotary position embedding. Definition: docs/numerics.md; the tables come from the contract's host mathematics."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import float32 as f32

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.convert import Float32, require, require_range
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.memory import aligned_empty
from rlkernel.kernels.cpu.primitives import cast, fma
from rlkernel.kernels.cpu.threads import Workers

_ELEMENTS = 1 << 14


@kernel
def _rope(first, last, x, positions, cos, sin, sign, out, bf16):
    half = cos.shape[1]
    for i in range(first, last):
        c = cos[positions[i]]
        s = sin[positions[i]]
        for head in range(x.shape[1]):
            x1 = x[i, head, :half]
            x2 = x[i, head, half:]
            o1 = out[i, head, :half]
            o2 = out[i, head, half:]
            for j in range(half):
                t = s[j] * sign  # sign is 1 or -1: exact
                o1[j] = cast(fma(x1[j], c[j], -(x2[j] * t)), bf16)
                o2[j] = cast(fma(x2[j], c[j], x1[j] * t), bf16)


def rope(
    x: Float32,
    positions: npt.NDArray[np.int32],
    cos: Float32,
    sin: Float32,
    workers: Workers,
    bf16: bool,
    inverse: bool = False,
) -> Float32:
    """Rotate both halves of every head by the angle of the row's position.

    Args:
        x: float32 [N, heads, D]; D even.
        positions: int32 [N], each below P.
        cos: float32 [P, D/2], ``sin``: float32 [P, D/2].
        bf16: round the result to bfloat16.
        inverse: rotate back (``-sin``): the backward of the forward rotation.

    Returns:
        float32 [N, heads, D].

    Raises:
        ContractError: an array of another dtype, shape or layout, an odd D, or a position outside the tables.
    """
    require("x of rope", x, np.float32, None, None, None)
    rows, heads, depth = x.shape
    if depth % 2:
        raise ContractError(f"the head dimension of rope is {depth}; it must be even")
    require("cos of rope", cos, np.float32, None, depth // 2)
    require("sin of rope", sin, np.float32, cos.shape[0], depth // 2)
    require("positions of rope", positions, np.int32, rows)
    require_range("positions of rope", positions, 0, cos.shape[0])
    out = aligned_empty(x.shape)
    sign = f32(-1.0 if inverse else 1.0)
    grain = 1 + _ELEMENTS // max(1, heads * depth)
    workers.run(_rope, rows, x, positions, cos, sin, sign, out, bf16, grain=grain)
    return out
