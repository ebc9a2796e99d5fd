"""The audited attention kernels: those whose launches the machines execute whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.contract.points import SixPoints
from rlkernel.kernels.triton.attention_backward import row_dots
from rlkernel.kernels.triton.attention_decode import decode_merge
from rlkernel.models.config import ModelConfig
from rlkernel.verify.audit import launches_attention as launches
from rlkernel.verify.audit.audited import Audited, type_of
from rlkernel.verify.audit.targets import SM_90, TARGETS, Variant

_MODEL = ModelConfig(
    family="llama",
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    max_position=64,
)


def _part(profile: str, dtype: str, roles: tuple[str, ...]) -> SixPoints:
    """The attention entry with the primitives that one kernel of the region has."""
    contract = build_contract(_MODEL, profile=profile, dtype=dtype, topology=Topology())
    points = contract.entries[("trainer_forward", "attention")]
    return replace(points, primitives=tuple((role, name) for role, name in points.primitives if role in roles))


def attention_kernels() -> Iterator[Audited]:
    """Row dot products of the backward, and the merge of splits, on both targets."""
    for target in TARGETS:
        for dtype, profile in (("float32", "portable"), ("bfloat16", "hopper" if target is SM_90 else "cdna3")):
            pointer = type_of(dtype)
            points = _part(profile, dtype, ("fma",))
            variant = Variant(
                row_dots,
                (("a", pointer), ("b", pointer), ("out", "*fp32"), ("count", "i32")),
                (("D", 64), ("ROWS", 64)),
                num_warps=1,
            )
            launch = launches.row_dots(100, 64, dtype, 2)
            yield Audited("row_dots 64", target, f"{profile} {dtype} attention, delta", points, variant, (launch,))
        points = _part("portable", "float32", ("exp2", "log2", "fma", "add", "mul", "div", "max"))
        pointers = tuple((name, "*fp32") for name in ("part", "part_m", "part_l", "out", "lse2"))
        variant = Variant(
            decode_merge,
            (*pointers, ("positions", "*i32"), ("splits", "i32")),
            (("QH", 6), ("D", 16), ("BLOCK_D", 16), ("HEADS", 4), ("SPLIT", 512)),
            num_warps=1,
        )
        launch = launches.split_merge(6, 16, 4, 3, 512, 2)
        yield Audited("decode_merge 6x16", target, "portable float32 attention, merge", points, variant, (launch,))
