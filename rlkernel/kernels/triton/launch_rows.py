"""Starts the Triton kernels that go over rows or elements: norms, rotations, activations, sums, the embedding.

Every function takes C-contiguous tensors of one GPU, float32 or bfloat16 (one dtype a call), and allocates its results
unless ``out`` is given. None waits for the host, except :func:`embedding_gradient`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from rlkernel.errors import ContractError
from rlkernel.kernels.triton import activation as activation_kernels
from rlkernel.kernels.triton import embedding as embedding_kernels
from rlkernel.kernels.triton import norm as norm_kernels
from rlkernel.kernels.triton import norm_backward as norm_backward_kernels
from rlkernel.kernels.triton import residual as residual_kernels
from rlkernel.kernels.triton.launch import _options, lanes

DTYPES = (torch.float32, torch.bfloat16)
HELD = 4096
"""Longest row that a norm holds in registers."""


@dataclass(frozen=True)
class RowTuning:
    """Rows a program and warps. ``block`` and ``stages`` are those of chains over rows: rows read ahead.

    ``holds``: rows are held in registers, for few rows; not where they are longer than ``HELD``.
    """

    rows: int = 1
    num_warps: int = 4
    columns: int = 32
    block: int = 32
    stages: int = 1
    holds: bool = False


def _require(name: str, x: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(x.shape) != shape or x.dtype not in dtypes or not x.is_contiguous():
        raise ContractError(
            f"{name} is {x.dtype} {list(x.shape)} with strides {x.stride()}; "
            f"{' or '.join(map(str, dtypes))} {list(shape)}, C-contiguous, is expected"
        )


def _like(name: str, out: torch.Tensor | None, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    _require(name, out, shape, (x.dtype,))
    return out


def add_rms_norm(
    x: torch.Tensor,
    branch: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    *,
    tuning: RowTuning | None = None,
    overlaps: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``stream = cast(x + branch)`` and the RMSNorm of the stream, in one pass.

    Args:
        x, branch: [R, N]; ``w``: [N]; ``eps``: rounded once to float32.
        overlaps: on sm_90: start while the kernel before runs, and wait for it.

    Returns:
        stream [R, N], y [R, N], and the inverse root mean square of each row of the stream, float32 [R].

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    t = tuning or RowTuning()
    _require("x of add_rms_norm", x, (len(x), *w.shape), DTYPES)
    _require("branch of add_rms_norm", branch, tuple(x.shape), (x.dtype,))
    _require("w of add_rms_norm", w, (x.shape[1],), (x.dtype,))
    stream, y = torch.empty_like(x), torch.empty_like(x)
    inv_rms = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        n = x.shape[1]
        holds = (t.holds or overlaps) and n <= HELD
        norm_kernels.rms_norm[(triton.cdiv(len(x), t.rows),)](
            x, branch, w, stream, y, inv_rms, len(x), eps,
            N=n, ROWS=t.rows, LANES=lanes(n), ADDS=True, HOLDS=holds, OVERLAPS=overlaps and holds,
            num_warps=t.num_warps, **({"launch_pdl": True} if overlaps and holds else {}), **_options(),
        )  # fmt: skip
    return stream, y, inv_rms


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    inv_rms: torch.Tensor,
    dw: torch.Tensor,
    *,
    tuning: RowTuning | None = None,
) -> torch.Tensor:
    """dx of RMSNorm, [R, N]; the chain of the weight's gradient ``dw``, float32 [N], is continued over the rows.

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    t = tuning or RowTuning()
    _require("x of rms_norm_backward", x, (len(x), *w.shape), DTYPES)
    _require("dy of rms_norm_backward", dy, tuple(x.shape), (x.dtype,))
    _require("w of rms_norm_backward", w, (x.shape[1],), (x.dtype,))
    _require("inv_rms of rms_norm_backward", inv_rms, (len(x),), (torch.float32,))
    _require("dw of rms_norm_backward", dw, (x.shape[1],), (torch.float32,))
    dx = torch.empty_like(x)
    rows, n = x.shape
    if rows:
        norm_backward_kernels.rms_norm_dx[(triton.cdiv(rows, t.rows),)](
            dy, x, w, inv_rms, dx, rows, N=n, ROWS=t.rows, LANES=lanes(n), num_warps=t.num_warps, **_options()
        )
        rms_norm_dw(dy, x, inv_rms, dw, tuning=tuning)
    return dx


def rms_norm_dw(
    dy: torch.Tensor, x: torch.Tensor, inv_rms: torch.Tensor, dw: torch.Tensor, *, tuning: RowTuning | None = None
) -> None:
    """``dw[i] = fma(dy[t, i], x[t, i] * r[t], dw[i])``, t ascending, in place. Arguments: :func:`rms_norm_backward`.

    On CUDA, rows that can be copied 16 bytes at a time go through shared memory; ``tuning`` asks for the plain kernel.
    """
    rows, n = x.shape
    if tuning is None and not torch.version.hip:
        from rlkernel.kernels.triton import launch_chains  # Gluon: on CUDA alone

        if launch_chains.copies(n, dy, x):
            launch_chains.column_chain(dy, dw, x=x, inv_rms=inv_rms)
            return
    t = tuning or RowTuning()
    norm_backward_kernels.rms_norm_dw[(triton.cdiv(n, t.columns),)](
        dy, x, inv_rms, dw, rows, n,
        COLUMNS=t.columns, BLOCK=t.block, STAGES=t.stages, num_warps=max(1, t.columns // 32), **_options(),
    )  # fmt: skip


def bias_gradient(dy: torch.Tensor, total: torch.Tensor, *, tuning: RowTuning | None = None) -> None:
    """``total[n] = add(total[n], dy[t, n])``, t ascending, in place: dy [T, N], total float32 [N].

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    _require("dy of bias_gradient", dy, (len(dy), *total.shape), DTYPES)
    _require("the bias gradient", total, (dy.shape[1],), (torch.float32,))
    if tuning is None and not torch.version.hip:
        from rlkernel.kernels.triton import launch_chains  # Gluon: on CUDA alone

        if launch_chains.copies(dy.shape[1], dy):
            launch_chains.column_chain(dy, total)
            return
    t, n = tuning or RowTuning(), dy.shape[1]
    norm_backward_kernels.column_sum[(triton.cdiv(n, t.columns),)](
        dy, total, len(dy), n,
        COLUMNS=t.columns, BLOCK=t.block, STAGES=t.stages, num_warps=max(1, t.columns // 32), **_options(),
    )  # fmt: skip


def residual_add(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``cast(add(a, b))`` of two tensors of one shape and dtype; ``out`` may be one of them.

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    _require("a of residual_add", a, tuple(a.shape), DTYPES)
    _require("b of residual_add", b, tuple(a.shape), (a.dtype,))
    out = _like("out of residual_add", out, a, tuple(a.shape))
    if a.numel():
        grid = (triton.cdiv(a.numel(), 2048),)
        residual_kernels.residual_add[grid](a, b, out, a.numel(), BLOCK=2048, num_warps=8, **_options())
    return out


def swiglu(fused: torch.Tensor, *, leaves: int = 1, out: torch.Tensor | None = None) -> torch.Tensor:
    """``cast(gate * sigmoid(gate) * up)``.

    Args:
        fused: [T, 2 * I]: ``leaves`` times [gate slice, up slice], I / leaves columns each.

    Returns:
        [T, I].

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    width = _fused_width(fused, leaves, "swiglu")
    out = _like("out of swiglu", out, fused, (len(fused), width))
    if out.numel():
        block = min(1024, triton.next_power_of_2(width // leaves))
        grid = (len(fused), triton.cdiv(width // leaves, block), leaves)
        activation_kernels.swiglu[grid](fused, out, width, width // leaves, BLOCK=block, num_warps=4, **_options())
    return out


def swiglu_backward(
    dy: torch.Tensor, fused: torch.Tensor, *, leaves: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Gradient of ``fused`` (its layout, [T, 2 * I]) for the gradient dy [T, I] of :func:`swiglu`; out may be fused.

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    width = _fused_width(fused, leaves, "swiglu_backward")
    _require("dy of swiglu_backward", dy, (len(fused), width), (fused.dtype,))
    out = _like("out of swiglu_backward", out, fused, tuple(fused.shape))
    if dy.numel():
        block = min(1024, triton.next_power_of_2(width // leaves))
        grid = (len(fused), triton.cdiv(width // leaves, block), leaves)
        activation_kernels.swiglu_backward[grid](
            dy, fused, out, width, width // leaves, BLOCK=block, num_warps=4, **_options()
        )
    return out


def _fused_width(fused: torch.Tensor, leaves: int, name: str) -> int:
    _require(f"fused of {name}", fused, tuple(fused.shape), DTYPES)
    if fused.ndim != 2 or leaves < 1 or fused.shape[1] % (2 * leaves):
        raise ContractError(
            f"fused of {name} is {list(fused.shape)} with {leaves} leaves: [T, 2 * I] is expected, I divided by leaves"
        )
    return fused.shape[1] // 2


def embedding(table: torch.Tensor, ids: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The rows ``table[ids]``: [V, N] and int32 or int64 [T] give [T, N]. Ids are not checked (that needs the host).

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    _require("table of embedding", table, tuple(table.shape), DTYPES)
    _require("ids of embedding", ids, (len(ids),), (torch.int32, torch.int64))
    out = _like("out of embedding", out, table, (len(ids), table.shape[1]))
    if out.numel():
        n, block = table.shape[1], min(2048, triton.next_power_of_2(table.shape[1]))
        grid = (len(ids), triton.cdiv(n, block))
        embedding_kernels.embedding[grid](table, ids, out, n, BLOCK=block, num_warps=4, **_options())
    return out


def embedding_gradient(dh: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor) -> None:
    """``grad[id] = add(grad[id], dh[t])`` for every token in order, in place. It waits for the host.

    Args:
        dh: [T, N]; ``ids``: int32 or int64 [T], each below V; ``grad``: float32 [V, N].

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit, or an id outside of the table.
    """
    _require("grad of embedding_gradient", grad, (len(grad), *dh.shape[1:]), (torch.float32,))
    _require("ids of embedding_gradient", ids, (len(ids),), (torch.int32, torch.int64))
    _require("dh of embedding_gradient", dh, (len(ids), grad.shape[1]), DTYPES)
    if not dh.numel():
        return
    ordered, order = torch.sort(ids.long(), stable=True)
    found, counts = torch.unique_consecutive(ordered, return_counts=True)
    if int(found[0]) < 0 or int(found[-1]) >= len(grad):
        raise ContractError(
            f"ids of embedding_gradient lie between {int(found[0])} and {int(found[-1])}; "
            f"the table has {len(grad)} rows"
        )
    first = torch.zeros(len(found) + 1, dtype=torch.int64, device=dh.device)
    torch.cumsum(counts, 0, out=first[1:])
    n, block = dh.shape[1], min(512, triton.next_power_of_2(dh.shape[1]))
    grid = (len(found), triton.cdiv(n, block))
    embedding_kernels.embedding_gradient[grid](
        dh, order, found, first, grad, len(found), n, BLOCK=block, num_warps=4, **_options()
    )
