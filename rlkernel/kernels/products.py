"""The matrix products of a dense model on one GPU, each sent to the kernel that a declared rule names.

The rule, in this order (:meth:`Products.describe` answers with what it gives and why):

0. With ``overlaps`` and few rows the warp-specialised kernel of sm_90: it can start while another one runs.
1. cuBLASLt where the shape was admitted on this device with this library: one chain, no bias, a fresh result. Up to 32
   rows are padded to 32; any other number of rows has to be the admitted one.
2. On sm_90 the warp-specialised kernel, where it takes the operands.
3. The plain Triton kernel.

All of them give the contract's bits; where the library runs, a part of its results is computed again, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from rlkernel.errors import ContractError
from rlkernel.kernels.triton import launch_rows
from rlkernel.kernels.triton.launch import MultiplyAccumulate, Tile, gemm, product_output
from rlkernel.kernels.triton.tiles import (
    Choice,
    HopperTile,
    Layout,
    TileTable,
    default_choice,
    device_table,
    few_rows_tile,
)
from rlkernel.kernels.vendor.admission import Admission, AdmissionTable, VendorShape
from rlkernel.kernels.vendor.cublas import admit_vendor, differing, this_library, use_cublaslt, vendor_gemm

PADDED_ROWS = 32
CHECKED_ROWS = 64
FEW_ROWS = 64
"""Up to so many rows a product is one tile high."""
STEPS = {"matrix": 16, "fma": 1}
"""Tokens of a weight gradient come in multiples of this (8 on gfx942): the caller pads samples with rows of zeros."""


@dataclass(frozen=True)
class Route:
    """Where a product goes, and why. ``rows``: M with its padding; ``tile`` is empty for the library."""

    kernel: Literal["vendor", "hopper", "plain"]
    why: str
    rows: int
    choice: Choice | None = None


@dataclass
class _Calls:
    calls: int = 0
    checks: int = 0
    compared: int = 0
    differing: torch.Tensor | None = None


class Products:
    """Products of one device.

    Args:
        mac: multiply-accumulate of the profile: ``matrix`` (the GPU's unit) or ``fma`` (portable).
        admissions: shapes in which the library may run; none without a table.
        tiles: measured tiles; those of the device unless given.
        check_every: every so many calls of a shape, 64 rows of the library's result are computed again; 0: never.
    """

    def __init__(
        self,
        mac: MultiplyAccumulate,
        device: torch.device,
        *,
        admissions: AdmissionTable | None = None,
        tiles: TileTable | None = None,
        check_every: int = 256,
    ) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._mac: MultiplyAccumulate = mac
        self._device = device
        self._hopper = mac == "matrix" and not torch.version.hip and properties.major == 9
        self._tiles = tiles if tiles is not None else device_table(properties.name)
        self._admissions = admissions if mac == "matrix" and not torch.version.hip else None
        self._check_every = check_every
        self._calls: dict[VendorShape, _Calls] = {}
        if self._admissions is not None:
            use_cublaslt()
            self._library = this_library(device)

    def describe(
        self, layout: Layout, m: int, n: int, k: int, *, leaves: int = 1, out: str = "bfloat16", plain: bool = True
    ) -> Route:
        """Where a product [M, K] x [N, K] goes. ``plain``: it starts at +0 and has no bias."""
        why = "the library has no table of admissions"
        if self._admissions is not None:
            rows = PADDED_ROWS if m <= PADDED_ROWS and layout != "wgrad" else m
            record = self._admissions.find(VendorShape(layout, rows, n, k, out), self._library)
            if leaves > 1 or not plain:
                why = "leaves, a bias or a start are not the library's"
            elif record is None:
                why = f"the library was not compared with {rows} rows of this shape"
            elif not record.admitted:
                why = f"the library differed in {record.differing} of {record.compared} elements"
            else:
                return Route("vendor", f"admitted on {record.date}: none of {record.compared} elements differed", rows)
        choice = self._tiles.choose(layout, leaves, m, n, k)
        return Route("hopper" if self._hopper and choice.hopper is not None else "plain", why, m, choice)

    def _few(self, m: int) -> bool:
        """Whether a projection of m rows is one tile high, for the kernel of sm_90."""
        return self._hopper and m <= FEW_ROWS

    def _early_choice(self, m: int, n: int, k: int) -> Choice:
        """The measured choice where it is a tile of the kernel of sm_90, or one by rule."""
        choice = self._tiles.choose("forward", 1, m, n, k)
        return choice if choice.hopper is not None else replace(choice, hopper=few_rows_tile(n), plain=None)

    def admit(self, layout: Layout, m: int, n: int, k: int, out: str) -> Admission:
        """Compare the library with the own kernel in one shape, and keep the record. It waits for the host.

        Raises:
            ContractError: these products have no table of admissions.
        """
        if self._admissions is None:
            raise ContractError("products without a table of admissions admit nothing: give one, and mac='matrix'")
        record = admit_vendor(VendorShape(layout, m, n, k, out), self._chain, self._device)
        self._admissions.add(record)
        return record

    def _chain(self, shape: VendorShape, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if shape.out == "float32" else torch.bfloat16
        choice = self._tiles.choose(shape.product, 1, shape.m, shape.n, shape.k)
        kernel: Literal["hopper", "plain"] = "hopper" if self._hopper and choice.hopper is not None else "plain"
        route = Route(kernel, "the chain that the library is held to", shape.m, choice)
        return self._own(route, shape.product, a, b, 1, None, dtype, None, None)

    def forward(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        leaves: int = 1,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        overlaps: bool = False,
    ) -> torch.Tensor:
        """``cast(tree over leaves of chain(x, w) [+ bias])``: x [M, K], w [N, K] -> [M, N].

        Args:
            overlaps: the kernel may start, and read w, while the one before it runs, which must not write w.
        """
        dtype = out_dtype or (out.dtype if out is not None else x.dtype)
        return self._product("forward", x, w, leaves, bias, dtype, out, overlaps)

    def swiglu(self, x: torch.Tensor, w: torch.Tensor, *, slices: int = 1, overlaps: bool = False) -> torch.Tensor:
        """``swiglu(cast(chain(x, w)))``: x [M, K], w [2 * I, K], ``slices`` times [gate, up], -> [M, I].

        In one kernel where few rows go to the own one of sm_90, else in two: the same bits.
        """
        m, (n, k) = len(x), w.shape
        if self._few(m) and x.numel() and (overlaps or self.describe("forward", m, n, k).kernel != "vendor"):
            from rlkernel.kernels.triton.launch_hopper import gemm_hopper, unfit  # Gluon: on sm_90 alone

            tile = few_rows_tile(n, gated=True)
            if not n // (2 * slices) % (tile.block_n // 2) and not unfit(x, w, n // 2, x.element_size(), 1, k, tile):
                return gemm_hopper(x, w, tile=tile, swiglu_leaves=slices, overlaps=overlaps)
        return launch_rows.swiglu(self.forward(x, w, overlaps=overlaps), leaves=slices)

    def dgrad(
        self, dy: torch.Tensor, w: torch.Tensor, *, leaves: int = 1, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Gradient of a projection's input, ``cast(tree over leaves of chain over N)``: dy [T, N], w [N, K] -> [T, K].

        The features of a fused projection lie in the order in which they are reduced (``dgrad_order`` of
        :mod:`rlkernel.ops.weights`), in w and so in dy.
        """
        return self._product("dgrad", dy, w, leaves, None, dy.dtype, out)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, *, fresh: bool = False) -> None:
        """Continue ``grad`` over tokens, in place: dy [T, N], x [T, K], grad float32 [N, K].

        Args:
            fresh: grad is +0 everywhere, so that the chain starts here.

        Raises:
            ContractError: T is no multiple of the unit's step: the caller pads every sample with rows of zeros.
        """
        step = 8 if torch.version.hip and self._mac == "matrix" else STEPS[self._mac]
        if len(dy) != len(x) or len(dy) % step:
            raise ContractError(
                f"dy has {len(dy)} tokens and x {len(x)}; a weight gradient takes equal numbers, multiples of {step}: "
                "every sample is padded with rows of zeros"
            )
        if grad.dtype != torch.float32 or grad.shape != (dy.shape[1], x.shape[1]) or not grad.is_contiguous():
            raise ContractError(
                f"the weight gradient is {grad.dtype} {list(grad.shape)}; "
                f"float32 [{dy.shape[1]}, {x.shape[1]}], C-contiguous, is expected"
            )
        if not dy.numel() or not x.numel():
            return
        m, n, k = dy.shape[1], x.shape[1], len(dy)
        route = self.describe("wgrad", m, n, k, out="float32", plain=fresh)
        if route.kernel == "vendor":
            self._vendor(VendorShape("wgrad", m, n, k, "float32"), dy, x, grad)
        else:
            start = None if fresh else grad
            self._own(route, "wgrad", dy, x, 1, None, torch.float32, grad if fresh else None, start)

    def _product(
        self,
        layout: Layout,
        a: torch.Tensor,
        b: torch.Tensor,
        leaves: int,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out: torch.Tensor | None,
        overlaps: bool = False,
    ) -> torch.Tensor:
        n, k = (b.shape[1], b.shape[0]) if layout == "dgrad" else b.shape
        name = str(dtype).removeprefix("torch.")
        route = self.describe(layout, len(a), n, k, leaves=leaves, out=name, plain=bias is None)
        if overlaps and leaves == 1 and self._few(len(a)):
            route = Route("hopper", "the only kernel that starts early", len(a), self._early_choice(len(a), n, k))
        if route.kernel != "vendor" or not a.numel():
            return self._own(route, layout, a, b, leaves, bias, dtype, out, None, overlaps)
        shape = VendorShape(layout, route.rows, n, k, name)
        result = product_output(a, (len(a), n), out, dtype)
        if route.rows == len(a):
            self._vendor(shape, a, b, result)
            return result
        padded = torch.empty((route.rows, k), dtype=a.dtype, device=a.device)
        padded[: len(a)] = a  # what lies below enters no row of the result
        result.copy_(self._vendor(shape, padded, b, None)[: len(a)])
        return result

    def _own(
        self,
        route: Route,
        layout: Layout,
        a: torch.Tensor,
        b: torch.Tensor,
        leaves: int,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out: torch.Tensor | None,
        grad: torch.Tensor | None,
        overlaps: bool = False,
    ) -> torch.Tensor:
        first = {"a_depth_first": layout == "wgrad", "b_depth_first": layout != "forward"}
        choice = route.choice or default_choice(layout, leaves, len(a), 1, 1)
        depth = a.shape[0] if layout == "wgrad" else a.shape[1]
        columns = b.shape[0] if layout == "forward" else b.shape[1]
        if route.kernel == "hopper":
            from rlkernel.kernels.triton.launch_hopper import fitting, gemm_hopper  # Gluon: on sm_90 alone

            target = grad if grad is not None else out
            if depth and a.numel() and b.numel() and (target is None or target.data_ptr() % 16 == 0):
                tile = fitting(a, b, columns, dtype.itemsize, leaves, depth, choice.hopper or HopperTile())
                if tile is not None:
                    return gemm_hopper(
                        a, b, leaves=leaves, bias=bias, grad=grad, out_dtype=dtype, tile=tile, out=out,
                        overlaps=overlaps, **first,
                    )  # fmt: skip
        plain = choice.plain or Tile()
        if torch.version.hip and self._mac == "matrix" and depth // leaves % plain.block_k:
            plain = replace(plain, block_k=min(plain.block_k, (depth // leaves) & -(depth // leaves)))
        return gemm(
            a, b, mac=self._mac, leaves=leaves, split=choice.split, bias=bias, grad=grad, out_dtype=dtype, tile=plain,
            out=out, **first,
        )  # fmt: skip

    def _vendor(self, shape: VendorShape, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        result = vendor_gemm(shape, a, b, out)
        calls = self._calls.setdefault(shape, _Calls())
        calls.calls += 1
        due = self._check_every and (calls.calls - 1) % self._check_every == 0
        if due and not torch.cuda.is_current_stream_capturing():
            self._check(shape, calls, a, b, result)
        return result

    def _check(self, shape: VendorShape, calls: _Calls, a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> None:
        """Compute some rows again, others every time, and count what differs on the device."""
        blocks = max(1, shape.m // CHECKED_ROWS)
        rows = slice(calls.checks % blocks * CHECKED_ROWS, (calls.checks % blocks + 1) * CHECKED_ROWS)
        part = a[:, rows].contiguous() if shape.product == "wgrad" else a[rows]
        ours = self._chain(replace(shape, m=len(result[rows])), part, b)
        found = differing(ours, result[rows])
        calls.checks += 1
        calls.compared += ours.numel()
        calls.differing = found if calls.differing is None else calls.differing + found

    def counts(self) -> dict[str, dict[str, int]]:
        """Per shape: calls of the library, checks, elements compared and differing. It waits for the host."""
        return {
            str(shape): {
                "calls": c.calls,
                "checks": c.checks,
                "compared": c.compared,
                "differing": 0 if c.differing is None else int(c.differing),
            }
            for shape, c in self._calls.items()
        }
