"""The projections of a model on a GPU, forward, dgrad and wgrad, and rows filled up to whole steps of a chain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import torch

from rlkernel.contract.points import SixPoints
from rlkernel.contract.profiles import FMA
from rlkernel.kernels.products import PADDED_ROWS, Products
from rlkernel.kernels.triton import launch, launch_rows
from rlkernel.kernels.triton.launch import MultiplyAccumulate
from rlkernel.kernels.vendor.admission import AdmissionTable

FMA_TILE = launch.Tile(64, 64, 16, 8, 4, 3)
"""Of the portable chain: small, since every fma of a tile is an instruction of its own."""


def multiply_accumulate(points: SixPoints) -> MultiplyAccumulate:
    """Which chain an entry has: of fma, or of the matrix unit."""
    return "fma" if points.primitive("mac") == FMA else "matrix"


@cache
def products(device: torch.device) -> Products:
    """The matrix unit's products on a device. cuBLASLt runs in the shapes that :func:`admit` found equal."""
    return Products("matrix", device, admissions=None if torch.version.hip else AdmissionTable())


def admit(points: SixPoints, rows: int, w: torch.Tensor, out_dtype: torch.dtype) -> None:
    """Compare cuBLASLt with the own chain for ``rows`` rows times w [N, K], once, so that it may run where it is equal.

    It waits for the host, and does nothing for a product that is no single chain of the matrix unit.
    """
    if multiply_accumulate(points) == "fma" or torch.version.hip or points.split.leaves > 1:
        return
    found, name = products(w.device), str(out_dtype).removeprefix("torch.")
    (n, k), padded = w.shape, max(rows, PADDED_ROWS)
    if "was not compared" in found.describe("forward", rows, n, k, out=name).why:
        found.admit("forward", padded, n, k, name)


def forward(
    points: SixPoints,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    overlaps: bool = False,
) -> torch.Tensor:
    """``cast(add(tree over leaves of chain(x, w), bias))``: x [T, K], w [N, K], bias [N] -> [T, N].

    ``overlaps``: the kernel may read w while the one before it runs.
    """
    mac, leaves = multiply_accumulate(points), points.split.leaves
    if mac == "fma":
        return launch.gemm(x, w, mac=mac, leaves=leaves, bias=bias, out_dtype=out_dtype, tile=FMA_TILE)
    return products(x.device).forward(x, w, leaves=leaves, bias=bias, out_dtype=out_dtype, overlaps=overlaps)


def swiglu(points: SixPoints, x: torch.Tensor, w: torch.Tensor, slices: int, *, overlaps: bool = False) -> torch.Tensor:
    """SwiGLU of the projection w [2 * I, K], ``slices`` times [gate, up], of x [T, K]: [T, I] in the dtype of x."""
    if multiply_accumulate(points) == "fma" or points.split.leaves > 1:
        return launch_rows.swiglu(forward(points, x, w, None, x.dtype), leaves=slices)
    return products(x.device).swiglu(x, w, slices=slices, overlaps=overlaps)


def dgrad(points: SixPoints, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``cast(tree over leaves of chain over N (dy, w))``: dy [T, N], w [N, K] -> [T, K] in the dtype of dy."""
    mac, leaves = multiply_accumulate(points), points.split.leaves
    if mac == "fma":
        return launch.gemm(dy, w, mac=mac, leaves=leaves, b_depth_first=True, tile=FMA_TILE)
    return products(dy.device).dgrad(dy, w, leaves=leaves)


def weight_gradient(points: SixPoints, dy: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> None:
    """Continue the chains of ``grad`` float32 [N, K] over whole steps of tokens: dy [T, N], x [T, K]."""
    mac = multiply_accumulate(points)
    if mac == "fma":
        launch.gemm(dy, x, mac=mac, a_depth_first=True, b_depth_first=True, grad=grad, tile=FMA_TILE)
    else:
        products(dy.device).wgrad(dy, x, grad)


@dataclass(frozen=True)
class Places:
    """Where rows go in a layout that fills every sequence up to whole steps: int64 [R], and its number of rows."""

    rows: torch.Tensor
    total: int


def places_of_whole_steps(points: SixPoints, starts: tuple[int, ...], device: torch.device) -> Places | None:
    """The layout of rows of sequences at ``starts``; None where every sequence has whole steps already."""
    return _places(points.split.step, starts, device)


@lru_cache(maxsize=64)  # every projection of a pass asks for the same one, and it crosses to the device
def _places(step: int, starts: tuple[int, ...], device: torch.device) -> Places | None:
    if all((last - first) % step == 0 for first, last in pairwise(starts)):
        return None
    rows: list[int] = []
    total = 0
    for first, last in pairwise(starts):
        rows += range(total, total + last - first)
        total += -(-(last - first) // step) * step
    return Places(torch.tensor(rows, dtype=torch.int64, device=device), total)


def spread(values: torch.Tensor, places: Places) -> torch.Tensor:
    """Rows [R, ...] at their places, zeros between them."""
    result = values.new_zeros((places.total, *values.shape[1:]))
    result[places.rows] = values
    return result


def whole_steps(points: SixPoints, rows: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
    """Rows [T, W] of sequences at ``starts``, each filled up with zero rows to whole steps of the entry's chain."""
    places = places_of_whole_steps(points, starts, rows.device)
    return rows if places is None else spread(rows, places)


def starts_of(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Offsets [S+1] of sequences of these lengths."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return tuple(offsets)


def tile_of(mac: MultiplyAccumulate, depth: int) -> launch.Tile | None:
    """A tile for chains of ``depth``: small for fma, each an instruction, and on AMD a divisor of the leaf."""
    if mac == "fma":
        return FMA_TILE
    if not torch.version.hip:
        return None
    return launch.Tile(block_k=next((b for b in (64, 32, 16) if depth % b == 0), 16))
