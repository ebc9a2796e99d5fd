"""SwiGLU, forward and backward. Definitions: docs/numerics.md."""

from __future__ import annotations

import numpy as np
from numba import float32 as f32

from rlkernel.kernels.cpu.convert import Float32, require
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.memory import aligned_empty
from rlkernel.kernels.cpu.primitives import cast, fma, sigmoid
from rlkernel.kernels.cpu.threads import Workers

_ELEMENTS = 1 << 13


@kernel
def _swiglu(first, last, gate, up, out, bf16):
    gate_part = gate[first:last]
    up_part = up[first:last]
    out_part = out[first:last]
    for j in range(out_part.size):
        g = gate_part[j]
        out_part[j] = cast(g * sigmoid(g) * up_part[j], bf16)


@kernel
def _swiglu_backward(first, last, dy, gate, up, dgate, dup, bf16):
    dy_part = dy[first:last]
    gate_part = gate[first:last]
    up_part = up[first:last]
    dgate_part = dgate[first:last]
    dup_part = dup[first:last]
    for j in range(dy_part.size):
        ds = dy_part[j]
        g = gate_part[j]
        sg = sigmoid(g)
        dup_part[j] = cast(ds * (g * sg), bf16)
        slope = sg * fma(g, f32(1.0) - sg, f32(1.0))
        dgate_part[j] = cast(ds * up_part[j] * slope, bf16)


def swiglu(gate: Float32, up: Float32, workers: Workers, bf16: bool) -> Float32:
    """``cast(gate * sigmoid(gate) * up)`` for two float32 arrays of one shape.

    Raises:
        ContractError: an array of another dtype, shape or layout.
    """
    require("gate of swiglu", gate, np.float32, *gate.shape)
    require("up of swiglu", up, np.float32, *gate.shape)
    out = aligned_empty(gate.shape)
    flat = (gate.reshape(-1), up.reshape(-1), out.reshape(-1))
    workers.run(_swiglu, gate.size, *flat, bf16, grain=_ELEMENTS)
    return out


def swiglu_backward(dy: Float32, gate: Float32, up: Float32, workers: Workers, bf16: bool) -> tuple[Float32, Float32]:
    """Gradients of :func:`swiglu` for the gradient ``dy`` of its result; all arrays have one shape.

    Returns:
        (dgate, dup), float32, rounded to bfloat16 with ``bf16``.

    Raises:
        ContractError: an array of another dtype, shape or layout.
    """
    require("gate of swiglu_backward", gate, np.float32, *gate.shape)
    require("up of swiglu_backward", up, np.float32, *gate.shape)
    require("dy of swiglu_backward", dy, np.float32, *gate.shape)
    dgate, dup = aligned_empty(gate.shape), aligned_empty(gate.shape)
    flat = [array.reshape(-1) for array in (dy, gate, up, dgate, dup)]
    workers.run(_swiglu_backward, gate.size, *flat, bf16, grain=_ELEMENTS)
    return dgate, dup
