"""The scalar primitives: bits, accuracy, special values; the lane sums and trees; the probe for flushed subnormals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rlkernel.errors import ContractError, NumericsError
from rlkernel.kernels.cpu import primitives
from rlkernel.kernels.cpu.convert import as_float32, from_float32, narrow, require, require_range, widen
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.reductions import LANES, key_value, lane_dot, order_key, tree, tree_of_array
from rlkernel.kernels.cpu.threads import Workers
from tests.kernels import arith, rowref
from tests.kernels.arith import assert_same_bits, differs

_POWERS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, 126.0, 127.0, 127.99999, 128.0, 200.0, -125.99999, -126.0]
_LIMITS = [
    -126.00001,
    -149.0,
    -200.0,
    np.inf,
    -np.inf,
    np.nan,
    1e-45,
    -1e-45,
    1.1754944e-38,
    3.4028235e38,
    -3.4028235e38,
]
EDGES = np.array([*_POWERS, *_LIMITS], np.float32)
OPERATIONS = 7


@kernel
def _apply(first, last, a, b, c, out):
    for i in range(first, last):
        out[0, i] = primitives.exp2_full(a[i])
        out[1, i] = primitives.log2_full(a[i])
        out[2, i] = primitives.maximum(a[i], b[i])
        out[3, i] = primitives.round_bf16(a[i])
        out[4, i] = primitives.fma(a[i], b[i], c[i])
        out[5, i] = primitives.sigmoid(a[i])
        out[6, i] = key_value(order_key(a[i]))


@kernel
def _reduce(first, last, a, b, out):
    lanes = np.empty(LANES, dtype=np.float32)
    other = np.empty(LANES, dtype=np.float32)
    for i in range(first, last):
        out[0, i] = lane_dot(a[i], b[i], lanes, other)
        for j in range(128):
            lanes[j] = a[i, j]
        out[1, i] = tree(lanes, other, 128)


def apply(a: arith.F32, b: arith.F32 | None = None, c: arith.F32 | None = None) -> arith.F32:
    out = np.empty((OPERATIONS, a.size), np.float32)
    _apply(0, a.size, a, a if b is None else b, a if c is None else c, out)
    return out


@pytest.fixture(scope="module")
def patterns() -> arith.F32:
    generator = np.random.default_rng(20)
    raw = generator.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    near = (generator.standard_normal(1 << 16) * 40).astype(np.float32)
    return np.concatenate([raw, near, EDGES])


@pytest.fixture(scope="module")
def results(patterns: arith.F32) -> arith.F32:
    return apply(patterns)


def ulps(actual: arith.F32, exact: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of float32 at the exact value (subnormal spacing below 2^-126)."""
    _, exponent = np.frexp(exact)
    return np.abs(actual.astype(np.float64) - exact) / np.ldexp(1.0, np.maximum(exponent - 24, -149))


def test_exp2_is_within_one_ulp_of_float64(patterns: arith.F32, results: arith.F32) -> None:
    inside = (patterns >= -126) & (patterns < 128)
    exact = np.exp2(patterns[inside].astype(np.float64))
    finite = exact < 2.0**128 * (1 - 2.0**-25)
    assert ulps(results[0][inside][finite], exact[finite]).max() <= 1.0


def test_exp2_special_values(patterns: arith.F32, results: arith.F32) -> None:
    assert np.all(arith.bits(results[0][patterns < -126]) == 0), "exactly +0 below -126"
    assert np.all(arith.bits(results[0][patterns == 0]) == 0x3F800000), "exactly 1 at +0 and -0"
    assert np.all(results[0][patterns >= 128] == np.inf)
    assert np.all(np.isnan(results[0]) == np.isnan(patterns))
    assert float(apply(np.full(1, -126, np.float32))[0, 0]) == 2.0**-126


def test_log2_is_within_one_ulp_of_float64(patterns: arith.F32, results: arith.F32) -> None:
    positive = (patterns > 0) & np.isfinite(patterns)
    assert (positive & (patterns < 2.0**-126)).sum() > 1000, "subnormals are among the samples"
    exact = np.log2(patterns[positive].astype(np.float64))
    assert ulps(results[1][positive], exact).max() <= 1.0
    near_one = np.linspace(0.99, 1.01, 1 << 14).astype(np.float32)
    assert ulps(apply(near_one)[1], np.log2(near_one.astype(np.float64))).max() <= 1.0


def test_log2_special_values(patterns: arith.F32, results: arith.F32) -> None:
    assert np.all(results[1][patterns == 0] == -np.inf)
    assert np.all(np.isnan(results[1][(patterns < 0) | np.isnan(patterns)]))
    assert np.all(results[1][patterns == np.inf] == np.inf)
    assert arith.bits(apply(np.ones(1, np.float32))[1])[0] == 0


def test_polynomials_have_the_bits_of_the_reference(patterns: arith.F32, results: arith.F32) -> None:
    part = np.r_[0 : 1 << 14, patterns.size - (1 << 13) - EDGES.size : patterns.size]
    assert_same_bits(results[0][part], rowref.exp2_full(patterns[part]))
    assert_same_bits(results[1][part], rowref.log2_full(patterns[part]))
    assert_same_bits(results[5][part], rowref.sigmoid(patterns[part]))


def test_a_polynomial_without_fma_has_other_bits() -> None:
    x = np.linspace(-3, 3, 4096).astype(np.float32)
    r = x - np.rint(x)
    q = np.float32(primitives._E6) * r + np.float32(primitives._E5)
    for coefficient in (primitives._E4, primitives._E3, primitives._E2, primitives._E1, np.float32(1)):
        q = q * r + coefficient
    unfused = np.ldexp(q, np.rint(x).astype(int)).astype(np.float32)
    assert differs(apply(x)[0], unfused)


@pytest.mark.parametrize("kind", arith.HAZARDS)
def test_fma_maximum_and_round(kind: str) -> None:
    generator = np.random.default_rng(3)
    a, b, c = (arith.hazards(generator, (4096,), kind) for _ in range(3))
    out = apply(a, b, c)
    assert_same_bits(out[4], arith.fma32(a, b, c))
    assert_same_bits(out[3], arith.round_bf16(a))
    expected = [rowref.largest(np.array(pair)) for pair in zip(a, b, strict=True)]
    assert_same_bits(out[2], np.array(expected, np.float32))
    ordered = ~np.isnan(a)
    assert np.array_equal(arith.bits(out[6][ordered]), arith.bits(a[ordered]))
    if kind == "normal":
        assert differs(out[4], a * b + c), "two roundings differ from one"


def test_maximum_of_zeros_and_nan() -> None:
    a = np.array([0.0, -0.0, -0.0, np.nan, 1.0, np.nan], np.float32)
    b = np.array([-0.0, 0.0, -0.0, 1.0, np.nan, np.nan], np.float32)
    assert arith.canonical(apply(a, b)[2]).tolist() == [0, 0, 0x80000000, 0x7FC00000, 0x7FC00000, 0x7FC00000]


def test_order_keys_sort_as_max_does() -> None:
    @kernel
    def keys(values, out):
        for i in range(values.size):
            out[i] = order_key(values[i])

    values = np.array([-np.inf, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3e38, np.inf], np.float32)
    out = np.empty(values.size, np.int32)
    keys(values, out)
    assert np.all(np.diff(out.astype(np.int64)) > 0)


@pytest.mark.parametrize("kind", arith.HAZARDS)
@pytest.mark.parametrize("columns", [128, 200, 256, 257, 576, 1024])
def test_lane_sum_and_tree(kind: str, columns: int) -> None:
    generator = np.random.default_rng(columns)
    a, b = (arith.hazards(generator, (5, columns), kind) for _ in range(2))
    out = np.empty((2, 5), np.float32)
    _reduce(0, 5, a, b, out)
    assert_same_bits(out[0], arith.lane_sum(a, b))
    assert_same_bits(out[1], arith.tree(a[:, :128]))


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 64, 100, 127])
def test_lane_sum_of_short_rows(columns: int) -> None:
    generator = np.random.default_rng(columns)
    a, b = (arith.hazards(generator, (5, columns), "spread") for _ in range(2))
    padded = np.zeros((2, 5, 128), np.float32)  # the tree of _reduce reads 128
    padded[0, :, :columns], padded[1, :, :columns] = a, b
    out = np.empty((2, 5), np.float32)
    for i in range(5):
        single = np.empty((2, 1), np.float32)
        _reduce_short(a[i], b[i], single)
        out[:, i] = single[:, 0]
    assert_same_bits(out[0], arith.lane_sum(a, b))


@kernel
def _reduce_short(a, b, out):
    lanes = np.empty(LANES, dtype=np.float32)
    other = np.empty(LANES, dtype=np.float32)
    out[0, 0] = lane_dot(a, b, lanes, other)


def test_other_lane_counts_and_orders_are_noticed() -> None:
    generator = np.random.default_rng(1)
    a = arith.hazards(generator, (64, 1024), "normal")
    out = np.empty((2, 64), np.float32)
    _reduce(0, 64, a, a, out)
    half = np.zeros((64, 128), np.float32)
    for first in range(0, 1024, 128):
        half = arith.fma32(a[:, first : first + 128], a[:, first : first + 128], half)
    assert differs(out[0], arith.tree(half)), "128 lanes instead of 256"
    assert differs(out[0], arith.chain(a, a)), "one chain"
    halves = a[:, :128]
    while halves.shape[1] > 1:
        middle = halves.shape[1] // 2
        halves = halves[:, :middle] + halves[:, middle:]
    assert differs(out[1], halves[:, 0]), "a tree of distant pairs"
    assert differs(out[1], arith.add_chain(a[:, :128].T)), "a chain instead of a tree"


def test_tree_of_array_pads_with_zero() -> None:
    values = arith.hazards(np.random.default_rng(2), (11,), "spread")
    assert_same_bits(tree_of_array(values), arith.tree(np.r_[values, np.zeros(5, np.float32)]))
    assert arith.bits(tree_of_array(np.empty(0, np.float32)))[()] == 0


def test_bfloat16_round_trip_of_every_pattern() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = widen(every)
    assert np.array_equal(arith.bits(wide), every.astype(np.uint32) << 16)
    assert np.array_equal(narrow(wide), every)
    tensor = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16)
    assert np.array_equal(arith.bits(as_float32(tensor)), arith.bits(wide))
    back = from_float32(wide, torch.bfloat16)
    assert back.dtype == torch.bfloat16 and torch.equal(back.view(torch.int16), tensor.view(torch.int16))


def test_narrow_rounds_to_nearest_even(patterns: arith.F32) -> None:
    part = patterns[-200_000:]
    quiet = np.where(np.isnan(part), np.float32(np.nan), part)  # one pattern: NaN off the grid becomes quiet
    assert np.array_equal(widen(narrow(quiet)).view(np.uint32), arith.bits(arith.round_bf16(quiet)))
    off_grid = np.array([0x7F800001, 0xFF80FFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert narrow(off_grid).tolist() == [0x7FC0, 0xFFC0, 0x7FFF]
    truncated = (arith.bits(quiet) >> 16).astype(np.uint16)
    assert np.any(narrow(quiet) != truncated), "truncation is noticed"


def test_conversion_under_flushed_subnormals_is_exact() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    torch.set_flush_denormal(True)
    try:
        assert np.array_equal(narrow(widen(every)), every)
    finally:
        torch.set_flush_denormal(False)


def test_float32_tensors_are_shared_not_copied() -> None:
    tensor = torch.zeros(3, 4)
    array = as_float32(tensor)
    array[1, 2] = 5
    assert tensor[1, 2] == 5
    assert as_float32(tensor.T).flags.c_contiguous
    assert from_float32(array, torch.float32).data_ptr() == tensor.data_ptr()
    assert from_float32(np.full((1, 1), 1.5, np.float32), torch.bfloat16).shape == (1, 1)


def test_conversion_refuses_other_dtypes() -> None:
    for tensor in (torch.zeros(2, dtype=torch.float16), torch.zeros(2, dtype=torch.float64), torch.zeros(2).int()):
        with pytest.raises(ContractError, match="float32 and bfloat16"):
            as_float32(tensor)
    with pytest.raises(ContractError, match="float64"):
        from_float32(np.zeros(2), torch.float32)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="float16"):
        from_float32(np.zeros(2, np.float32), torch.float16)
    with pytest.raises(ContractError, match="float64"):
        narrow(np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="int32"):
        widen(np.zeros(2, np.int32))  # type: ignore[arg-type]


def test_require_names_the_argument_and_what_is_right() -> None:
    good = np.zeros((2, 3), np.float32)
    require("x", good, np.float32, 2, None)
    for bad, words in (
        (good.astype(np.float64), "x is float64.*float32.2, any. is required"),
        (good.T.copy(), "x is float32.3, 2."),
        (np.zeros((3, 2), np.float32).T, "not C-contiguous"),
        ([1.0], "x is a list"),
        (np.zeros(2, np.float32), "x is float32.2."),
    ):
        with pytest.raises(ContractError, match=words):
            require("x", bad, np.float32, 2, None)
    require_range("ids", np.array([0, 4]), 0, 5)
    with pytest.raises(ContractError, match=r"ids\[1\] is 5"):
        require_range("ids", np.array([0, 5]), 0, 5)
    with pytest.raises(ContractError, match=r"ids\[0\] is -1"):
        require_range("ids", np.array([-1, 2]), 0, 5)


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


def test_probe_finds_flushed_subnormals_in_the_calling_thread(restored: None) -> None:
    workers = Workers(2)
    workers.probe()
    assert torch.set_flush_denormal(True), "this CPU can flush"
    with pytest.raises(NumericsError, match="this thread flushes"):
        workers.probe()
    with pytest.raises(NumericsError, match="flush"):
        Workers(1)
    torch.set_flush_denormal(False)
    workers.probe()
    workers.close()


def test_probe_finds_flushed_subnormals_in_one_worker_thread() -> None:
    workers = Workers(2)
    assert workers._pool is not None
    assert workers._pool.submit(torch.set_flush_denormal, True).result()
    assert primitives.subnormals_survive(), "the calling thread is untouched"
    with pytest.raises(NumericsError, match="1 of 1 worker threads flush"):
        workers.probe()
    workers._pool.submit(torch.set_flush_denormal, False).result()
    workers.probe()
    workers.close()
