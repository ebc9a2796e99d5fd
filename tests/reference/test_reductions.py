"""Reductions driven by the six points: the bits of the compiled kernels; every point of the data changes the result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hardware.cuda import mma
from hardware.rocm import mfma
from rlkernel.contract.points import Dependency, Merge, Precision, SixPoints, Split
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu import gemm, norm, optimizer
from rlkernel.kernels.cpu.gemm_gradient import weight_gradient
from rlkernel.kernels.cpu.panels import pack_rows
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.reference import reductions
from rlkernel.reference.arith import div, sqrt
from tests.kernels import arith as slow
from tests.kernels.arith import assert_same_bits, differs

WORKERS = Workers(1)


def entry(
    *,
    split: Split | None = None,
    merge: Merge | None = None,
    mac: str = "fma.rn.f32",
    inputs: str = "float32",
    roles: tuple[tuple[str, str], ...] | None = None,
) -> SixPoints:
    split = split or Split()
    merge = merge or Merge("ascending_chain", leaves="balanced_tree" if split.leaves > 1 else "none")
    precision = Precision(inputs, "float32", "float32", "float32", inputs)
    roles = roles if roles is not None else (("mac", mac), ("add", "add.rn.f32"))
    return SixPoints(Dependency(("row",), "an axis"), split, merge, precision, (), roles)


def operands(kind: str, *shapes: tuple[int, ...]) -> list[Any]:
    generator = np.random.default_rng(21)
    return [slow.hazards(generator, shape, kind) for shape in shapes]


def tensors(*arrays: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(a) for a in arrays]


@pytest.mark.parametrize("leaves", [1, 2, 4])
@pytest.mark.parametrize("kind", slow.HAZARDS)
def test_matmul_has_the_bits_of_the_compiled_gemm(kind: str, leaves: int) -> None:
    a, b, bias = operands(kind, (5, 48), (7, 48), (7,))
    points = entry(split=Split(leaves=leaves))
    panels = pack_rows(b, WORKERS)
    found = reductions.matmul(points, *tensors(a, b), bias=torch.from_numpy(bias))
    assert_same_bits(found.numpy(), gemm.matmul(a, panels, WORKERS, leaves=leaves, bias=bias))
    found = reductions.matmul(points, *tensors(a, b))
    assert_same_bits(found.numpy(), gemm.matmul(a, panels, WORKERS, leaves=leaves))


@pytest.mark.parametrize("real", [0, 5, 24, 41, 48])
@pytest.mark.parametrize("kind", slow.HAZARDS)
def test_padding_behind_the_real_depth_is_left_out(kind: str, real: int) -> None:
    a, b = operands(kind, (5, 48), (7, 48))
    borders = [min(12 * leaf, real) for leaf in range(5)]
    found = reductions.matmul(entry(split=Split(leaves=4)), *tensors(a[:, :real], b[:, :real]), borders=borders)
    compiled = gemm.matmul(a, pack_rows(b, WORKERS), WORKERS, leaves=4, real=real)
    assert_same_bits(found.numpy(), compiled)


def test_padding_would_change_the_sign_of_a_zero() -> None:
    a, b = np.full((1, 8), 1e-30, np.float32), np.full((1, 8), -1e-30, np.float32)
    a[:, 4:] = b[:, 4:] = 0.0
    panels = pack_rows(b, WORKERS)
    assert bool(np.signbit(gemm.matmul(a[:, :4].copy(), pack_rows(b[:, :4].copy(), WORKERS), WORKERS))[0, 0])
    taken = gemm.matmul(a, panels, WORKERS, leaves=1)
    assert not np.signbit(taken)[0, 0], "a product of zeros makes +0 of -0"
    with pytest.raises(ContractError, match="real elements"):
        gemm.matmul(a, panels, WORKERS, leaves=1, real=4)


def test_matmul_of_bfloat16_tensors() -> None:
    a, b = (torch.from_numpy(x).bfloat16() for x in operands("normal", (3, 24), (4, 24)))
    points = entry(inputs="bfloat16")
    found = reductions.matmul(points, a, b)
    assert_same_bits(found.numpy(), slow.matmul_chain(a.float().numpy(), b.float().numpy()))


def test_a_chain_is_continued_like_a_weight_gradient() -> None:
    dy, x, grad = operands("spread", (11, 6), (11, 5), (6, 5))
    expected = grad.copy()
    weight_gradient(dy, x, expected, WORKERS)
    start = torch.from_numpy(grad)
    found = reductions.matmul(entry(), *(t.T for t in tensors(dy, x)), start=start)
    assert_same_bits(found.numpy(), expected)
    half = reductions.matmul(entry(), *(t[:4].T for t in tensors(dy, x)), start=start)
    assert_same_bits(reductions.matmul(entry(), *(t[4:].T for t in tensors(dy, x)), start=half).numpy(), expected)
    from_zero = reductions.matmul(entry(), *(t.T for t in tensors(dy, x)))
    assert differs((from_zero + start).numpy(), expected)  # a chain continued is not a sum of two


@pytest.mark.parametrize("width", [1, 3, 64, 300, 777])
@pytest.mark.parametrize("kind", slow.HAZARDS)
def test_row_sum_has_the_bits_of_lane_sum_and_of_the_compiled_norm(kind: str, width: int) -> None:
    x, y = operands(kind, (4, width), (4, width))
    lanes = min(256, 1 << max(0, (width - 1).bit_length()))
    points = entry(
        split=Split(lanes=lanes), merge=Merge("ascending_chain", "balanced_tree"), roles=(("fma", "fma.rn.f32"),)
    )
    assert_same_bits(reductions.row_sum(points, *tensors(x, y)).numpy(), slow.lane_sum(x, y))
    if width > 1:
        _, inverse = norm.rms_norm(x, np.ones(width, np.float32), np.float32(0), WORKERS, False)
        mean = div(reductions.row_sum(points, *tensors(x, x)), float(width))
        assert_same_bits(div(1.0, sqrt(mean)).numpy(), inverse)


@pytest.mark.parametrize("size", [5, 1024, 3000])
def test_leaves_of_a_size_have_the_bits_of_the_gradient_norm(size: int) -> None:
    (g,) = operands("spread", (size,))
    points = entry(
        split=Split(leaves=0, leaf_size=1024, lanes=256),
        merge=Merge("ascending_chain", "balanced_tree", "balanced_tree"),
    )
    (tensor,) = tensors(g)
    found = reductions.row_sum(points, tensor[None], tensor[None])
    assert_same_bits(found.numpy()[0], optimizer.sum_of_squares(g, WORKERS))


def test_trees_and_chains_of_adds() -> None:
    (values,) = operands("spread", (8, 33))
    (tensor,) = tensors(values)
    assert_same_bits(reductions.tree(tensor, 0).numpy(), slow.tree(values.T))
    assert_same_bits(reductions.tree(tensor.T).numpy(), slow.tree(values.T))
    assert_same_bits(reductions.tree(tensor[:5], 0).numpy(), slow.tree(np.pad(values[:5], ((0, 3), (0, 0))).T))
    assert_same_bits(reductions.add_chain(tensor).numpy(), slow.add_chain(values))
    assert_same_bits(reductions.add_chain(tensor, tensor[0]).numpy(), slow.add_chain(values, values[0]))
    assert reductions.tree(torch.zeros(0, 2), 0).tolist() == [0.0, 0.0]
    assert reductions.add_chain(torch.zeros(0, 2)).tolist() == [0.0, 0.0]
    assert differs(reductions.tree(tensor, 0).numpy(), reductions.add_chain(tensor).numpy())


@pytest.mark.parametrize(
    ("mac", "step", "chain_bf16"),
    [("mma.bf16.sm90", 16, mma.chain_bf16), ("mfma.bf16.gfx942", 8, mfma.chain_bf16)],
)
def test_chains_of_matrix_units_with_leaves(mac: str, step: int, chain_bf16: Any) -> None:
    a, b, start = operands("spread", (5, 80), (6, 80), (5, 6))
    x, y = (torch.from_numpy(v).bfloat16().float() for v in (a, b))
    one = entry(split=Split(step=step), mac=mac, inputs="bfloat16")
    assert torch.equal(reductions.matmul(one, x, y), chain_bf16(x, y))
    c = torch.from_numpy(start)
    assert torch.equal(reductions.matmul(one, x, y, start=c), chain_bf16(x, y, c))
    two = entry(split=Split(step=step, leaves=2), mac=mac, inputs="bfloat16")
    parts = [chain_bf16(x[:, k : k + 40], y[:, k : k + 40]) for k in (0, 40)]  # each leaf is padded by itself
    assert torch.equal(reductions.matmul(two, x, y), parts[0] + parts[1])
    assert differs(reductions.matmul(one, x, y).numpy(), reductions.matmul(two, x, y).numpy())
    portable = entry(inputs="bfloat16")
    assert differs(reductions.matmul(one, x, y).numpy(), reductions.matmul(portable, x, y).numpy())


def test_leaves_with_given_borders() -> None:
    a, b = tensors(*operands("spread", (3, 30), (4, 30)))
    points = entry(split=Split(leaves=2))
    parts = [reductions.matmul(entry(), a[:, cut], b[:, cut]) for cut in (slice(0, 7), slice(7, 30))]
    assert torch.equal(reductions.matmul(points, a, b, borders=[0, 7, 30]), parts[0] + parts[1])
    assert torch.equal(reductions.matmul(points, a, b, borders=[0, 15, 30]), reductions.matmul(points, a, b))
    with pytest.raises(ContractError, match=r"borders \[0, 40\] do not cut an axis of 30 elements into 2 leaves"):
        reductions.matmul(points, a, b, borders=[0, 40])


def test_every_point_of_the_data_changes_the_bits() -> None:
    a, b = tensors(*operands("spread", (6, 64), (6, 64)))
    base = entry(split=Split(leaves=8))
    right = reductions.matmul(base, a, b).numpy()
    chain = replace(base, merge=Merge("ascending_chain", leaves="ascending_chain"))
    lanes = replace(base, split=Split(leaves=8, lanes=4), merge=replace(base.merge, lanes="balanced_tree"))
    lane_chain = replace(lanes, merge=replace(base.merge, lanes="ascending_chain"))
    sizes = replace(base, split=Split(leaves=0, leaf_size=16))
    results = [right, *(reductions.matmul(p, a, b).numpy() for p in (chain, lanes, lane_chain, sizes, entry()))]
    for i, one in enumerate(results):
        for other in results[i + 1 :]:
            assert differs(one, other)
    same = replace(base, split=Split(leaves=0, leaf_size=8))
    assert not differs(reductions.matmul(same, a, b).numpy(), right)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": Split(leaves=3)}, r"64 elements cannot be cut into 3 equal leaves: 1 would be left over"),
        ({"split": Split(leaves=0)}, r"split.leaves is 0 and split.leaf_size 0"),
        ({"split": Split(leaves=2, leaf_size=8)}, r"split.leaves is 2 and split.leaf_size 8"),
        ({"split": Split(shards=2)}, r"split.shards is 2"),
        ({"split": Split(step=2)}, r"split.step is 2, but fma.rn.f32 adds 1 products at a time"),
        ({"split": Split(lanes=0)}, r"split.lanes is 0"),
        ({"split": Split(lanes=4), "merge": Merge("ascending_chain")}, r"merge.lanes is 'none' for 4 parts"),
        ({"split": Split(leaves=2), "merge": Merge("ascending_chain")}, r"merge.leaves is 'none' for 2 parts"),
        (
            {"split": Split(leaves=2), "merge": Merge("ascending_chain", leaves="rescale_ascending")},
            r"merge.leaves is 'rescale_ascending' for 2 parts",
        ),
        ({"merge": Merge("balanced_tree")}, r"merge.leaf is 'balanced_tree'; a leaf over an axis is"),
        ({"roles": (("add", "add.rn.f32"),)}, r"name no multiply-accumulate"),
        ({"mac": "exp2.full"}, r"name no multiply-accumulate"),
        ({"mac": "mma.bf16.sm90"}, r"split.step is 1, but mma.bf16.sm90 adds 16"),
        ({"mac": "mma.bf16.sm90", "split": Split(step=16)}, r"precision.inputs is 'float32', but mma.bf16.sm90 takes"),
        (
            {"mac": "mma.bf16.sm90", "split": Split(step=16, lanes=8), "inputs": "bfloat16"},
            r"split.lanes is 8 with mma.bf16.sm90",
        ),
        (
            {"mac": "mma.bf16.sm90", "split": Split(step=16), "inputs": "bfloat16"},
            r"mma.bf16.sm90: 4\d\d of 448 operands are no torch.bfloat16 values",
        ),
    ],
)
def test_what_the_data_does_not_define_is_refused(changes: Any, message: str) -> None:
    a, b = tensors(*operands("normal", (7, 64), (7, 64)))
    with pytest.raises(ContractError, match=message):
        reductions.matmul(entry(**changes), a, b)


def test_calls_that_do_not_fit_are_refused() -> None:
    a, b = tensors(*operands("normal", (2, 8), (3, 8)))
    start = torch.zeros(2, 3)
    with pytest.raises(ContractError, match="a start was given for 2 leaves"):
        reductions.matmul(entry(split=Split(leaves=2)), a, b, start=start)
    with pytest.raises(ContractError, match=r"the start of a chain is float32 \[2, 3\]"):
        reductions.matmul(entry(), a, b, start=start.T)
    with pytest.raises(ContractError, match="have 8 and 7 elements"):
        reductions.matmul(entry(), a, b[:, :7])
    with pytest.raises(ContractError, match=r"rows of one shape \[R, K\]"):
        reductions.row_sum(entry(), a, b)
    with pytest.raises(ContractError, match="no primitive for the role 'add'"):
        reductions.matmul(entry(roles=(("mac", "fma.rn.f32"),)), a, b, bias=torch.zeros(3))
    with pytest.raises(ContractError, match=r"dtype torch.float64"):
        reductions.matmul(entry(), a.double(), b)


def test_empty_axes_and_shapes() -> None:
    a, b = torch.zeros(2, 0), torch.zeros(3, 0)
    assert reductions.matmul(entry(split=Split(leaves=2)), a, b).tolist() == [[0.0] * 3] * 2
    assert reductions.matmul(entry(), torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)
    unit = entry(split=Split(step=16), mac="mma.bf16.sm90", inputs="bfloat16")
    assert reductions.matmul(unit, torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)
    assert reductions.matmul(unit, torch.zeros(2, 4), torch.zeros(0, 4)).shape == (2, 0)
