"""The kernels in Triton's interpreter against the reference: indexing and masks, for rows and scalars also bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkernel.contract.profiles import DIV, EXP2, EXP2_P3, LOG2, MAX, SQRT
from rlkernel.kernels.triton import elementwise, gemm, norm, reductions
from rlkernel.kernels.triton.launch import lanes
from rlkernel.reference import arith
from rlkernel.reference.primitives import PRIMITIVES
from rlkernel.reference.reductions import row_sum, tree
from rlkernel.verify.audit.catalogue import entry
from rlkernel.verify.audit.launches import special_values

NORM = entry("portable", "float32", "rms_norm")


def _interpret(kernel: object, grid: int, *arguments: object, **constants: object) -> None:
    with np.errstate(all="ignore"):
        kernel[(grid,)](*arguments, **constants)  # type: ignore[index]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    nan = torch.isnan(a) & torch.isnan(b)
    return bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all())


@pytest.mark.parametrize("n", [1, 3, 100, 257, 512])
def test_rows(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randn((5, n), generator=generator) * 1e-20 ** (n % 2) for _ in range(2))
    out = torch.empty(5)
    _interpret(reductions.row_reduction, 3, a, b, out, 5, N=n, ROWS=2, LANES=lanes(n))
    assert _equal(out, row_sum(NORM, a, b))
    y, inverse, eps = torch.empty_like(a), torch.empty(5), 1e-6
    _interpret(
        norm.rms_norm, 3, a, a, b[0].contiguous(), a, y, inverse, 5, eps, N=n, ROWS=2, LANES=lanes(n), ADDS=False
    )
    mean = arith.div(row_sum(NORM, a, a), float(n))
    root = arith.sqrt(arith.add(mean, torch.tensor(eps, dtype=torch.float32)))
    expected = arith.div(torch.ones(5), root)
    assert _equal(inverse, expected)
    assert _equal(y, arith.mul(arith.mul(a, expected[:, None]), b[0][None]))


@pytest.mark.parametrize("depth_first", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("leaves", [1, 2, 4, 8])
def test_products(leaves: int, depth_first: tuple[bool, bool]) -> None:
    generator = torch.Generator().manual_seed(leaves)
    a, b = torch.randn((33, 72), generator=generator), torch.randn((40, 72), generator=generator)
    bias, grad = torch.randn(40, generator=generator), torch.randn((33, 40), generator=generator)
    operands = [x.t().contiguous() if first else x for x, first in zip((a, b), depth_first, strict=True)]
    expected = a.double() @ b.double().T
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2, "WIDEN": True, "EVEN": False}
    shape = {"A_DEPTH_FIRST": depth_first[0], "B_DEPTH_FIRST": depth_first[1], "LEAVES": leaves} | blocks
    c = torch.full((33, 40), torch.nan)
    sizes = (33, 40, 72, 0.0)
    _interpret(gemm.gemm, 9, *operands, c, bias, grad, *sizes, SPLIT=False, HAS_BIAS=True, CONTINUES=False, **shape)
    assert float((c.double() - expected - bias).abs().max()) < 1e-4
    parts = torch.full((leaves, 33, 40), torch.nan)
    with np.errstate(all="ignore"):
        gemm.gemm[(9, leaves)](
            *operands, parts, bias, grad, *sizes, SPLIT=True, HAS_BIAS=False, CONTINUES=False, **shape
        )
    size = 72 // leaves
    for leaf in range(leaves):
        part = slice(leaf * size, (leaf + 1) * size)
        assert float((parts[leaf].double() - a[:, part].double() @ b[:, part].double().T).abs().max()) < 1e-4
    merged = torch.full((33, 40), torch.nan)
    _interpret(gemm.merge_leaves, 6, parts, bias, merged, 33 * 40, 40, LEAVES=leaves, HAS_BIAS=True, BLOCK=256)
    assert _equal(merged, tree(parts, 0) + bias)
    if leaves == 1:
        start = grad.clone()
        _interpret(
            gemm.gemm, 9, *operands, grad, bias, grad, *sizes, SPLIT=False, HAS_BIAS=False, CONTINUES=True, **shape
        )
        assert float((grad.double() - expected - start).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("primitive", "kernel", "operands"),
    [
        (EXP2, elementwise.exp2_full_kernel, 1),
        (EXP2_P3, elementwise.exp2_p3_kernel, 1),
        (LOG2, elementwise.log2_full_kernel, 1),
        ("cast.bf16", elementwise.round_bf16_kernel, 1),
        (SQRT, elementwise.square_root_kernel, 1),
        (MAX, elementwise.maximum_kernel, 2),
        (DIV, elementwise.divide_kernel, 2),
    ],
)
def test_scalars(primitive: str, kernel: object, operands: int) -> None:
    inputs = [torch.from_numpy(np.roll(special_values(3000, 7 + i), 5 * i)) for i in range(operands)]
    out = torch.empty(3000)
    _interpret(kernel, 3, *inputs, out, 3000, BLOCK=1024)
    assert _equal(out, PRIMITIVES[primitive].function(*inputs))
