"""cuBLASLt without split-K through torch, held to the Triton chain: admission, and checks while it runs.

torch's setting (False, False) keeps reduced-precision reductions *and* split-K out of cuBLASLt's choice. The setting is
torch's own and global; it is made here once and looked at before every call.
"""

from __future__ import annotations

import ctypes
import datetime
import os
from collections.abc import Callable

import torch

from rlkernel.errors import NumericsError
from rlkernel.kernels.vendor.admission import Admission, Library, VendorShape

_SPLIT_K_OFF = (False, False)  # reduced-precision reductions, split-K
INPUTS = ("normal", "exponents spread", "cancellation")
"""Classes of inputs that an admission compares."""


def _cublas_version() -> str:
    major = (torch.version.cuda or "0").split(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return "unknown"
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return str(library.cublasLtGetVersion())


def this_library(device: torch.device) -> Library:
    """Device, versions and workspace settings of this process."""
    workspace = {name: os.environ.get(name, "") for name in ("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG")}
    return Library(
        device=torch.cuda.get_device_properties(device).name,
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        cublas=_cublas_version(),
        workspace=",".join(f"{name}={value}" for name, value in workspace.items() if value),
    )


def use_cublaslt() -> None:
    """Let torch's products run in cuBLASLt without split-K, for this process."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = _SPLIT_K_OFF  # type: ignore[assignment]


def require_cublaslt() -> None:
    """Raise NumericsError if somebody changed what :func:`use_cublaslt` set."""
    library = torch.backends.cuda.preferred_blas_library()
    matmul = torch.backends.cuda.matmul
    found = (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k)
    if library != torch._C._BlasBackend.Cublaslt or found != _SPLIT_K_OFF:
        raise NumericsError(
            f"torch's products run in {library} with (reduced precision, split-K) = {found}: something changed the "
            f"settings that cuBLASLt was admitted with, (cublaslt, {_SPLIT_K_OFF})"
        )


def vendor_gemm(shape: VendorShape, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The product of one shape by the library. Whether its bits are the contract's is for the caller to know.

    Args:
        a, b: as :class:`VendorShape` says; ``out``: [M, N] of the shape's ``out`` dtype.

    Raises:
        NumericsError: torch's settings are no longer those of :func:`use_cublaslt`.
    """
    require_cublaslt()
    left = a.t() if shape.product == "wgrad" else a
    right = b.t() if shape.product == "forward" else b
    if shape.out == "bfloat16":
        return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)
    if out is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right, out_dtype=torch.float32, out=out)


def operands(shape: VendorShape, kind: str, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of one class of :data:`INPUTS`, stored as the shape says."""
    generator = torch.Generator(device).manual_seed(seed)

    def rows(count: int, sign: float) -> torch.Tensor:
        x = torch.randn((count, shape.k), generator=generator, device=device)
        if kind == "exponents spread":
            power = torch.randint(-20, 21, x.shape, generator=generator, device=device, dtype=torch.int32)
            x = torch.ldexp(x, power)
        elif kind == "cancellation":
            half = shape.k // 2
            x[:, half : 2 * half] = sign * x[:, :half].flip(1)
        return x.bfloat16()

    a, b = rows(shape.m, 1.0), rows(shape.n, -1.0)
    return (
        a.t().contiguous() if shape.product == "wgrad" else a,
        b if shape.product == "forward" else b.t().contiguous(),
    )


def differing(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """How many elements differ in a bit, every NaN taken as one pattern: int64 scalar on the device."""
    integer = torch.int16 if ours.element_size() == 2 else torch.int32
    nan = torch.isnan(ours), torch.isnan(theirs)
    return torch.where(nan[0] | nan[1], nan[0] != nan[1], ours.view(integer) != theirs.view(integer)).sum()


def admit_vendor(
    shape: VendorShape,
    own: Callable[[VendorShape, torch.Tensor, torch.Tensor], torch.Tensor],
    device: torch.device,
) -> Admission:
    """Compare the library with ``own``, the Triton chain, in one shape. It waits for the host.

    The record admits the shape only if no element differs; it is worth keeping either way.
    """
    compared = different = 0
    for seed, kind in enumerate(INPUTS):
        a, b = operands(shape, kind, seed, device)
        theirs, ours = vendor_gemm(shape, a, b), own(shape, a, b)
        compared += ours.numel()
        different += int(differing(ours, theirs))
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Admission(shape, this_library(device), compared, different, INPUTS, date)
