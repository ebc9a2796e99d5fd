"""What every adapter needs and should not write again: digests, and an identity for numerics of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.canonical import digest
from rlkernel.contract.claims import AXES, Topology
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.digest import float32_rows_digest
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.ops.weights import tensors_manifest_digest

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Manifest digest (SHA-256 in hex) of whole logical tensors on the CPU.

    Raises ContractError for no tensors, or dtypes other than one of float32 and bfloat16.
    """
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise ContractError(
            f"weights have the dtypes {sorted(map(str, dtypes))}: one of float32 and bfloat16 is needed"
        )
    workers = Workers(1)
    try:
        return tensors_manifest_digest(tensors, DTYPES[dtypes.pop()], workers)
    finally:
        workers.close()


def distribution_digests(logits: torch.Tensor) -> NDArray[np.uint64]:
    """Digests uint64 [R, 2] of float32 logits [R, V] after temperature, real vocabulary only."""
    return float32_rows_digest(np.ascontiguousarray(logits.detach().cpu().numpy()))


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def own_policy(description: Mapping[str, Any]) -> str:
    """The ``numerical_policy`` of a side whose arithmetic is not the contract's, from plain data about what it is."""
    return digest({"native": True, **description})


def observed_degrees(**degrees: int) -> dict[str, int]:
    """The fact ``degrees``: what is not named is 1. Raises ContractError for an unknown axis."""
    unknown = sorted(set(degrees) - set(AXES))
    if unknown:
        raise ContractError(f"{', '.join(unknown)} is no parallel axis; there are {', '.join(AXES)}")
    return Topology(**degrees).as_json()
