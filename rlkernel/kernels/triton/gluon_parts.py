"""Parts of Gluon kernels: dependencies between kernels on sm_90, scalar functions, and row sums in lanes."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from rlkernel.contract import constants

_ROUND = gl.constexpr(constants.ROUND_TO_INTEGER)
_ROUND_BITS = gl.constexpr(constants.ROUND_TO_INTEGER_BITS)
_E1, _E2, _E3, _E4, _E5, _E6 = (gl.constexpr(value) for value in constants.EXP2_FULL[1:])
_LOG2E = gl.constexpr(constants.LOG2E)
_PROPAGATE = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def wait_for_prior():
    """Until the kernel before has ended, and what it wrote is there. Nothing to wait for: no effect."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def launch_dependents():
    """The kernel after this one may start where there is room; it has to wait itself."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def negative(x):
    """``primitives.negative``."""
    return (x.to(gl.int32, bitcast=True) ^ -0x80000000).to(gl.float32, bitcast=True)


@gluon.jit
def exp2_full(x):
    """``primitives.exp2_full``."""
    low = gl.where(x < -126.0, -126.0, x)
    inside = gl.where(low > 128.0, 128.0, low)
    shifted = inside + _ROUND
    r = inside - (shifted - _ROUND)
    q = gl.fma(r, gl.full_like(x, _E6), gl.full_like(x, _E5))
    q = gl.fma(r, q, gl.full_like(x, _E4))
    q = gl.fma(r, q, gl.full_like(x, _E3))
    q = gl.fma(r, q, gl.full_like(x, _E2))
    q = gl.fma(r, q, gl.full_like(x, _E1))
    p = gl.fma(r, q, gl.full_like(x, 1.0))
    n = shifted.to(gl.int32, bitcast=True) - _ROUND_BITS
    y = (p.to(gl.int32, bitcast=True) + (n << 23)).to(gl.float32, bitcast=True)
    y = gl.where(x < -126.0, 0.0, y)
    y = gl.where(x >= 128.0, float("inf"), y)
    return gl.where(x == x, y, x)


@gluon.jit
def swiglu(g, u):
    """``(g * sigmoid(g)) * u`` of float32, as ``activation.swiglu``."""
    divisor = exp2_full(negative(g) * _LOG2E) + 1.0
    sigmoid = gl.div_rn(gl.full_like(g, 1.0), divisor)
    silu = g * sigmoid
    return silu * u


@gluon.jit
def larger(a, b):
    """``max.f32``: NaN where one of the two is."""
    return gl.maximum(a, b, propagate_nan=_PROPAGATE)


@gluon.jit
def sum_of_two(a, b):
    """For reductions over two."""
    return a + b


@gluon.jit
def _chain_of_groups(
    values, total, CONTINUED: gl.constexpr, ROWS: gl.constexpr, LANES: gl.constexpr, COUNT: gl.constexpr
):  # fmt: skip
    """Groups of LANES columns of values [ROWS, COUNT * LANES], added one after the other, to total where CONTINUED."""
    if COUNT == 1:
        if CONTINUED:  # noqa: SIM108
            result = total + values
        else:
            result = values
    else:
        halves = gl.permute(gl.reshape(values, (ROWS, 2, COUNT // 2 * LANES)), (0, 2, 1))
        low, high = gl.split(halves)
        result = _chain_of_groups(low, total, CONTINUED, ROWS, LANES, COUNT // 2)
        result = _chain_of_groups(high, result, True, ROWS, LANES, COUNT // 2)
    return result


@gluon.jit
def lane_total(weights, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Row sums of weights [ROWS, KEYS]: of 8 lanes, lane i adds keys i, i + 8, ... ascending; then a tree of them."""
    values = _chain_of_groups(weights, weights, False, ROWS, 8, KEYS // 8)
    for level in gl.static_range(3):
        values = gl.reduce(gl.reshape(values, (ROWS, 4 >> level, 2)), 2, sum_of_two)
    return gl.reshape(values, (ROWS,))
