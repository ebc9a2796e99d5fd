"""The GEMM's bits against exact arithmetic, in every way of cutting the work; and twins that must differ."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu import gemm, gemm_gradient
from rlkernel.kernels.cpu.gemm import matmul
from rlkernel.kernels.cpu.gemm_gradient import bias_gradient, weight_gradient
from rlkernel.kernels.cpu.microkernel import PANEL_WIDTH, vector_shape
from rlkernel.kernels.cpu.panels import join_columns, pack_columns, pack_rows, unpack_row
from rlkernel.kernels.cpu.threads import Workers
from tests.kernels.arith import (
    F32,
    HAZARDS,
    add32,
    add_chain,
    assert_same_bits,
    bits,
    differs,
    hazards,
    matmul_chain,
    mul32,
    round_bf16,
    tree,
)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(2)
    yield pool
    pool.close()


@pytest.fixture
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems are cut over threads too."""
    monkeypatch.setattr(gemm, "_TASK_NANOSECONDS", 0.0)


def normal(seed: int, *shape: int) -> F32:
    return hazards(np.random.default_rng(seed), shape, "normal")


def bf16_bits(x: F32) -> NDArray[np.uint16]:
    return (round_bf16(x).view(np.uint32) >> 16).astype(np.uint16)


SHAPES = [
    (1, 1, 1),
    (6, PANEL_WIDTH, 1),
    (7, PANEL_WIDTH + 1, 7),
    (5, PANEL_WIDTH - 1, 513),
    (13, 2 * PANEL_WIDTH + 3, 70),
    (1, 3 * PANEL_WIDTH, 1100),
    (61, 3, 40),
    (101, PANEL_WIDTH + 1, 33),
]


@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_ascending_chain_per_output(rows: int, columns: int, depth: int, threads: int, many_tasks: None) -> None:
    a, w = normal(1, rows, depth), normal(2, columns, depth)
    pool = Workers(threads)
    expected = matmul_chain(a, w)
    assert_same_bits(matmul(a, pack_rows(w, pool), pool), expected)
    assert_same_bits(matmul(a, pack_columns(np.ascontiguousarray(w.T), pool), pool), expected)
    pool.close()


@pytest.mark.parametrize("kind", sorted(HAZARDS))
def test_hazards(kind: str, workers: Workers) -> None:
    generator = np.random.default_rng(3)
    a = hazards(generator, (9, 96), kind)
    w = hazards(generator, (PANEL_WIDTH + 2, 96), kind)
    expected = matmul_chain(a, w)
    assert_same_bits(matmul(a, pack_rows(w, workers), workers), expected)
    if kind == "subnormal":  # the class does what it is for
        tiny = np.abs(expected) < np.finfo(np.float32).tiny
        assert np.any(tiny & (expected != 0))
    if kind == "signed_zeros":
        assert np.any(bits(a) == 0x80000000)
    if kind == "special":
        assert np.any(np.isnan(expected)) and np.any(np.isinf(expected))


def test_negative_zero_products_start_from_positive_zero(workers: Workers) -> None:
    a, w = np.full((1, 3), -0.0, np.float32), np.ones((1, 3), np.float32)
    assert bits(matmul(a, pack_rows(w, workers), workers))[0, 0] == 0  # +0 + -0 = +0: a chain from -0 would keep -0


def test_other_orders_and_roundings_differ(workers: Workers) -> None:
    """Twins: what the comparison would catch."""
    a, w = normal(4, 8, 200), normal(5, 30, 200)
    result = matmul(a, pack_rows(w, workers), workers)
    assert_same_bits(result, matmul_chain(a, w))
    assert differs(result, matmul_chain(a[:, ::-1], w[:, ::-1]))  # descending k
    unfused = np.zeros((8, 30), np.float32)
    for k in range(200):
        unfused = add32(unfused, mul32(a[:, k, None], w[None, :, k]))
    assert differs(result, unfused)
    lanes = [matmul_chain(a[:, i::4], w[:, i::4]) for i in range(4)]
    assert differs(result, tree(np.stack(lanes, axis=-1)))  # what a vectorised reduction would do
    assert differs(result, (a.astype(np.float64) @ w.T.astype(np.float64)).astype(np.float32))
    flipped = w.copy()
    flipped.view(np.uint32)[17, 100] ^= 1
    assert differs(result, matmul(a, pack_rows(flipped, workers), workers))


def test_rows_alone_and_in_any_batch(workers: Workers, many_tasks: None) -> None:
    a, w = normal(6, 40, 600), normal(7, PANEL_WIDTH + 9, 600)
    panels = pack_rows(w, workers)
    whole = matmul(a, panels, workers)
    for first, last in [(0, 1), (17, 18), (39, 40), (3, 5), (2, 15), (7, 40)]:
        assert_same_bits(matmul(a[first:last].copy(), panels, workers), whole[first:last])
    shuffled = np.random.default_rng(8).permutation(40)
    assert_same_bits(matmul(a[shuffled], panels, workers), whole[shuffled])


@pytest.mark.parametrize("leaves", [1, 2, 4])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("rows", [3, 203])
def test_leaves_bias_and_rounding(leaves: int, bf16: bool, rows: int, workers: Workers, many_tasks: None) -> None:
    columns, depth = 2 * PANEL_WIDTH + 5, 24
    a, w, bias = normal(9, rows, depth), normal(10, columns, depth), normal(11, columns)
    parts = np.split(a, leaves, axis=1), np.split(w, leaves, axis=1)
    roots = tree(np.stack([matmul_chain(x, y) for x, y in zip(*parts, strict=True)], axis=-1))
    expected = add32(roots, bias)
    expected = round_bf16(expected) if bf16 else expected
    out = np.full((rows, columns), np.nan, np.float32)
    result = matmul(a, pack_rows(w, workers), workers, leaves=leaves, bias=bias, bf16=bf16, out=out)
    assert result is out
    assert_same_bits(result, expected)
    assert_same_bits(
        matmul(a, pack_rows(w, workers), workers, leaves=leaves), roots if leaves > 1 else matmul_chain(a, w)
    )
    if leaves > 1:
        assert differs(roots, matmul_chain(a, w))
        linear = matmul_chain(parts[0][0], parts[1][0])
        for x, y in zip(parts[0][1:], parts[1][1:], strict=True):
            linear = add32(linear, matmul_chain(x, y))
        assert leaves == 2 or differs(roots, linear)  # a linear merge is another function
    if bf16:
        assert differs(result, round_bf16(add32(round_bf16(roots), bias)))  # rounding before the bias, too


def test_deep_leaves_cross_blocks_of_the_depth(workers: Workers) -> None:
    a, w = normal(12, 5, 2400), normal(13, 7, 2400)
    halves = [matmul_chain(a[:, i : i + 1200], w[:, i : i + 1200]) for i in (0, 1200)]
    assert_same_bits(matmul(a, pack_rows(w, workers), workers, leaves=2), tree(np.stack(halves, axis=-1)))


def test_empty_operands(workers: Workers) -> None:
    w = normal(14, 5, 4)
    assert matmul(np.zeros((0, 4), np.float32), pack_rows(w, workers), workers).shape == (0, 5)
    assert matmul(normal(1, 3, 4), pack_rows(w[:0], workers), workers).shape == (3, 0)
    bias = normal(15, 5)
    no_depth = matmul(np.zeros((2, 0), np.float32), pack_rows(w[:, :0], workers), workers, bias=bias)
    assert_same_bits(no_depth, np.stack([bias, bias]))
    grad = normal(16, 5, 4)
    before = grad.copy()
    weight_gradient(np.zeros((0, 5), np.float32), np.zeros((0, 4), np.float32), grad, workers)
    assert_same_bits(grad, before)


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 1, 1), (19, 70, PANEL_WIDTH + 3), (600, 13, 5)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_weight_gradient_continues_the_chain(
    tokens: int, rows: int, columns: int, threads: int, many_tasks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_gradient, "_SCRATCH", 1)  # blocks of tokens as small as they get
    pool = Workers(threads)
    dy, x, start = normal(17, tokens, rows), normal(18, tokens, columns), normal(19, rows, columns)
    expected = matmul_chain(dy.T, x.T, start)
    whole = start.copy()
    weight_gradient(dy, x, whole, pool)
    assert_same_bits(whole, expected)
    parts = start.copy()
    for first, last in [(0, tokens // 3), (tokens // 3, tokens // 2), (tokens // 2, tokens)]:
        weight_gradient(dy[first:last], x[first:last], parts, pool)
    assert_same_bits(parts, expected)
    if tokens > 1:
        apart = np.zeros_like(start)
        weight_gradient(dy, x, apart, pool)
        assert differs(add32(start, apart), expected)  # adding a finished sum is not continuing the chain
    pool.close()


@pytest.mark.parametrize("kind", sorted(HAZARDS))
def test_weight_gradient_hazards(kind: str, workers: Workers) -> None:
    generator = np.random.default_rng(20)
    dy, x = hazards(generator, (31, 12), kind), hazards(generator, (31, PANEL_WIDTH + 1), kind)
    grad = np.zeros((12, PANEL_WIDTH + 1), np.float32)
    weight_gradient(dy, x, grad, workers)
    assert_same_bits(grad, matmul_chain(dy.T, x.T))


def test_bias_gradient(workers: Workers) -> None:
    dy, start = normal(21, 50, 37), normal(22, 37)
    grad = start.copy()
    bias_gradient(dy[:20], grad, workers)
    bias_gradient(dy[20:], grad, workers)
    assert_same_bits(grad, add_chain(dy, start))
    assert differs(grad, add_chain(dy[::-1], start))


def test_packing_is_exact_in_both_directions(workers: Workers) -> None:
    w = hazards(np.random.default_rng(23), (2 * PANEL_WIDTH + 7, 45), "special")
    panels = pack_rows(w, workers)
    ids = np.array([0, PANEL_WIDTH, 5, 2 * PANEL_WIDTH + 6, 5])
    np.testing.assert_array_equal(bits(unpack_row(panels, ids)), bits(w[ids]))  # NaN payloads too
    for pack in (pack_rows, pack_columns):
        half = bf16_bits(w)
        np.testing.assert_array_equal(bits(pack(half, workers).data), bits(pack(round_bf16(w), workers).data))
        target = pack(w, workers)
        target.data[:] = np.nan
        assert pack(half, workers, out=target).data is target.data
        np.testing.assert_array_equal(bits(target.data), bits(pack(half, workers).data))
        tail = target.data[-1, :, target.rows % PANEL_WIDTH or PANEL_WIDTH :]
        assert not np.any(bits(tail))  # padding is +0
    columns = pack_columns(w, workers)
    assert (columns.rows, columns.depth) == (45, 2 * PANEL_WIDTH + 7)
    np.testing.assert_array_equal(bits(unpack_row(columns, np.arange(45))), bits(w.T))


def test_refusals_say_what_is_wrong(workers: Workers) -> None:
    w = normal(24, 5, 6)
    panels = pack_rows(w, workers)
    a = normal(25, 2, 6)
    with pytest.raises(ContractError, match="depth of 6 cannot be cut into 4"):
        matmul(a, panels, workers, leaves=4)
    with pytest.raises(ContractError, match="cut into 3"):
        matmul(a, panels, workers, leaves=3)
    with pytest.raises(ContractError, match=r"shape \[2, 6\].*\[2, 5\]"):
        matmul(a[:, :5].copy(), panels, workers)
    with pytest.raises(ContractError, match="float64"):
        matmul(a.astype(np.float64), panels, workers)
    with pytest.raises(ContractError, match="not C-contiguous"):
        matmul(np.asfortranarray(a), panels, workers)
    with pytest.raises(ContractError, match="bias"):
        matmul(a, panels, workers, bias=normal(1, 4))
    with pytest.raises(ContractError, match="output"):
        matmul(a, panels, workers, out=np.zeros((2, 6), np.float32))
    with pytest.raises(ContractError, match="weight gradient"):
        weight_gradient(normal(1, 3, 5), normal(1, 4, 6), np.zeros((5, 6), np.float32), workers)
    with pytest.raises(ContractError, match=r"row 5 .* 5 rows"):
        unpack_row(panels, np.array([0, 5]))
    with pytest.raises(ContractError, match="row -1"):
        unpack_row(panels, np.array([-1]))
    with pytest.raises(ContractError, match="int32"):
        pack_rows(w.view(np.int32), workers)
    with pytest.raises(ContractError, match="cannot take"):
        pack_rows(w[:4], workers, out=panels)


def test_panel_shape_follows_the_features() -> None:
    assert vector_shape("+avx,+avx2,+fma,+avx512f") == (16, 4)
    assert vector_shape("+avx,+avx2,+fma,-avx512f") == (8, 2)
    assert vector_shape("+neon") == (4, 4)


def sample_digest() -> str:
    """SHA-256 over results that every CPU must give alike, whatever its vector width."""
    pool = Workers(2)
    digest = hashlib.sha256()
    for seed, (rows, columns, depth) in enumerate([(1, 50, 30), (7, 150, 600), (20, 33, 8)]):
        a, w = normal(seed, rows, depth), normal(100 + seed, columns, depth)
        panels = pack_rows(w, pool)
        digest.update(matmul(a, panels, pool).tobytes() + matmul(a, panels, pool, leaves=2, bf16=True).tobytes())
        grad = np.zeros((columns, depth), np.float32)
        weight_gradient(normal(200 + seed, rows, columns), a, grad, pool)
        digest.update(grad.tobytes())
    pool.close()
    return digest.hexdigest()


@pytest.mark.skipif(platform.machine() != "x86_64" or PANEL_WIDTH != 64, reason="needs a CPU with AVX-512")
def test_narrower_vectors_give_the_same_bits() -> None:
    """The code for AVX2 CPUs, compiled and run on this one."""
    script = (
        "from rlkernel.kernels.cpu.microkernel import LANES, VECTORS\n"
        "from tests.kernels.test_gemm import sample_digest\n"
        "print(LANES, VECTORS, sample_digest())"
    )
    environment = dict(os.environ, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx,+avx2,+fma,+f16c,+bmi,+bmi2")
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["8", "2", sample_digest()]


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("widths", [(96,), (64, 128), (5, 17, 1), (70, 66, 130)])
@pytest.mark.parametrize("bf16", [False, True])
def test_parts_are_the_columns_of_the_whole(workers, rows, widths, bf16):
    generator = np.random.default_rng(rows + sum(widths))
    w = generator.standard_normal((sum(widths), 45), dtype=np.float32)
    a = generator.standard_normal((rows, 45), dtype=np.float32)
    bias = generator.standard_normal(sum(widths), dtype=np.float32)
    panels = pack_rows(w, workers)
    whole = matmul(a, panels, workers, bias=bias, bf16=bf16)
    parts = gemm.matmul_parts(a, panels, widths, workers, bias=bias, bf16=bf16)
    assert [part.shape for part in parts] == [(rows, width) for width in widths]
    assert all(part.flags.c_contiguous for part in parts)
    assert not any(np.may_share_memory(a, b) for a, b in itertools.combinations(parts, 2))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1).view(np.uint32), whole.view(np.uint32))


def test_groups_of_rows_change_no_bit(workers, monkeypatch):
    generator = np.random.default_rng(5)
    panels = pack_rows(generator.standard_normal((200, 70), dtype=np.float32), workers)
    a = generator.standard_normal((77, 70), dtype=np.float32)
    whole = matmul(a, panels, workers)
    for group in (1, 2, 3, 5, 1000):
        monkeypatch.setattr(gemm, "_ROW_GROUP", group)
        np.testing.assert_array_equal(matmul(a, panels, workers).view(np.uint32), whole.view(np.uint32))
        parts = gemm.matmul_parts(a, panels, (90, 110), workers)
        np.testing.assert_array_equal(np.concatenate(parts, axis=1).view(np.uint32), whole.view(np.uint32))


@pytest.mark.parametrize("widths", [(), (199,), (100, 101), (200, 0), (50, 50, 50, 50)])
def test_parts_that_are_no_cut_are_refused(workers, widths):
    panels = pack_rows(np.zeros((200, 8), np.float32), workers)
    with pytest.raises(ContractError, match="not a cut of 200 columns"):
        gemm.matmul_parts(np.zeros((3, 8), np.float32), panels, widths, workers)


def test_joined_columns_are_where_the_order_says(workers):
    generator = np.random.default_rng(9)
    parts = [generator.standard_normal((300, width), dtype=np.float32) for width in (48, 16, 16)]
    side_by_side = np.concatenate(parts, axis=1)
    groups = np.concatenate(
        [np.r_[24 * g : 24 * g + 24, 48 + 8 * g : 56 + 8 * g, 64 + 8 * g : 72 + 8 * g] for g in (0, 1)]
    )
    for order in (np.arange(80), groups, generator.permutation(80), np.arange(40, 60), np.arange(0)):
        np.testing.assert_array_equal(join_columns(parts, order, workers), side_by_side[:, order])
    with pytest.raises(ContractError, match="from 3 to 80 for 80 columns"):
        join_columns(parts, np.array([80, 3]), workers)
    with pytest.raises(ContractError, match="300 rows"):
        join_columns([parts[0], parts[1][:5]], np.arange(4), workers)
