"""Starts the linear log-probability's forward on torch tensors of a GPU. Tuning and ``gemm`` change no bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import triton

from rlkernel.contract.entries import VOCABULARY_LEAF
from rlkernel.errors import ContractError
from rlkernel.kernels.triton import logprob as kernels
from rlkernel.kernels.triton import logprob_merge
from rlkernel.kernels.triton.launch import MultiplyAccumulate, Tile, _options
from rlkernel.kernels.triton.launch import gemm as plain_gemm

if TYPE_CHECKING:
    from rlkernel.kernels.triton.launch_logprob_hopper import HopperHeadTile

Gemm = Literal["triton", "hopper", "vendor"]
Tensor = torch.Tensor


@dataclass(frozen=True)
class DeviceRowStatistics:
    """What the head reports of R rows of logits (after division by the temperature), on the device.

    ``max``, ``log_sum`` (ln of the sum of exp(z - max)), ``logprob`` (of the target) and ``entropy`` (nats) are
    float32 [R]; ``digest`` is int64 [R, 2], the two lanes of the distribution digest mod 2^64.
    """

    max: Tensor
    log_sum: Tensor
    logprob: Tensor
    entropy: Tensor
    digest: Tensor


@dataclass(frozen=True)
class HeadTile:
    """Tuning of ``linear_leaves``. Nothing here is part of the contract.

    ``block_n`` is 128 or 256; ``piece``: columns of a thread (of 32) whose statistics are in flight together;
    ``max_registers`` of a thread on NVIDIA's GPUs, 0 for the compiler's choice.
    """

    block_m: int = 64
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    piece: int = 4
    num_warps: int = 4
    num_stages: int = 4
    max_registers: int = 0


@dataclass(frozen=True)
class LeafTile:
    """Tuning of ``logits_leaves``: rows of a program, warps (each 4 leaves of a row), ``piece`` of 16 columns."""

    rows: int = 2
    warps: int = 2
    piece: int = 8


@dataclass(frozen=True)
class MergeTile:
    """Tuning of ``merge_leaves``: rows of a program, leaves that are loaded together."""

    rows: int = 16
    block: int = 64
    unroll: int = 32
    num_warps: int = 4

    @classmethod
    def of(cls, rows: int, by_row: bool = False) -> MergeTile:
        """For so many rows: where there are few, more leaves at a time; by row each has a program of its own."""
        if by_row:
            return cls(rows=1, block=1024, unroll=64, num_warps=2)
        return cls() if rows > 8 else cls(rows=4, block=256)


FMA_TILE = Tile(64, 64, 32, 8, 4, 2)
"""Of products that are chains of fma, which the compiler unrolls."""

CHUNK = 8448
"""Columns of logits that the vendor's GEMM writes at a time: 33 tiles of 256, 8 waves of 132 multiprocessors."""


@dataclass
class KeptLogits:
    """Logits that a forward leaves in memory so that its backward need not compute them again.

    ``columns``: how many of the vocabulary, from its end, in whole pieces of the forward's ``chunk``; R * columns * 4
    bytes. ``pieces``: {(first, last): float32 [R, last - first]}, filled by the forward.
    """

    columns: int
    pieces: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def covers(self, first: int, last: int) -> list[tuple[int, int]]:
        """The pieces that make up the columns [first, last), in order, or none where one is missing."""
        inside = sorted(border for border in self.pieces if first <= border[0] and border[1] <= last)
        return inside if sum(end - begin for begin, end in inside) == last - first else []


class Partials:
    """Partial results of every (leaf, row), before the merge; ``by_row``: those of a row together."""

    def __init__(self, rows: int, leaves: int, device: torch.device, *, by_row: bool = False) -> None:
        self.rows, self.leaves, self.by_row = rows, leaves, by_row
        shape, pairs = ((rows, leaves), (rows, 2, leaves)) if by_row else ((leaves, rows), (2, leaves, rows))
        self.sums = torch.empty((3, *shape), dtype=torch.float32, device=device)
        self.lanes = torch.empty(pairs, dtype=torch.int64, device=device)
        self.chosen = torch.empty(rows, dtype=torch.float32, device=device)

    def arguments(self) -> tuple[Tensor, ...]:
        return (*self.sums, self.lanes, self.chosen)


def division(temperature: float) -> tuple[str, float]:
    """How kernels divide by a temperature, and by which float32 they multiply or divide.

    By 1 nothing happens, and a power of two is a product with its reciprocal: both have the bits of the division.

    Raises:
        ContractError: a temperature that is not positive and finite in float32.
    """
    rounded = np.float32(temperature)
    if not (np.isfinite(rounded) and rounded > 0):
        raise ContractError(f"the temperature is {temperature}; it must be positive and finite in float32")
    if rounded == 1:
        return "one", 1.0
    mantissa, exponent = np.frexp(rounded)
    if mantissa == 0.5 and abs(int(exponent)) < 100:
        return "product", float(1 / rounded)
    return "quotient", float(rounded)


def require_shards(shards: int) -> None:
    """Raises ContractError unless the number of vocabulary shards is a power of two."""
    if shards < 1 or shards & (shards - 1):
        raise ContractError(f"the vocabulary is cut into {shards} shards; a tree adds them: it must be a power of two")


def require_head(x: Tensor, w: Tensor, targets: Tensor, mac: MultiplyAccumulate) -> None:
    """Raises ContractError unless x [R, H], w [V, H] and targets [R] fit each other and ``mac``."""
    for name, tensor in (("x", x), ("w", w)):
        if tensor.ndim != 2 or not tensor.is_contiguous() or tensor.dtype != x.dtype or tensor.shape[1] != x.shape[1]:
            raise ContractError(
                f"{name} of the head is {tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}: "
                "x [R, H] and w [V, H] are C-contiguous, of one dtype and one H"
            )
    accepted = (torch.bfloat16,) if mac == "matrix" else (torch.bfloat16, torch.float32)
    if x.dtype not in accepted:
        raise ContractError(f"the head with mac={mac!r} takes {' or '.join(map(str, accepted))}, not {x.dtype}")
    if 0 in w.shape:
        raise ContractError(f"the head's weight is {list(w.shape)}; neither axis may be empty")
    require_targets(targets, len(x))


def require_targets(targets: Tensor, rows: int) -> None:
    """Raises ContractError unless targets are int64 [rows]. Their range is the caller's: the device is not asked."""
    if targets.dtype != torch.int64 or targets.shape != (rows,) or not targets.is_contiguous():
        raise ContractError(f"targets are {targets.dtype} {list(targets.shape)}; int64 [{rows}] is expected")


def require_vendor(x: Tensor, mac: MultiplyAccumulate) -> None:
    """Raises ContractError unless the vendor's GEMM is, as configured, the single chain of the matrix unit.

    It is on sm_90 with cuBLASLt and without split-K or reduced-precision reductions, settings of the process that a
    library does not change by itself.
    """
    matmul = torch.backends.cuda.matmul
    if mac != "matrix" or torch.version.hip or x.dtype != torch.bfloat16:
        raise ContractError("gemm='vendor' stands for cuBLASLt on bfloat16 with mac='matrix'; choose gemm='triton'")
    library = torch.backends.cuda.preferred_blas_library()
    allowed = matmul.allow_bf16_reduced_precision_reduction
    if "Cublaslt" not in str(library) or allowed not in (False, (False, False)) or _splits(matmul):
        raise ContractError(
            f"gemm='vendor' needs cuBLASLt without split-K, but the library is {library} and "
            f"allow_bf16_reduced_precision_reduction {allowed}: call preferred_blas_library('cublaslt') and set "
            "allow_bf16_reduced_precision_reduction = (False, False)"
        )


def _splits(matmul: object) -> bool:
    split = getattr(matmul, "allow_bf16_reduced_precision_reduction_split_k", None)
    return bool(split)


def best_gemm(x: Tensor, w: Tensor, mac: MultiplyAccumulate) -> Gemm:
    """The fastest kernels that take x [R, H] and w [V, H]: ``hopper`` on sm_90 where the TMA can read them.

    For the backward the vocabulary must be a multiple of 8 too.
    """
    if mac != "matrix" or torch.version.hip or torch.cuda.get_device_capability(x.device) != (9, 0):
        return "triton"
    aligned = all(operand.data_ptr() % 16 == 0 for operand in (x, w)) and x.shape[1] % 8 == 0 and len(w) % 8 == 0
    return "hopper" if aligned else "triton"


def vendor_logits(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """``out[:] = x @ w.T`` in float32 by cuBLASLt."""
    return torch.mm(x, w.T, out_dtype=torch.float32, out=out)


def column_chunks(vocabulary: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Borders of chunks of the vocabulary; all but the last are whole leaves."""
    for first in range(0, vocabulary, chunk):
        yield first, min(vocabulary, first + chunk)


def linear_logprob(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    temperature: float,
    shards: int,
    mac: MultiplyAccumulate,
    *,
    gemm: Gemm = "triton",
    tile: HeadTile | None = None,
    hopper_tile: HopperHeadTile | None = None,
    leaf_tile: LeafTile | None = None,
    merge_tile: MergeTile | None = None,
    product_tile: Tile | None = None,
    chunk: int = CHUNK,
    keep: KeptLogits | None = None,
) -> DeviceRowStatistics:
    """Statistics of logits ``div(chain over H (x, w), temperature)`` that are never in memory as a whole.

    Args:
        x: [R, H] and w: [V, H], bfloat16 or (``mac='fma'`` only) float32, C-contiguous; V the real vocabulary.
        targets: int64 [R], each below V (not looked at; the log-probability of another one is arbitrary).
        temperature: rounded once to float32.
        shards: T of the definition, the largest claimed tensor-parallel degree; a power of two.
        mac: ``fma`` is the portable chain, ``matrix`` that of the GPU's bf16 matrix unit.
        gemm: ``triton`` makes the statistics in the GEMM's epilogue; ``hopper`` (sm_90, ``matrix``) beside the GEMM;
            ``vendor`` lets cuBLASLt write ``chunk`` columns of logits at a time (R * chunk * 4 bytes). So does
            ``triton`` with ``fma``, by the plain GEMM with ``product_tile``.
        keep: filled with the last columns' logits where they are written to memory at all (``vendor``, ``fma``).

    Returns:
        DeviceRowStatistics of R rows. Besides them 28 * R * V / 128 bytes are used (and a chunk).

    Raises:
        ContractError: operands, a temperature, shards or tuning that do not fit, or a vendor's GEMM that is not set up.
    """
    require_head(x, w, targets, mac)
    require_shards(shards)
    rows, vocabulary = len(x), len(w)
    partials = Partials(rows, triton.cdiv(vocabulary, VOCABULARY_LEAF), x.device)
    if rows and gemm == "triton" and mac == "matrix":
        fused_leaves(x, w, targets, temperature, partials, tile or HeadTile())
    elif rows and gemm == "hopper":
        from rlkernel.kernels.triton.launch_logprob_hopper import hopper_leaves  # Gluon: on sm_90 alone

        if mac != "matrix":
            raise ContractError(f"gemm='hopper' is the matrix unit's chain, not {mac!r}; choose gemm='triton'")
        hopper_leaves(x, w, targets, division(temperature), partials, hopper_tile)
    elif rows:
        if gemm == "vendor":
            require_vendor(x, mac)
        if chunk % VOCABULARY_LEAF or chunk < 1:
            raise ContractError(f"a chunk of {chunk} columns is not a multiple of a leaf's {VOCABULARY_LEAF}")
        z = torch.empty(rows * min(chunk, vocabulary), dtype=torch.float32, device=x.device)
        for first, last in column_chunks(vocabulary, chunk):
            part = z[: rows * (last - first)].view(rows, last - first)
            if keep is not None and first >= vocabulary - keep.columns:
                part = keep.pieces[first, last] = torch.empty_like(part)
            if gemm == "vendor":
                vendor_logits(x, w[first:last], part)
            else:
                own = product_tile or (FMA_TILE if mac == "fma" else Tile())
                plain_gemm(x, w[first:last], mac=mac, out_dtype=torch.float32, out=part, tile=own)
            logits_leaves(part, targets, temperature, partials, first // VOCABULARY_LEAF, leaf_tile or LeafTile())
    return merge(partials, vocabulary, shards, merge_tile or MergeTile.of(rows))


def fused_leaves(x: Tensor, w: Tensor, targets: Tensor, temperature: float, partials: Partials, tile: HeadTile) -> None:
    """Partial results of x [R, H] and w [V, H], made in the epilogue of their product."""
    if tile.block_n not in (128, 256):
        raise ContractError(f"block_n of the head is {tile.block_n}; a tile holds one or two leaves: 128 or 256")
    (rows, depth), vocabulary = x.shape, len(w)
    even = depth % tile.block_k == 0
    if torch.version.hip and not even:
        raise ContractError(
            f"H = {depth} is no multiple of block_k {tile.block_k}: on this GPU a step of padding turns an "
            "accumulator of -0 into +0; choose a block_k that divides it"
        )
    how, factor = division(temperature)
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(partials.leaves, tile.block_n // VOCABULARY_LEAF)
    kernels.linear_leaves[(tiles,)](
        x,
        w,
        targets,
        *partials.arguments(),
        rows,
        vocabulary,
        depth,
        partials.leaves,
        factor,
        0.0,
        0,
        DIVISION=how,
        EVEN=even,
        MASKED=vocabulary % VOCABULARY_LEAF != 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        PIECE=tile.piece,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **({"maxnreg": tile.max_registers} if tile.max_registers and not torch.version.hip else {}),
        **_options(),
    )


def logits_leaves(
    z: Tensor, targets: Tensor, temperature: float, partials: Partials, first_leaf: int, tile: LeafTile
) -> None:
    """Partial results of logits z float32 [R, C] that begin at leaf ``first_leaf`` of the vocabulary."""
    rows, columns = z.shape
    leaves = triton.cdiv(columns, VOCABULARY_LEAF)
    how, factor = division(temperature)
    kernels.logits_leaves[(triton.cdiv(leaves, 4 * tile.warps), triton.cdiv(rows, tile.rows))](
        z,
        targets,
        *partials.arguments(),
        rows,
        columns,
        z.stride(0),
        first_leaf,
        leaves,
        partials.leaves,
        factor,
        0,
        DIVISION=how,
        MASKED=columns % VOCABULARY_LEAF != 0,
        ROWS=tile.rows,
        WARPS=tile.warps,
        PIECE=tile.piece,
        num_warps=tile.warps,
        **_options(),
    )


def merge(partials: Partials, vocabulary: int, shards: int, tile: MergeTile) -> DeviceRowStatistics:
    """Merge the partial results of rows whose vocabulary is cut into ``shards``."""
    rows, device = partials.rows, partials.sums.device
    out = torch.empty((4, rows), dtype=torch.float32, device=device)
    digest = torch.empty((rows, 2), dtype=torch.int64, device=device)
    if rows:
        logprob_merge.merge_leaves[(triton.cdiv(rows, tile.rows),)](
            *partials.arguments(),
            out,
            digest,
            rows,
            partials.leaves,
            triton.cdiv(vocabulary, VOCABULARY_LEAF * shards),
            SHARDS=shards,
            ROWS=tile.rows,
            BLOCK=tile.block,
            UNROLL=tile.unroll,
            BY_ROW=partials.by_row,
            num_warps=tile.num_warps,
            **_options(),
        )
    return DeviceRowStatistics(out[0], out[1], out[2], out[3], digest)
