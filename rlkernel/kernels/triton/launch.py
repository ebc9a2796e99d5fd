"""Starts the Triton kernels on torch tensors of a GPU. Tiles, warps and stages are arguments: they change no bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
import triton
from triton.runtime.jit import JITFunction

from rlkernel.contract.constants import MAX_LANES
from rlkernel.errors import ContractError
from rlkernel.kernels.triton.gemm import gemm as gemm_kernel
from rlkernel.kernels.triton.gemm import merge_leaves as merge_kernel
from rlkernel.kernels.triton.norm import rms_norm as rms_norm_kernel
from rlkernel.kernels.triton.reductions import row_reduction as row_reduction_kernel

MultiplyAccumulate = Literal["fma", "matrix"]
LEAVES = (1, 2, 4, 8)


def compiler_options(backend: str) -> dict[str, Any]:
    """Options that every kernel is compiled with, on ``cuda`` or ``hip``.

    Triton's defaults differ between versions and targets: contraction may be on, and library functions may flush
    subnormals.

    Raises:
        ContractError: another backend.
    """
    if backend == "cuda":
        return {"enable_fp_fusion": False, "enable_reflect_ftz": False}
    if backend == "hip":
        return {"enable_fp_fusion": False, "allow_flush_denorm": False, "kpack": 1}
    raise ContractError(f"Triton backend {backend!r}: the kernels are compiled for 'cuda' and 'hip'")


def _options() -> dict[str, Any]:
    return compiler_options("hip" if torch.version.hip else "cuda")


def lanes(n: int) -> int:
    """Lanes of ``lane_sum`` over n elements: the smallest power of two >= n, at most 256."""
    return min(MAX_LANES, 1 << max(0, (n - 1).bit_length()))


@dataclass(frozen=True)
class Tile:
    """Tuning of a GEMM. Nothing here is part of the contract."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value < 1 or (item.name.startswith("block") and (value < 16 or value & (value - 1))):
                raise ContractError(
                    f"{item.name} of a tile is {value}; blocks are powers of two from 16, the rest >= 1"
                )


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    mac: MultiplyAccumulate,
    leaves: int = 1,
    split: bool = False,
    a_depth_first: bool = False,
    b_depth_first: bool = False,
    bias: torch.Tensor | None = None,
    grad: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``cast(tree over leaves of chain(a, b) [+ bias])`` -> [M, N].

    Args:
        a: [M, K], or [K, M] with ``a_depth_first``; ``b``: [N, K], or [K, N] with ``b_depth_first``; C-contiguous, both
            bfloat16 or both float32 (float32 only with ``mac='fma'``).
        mac: ``fma`` is the portable chain of fma.rn.f32, ``matrix`` the chain of the GPU's bf16 matrix unit.
        leaves: equal contiguous parts of K.
        split: every leaf by a program of its own, merged by a second kernel (for few rows; the same bits).
        bias: [N], dtype of a, added after the last merge.
        grad: float32 [M, N] that the chain continues, in place: it is the result (one leaf, no bias).
        out_dtype: dtype that the result is rounded to; that of a unless given.

    Raises:
        ContractError: operands, leaves or a dtype that the kernel does not take.
    """
    tile = tile or Tile()
    m, n, k = product_shape(a, b, a_depth_first, b_depth_first)
    require_product(a, b, mac, bias, n)
    if leaves not in LEAVES or k % leaves:
        raise ContractError(f"{leaves} leaves of K = {k}: {LEAVES} are compiled, and they must divide K")
    if grad is not None and (leaves > 1 or split or bias is not None or out is not None):
        raise ContractError("a gradient is one continued chain: leaves, bias and out do not go with it")
    even = (k // leaves) % tile.block_k == 0
    if mac == "matrix" and torch.version.hip and not even:
        raise ContractError(
            f"leaves of {k // leaves} in k are no multiple of block_k {tile.block_k}: on this GPU a step of padding "
            "turns an accumulator of -0 into +0; choose a block_k that divides the leaf"
        )
    c = product_output(a, (m, n), grad if grad is not None else out, torch.float32 if grad is not None else out_dtype)
    if not c.numel() or (not k and grad is not None):
        return c
    if not k:
        return c.zero_() if bias is None else c.copy_(bias.expand(m, n))
    tiles = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
    split = split and leaves > 1
    parts = torch.empty((leaves, m, n), dtype=torch.float32, device=a.device) if split else c
    inside = bias is not None and not split
    knobs = {name.upper(): value for name, value in asdict(tile).items() if name.startswith(("block", "group"))}
    gemm_kernel[(tiles, leaves if split else 1)](
        a, b, parts, bias if inside else a, c if grad is None else grad, m, n, k, 0.0,
        LEAVES=leaves, SPLIT=split, HAS_BIAS=inside, CONTINUES=grad is not None,
        A_DEPTH_FIRST=a_depth_first, B_DEPTH_FIRST=b_depth_first, WIDEN=mac == "fma", EVEN=even,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **knobs, **_options(),
    )  # fmt: skip
    if split:
        merge_leaves(parts, c, bias)
    return c


def merge_leaves(parts: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """``out = cast(tree over leaves of parts [+ bias])``: parts float32 [leaves, M, N], out [M, N], bias [N]."""
    leaves, m, n = parts.shape
    if out.numel():
        merge_kernel[(triton.cdiv(m * n, 1024),)](
            parts, out if bias is None else bias, out, m * n, n,
            LEAVES=leaves, HAS_BIAS=bias is not None, BLOCK=1024, num_warps=4, **_options(),
        )  # fmt: skip


def product_shape(a: torch.Tensor, b: torch.Tensor, a_depth_first: bool, b_depth_first: bool) -> tuple[int, int, int]:
    """(M, N, K) of a product. Raises ContractError unless both are C-contiguous matrices of one depth."""
    for name, x in (("a", a), ("b", b)):
        if x.ndim != 2 or not x.is_contiguous():
            raise ContractError(
                f"operand {name} is {list(x.shape)} with strides {x.stride()}: C-contiguous matrices go in"
            )
    (k, m) = a.shape if a_depth_first else a.shape[::-1]
    (depth, n) = b.shape if b_depth_first else b.shape[::-1]
    if depth != k:
        raise ContractError(
            f"a {list(a.shape)} has a depth of {k}, b {list(b.shape)} one of {depth}; they must be equal"
        )
    return m, n, k


def require_product(
    a: torch.Tensor, b: torch.Tensor, mac: MultiplyAccumulate, bias: torch.Tensor | None, columns: int
) -> None:
    """Raise ContractError unless the dtypes are the multiply-accumulate's, and the bias fits."""
    accepted = (torch.bfloat16,) if mac == "matrix" else (torch.bfloat16, torch.float32)
    if a.dtype not in accepted or a.dtype != b.dtype:
        names = " or ".join(map(str, accepted))
        raise ContractError(f"a product with mac={mac!r} takes {names} on both sides, not {a.dtype} and {b.dtype}")
    if bias is not None and (bias.shape != (columns,) or bias.dtype != a.dtype or not bias.is_contiguous()):
        raise ContractError(f"the bias is {bias.dtype} {list(bias.shape)}; {a.dtype} [{columns}] is expected")


def product_output(
    a: torch.Tensor, shape: tuple[int, int], out: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """``out`` if it fits, or a new matrix. Raises ContractError for an out of another shape, dtype or layout."""
    dtype = dtype or (out.dtype if out is not None else a.dtype)
    if out is None:
        return torch.empty(shape, dtype=dtype, device=a.device)
    if tuple(out.shape) != shape or out.dtype != dtype or not out.is_contiguous():
        raise ContractError(
            f"the output is {out.dtype} {list(out.shape)} with strides {out.stride()}; {dtype} {list(shape)}, "
            "C-contiguous, is expected"
        )
    return out


def row_reduction(a: torch.Tensor, b: torch.Tensor, *, rows: int = 1, num_warps: int = 4) -> torch.Tensor:
    """``lane_sum(a * b)`` of every row: [R, N] float32 or bfloat16, N >= 1 -> float32 [R]. ``rows``: per program."""
    _require_rows(a, "a of row_reduction")
    if a.shape != b.shape or not b.is_contiguous():
        raise ContractError(f"a {list(a.shape)} and b {list(b.shape)} of row_reduction: one shape, C-contiguous")
    out = torch.empty(len(a), dtype=torch.float32, device=a.device)
    if len(a):
        n = a.shape[1]
        grid = (triton.cdiv(len(a), rows),)
        row_reduction_kernel[grid](a, b, out, len(a), N=n, ROWS=rows, LANES=lanes(n), num_warps=num_warps, **_options())
    return out


def rms_norm(
    x: torch.Tensor, w: torch.Tensor, eps: float, *, rows: int = 1, num_warps: int = 4
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of every row.

    Args:
        x: [R, N] float32 or bfloat16, C-contiguous; ``w``: [N].
        eps: rounded once to float32.
        rows: rows of a program.

    Returns:
        y [R, N] in the dtype of x, and 1 / sqrt(mean + eps) of each row, float32 [R].

    Raises:
        ContractError: shapes or layouts that do not fit.
    """
    _require_rows(x, "x of rms_norm")
    if w.shape != x.shape[1:] or not w.is_contiguous():
        raise ContractError(
            f"w of rms_norm is {list(w.shape)}; one weight for each of {x.shape[1]} columns is expected"
        )
    y = torch.empty_like(x)
    inv_rms = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        n = x.shape[1]
        grid = (triton.cdiv(len(x), rows),)
        rms_norm_kernel[grid](
            x, x, w, x, y, inv_rms, len(x), eps,
            N=n, ROWS=rows, LANES=lanes(n), ADDS=False, num_warps=num_warps, **_options(),
        )  # fmt: skip
    return y, inv_rms


def elementwise(kernel: JITFunction, *operands: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Apply a kernel of :mod:`rlkernel.kernels.triton.elementwise` to float32 arrays of one shape."""
    first = operands[0]
    for x in operands:
        if x.shape != first.shape or x.dtype != torch.float32 or not x.is_contiguous():
            raise ContractError(f"operands are float32, C-contiguous, of one shape; one is {x.dtype} {list(x.shape)}")
    out = torch.empty(first.shape, dtype=out_dtype, device=first.device)
    if first.numel():
        block = 1024
        grid = (triton.cdiv(first.numel(), block),)
        kernel[grid](*operands, out, first.numel(), BLOCK=block, num_warps=4, **_options())
    return out


def _require_rows(x: torch.Tensor, name: str) -> None:
    if x.ndim != 2 or not x.is_contiguous() or x.shape[1] < 1 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ContractError(
            f"{name} is {x.dtype} {list(x.shape)} with strides {x.stride()}: float32 or bfloat16 [R, N], C-contiguous"
        )
