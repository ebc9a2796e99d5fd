"""The CPU kernels of this package as targets: each with inputs for which its output tells one of its sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu import attention as attention_kernel
from rlkernel.kernels.cpu import gemm, gemm_gradient, logprob, norm, optimizer
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.panels import pack_rows
from rlkernel.kernels.cpu.primitives import LN2, LOG2E, exp2_full, log2_full
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.discovery.formats import Array, Float64, float32_fma
from rlkernel.verify.discovery.targets import PositiveTarget, Target, Trial

Float32 = npt.NDArray[np.float32]
_EPS = np.float32(1e-6)
_PAGE = 64
_HEAD_DIM = 32


def _gemm(n: int, rows: int, columns: int, dtype: str, parts: int, workers: Workers) -> Target:
    def call(a: Array, b: Array | None) -> Array:
        assert b is not None
        panels = pack_rows(np.ascontiguousarray(b.T), workers)
        return gemm.matmul(a, panels, workers, leaves=parts, bf16=dtype == "bfloat16")

    return Target("rlkernel.gemm", n, call, rows, columns, 2, dtype, dtype)


def _weight_gradient(n: int, rows: int, columns: int, dtype: str, parts: int, workers: Workers) -> Target:
    """Reduces over tokens: one row of the gradient for every column of dy."""

    def call(a: Array, b: Array | None) -> Array:
        assert b is not None
        grad = np.zeros((rows, columns), dtype=np.float32)
        gemm_gradient.weight_gradient(np.ascontiguousarray(a.T), np.ascontiguousarray(b), grad, workers)
        return grad

    return Target("rlkernel.weight_gradient", n, call, rows, columns, 2, dtype, "float32")


@dataclass(frozen=True)
class _NormBackward(Target):
    """``lane_sum`` of RMSNorm's backward: with w = 1 and an inverse root mean square of 1,
    ``dx[j] = fma(-x[j], c, dy[j])``, c = sum / n, where the sum is over dy * x. Second operands belong to a row."""

    columns_alike = False
    noise = 0.01

    def alike(self, row: Array, column: Array | None) -> Trial:
        assert column is not None
        shape = (self.rows, self.n)
        return Trial(*(np.ascontiguousarray(np.broadcast_to(item, shape)) for item in (row, column)))

    def trial(self, draw: Callable[[int], Array]) -> Trial:
        return Trial(draw(self.rows), draw(self.rows))

    def operands_at(self, trial: Trial, rows: Array, columns: Array) -> tuple[Array, Array | None]:
        assert trial.b is not None
        return trial.a[rows], trial.b[rows]

    def finish(self, sums: Array, trial: Trial, rows: Array, columns: Array) -> Array:
        assert trial.b is not None
        mean = sums / np.float32(self.n)
        return float32_fma(-trial.b[rows, columns], mean, trial.a[rows, columns])

    def sums(self, terms: Float64, factor: float = 1.0) -> Float64:
        dy = terms.astype(np.float32)
        dx = self.outputs(Trial(dy, np.full_like(dy, factor)))
        at = np.argmin(np.abs(dy), axis=1)[:, None]
        mean = np.take_along_axis(dy, at, axis=1).astype(np.float64) - np.take_along_axis(dx, at, axis=1)
        # dx was rounded: the sum itself is the float32 next to what it says
        return (mean / factor * self.n).astype(np.float32).astype(np.float64)


def _norm_backward(n: int, rows: int, columns: int, dtype: str, parts: int, workers: Workers) -> Target:
    if n == 2:
        raise ContractError("rlkernel.rms_norm_backward is probed with 1 input, or with 3 and more: one shows the sum")
    ones, scale = np.ones(n, dtype=np.float32), np.ones(rows, dtype=np.float32)

    def call(a: Array, b: Array | None) -> Array:
        assert b is not None
        return norm.rms_norm_backward(a, b, ones, scale, np.zeros(n, dtype=np.float32), workers, False)

    return _NormBackward("rlkernel.rms_norm_backward", n, call, rows, n, 2)


@dataclass(frozen=True)
class _Norm(PositiveTarget):
    """The mean square of RMSNorm. ``eps = -base / n`` makes the inverse root infinite exactly where the sum is base."""

    workers: Workers = field(kw_only=True)

    def _inverse(self, x: Array, eps: np.float32) -> Float32:
        ones = np.ones(self.n, dtype=np.float32)
        return norm.rms_norm(x.astype(np.float32), ones, eps, self.workers, False)[1]

    def exceeds(self, operands: Float64, base: float) -> npt.NDArray[np.bool_]:
        eps = -(np.float32(base) / np.float32(self.n))
        return ~np.isinf(self._inverse(operands, eps))

    def operands_at(self, trial: Trial, rows: Array, columns: Array) -> tuple[Array, Array | None]:
        return trial.a[rows], trial.a[rows]

    def trial(self, draw: Callable[[int], Array]) -> Trial:
        return Trial(draw(self.rows), None)

    def alike(self, row: Array, column: Array | None) -> Trial:
        return super().alike(row, None)

    def finish(self, sums: Array, trial: Trial, rows: Array, columns: Array) -> Array:
        result: Array = np.float32(1.0) / np.sqrt(sums / np.float32(self.n) + _EPS)
        return result


def _norm(n: int, rows: int, columns: int, dtype: str, parts: int, workers: Workers) -> Target:
    def call(a: Array, b: Array | None) -> Array:
        return norm.rms_norm(a, np.ones(n, dtype=np.float32), _EPS, workers, False)[1]

    return _Norm("rlkernel.rms_norm", n, call, rows, 1, 2, workers=workers)


@dataclass(frozen=True)
class _Squares(_Norm):
    def exceeds(self, operands: Float64, base: float) -> npt.NDArray[np.bool_]:
        return self.call(operands.astype(np.float32), None)[:, 0] > base

    def finish(self, sums: Array, trial: Trial, rows: Array, columns: Array) -> Array:
        return sums


def _sum_of_squares(n: int, rows: int, columns: int, dtype: str, parts: int, workers: Workers) -> Target:
    def call(a: Array, b: Array | None) -> Array:
        return np.array([[optimizer.sum_of_squares(row, workers)] for row in a])

    return _Squares("rlkernel.sum_of_squares", n, call, rows, 1, 2, workers=workers)


@kernel
def _exponentials(z, out):
    for i in range(z.size):
        out[i] = exp2_full(z[i] * LOG2E)


@kernel
def _logarithms(x, out):
    for i in range(x.size):
        out[i] = log2_full(x[i]) * LN2


def _apply(function: Any, values: Array) -> Float32:
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    out = np.empty_like(flat)
    function(flat, out)
    return out.reshape(values.shape)


@dataclass(frozen=True)
class _RowSum(PositiveTarget):
    """The sum of exponentials of a row of logits, whose largest is 0 in every leaf, so that every rescaling is by 1."""

    zero = -200.0
    large = 0.0
    small = -17.0  # exp(-17) lies between 2^-25 and 2^-24
    squares = False

    def exceeds(self, operands: Float64, base: float) -> npt.NDArray[np.bool_]:
        return self.call(operands.astype(np.float32), None)[:, 0] > 0

    def _logits(self, values: Array) -> Array:
        z = -np.fmod(np.abs(values), np.float32(24.0))
        for start in range(0, self.n, logprob.LEAF):
            leaf = z[:, start : start + logprob.LEAF]
            np.put_along_axis(leaf, np.argmax(leaf, axis=1)[:, None], np.float32(0.0), axis=1)
        return z

    def alike(self, row: Array, column: Array | None) -> Trial:
        return super().alike(self._logits(row[None])[0], None)

    def trial(self, draw: Callable[[int], Array]) -> Trial:
        return Trial(self._logits(draw(self.rows)), None)

    def operands_at(self, trial: Trial, rows: Array, columns: Array) -> tuple[Array, Array | None]:
        return _apply(_exponentials, trial.a)[rows], None

    def finish(self, sums: Array, trial: Trial, rows: Array, columns: Array) -> Array:
        return _apply(_logarithms, sums)


def _logprob(n: int, rows: int, columns: int, dtype: str, parts: int, workers: Workers) -> Target:
    def call(a: Array, b: Array | None) -> Array:
        targets = np.zeros(rows, dtype=np.int64)
        return logprob.row_statistics(a.copy(), np.float32(1.0), targets, parts, workers).log_sum[:, None]

    return _RowSum("rlkernel.logprob", n, call, rows, 1, 1)


@dataclass(frozen=True)
class _WeightedValues(Target):
    """The sum over keys of attention, one output for every channel: with q = 0 every weight is exactly 1."""

    noise = 0.01

    def sums(self, terms: Float64, factor: float = 1.0) -> Float64:
        out = self.outputs(Trial(terms.astype(np.float32), None)).astype(np.float64) * self.n
        return out.astype(np.float32).astype(np.float64)

    def finish(self, sums: Array, trial: Trial, rows: Array, columns: Array) -> Array:
        result: Array = sums / np.float32(self.n)
        return result


def _attention(n: int, rows: int, columns: int, dtype: str, parts: int, workers: Workers) -> Target:
    pages = -(-n // _PAGE)
    keys = np.zeros((pages, 1, rows, _PAGE), dtype=np.float32)
    values = np.full((pages, 1, _PAGE, rows), np.nan, dtype=np.float32)
    table = np.arange(pages, dtype=np.int32)[None]
    query = np.zeros((1, 1, rows), dtype=np.float32)
    starts, position = np.array([0, 1], dtype=np.int32), np.array([n - 1], dtype=np.int32)

    def call(a: Array, b: Array | None) -> Array:
        values.reshape(pages * _PAGE, rows)[:n] = a.T
        scale2 = np.float32(1.0)
        out, _ = attention_kernel.attention(query, keys, values, table, starts, position, scale2, workers, False)
        return out.reshape(rows, 1)

    return _WeightedValues("rlkernel.attention", n, call, rows, 1, 1)


_Builder = Callable[[int, int, int, str, int, Workers], Target]
KERNELS: dict[str, tuple[_Builder, bool, tuple[str, ...]]] = {
    "rlkernel.gemm": (_gemm, True, ("float32", "bfloat16")),
    "rlkernel.weight_gradient": (_weight_gradient, True, ("float32", "bfloat16")),
    "rlkernel.rms_norm": (_norm, False, ("float32",)),
    "rlkernel.rms_norm_backward": (_norm_backward, False, ("float32",)),
    "rlkernel.sum_of_squares": (_sum_of_squares, False, ("float32",)),
    "rlkernel.logprob": (_logprob, False, ("float32",)),
    "rlkernel.attention": (_attention, False, ("float32",)),
}
"""Name -> (builder, whether it is a product of matrices, dtypes)."""


def kernel_target(
    name: str,
    *,
    n: int,
    rows: int | None = None,
    columns: int | None = None,
    dtype: str = "float32",
    parts: int = 1,
    workers: Workers | None = None,
) -> Target:
    """A CPU kernel of this package as a target.

    Args:
        name: one of :data:`KERNELS`.
        n: inputs that are reduced.
        rows, columns: outputs of one call (``columns`` only for matrix products).
        dtype: of the operands.
        parts: leaves of K for ``rlkernel.gemm``, shards of the vocabulary for ``rlkernel.logprob``.
        workers: threads; one without it.

    Raises:
        ContractError: an unknown name or an option that the kernel does not have.
    """
    if name not in KERNELS:
        raise ContractError(f"there is no kernel {name!r} to probe; there is {', '.join(KERNELS)}")
    build, matrices, dtypes = KERNELS[name]
    if dtype not in dtypes:
        raise ContractError(f"{name} is probed with {' or '.join(dtypes)} inputs, not {dtype}")
    if columns is not None and not matrices:
        raise ContractError(f"{name} takes a shape ROWSxN, not {rows}x{n}x{columns}")
    if parts != 1 and name not in ("rlkernel.gemm", "rlkernel.logprob"):
        raise ContractError(f"{name} has no parts; rlkernel.gemm (leaves) and rlkernel.logprob (shards) have")
    default = {"rlkernel.sum_of_squares": 1, "rlkernel.attention": _HEAD_DIM}.get(name, 64)
    return build(n, rows or default, columns or (8 if matrices else 1), dtype, parts, workers or Workers(1))
