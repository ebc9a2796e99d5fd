"""The audited kernels of a dense model beside forward products: gradients, bias, sums, activations, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.contract.points import SixPoints
from rlkernel.contract.profiles import MUL
from rlkernel.kernels.cpu.optimizer import AdamWScalars
from rlkernel.kernels.triton import activation, norm, norm_backward, optimizer, residual
from rlkernel.kernels.triton.launch import Tile, lanes
from rlkernel.models.config import ModelConfig
from rlkernel.reference import arith
from rlkernel.reference import optimizer as reference_optimizer
from rlkernel.reference.primitives import sigmoid
from rlkernel.verify.audit import launches_model as launches
from rlkernel.verify.audit.audited import Audited, gemm_variant, pointers, type_of
from rlkernel.verify.audit.launches import Launch
from rlkernel.verify.audit.targets import SM_90, TARGETS, Target, Variant

_MODEL = ModelConfig(
    family="qwen2",
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    max_position=64,
    qkv_bias=True,
)
Floats = NDArray[np.float32]


def _entry(profile: str, dtype: str, case: str, region: str) -> SixPoints:
    contract = build_contract(_MODEL, profile=profile, dtype=dtype, topology=Topology())
    return contract.entries[(case, region)]


def _profile(target: Target, dtype: str) -> str:
    return "portable" if dtype == "float32" else "hopper" if target is SM_90 else "cdna3"


def _products() -> Iterator[Audited]:
    for target in TARGETS:
        # wgmma reads operands that lie depth first in a layout that the machine has no model of; mma.sync does not
        unit = Tile(32, 64, 32, num_warps=4, num_stages=2)
        chain = Tile(32, 32, 16, num_warps=2, num_stages=2)
        for dtype, tile in (("bfloat16", unit), ("float32", chain)):
            profile, shape = _profile(target, dtype), (tile.block_m, tile.block_n, 3 * tile.block_k)
            forward = _entry(profile, dtype, "trainer_forward", "qkv_proj")
            dgrad = _entry(profile, dtype, "trainer_backward", "o_proj")
            wgrad = _entry(profile, dtype, "trainer_backward", "qkv_proj.wgrad")
            for points, what, keys in (
                (forward, "qkv_proj", {"depth_first": (False, False), "biased": True}),
                (dgrad, "o_proj dgrad", {"depth_first": (False, True)}),
                (wgrad, "qkv_proj wgrad", {"depth_first": (True, True), "continued": True}),
            ):
                yield Audited(
                    f"gemm {what.split()[-1]} {'fma' if dtype == 'float32' else 'matrix'}",
                    target,
                    f"{profile} {dtype} {what}",
                    points,
                    gemm_variant(dtype, tile, 1, fma=dtype == "float32", output=points.precision.output, **keys),
                    (launches.product(points, shape, dtype, **keys),),
                )


def _norms() -> Iterator[Audited]:
    for target in TARGETS:
        # on gfx942 a row a wave would be read by scalar loads, which the machine does not follow
        rows, warps = (1, 4) if target is SM_90 else (4, 1)
        for dtype, width in (("bfloat16", 1024 if target is SM_90 else 600), ("float32", 600)):
            profile, pointer, count = _profile(target, dtype), type_of(dtype), 3 * rows - 1
            shape = (("N", width), ("ROWS", rows), ("LANES", lanes(width)))
            forward = _entry(profile, dtype, "trainer_forward", "rms_norm")
            backward = _entry(profile, dtype, "trainer_backward", "rms_norm")
            variant = Variant(
                norm.rms_norm,
                (
                    *pointers(("x", "branch", "w", "stream", "y"), pointer),
                    ("inv_rms", "*fp32"),
                    ("row_count", "i32"),
                    ("eps", "fp32"),
                ),
                (*shape, ("ADDS", True)),
                num_warps=warps,
            )
            launch = launches.norm_after_sum(forward, count, width, dtype, 3)
            what = f"{profile} {dtype} residual_add, then rms_norm"
            yield Audited(f"add_rms_norm {width}", target, what, forward, variant, (launch,))
            if dtype == "float32":  # both of its loops are merged into one there, and operations lose their lines
                continue
            variant = Variant(
                norm_backward.rms_norm_dx,
                (*pointers(("dy", "x", "w"), pointer), ("inv_rms", "*fp32"), ("dx", pointer), ("row_count", "i32")),
                shape,
                num_warps=warps,
            )
            launch = launches.norm_gradient(backward, count, width, dtype, 3)
            what = f"{profile} {dtype} rms_norm, gradient of the row"
            yield Audited(f"rms_norm_dx {width}", target, what, backward, variant, (launch,))


def _chains() -> Iterator[Audited]:
    for target in TARGETS:
        for dtype in ("bfloat16", "float32"):
            profile, pointer = _profile(target, dtype), type_of(dtype)
            shape = (("COLUMNS", 64), ("BLOCK", 4), ("STAGES", 1))
            points = _entry(profile, dtype, "trainer_backward", "rms_norm.wgrad")
            # the normed row is an input of the entry; the kernel makes it again, as the region's forward does
            points = replace(points, primitives=(*points.primitives, ("mul", MUL)))
            variant = Variant(
                norm_backward.rms_norm_dw,
                (
                    *pointers(("dy", "x"), pointer),
                    *pointers(("inv_rms", "dw"), "*fp32"),
                    ("row_count", "i32"),
                    ("N", "i32"),
                ),
                shape,
                num_warps=1,
            )
            launch = launches.norm_weight_gradient(10, 90, dtype, 2)
            if target is SM_90:  # gfx942 reads r by scalar loads, which the machine does not follow
                yield Audited("rms_norm_dw", target, f"{profile} {dtype} rms_norm.wgrad", points, variant, (launch,))
            points = _entry(profile, dtype, "trainer_backward", "qkv_proj.bias")
            variant = Variant(
                norm_backward.column_sum,
                (("dy", pointer), ("total", "*fp32"), ("row_count", "i32"), ("N", "i32")),
                shape,
                num_warps=1,
            )
            launch = launches.column_sum(10, 90, dtype, 2)
            yield Audited("column_sum", target, f"{profile} {dtype} qkv_proj.bias", points, variant, (launch,))


def _torch(function: Callable[..., Any]) -> Callable[..., tuple[Floats, ...]]:
    def run(*inputs: Floats) -> tuple[Floats, ...]:
        found = function(*(torch.from_numpy(x) for x in inputs))
        return tuple(np.asarray(x.contiguous().reshape(-1).numpy()) for x in found)

    return run


def _swiglu(fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = fused.reshape(2, -1)
    return (arith.mul(arith.mul(gate, sigmoid(gate)), up),)


def _swiglu_backward(ds: torch.Tensor, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = fused.reshape(2, -1)
    sg, one = sigmoid(gate), torch.ones_like(gate)
    up_gradient = arith.mul(ds, arith.mul(gate, sg))
    slope = arith.mul(sg, arith.fma32(gate, arith.sub(one, sg), one))
    return (torch.stack([arith.mul(arith.mul(ds, up), slope), up_gradient]),)


def _elementwise() -> Iterator[Audited]:
    count = 512
    for target in TARGETS:

        def audited(
            name: str,
            case: str,
            region: str,
            function: Any,
            signature: Any,
            constants: Any,
            launch: Launch,
            target: Target = target,
        ) -> Audited:
            points = _entry("portable", "float32", case, region)
            variant = Variant(function, signature, constants, ("count", "WIDTH", "SLICE"))
            return Audited(name, target, f"portable float32 {region}", points, variant, (launch,))

        block = (("BLOCK", 512),)
        yield audited(
            "residual_add", "trainer_forward", "residual_add", residual.residual_add,
            (*pointers(("a", "b", "out"), "*fp32"), ("count", "i32")), block,
            launches.values(
                (("a", "in", count), ("b", "in", count), ("out", "out", count)),
                _torch(lambda a, b: (arith.add(a, b),)), {"count": count},
            ),
        )  # fmt: skip
        sizes = (("WIDTH", "i32"), ("SLICE", "i32"))
        yield audited(
            "swiglu", "trainer_forward", "swiglu", activation.swiglu,
            (*pointers(("fused", "out"), "*fp32"), *sizes), block,
            launches.values(
                (("fused", "in", 2 * count), ("out", "out", count)), _torch(_swiglu), {"WIDTH": count, "SLICE": count}
            ),
        )  # fmt: skip
        yield audited(
            "swiglu_backward", "trainer_backward", "swiglu", activation.swiglu_backward,
            (*pointers(("dy", "fused", "dfused"), "*fp32"), *sizes), block,
            launches.values(
                (("dy", "in", count), ("fused", "in", 2 * count), ("dfused", "out", 2 * count)),
                _torch(_swiglu_backward), {"WIDTH": count, "SLICE": count},
            ),
        )  # fmt: skip
        yield audited(
            "adamw", "optimizer_step", "adamw", optimizer.adamw,
            (*pointers(("master", "m", "v", "grad", "weight", "scalars", "clip"), "*fp32"), ("count", "i32")), block,
            launches.values(
                (
                    ("master", "in out", count), ("m", "in out", count), ("v", "in out", count), ("grad", "in", count),
                    ("weight", "out", count), ("scalars", "in", 9), ("clip", "in", 1),
                ),
                _torch(_adamw), {"count": count}, {"scalars": _RATES, "clip": _CLIP},
            ),
        )  # fmt: skip


_RATES = np.array([1e-3, 0.9, 0.95, 0.1, 0.05, 3.1, 2.2, 1e-8, 0.1], dtype=np.float32)
_CLIP = np.array([0.75], dtype=np.float32)


def _adamw(master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, *_: torch.Tensor) -> Any:
    points = _entry("portable", "float32", "optimizer_step", "adamw")
    return reference_optimizer.adamw(points, master, m, v, grad, AdamWScalars(*_RATES, *_CLIP))


def model_kernels() -> Iterator[Audited]:
    """Kernels of a dense model that are no forward product."""
    yield from _products()
    yield from _norms()
    yield from _chains()
    yield from _elementwise()
