"""Deviations that any region may have: orders, cuts, widths of accumulators, casts, primitives. Tried one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlkernel.contract.points import Merge, RoundingSite, SixPoints
from rlkernel.contract.profiles import EXP2, EXP2_P3
from rlkernel.reference.arith import add, cast_bf16, mul, sub
from rlkernel.reference.primitives import exp2_full, exp2_p3, log2_full
from rlkernel.verify.admission.chains import (
    LEAST_NORMAL,
    cut,
    descending,
    float16_inputs,
    flushed,
    flushing,
    fma_through_float64,
    from_zero,
    in_bf16,
    in_float64,
    narrow_inputs,
    rounded_state,
    strided,
    tf32_inputs,
    through_float64,
    unfused,
)
from rlkernel.verify.admission.variants import Chain, Edit, Function, Line, Variation

Tensor = torch.Tensor
_HALF_ULP_BF16 = 0x8000


def linear_tree(_: Any) -> Callable[..., Tensor]:
    """Neighbours added one after the other instead of a tree."""

    def merge(values: Tensor, dim: int = -1) -> Tensor:
        parts = values.float().movedim(dim, 0)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    return merge


def reversed_linear_tree(_: Any) -> Callable[..., Tensor]:
    """The last value first, one after the other."""
    return lambda values, dim=-1: linear_tree(None)(values.flip(dim), dim)


def halves_tree(_: Any) -> Callable[..., Tensor]:
    """A tree that pairs element i with element i + n/2."""

    def merge(values: Tensor, dim: int = -1) -> Tensor:
        level = values.float().movedim(dim, 0)
        width = 1 << max(0, len(level) - 1).bit_length()
        level = torch.cat([level, torch.zeros((width - len(level), *level.shape[1:]))])
        while len(level) > 1:
            level = level[: len(level) // 2] + level[len(level) // 2 :]
        return level[0]

    return merge


def wide_tree(_: Any) -> Callable[..., Tensor]:
    """The merge accumulated in float64."""
    return lambda values, dim=-1: values.double().sum(dim).to(torch.float32)


def narrow_tree(tree: Any) -> Callable[..., Tensor]:
    """Leaves rounded to bfloat16 before they are merged."""
    return lambda values, dim=-1: tree(cast_bf16(values), dim)


def truncated(_: Any) -> Callable[..., Tensor]:
    """A cast that truncates."""

    def cast(a: Tensor, dtype: str) -> Tensor:
        if dtype != "bfloat16":
            return a
        return torch.where(a.isnan(), cast_bf16(a), (a.view(torch.int32) & -0x10000).view(torch.float32))

    return cast


def half_up(_: Any) -> Callable[..., Tensor]:
    """A cast that rounds ties away from zero."""

    def cast(a: Tensor, dtype: str) -> Tensor:
        if dtype != "bfloat16":
            return a
        pattern = (a.view(torch.int32) + _HALF_ULP_BF16) & -0x10000
        return torch.where(a.isnan(), cast_bf16(a), pattern.view(torch.float32))

    return cast


def twice(cast: Any) -> Callable[..., Tensor]:
    """A cast by way of a narrower float: three more bits are rounded first."""

    def both(a: Tensor, dtype: str) -> Tensor:
        pattern = a.view(torch.int32)
        first = ((pattern + 0xFFF + ((pattern >> 13) & 1)) & -0x2000).view(torch.float32)
        return cast(torch.where(a.isnan(), a, first), dtype)

    return both


def _named(**functions: Callable[..., Tensor]) -> Edit:
    """Primitives that are looked up by name, replaced."""
    by_name = {name.replace("_", "."): function for name, function in functions.items()}
    return Function(
        "primitive",
        lambda original: lambda name: by_name.get(name, original(name)),
        ("attention", "regions", "head", "loss"),
    )


def flushed_to_plus(x: Tensor) -> Tensor:
    """Subnormals, and -0, as +0."""
    return torch.where(x.abs() < LEAST_NORMAL, torch.zeros_like(x), x)


def _flushing(operation: Any) -> Callable[..., Tensor]:
    """Subnormal operands and results as zeros of their sign."""
    return lambda *operands: flushed(operation(*(flushed(x) if isinstance(x, Tensor) else x for x in operands)))


def _outputs(change: Callable[[Tensor], Tensor]) -> tuple[Edit, ...]:
    return (Function("array", lambda array: lambda value: array(change(value)), ("regions", "head")),)


def exact_exp2(x: Tensor) -> Tensor:
    """2^x, correctly rounded (nearly)."""
    return torch.exp2(x.double()).to(torch.float32)


def library_exp2(x: Tensor) -> Tensor:
    """A library's float32 exp2."""
    return torch.exp2(x)


def _entry(**changes: Any) -> Callable[[SixPoints], SixPoints | None]:
    return lambda points: replace(points, **changes)


def _split(**changes: Any) -> Callable[[SixPoints], SixPoints | None]:
    return lambda points: replace(points, split=replace(points.split, **changes))


def leaves(count: int) -> Callable[[SixPoints], SixPoints | None]:
    """Another number of leaves of an axis that is cut into leaves."""

    def change(points: SixPoints) -> SixPoints | None:
        if points.split.leaf_size or points.merge.leaf != "ascending_chain" or points.split.lanes > 1:
            return None
        merge = replace(points.merge, leaves="balanced_tree" if count > 1 else "none")
        return replace(points, split=replace(points.split, leaves=count), merge=merge)

    return change


def lane_count(count: int) -> Callable[[SixPoints], SixPoints | None]:
    """Another number of strided lanes."""

    def change(points: SixPoints) -> SixPoints | None:
        if points.split.lanes == 1:
            return None
        return replace(points, split=replace(points.split, lanes=count), merge=_lane_merge(points.merge, count))

    return change


def _lane_merge(merge: Merge, count: int) -> Merge:
    return replace(merge, lanes="balanced_tree" if count > 1 else "none")


def leaf_size(size: int) -> Callable[[SixPoints], SixPoints | None]:
    """Leaves of another size."""
    return lambda points: None if not points.split.leaf_size else _split(leaf_size=size)(points)


def constant(name: str, value: str) -> Callable[[SixPoints], SixPoints | None]:
    """Another pinned constant."""

    def change(points: SixPoints) -> SixPoints | None:
        if name not in dict(points.constants):
            return None
        return replace(points, constants=tuple((k, value if k == name else v) for k, v in points.constants))

    return change


def not_rounded(site: str) -> Callable[[SixPoints], SixPoints | None]:
    """A rounding site left out."""
    return lambda points: replace(points, rounding=tuple(r for r in points.rounding if r.site != site))


def also_rounded(site: str) -> Callable[[SixPoints], SixPoints | None]:
    """A rounding to bfloat16 at a site that has none (or rounds to float32)."""

    def change(points: SixPoints) -> SixPoints | None:
        kept = tuple(r for r in points.rounding if r.site != site)
        return replace(points, rounding=(*kept, RoundingSite(site, "bfloat16")))

    return change


def other_weights_exp2(points: SixPoints) -> SixPoints | None:
    """The exponential of attention weights exchanged."""
    roles = dict(points.primitives)
    if "weights_exp2" not in roles:
        return None
    other = EXP2 if roles["weights_exp2"] != EXP2 else EXP2_P3
    return replace(points, primitives=tuple((r, other if r == "weights_exp2" else p) for r, p in points.primitives))


def _reciprocal_division(div: Any) -> Callable[..., Tensor]:
    return lambda a, b: mul(a, div(torch.ones_like(b) if isinstance(b, Tensor) else 1.0, b))


def _half_precision_division(div: Any) -> Callable[..., Tensor]:
    return lambda a, b: (a.double() * (1.0 / b.double()).float().double()).float()


def _plain_maximum(_: Any) -> Callable[..., Tensor]:
    return lambda a, b: torch.where(torch.as_tensor(a) > b, a, b)


_TENSOR = "return torch.tensor(np.ascontiguousarray(array), device=self.device)"
_FLUSHED_TENSOR = (
    "x = torch.tensor(np.ascontiguousarray(array), device=self.device); "
    "return torch.where(x.abs() < 2.0**-126, torch.zeros_like(x).copysign(x), x) if x.is_floating_point() else x"
)
_EMULATED = (
    Chain(through_float64),
    Function("fma32", lambda _: fma_through_float64, ("attention", "regions", "head", "optimizer")),
    _named(fma_rn_f32=fma_through_float64),
)
_TREES = ("reductions", "attention", "head", "optimizer")
_CASTS = ("attention", "regions", "optimizer")

TF32 = (
    ("nearest", "rounded to tf32 (11 bits)"),
    ("away", "rounded to tf32 (11 bits, ties away from zero)"),
    ("cut", "cut to tf32 (11 bits)"),
)
"""How operands become tf32: the mode, and what happens to them in words."""

GENERIC: tuple[Variation, ...] = (
    Variation("merge order", "a chain in descending order", (Chain(descending),)),
    Variation("merge order", "leaves or lanes merged one after the other instead of in a tree", (Function("tree", linear_tree, _TREES),)),
    Variation("merge order", "leaves or lanes merged one after the other from the last", (Function("tree", reversed_linear_tree, _TREES),)),
    Variation("merge order", "a tree that pairs element i with element i + n/2", (Function("tree", halves_tree, _TREES),)),
    *(Variation("split", f"{n} leaves", entry=leaves(n)) for n in (1, 2, 4, 8)),
    *(Variation("split", f"{n} strided lanes", entry=lane_count(n)) for n in (1, 4, 8, 16, 32, 64, 128, 512)),
    *(Variation("split", f"leaves of {n} elements", entry=leaf_size(n)) for n in (32, 64, 128, 256, 512, 1024, 2048)),
    *(Variation("split", f"chains that start anew every {n} elements", (Chain(cut(n)),)) for n in (2, 4, 8, 16, 32, 64, 128, 256, 512)),
    *(Variation("split", f"{n} interleaved chains", (Chain(strided(n)),)) for n in (2, 4, 8, 16)),
    Variation("split", "a chain from +0 that is added to the one it should have continued", (Chain(from_zero),)),
    Variation("precision", "an accumulator in float64", (Chain(in_float64),)),
    Variation("precision", "an accumulator in bfloat16", (Chain(in_bf16),)),
    *(Variation("precision", f"an accumulator that rests in bfloat16 every {n} elements", (Chain(rounded_state(n)),)) for n in (16, 32, 64, 128, 512)),
    Variation("precision", "operands rounded to bfloat16 before the products", (Chain(narrow_inputs),)),
    *(Variation("precision", f"operands {what} before the products", (Chain(tf32_inputs(mode)),)) for mode, what in TF32),
    Variation("precision", "operands rounded to float16 before the products", (Chain(float16_inputs),)),
    Variation("precision", "a merge of leaves in float64", (Function("tree", wide_tree, _TREES),)),
    Variation("precision", "leaves kept in bfloat16 before their merge", (Function("tree", narrow_tree, _TREES),)),
    Variation("rounding", "an output that is not rounded", entry=not_rounded("output")),
    Variation("rounding", "an output that is rounded to bfloat16", entry=also_rounded("output")),
    Variation("rounding", "a cast that truncates", (Function("cast", truncated, _CASTS),)),
    Variation("rounding", "a cast that rounds ties away from zero", (Function("cast", half_up, _CASTS),)),
    Variation("rounding", "a value that is rounded twice", (Function("cast", twice, _CASTS),)),
    Variation("primitives", "products and sums that are rounded apart (no fused multiply-add) in chains", (Chain(unfused),)),
    Variation("primitives", "products and sums that are rounded apart (no fused multiply-add) in formulas",
              (Function("fma32", lambda _: lambda a, b, c: add(mul(a, b), c), ("attention", "regions", "head", "optimizer")),)),
    Variation("primitives", "chains whose every step flushes subnormal operands and sums to zero", (Chain(flushing),)),
    Variation("primitives", "a fused multiply-add through float64, which rounds twice", _EMULATED),
    Variation("primitives", "a fused multiply-add through float64, which rounds twice, in chains", (Chain(through_float64),)),
    Variation("primitives", "a product with the reciprocal instead of a division",
              (Function("div", _reciprocal_division, ("attention", "regions", "head", "optimizer")),)),
    Variation("primitives", "exp2.p3 instead of exp2.full", (_named(exp2_full=exp2_p3),)),
    Variation("primitives", "another exp2 instead of exp2.full (correctly rounded)", (_named(exp2_full=exact_exp2),)),
    Variation("primitives", "a library's exp2 instead of exp2.full", (_named(exp2_full=library_exp2),)),
    Variation("primitives", "another logarithm instead of log2.full", (_named(log2_full=lambda x: torch.log2(x.double()).float()),)),
    Variation("primitives", "a maximum that ignores NaN or the sign of zero",
              (Function("maximum", _plain_maximum, ("attention", "head")),)),
)  # fmt: skip
"""Deviations that are tried for every region; those that cannot apply to its entry are skipped."""

_FLUSHED_OPERATIONS = (
    *(Function(name, _flushing, ("regions",)) for name in ("add", "div", "fma32", "mul", "sqrt", "sub")),
    _named(add_rn_f32=lambda a, b: flushed(add(flushed(a), flushed(b)))),
)
ELEMENTWISE: tuple[Variation, ...] = (
    Variation("primitives", "a result of -0 that becomes +0", _outputs(lambda x: torch.where(x == 0, torch.zeros_like(x), x))),
    Variation("primitives", "subnormal results that are flushed to zero", _outputs(flushed)),
    Variation("primitives", "subnormal results that are flushed to +0", _outputs(
        lambda x: torch.where((x.abs() < LEAST_NORMAL) & (x != 0), torch.zeros_like(x), x))),
    Variation("primitives", "subnormal results, and -0, that become +0", _outputs(flushed_to_plus)),
    Variation("primitives", "subnormal operands that are flushed to zero", (Line("regions", _TENSOR, _FLUSHED_TENSOR),)),
    Variation("primitives", "subnormal operands and results that are flushed to zero", (Line("regions", _TENSOR, _FLUSHED_TENSOR), *_outputs(flushed))),
    Variation("primitives", "operations that flush subnormals to zero", _FLUSHED_OPERATIONS),
)  # fmt: skip
"""Deviations of regions that compute element by element."""

__all__ = ["ELEMENTWISE", "GENERIC", "exp2_full", "log2_full", "sub"]
