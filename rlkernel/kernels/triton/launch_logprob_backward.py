"""Starts the linear log-probability's backward on torch tensors of a GPU. Tuning and ``gemm`` change no bit.

The gradient of the logits exists for a chunk of the vocabulary at a time. The input's gradient is a chain over the
vocabulary that continues from chunk to chunk, the weight's one over rows that continues from call to call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import triton

from rlkernel.contract.entries import VOCABULARY_LEAF
from rlkernel.errors import ContractError
from rlkernel.kernels.triton import logprob_gradient as kernels
from rlkernel.kernels.triton.launch import MultiplyAccumulate, Tile, _options
from rlkernel.kernels.triton.launch import gemm as plain_gemm
from rlkernel.kernels.triton.launch_logprob import (
    FMA_TILE,
    DeviceRowStatistics,
    Gemm,
    KeptLogits,
    division,
    require_head,
    require_shards,
    require_vendor,
    vendor_logits,
)
from rlkernel.kernels.triton.tiles import HopperTile

Tensor = torch.Tensor


@dataclass(frozen=True)
class BackwardTuning:
    """Tuning of the backward. Nothing here is part of the contract.

    ``chunk``: columns of the vocabulary whose gradients exist at a time, a multiple of 128; ``vendor_chunk``: columns
    of float32 logits that the vendor's GEMM writes at a time; ``vendor_products``: with ``hopper``, the vendor's GEMM
    computes what is a whole chain from +0 (set up as ``require_vendor`` says).
    """

    chunk: int = 16896
    vendor_chunk: int = 8448
    logits: Tile = field(default_factory=lambda: Tile(128, 128, 64, 8, 4, 3))
    inputs: Tile = field(default_factory=lambda: Tile(128, 128, 64, 8, 4, 3))
    weights: Tile = field(default_factory=lambda: Tile(128, 128, 64, 8, 4, 3))
    hopper_inputs: HopperTile = field(default_factory=lambda: HopperTile(parts=2))
    hopper_weights: HopperTile = field(default_factory=lambda: HopperTile(parts=2))
    rows: int = 4
    block: int = 1024
    vendor_products: bool = False


def linear_logprob_backward(
    x: Tensor,
    w: Tensor,
    statistics: DeviceRowStatistics,
    targets: Tensor,
    coefficient: Tensor,
    temperature: float,
    shards: int,
    grad_w: Tensor,
    mac: MultiplyAccumulate,
    *,
    gemm: Gemm = "triton",
    fresh: bool = False,
    kept: KeptLogits | None = None,
    tuning: BackwardTuning | None = None,
) -> Tensor:
    """Gradients of the head, from logits that are computed again by the forward's chain.

    Args:
        x: [R, H] and w: [V, H], bfloat16 or (``mac='fma'`` only) float32, C-contiguous.
        statistics: of the same rows, weight, targets and temperature; ``max`` and ``log_sum`` are used.
        targets: int64 [R]; ``coefficient``: float32 [R], d loss / d logprob.
        shards: T of the definition, the leaves of dx; a power of two.
        grad_w: float32 [V, H], C-contiguous; its chains continue over these rows, in place. R is a multiple of the
            multiply-accumulate's step over rows (16 on sm_90, 8 on gfx942, 1 for ``fma``), or these rows are the last
            of their chain: the step is filled up with zeros, which a later row could not take back.
        gemm: ``triton``; ``hopper``: warp-specialised kernels of sm_90 (``matrix``, H and the columns of every chunk
            multiples of 8); ``vendor``: logits, and what is a whole chain from +0, by cuBLASLt, the rest as ``triton``.
        kept: logits that the forward of these rows left in memory; what they do not cover is computed again.
        fresh: grad_w begins here: its old values are not read, the chains start at +0.

    Returns:
        dx [R, H] in the dtype of x. Besides it, ``R * chunk * (2 or 4)`` bytes of gradients are used, with ``vendor``
        also ``R * vendor_chunk * 4`` of logits, and R * H * 4 for every level of the tree over shards.

    Raises:
        ContractError: operands, a temperature, shards or tuning that do not fit, or a vendor's GEMM that is not set up.
    """
    if tuning is None:
        tuning = (
            BackwardTuning() if mac == "matrix" else BackwardTuning(logits=FMA_TILE, inputs=FMA_TILE, weights=FMA_TILE)
        )
    require_head(x, w, targets, mac)
    require_shards(shards)
    _require(x, w, statistics, coefficient, grad_w, tuning)
    if gemm == "vendor" or tuning.vendor_products:
        require_vendor(x, mac)
    if gemm == "hopper" and mac != "matrix":
        raise ContractError(f"gemm='hopper' is the matrix unit's chain, not {mac!r}; choose gemm='triton'")
    dx = torch.empty_like(x)
    if not len(x):
        return grad_w.zero_() and dx if fresh else dx
    work = _Work(x, w, statistics, targets, coefficient, temperature, grad_w, mac, gemm, fresh, kept, tuning)
    size = triton.cdiv(len(w), VOCABULARY_LEAF * shards) * VOCABULARY_LEAF
    pending: list[tuple[int, Tensor]] = []  # (leaves, sum), like the digits of a binary counter
    for shard in range(shards):
        first, last = min(shard * size, len(w)), min((shard + 1) * size, len(w))
        if shards == 1:
            return work.shard(first, last, dx)
        total = work.shard(first, last, torch.empty(x.shape, dtype=torch.float32, device=x.device))
        leaves = 1
        while pending and pending[-1][0] == leaves:
            total = pending.pop()[1].add_(total)
            leaves *= 2
        pending.append((leaves, total))
    return dx.copy_(pending[0][1])


class _Work:
    """The operands of one backward."""

    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        statistics: DeviceRowStatistics,
        targets: Tensor,
        coefficient: Tensor,
        temperature: float,
        grad_w: Tensor,
        mac: MultiplyAccumulate,
        gemm: Gemm,
        fresh: bool,
        kept: KeptLogits | None,
        tuning: BackwardTuning,
    ) -> None:
        self.x, self.w, self.grad_w = x, w, grad_w
        self.rows = (statistics.max, statistics.log_sum, targets, coefficient)
        self.temperature, self.mac, self.gemm, self.fresh, self.tuning = temperature, mac, gemm, fresh, tuning
        self.kept = kept or KeptLogits(0)
        width = min(tuning.chunk, len(w))
        self.dz = torch.empty(len(x) * width, dtype=x.dtype, device=x.device)
        logits = min(tuning.vendor_chunk, width) if gemm == "vendor" else 0
        self.z = torch.empty(len(x) * logits, dtype=torch.float32, device=x.device)

    def shard(self, first: int, last: int, out: Tensor) -> Tensor:
        """Gradients of the columns [first, last): the weight's in place, the input's leaf into ``out``."""
        if first == last:
            return out.zero_()
        chunk = self.tuning.chunk
        whole = last - first <= chunk
        leaf = out if whole or out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        for begin, end in _chunks(first, last, chunk):
            dz = self._logits_gradient(begin, end)
            self._product(dz, self.x, self.grad_w[begin:end], True, not self.fresh, self.tuning.weights)
            self._product(dz, self.w[begin:end], leaf, False, begin > first, self.tuning.inputs)
        return out if leaf is out else out.copy_(leaf)

    def _product(self, a: Tensor, b: Tensor, out: Tensor, depth_first: bool, continues: bool, tile: Tile) -> None:
        """``out`` = the chain of a [M, K] (or [K, M], ``depth_first``) and b [K, N], continued if it ``continues``."""
        if not continues and (self.gemm == "vendor" or self.tuning.vendor_products):
            left = a.T if depth_first else a
            torch.mm(left, b, out=out) if out.dtype == a.dtype else torch.mm(left, b, out_dtype=out.dtype, out=out)
            return
        given = {"grad": out} if continues else {"out": out, "out_dtype": out.dtype}
        if self.gemm == "hopper":
            from rlkernel.kernels.triton.launch_hopper import fitting, gemm_hopper  # Gluon: on sm_90 alone

            depth = a.shape[0] if depth_first else a.shape[1]
            wanted = self.tuning.hopper_weights if depth_first else self.tuning.hopper_inputs
            own = fitting(a, b, b.shape[1], out.element_size(), 1, depth, wanted)
            gemm_hopper(a, b, a_depth_first=depth_first, b_depth_first=True, tile=own or wanted, **given)
        else:
            plain_gemm(a, b, mac=self.mac, a_depth_first=depth_first, b_depth_first=True, tile=tile, **given)

    def _logits_gradient(self, first: int, last: int) -> Tensor:
        x, tuning, rows = self.x, self.tuning, len(self.x)
        how, factor = division(self.temperature)
        dz = self.dz[: rows * (last - first)].view(rows, last - first)
        divisor = float(np.float32(self.temperature))
        kept = self.kept.covers(first, last)
        if kept:
            for begin, end in kept:
                self._of_logits(self.kept.pieces[begin, end], dz[:, begin - first :], begin)
            return dz
        if self.gemm == "hopper":
            from rlkernel.kernels.triton.launch_logprob_hopper import hopper_gradient

            hopper_gradient(x, self.w[first:last], self.rows, dz, first, (how, factor), divisor)
            return dz
        if self.gemm == "triton":
            tile, depth = tuning.logits, x.shape[1]
            even = depth % tile.block_k == 0
            if self.mac == "matrix" and torch.version.hip and not even:
                raise ContractError(f"H = {depth} is no multiple of block_k {tile.block_k}; choose one that divides it")
            kernels.linear_gradient[(triton.cdiv(rows, tile.block_m) * triton.cdiv(last - first, tile.block_n),)](
                x,
                self.w[first:last],
                *self.rows,
                dz,
                rows,
                last - first,
                depth,
                first,
                factor,
                divisor,
                0.0,
                DIVISION=how,
                WIDEN=self.mac == "fma",
                EVEN=even,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                BLOCK_K=tile.block_k,
                GROUP_M=tile.group_m,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                **_options(),
            )
            return dz
        for begin, end in _chunks(first, last, tuning.vendor_chunk):
            z = vendor_logits(x, self.w[begin:end], self.z[: rows * (end - begin)].view(rows, end - begin))
            self._of_logits(z, dz[:, begin - first :], begin)
        return dz

    def _of_logits(self, z: Tensor, dz: Tensor, first: int) -> None:
        """dz [R, >= C], rows as far apart as its strides say, from logits z [R, C] of the columns from ``first`` on."""
        rows, columns = z.shape
        how, factor = division(self.temperature)
        kernels.logits_gradient[(triton.cdiv(columns, self.tuning.block), triton.cdiv(rows, self.tuning.rows))](
            z,
            *self.rows,
            dz,
            rows,
            columns,
            dz.stride(0),
            first,
            factor,
            float(np.float32(self.temperature)),
            DIVISION=how,
            ROWS=self.tuning.rows,
            BLOCK=self.tuning.block,
            num_warps=4,
            **_options(),
        )


def _chunks(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, last, size):
        yield begin, min(last, begin + size)


def _require(
    x: Tensor, w: Tensor, statistics: DeviceRowStatistics, coefficient: Tensor, grad_w: Tensor, tuning: BackwardTuning
) -> None:
    rows = len(x)
    for name, value in (("max", statistics.max), ("log_sum", statistics.log_sum), ("coefficient", coefficient)):
        if value.dtype != torch.float32 or value.shape != (rows,) or not value.is_contiguous():
            raise ContractError(
                f"{name} of the head's backward is {value.dtype} {list(value.shape)}, not float32 [{rows}]"
            )
    if grad_w.dtype != torch.float32 or grad_w.shape != w.shape or not grad_w.is_contiguous():
        raise ContractError(
            f"grad_w is {grad_w.dtype} {list(grad_w.shape)}; C-contiguous float32 {list(w.shape)} is expected"
        )
    for name in ("chunk", "vendor_chunk"):
        value = getattr(tuning, name)
        if value < VOCABULARY_LEAF or value % VOCABULARY_LEAF:
            raise ContractError(
                f"{name} of the backward is {value}; a positive multiple of {VOCABULARY_LEAF} is expected"
            )
