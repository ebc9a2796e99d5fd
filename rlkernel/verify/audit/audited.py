"""What the audit's catalogues are made of: one kernel on one target, and how a GEMM is compiled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rlkernel.contract.points import SixPoints
from rlkernel.kernels.triton.gemm import gemm
from rlkernel.kernels.triton.launch import Tile
from rlkernel.verify.audit.launches import Launch
from rlkernel.verify.audit.targets import Target, Variant

_TYPES = {"float32": "*fp32", "bfloat16": "*bf16"}


@dataclass(frozen=True)
class Audited:
    """One kernel on one target. ``claims`` says in words which entry it is held to."""

    name: str
    target: Target
    claims: str
    entry: SixPoints
    variant: Variant
    launches: tuple[Launch, ...] = field(default=(), repr=False)


def type_of(dtype: str) -> str:
    """Triton's type of a pointer to the dtype."""
    return _TYPES[dtype]


def pointers(names: Iterable[str], kind: str) -> tuple[tuple[str, str], ...]:
    """A signature of several arguments of one kind."""
    return tuple((name, kind) for name in names)


def gemm_variant(
    dtype: str,
    tile: Tile,
    leaves: int,
    *,
    fma: bool,
    even: bool = True,
    output: str = "",
    depth_first: tuple[bool, bool] = (False, False),
    biased: bool = False,
    continued: bool = False,
    **options: Any,
) -> Variant:
    """The GEMM for one tile; ``fma``: the portable chain; ``output``: dtype of the result, if not the operands'."""
    pointer = _TYPES[dtype]
    return Variant(
        gemm,
        (
            *pointers(("a", "b"), pointer),
            ("c", _TYPES[output or dtype]),
            ("bias", pointer),
            ("grad", "*fp32"),
            ("M", "i32"),
            ("N", "i32"),
            ("K", "i32"),
            ("zero", "fp32"),
        ),
        (
            ("LEAVES", leaves),
            ("SPLIT", False),
            ("HAS_BIAS", biased),
            ("CONTINUES", continued),
            ("A_DEPTH_FIRST", depth_first[0]),
            ("B_DEPTH_FIRST", depth_first[1]),
            ("WIDEN", fma),
            ("EVEN", even),
            ("BLOCK_M", tile.block_m),
            ("BLOCK_N", tile.block_n),
            ("BLOCK_K", tile.block_k),
            ("GROUP_M", tile.group_m),
        ),
        ("N", "K", *(("M",) if depth_first[0] else ())) if even else (),
        tile.num_warps,
        tile.num_stages,
        options,
    )
