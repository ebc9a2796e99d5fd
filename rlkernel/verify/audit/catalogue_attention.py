"""The audited attention kernels: those whose launches the machines execute whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rlkernel.contract.points import SixPoints
from rlkernel.kernels.triton.attention_backward import row_dots
from rlkernel.kernels.triton.attention_decode import decode_merge
from rlkernel.verify.audit import launches_attention as launches
from rlkernel.verify.audit.targets import SM_90, TARGETS, Variant

if TYPE_CHECKING:
    from rlkernel.verify.audit.catalogue import Audited


def _part(entry: SixPoints, roles: tuple[str, ...]) -> SixPoints:
    """The entry with the primitives that one kernel of the region has."""
    return replace(entry, primitives=tuple((role, name) for role, name in entry.primitives if role in roles))


def attention_kernels() -> Iterator[Audited]:
    """Row dot products of the backward, and the merge of splits, on both targets."""
    from rlkernel.verify.audit.catalogue import Audited, entry

    for target in TARGETS:
        for dtype, profile in (("float32", "portable"), ("bfloat16", "hopper" if target is SM_90 else "cdna3")):
            pointer = "*fp32" if dtype == "float32" else "*bf16"
            points = _part(entry(profile, dtype, "attention"), ("fma",))
            variant = Variant(
                row_dots,
                (("a", pointer), ("b", pointer), ("out", "*fp32"), ("count", "i32")),
                (("D", 64), ("ROWS", 64)),
                num_warps=1,
            )
            launch = launches.row_dots(100, 64, dtype, 2)
            yield Audited("row_dots 64", target, f"{profile} {dtype} attention, delta", points, variant, (launch,))
        points = _part(entry("portable", "float32", "attention"), ("exp2", "log2", "fma", "add", "mul", "div", "max"))
        pointers = tuple((name, "*fp32") for name in ("part", "part_m", "part_l", "out", "lse2"))
        variant = Variant(
            decode_merge,
            (*pointers, ("positions", "*i32"), ("splits", "i32")),
            (("QH", 6), ("D", 16), ("BLOCK_D", 16), ("HEADS", 4), ("SPLIT", 512)),
            num_warps=1,
        )
        launch = launches.split_merge(6, 16, 4, 3, 512, 2)
        yield Audited("decode_merge 6x16", target, "portable float32 attention, merge", points, variant, (launch,))
