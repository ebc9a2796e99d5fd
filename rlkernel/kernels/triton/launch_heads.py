"""Starts the kernels of rope and qk_norm on the head rows that a fused projection leaves, or on plain ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from rlkernel.errors import ContractError
from rlkernel.kernels.triton import rope as kernels
from rlkernel.kernels.triton.launch import _options
from rlkernel.kernels.triton.launch_rows import DTYPES, _require


@dataclass(frozen=True)
class HeadPlace:
    """Where head rows of one kind lie in a tensor [T, groups * slots * depth]: from slot ``first``, ``per`` a group."""

    groups: int
    per: int
    slots: int
    first: int
    depth: int

    @property
    def heads(self) -> int:
        return self.groups * self.per


def fused_places(heads: int, kv_heads: int, depth: int) -> tuple[HeadPlace, HeadPlace, HeadPlace]:
    """Places of q, k and v in a projection whose features lie by KV group: [its q heads, k head, v head]."""
    per = heads // kv_heads
    slots = per + 2
    return (
        HeadPlace(kv_heads, per, slots, 0, depth),
        HeadPlace(kv_heads, 1, slots, per, depth),
        HeadPlace(kv_heads, 1, slots, per + 1, depth),
    )


def plain_place(heads: int, depth: int) -> HeadPlace:
    """The place of heads that lie alone: [T, heads, depth]."""
    return HeadPlace(heads, 1, 1, 0, depth)


@dataclass(frozen=True)
class Rotation:
    """Positions int32 [T], and the contract's tables, float32 [P, depth / 2]."""

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def _rows(depth: int) -> int:
    return max(1, 1024 // depth)


def _check(grouped: torch.Tensor, place: HeadPlace, rotation: Rotation | None, name: str) -> int:
    tokens = len(grouped)
    width = place.groups * place.slots * place.depth
    if grouped.numel() != tokens * width or grouped.dtype not in DTYPES or not grouped.is_contiguous():
        raise ContractError(
            f"{name} is {grouped.dtype} {list(grouped.shape)} with strides {grouped.stride()}: "
            f"rows of {width} elements, float32 or bfloat16, C-contiguous, are expected"
        )
    if rotation is not None:
        if place.depth % 2 or place.depth > 256:
            raise ContractError(f"the head dimension of rope is {place.depth}; it must be even and at most 256")
        _require(f"positions of {name}", rotation.positions, (tokens,), (torch.int32,))
        shape = (len(rotation.cos), place.depth // 2)
        _require(f"cos of {name}", rotation.cos, shape, (torch.float32,))
        _require(f"sin of {name}", rotation.sin, shape, (torch.float32,))
    return tokens


def rope(
    grouped: torch.Tensor,
    place: HeadPlace,
    rotation: Rotation,
    *,
    w: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate head rows; with ``w`` [depth] after their RMSNorm, rounded in between as two regions do.

    Args:
        grouped: [T, ...], read at ``place``. Positions are not checked (that needs the host).

    Returns:
        [T, heads, depth], and with w the inverse root mean square of every head row, float32 [T, heads].

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit; a norm over a depth that is no power of two.
    """
    tokens = _check(grouped, place, rotation, "the input of rope")
    if out is None:
        out = torch.empty((tokens, place.heads, place.depth), dtype=grouped.dtype, device=grouped.device)
    _require("out of rope", out, (tokens, place.heads, place.depth), (grouped.dtype,))
    half = place.depth // 2
    inv_rms = None
    if w is not None:
        _require_norm(w, place, grouped.dtype)
        inv_rms = torch.empty((tokens, place.heads), dtype=torch.float32, device=grouped.device)
    if tokens:
        rows = _rows(place.depth)
        kernels.head_rope[(triton.cdiv(tokens * place.heads, rows),)](
            grouped, grouped if w is None else w, rotation.positions, rotation.cos, rotation.sin, out,
            rotation.cos if inv_rms is None else inv_rms, tokens * place.heads, eps,
            place.groups, place.per, place.slots, place.first,
            HALF=half, WIDTH=triton.next_power_of_2(half), ROWS=rows, NORMS=w is not None, num_warps=4, **_options(),
        )  # fmt: skip
    return out, inv_rms


def decode_heads(
    fused: torch.Tensor,
    rotation: Rotation,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_heads: int,
    *,
    w: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    overlaps: bool = False,
) -> torch.Tensor:
    """Queries of a decode step, normed with ``w`` and rotated; keys likewise, and values, into their pages.

    The bits of :func:`rope`, ``copy_heads`` and ``append_kv`` one after the other.

    Args:
        fused: [T, groups * slots * depth] by KV group: [its q heads, k head, v head].
        rotation: a negative position counts as 0.
        slots: int64 [T]; a negative one is not written.
        k_cache, v_cache: [pages, page, KVH, depth].
        w: weights of the norms of q and k, [depth] each.
        overlaps: on sm_90: start while the kernel before runs, and wait for it before ``fused`` is read.

    Returns:
        [T, q_heads, depth].

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit; a norm over a depth that is no power of two.
    """
    kv_heads, depth = k_cache.shape[2:]
    places = fused_places(q_heads, kv_heads, depth)
    tokens = _check(fused, places[0], rotation, "the input of decode_heads")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _require(f"{name} of decode_heads", cache, tuple(k_cache.shape), (fused.dtype,))
    _require("slots of decode_heads", slots, (tokens,), (torch.int64,))
    for weight in w or ():
        _require_norm(weight, places[0], fused.dtype)
    q = torch.empty((tokens, q_heads, depth), dtype=fused.dtype, device=fused.device)
    if tokens:
        wq, wk = w or (fused, fused)
        half, per = depth // 2, places[0].per
        pdl = {"launch_pdl": True} if overlaps else {}
        kernels.decode_heads[(tokens, kv_heads)](
            fused, wq, wk, rotation.positions, slots, rotation.cos, rotation.sin, q, k_cache, v_cache, eps, kv_heads,
            PER=per, SLOTS=triton.next_power_of_2(per + 2), HALF=half, WIDTH=triton.next_power_of_2(half),
            NORMS=w is not None, OVERLAPS=overlaps, num_warps=max(1, triton.next_power_of_2(per + 2) * depth // 512),
            **pdl, **_options(),
        )  # fmt: skip
    return q


@dataclass(frozen=True)
class HeadNorm:
    """What the backward of a norm before the rotation needs: of the forward, and the running gradient of the weight.

    ``grouped`` [T, ...], ``w`` [depth], ``inv_rms`` float32 [T, heads], ``dw`` float32 [depth], continued in place over
    tokens, then heads. ``plain``: the chain of dw by the kernel for any device, also on CUDA.
    """

    grouped: torch.Tensor
    w: torch.Tensor
    inv_rms: torch.Tensor
    dw: torch.Tensor
    plain: bool = False


def rope_backward(
    dy: torch.Tensor,
    place: HeadPlace,
    rotation: Rotation,
    dgrouped: torch.Tensor,
    norm: HeadNorm | None = None,
) -> None:
    """Gradient of :func:`rope`, written into ``dgrouped`` at ``place``; with a norm its weight's chain continues.

    Args:
        dy: [T, heads, depth]; with a norm it is overwritten by the gradient between rotation and norm.

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    tokens = _check(dgrouped, place, rotation, "the gradient of rope")
    _require("dy of rope_backward", dy, (tokens, place.heads, place.depth), (dgrouped.dtype,))
    half, rows = place.depth // 2, _rows(place.depth)
    if norm is not None:
        _require("grouped of rope_backward", norm.grouped, tuple(dgrouped.shape), (dgrouped.dtype,))
        _require_norm(norm.w, place, dy.dtype)
        _require("inv_rms of rope_backward", norm.inv_rms, (tokens, place.heads), (torch.float32,))
        _require("dw of rope_backward", norm.dw, (place.depth,), (torch.float32,))
    if not tokens:
        return
    of_norm = (dgrouped, dy, rotation.cos) if norm is None else (norm.grouped, norm.w, norm.inv_rms)
    grouped, w, inv_rms = of_norm
    kernels.head_rope_backward[(triton.cdiv(tokens * place.heads, rows),)](
        dy, grouped, w, rotation.positions, rotation.cos, rotation.sin, inv_rms, dgrouped, dy, tokens * place.heads,
        place.groups, place.per, place.slots, place.first,
        HALF=half, WIDTH=triton.next_power_of_2(half), ROWS=rows, NORMS=norm is not None, num_warps=4, **_options(),
    )  # fmt: skip
    if norm is not None:
        _norm_dw(dy, norm, place)


def _norm_dw(dy: torch.Tensor, norm: HeadNorm, place: HeadPlace) -> None:
    if not norm.plain and not torch.version.hip:
        from rlkernel.kernels.triton import launch_chains  # Gluon: on CUDA alone

        if launch_chains.copies(place.depth, dy, norm.grouped):
            rows = launch_chains.Rows(place.depth, place.groups, place.per, place.slots, place.first)
            flat = dy.view(-1, place.depth)
            launch_chains.column_chain(flat, norm.dw, x=norm.grouped, inv_rms=norm.inv_rms, rows=rows)
            return
    kernels.head_norm_dw[(triton.cdiv(place.depth, 32),)](
        dy, norm.grouped, norm.inv_rms, norm.dw, len(dy), place.groups, place.per, place.slots, place.first,
        DEPTH=place.depth, COLUMNS=32, BLOCK=32, num_warps=1, **_options(),
    )  # fmt: skip


def copy_heads(plain: torch.Tensor, grouped: torch.Tensor, place: HeadPlace, *, gathers: bool) -> None:
    """Head rows [T, heads, depth] out of ``grouped`` (``gathers``), or back into it, bits unchanged.

    Raises:
        ContractError: shapes, dtypes or layouts that do not fit.
    """
    tokens = _check(grouped, place, None, "the grouped side of copy_heads")
    _require("the plain side of copy_heads", plain, (tokens, place.heads, place.depth), (grouped.dtype,))
    if tokens:
        rows = _rows(place.depth)
        kernels.head_copy[(triton.cdiv(tokens * place.heads, rows),)](
            plain, grouped, tokens * place.heads, place.groups, place.per, place.slots, place.first,
            DEPTH=place.depth, WIDTH=triton.next_power_of_2(place.depth), ROWS=rows, GATHERS=gathers,
            num_warps=4, **_options(),
        )  # fmt: skip


def _require_norm(w: torch.Tensor, place: HeadPlace, dtype: torch.dtype) -> None:
    _require("w of the head norm", w, (place.depth,), (dtype,))
    if place.depth & (place.depth - 1):
        raise ContractError(
            f"a norm fused with rope takes a power of two of elements, not {place.depth}: use rms_norm, then rope"
        )
