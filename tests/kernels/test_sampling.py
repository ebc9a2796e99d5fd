"""Philox and the sampler: known answers, winners against an exhaustive reference, truncation, statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.philox import philox4x32
from rlkernel.kernels.cpu.sampling import sample, score
from tests.kernels import arith, rowref
from tests.kernels.arith import F32
from tests.kernels.rowref import FineWorkers

WORKERS = [FineWorkers(1), FineWorkers(2), FineWorkers(3)]
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@kernel
def _philox_row(words, out):
    out[0], out[1], out[2], out[3] = philox4x32(words[0], words[1], words[2], words[3], words[4], words[5])


@kernel
def _scores(z, bits, out):
    for i in range(z.size):
        out[i] = score(z[i], bits[i])


def keys(rows: int, **changes: Any) -> dict[str, Any]:
    base = {
        "seeds": np.full(rows, 0x123456789ABCDEF0, np.uint64),
        "prompt_index": np.arange(rows, dtype=np.int64) * 7,
        "k": np.arange(rows, dtype=np.int64) % 5,
        "namespace": np.arange(rows, dtype=np.int64) % 2,
        "position": np.arange(rows, dtype=np.int64) + 11,
        "greedy": np.zeros(rows, np.bool_),
        "top_k": np.zeros(rows, np.int64),
        "top_p": np.ones(rows, np.float64),
    }
    for name, value in changes.items():
        base[name] = np.broadcast_to(np.asarray(value, base[name].dtype), rows).copy()
    return base


def row_max(z: F32) -> F32:
    return np.array([rowref.largest(row) for row in z], np.float32)


def draw(z: F32, options: dict[str, Any], workers: FineWorkers = WORKERS[0]) -> np.ndarray:
    return sample(z, row_max(z), **options, workers=workers)


def expected(z: F32, options: dict[str, Any]) -> list[int]:
    result = []
    for i, row in enumerate(z):
        names = ("seeds", "prompt_index", "k", "namespace", "position")
        scores = rowref.gumbel_scores(row, *[int(options[name][i]) for name in names])
        result.append(rowref.winner(row, scores, int(options["top_k"][i]), float(options["top_p"][i])))
    return result


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    out = np.zeros(4, np.uint64)
    _philox_row(np.array([*counter, *key], np.uint64), out)
    assert out.tolist() == answer
    assert rowref.philox(counter, key) == answer
    _philox_row(np.array([*counter, key[0] ^ 1, key[1]], np.uint64), out)
    assert out.tolist() != answer


def test_score_bits_over_the_generator_s_range() -> None:
    generator = np.random.default_rng(0)
    edges = [
        0,
        1,
        255,
        256,
        0x03FFFFFF,
        0x04000000,
        0x7FFFFFFF,
        0x80000000,
        0xFFFFFE00,
        0xFFFFFEFF,
        0xFFFFFF00,
        0xFFFFFFFF,
    ]
    pattern = np.array([*edges, *generator.integers(0, 1 << 32, 4096).tolist(), *range(0, 1 << 20, 997)], np.uint64)
    out = np.empty(pattern.size, np.float32)
    _scores(np.zeros(pattern.size, np.float32), pattern, out)
    z = generator.standard_normal(pattern.size).astype(np.float32)
    shifted = np.empty(pattern.size, np.float32)
    _scores(z, pattern, shifted)
    arith.assert_same_bits(shifted, rowref.score(z, pattern))
    assert np.all(np.isfinite(out)), "the noise is finite for every pattern"
    assert out.max() < 17.4, "the bound that the pruning relies on"
    u = np.minimum((pattern >> np.uint64(8)).astype(np.float64) * 2.0**-24 + 2.0**-25, 1 - 2.0**-24)
    coarse = np.float32(u).astype(np.float64)  # the definition's w
    assert np.abs(out + np.log(-np.log1p(-np.minimum(coarse, 1 - 2.0**-24)))).max() < 1e-5


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("columns", [1, 3, 127, 1001])
def test_pruning_never_changes_the_winner(columns: int, scale: float) -> None:
    z = (np.random.default_rng(columns).standard_normal((40, columns)) * scale).astype(np.float32)
    options = keys(40)
    want = expected(z, options)
    for workers in WORKERS:
        assert draw(z, options, workers).tolist() == want


def test_pruning_of_large_and_offset_rows() -> None:
    generator = np.random.default_rng(1)
    rows = [generator.standard_normal(20_000) * s + shift for s in (1, 5) for shift in (0, 1e4, -1e6)]
    z = np.array(rows, np.float32)
    options = keys(len(rows))
    assert draw(z, options).tolist() == expected(z, options)


@pytest.mark.parametrize("top_k", [0, 1, 5, 200, 2000])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.7, 1e-9])
def test_truncation(top_k: int, top_p: float) -> None:
    generator = np.random.default_rng(2)
    z = np.round(generator.standard_normal((12, 600)) * 4).astype(np.float32) / np.float32(4)  # many ties
    z[0] = 0
    z[1, ::2] = -0.0
    z[2, 5:] = -np.inf
    options = keys(12, top_k=top_k, top_p=top_p)
    tokens = draw(z, options, WORKERS[1])
    with np.errstate(all="ignore"):
        assert tokens.tolist() == expected(z, options)
    if top_k == 1 or top_p == 1e-9:
        assert tokens.tolist() == draw(z, keys(12, greedy=True)).tolist()


def test_truncation_restricts_the_support() -> None:
    z = np.broadcast_to(np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32)), (2000, 4)).copy()
    seen = [
        set(draw(z, keys(2000, top_k=top_k, top_p=top_p)).tolist())
        for top_k, top_p in ((0, 1.0), (2, 1.0), (0, 0.6), (3, 0.75), (3, 0.8))
    ]
    # of the top three 0.4/0.9 + 0.3/0.9 = 0.78 already reaches 0.75
    assert seen == [{0, 1, 2, 3}, {0, 1}, {0, 1}, {0, 1}, {0, 1, 2}]


def test_top_p_stops_where_the_sum_is_reached_exactly() -> None:
    z = np.zeros((500, 4), np.float32)  # weights of exactly 1: the running sum 2 equals 0.5 * 4
    assert set(draw(z, keys(500, top_p=0.5)).tolist()) == {0, 1}
    assert set(draw(z, keys(500, top_p=np.nextafter(0.5, 1))).tolist()) == {0, 1, 2}


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    z = np.zeros((3, 300), np.float32)
    z[0, [150, 299]] = 2
    z[1, 7:] = -0.0
    z[2] = -np.inf
    assert draw(z, keys(3, greedy=True)).tolist() == [150, 0, 0]


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.5}, {"greedy": True}])
def test_rows_that_are_not_finite(changes: dict[str, Any]) -> None:
    z = np.random.default_rng(3).standard_normal((5, 400)).astype(np.float32)
    z[0, 100:] = np.nan
    z[1] = np.nan
    z[2] = -np.inf
    z[3, [30, 20]] = np.inf
    z[4, 1:] = -np.inf
    tokens = draw(z, keys(5, **changes))
    assert tokens[0] < 100, "NaN never wins"
    assert tokens[1] == 0 and tokens[2] == 0 and tokens[3] == 20 and tokens[4] == 0


def test_a_nan_removes_only_itself() -> None:
    z = np.random.default_rng(4).standard_normal((30, 200)).astype(np.float32)
    options = keys(30)
    before = draw(z, options)
    z[np.arange(30), (before + 1) % 200] = np.nan
    assert draw(z, options).tolist() == before.tolist()
    z[np.arange(30), before] = np.nan
    assert np.all(draw(z, options) != before)


def test_a_draw_depends_on_its_key_alone() -> None:
    z = np.random.default_rng(5).standard_normal((16, 500)).astype(np.float32)
    options = keys(16, top_k=np.arange(16) % 3 * 50)
    together = draw(z, options, WORKERS[2])
    order = np.random.default_rng(6).permutation(16)
    permuted = draw(z[order].copy(), {name: value[order] for name, value in options.items()}, WORKERS[1])
    assert permuted.tolist() == together[order].tolist()
    for i in range(16):
        alone = draw(z[i : i + 1].copy(), {name: value[i : i + 1] for name, value in options.items()})
        assert alone[0] == together[i]


@pytest.mark.parametrize("name", ["seeds", "prompt_index", "k", "namespace", "position"])
def test_every_part_of_the_key_matters(name: str) -> None:
    z = np.zeros((50, 1000), np.float32)
    options = keys(50, prompt_index=3, k=1, namespace=0, position=9)
    other = dict(options)
    other[name] = options[name] + options[name].dtype.type(1)
    first, second = draw(z[:1], keys(1, **{n: v[0] for n, v in options.items()})), draw(z, other)
    assert np.all(draw(z, options) == first[0]) and np.all(second != first[0])


def test_high_half_of_the_seed_matters() -> None:
    z = np.zeros((1, 5000), np.float32)
    assert draw(z, keys(1, seeds=1))[0] != draw(z, keys(1, seeds=1 + (1 << 32)))[0]


def test_draws_follow_the_distribution() -> None:
    p = np.array([0.3, 0.25, 0.2, 0.1, 0.08, 0.05, 0.015, 0.005])
    draws = 40_000
    z = np.broadcast_to(np.log(p).astype(np.float32), (draws, 8)).copy()
    tokens = draw(z, keys(draws, position=np.arange(draws), prompt_index=0))
    counts = np.bincount(tokens, minlength=8)
    chi_square = ((counts - draws * p) ** 2 / (draws * p)).sum()
    assert chi_square < 29.9, "7 degrees of freedom: 29.9 is exceeded once in 10,000 seeds"
    assert ((counts - draws * p[::-1]) ** 2 / (draws * p[::-1])).sum() > 1000, "another distribution is noticed"
    pairs = np.bincount(tokens[0::2] * 8 + tokens[1::2], minlength=64)
    wanted = draws / 2 * np.outer(p, p).reshape(-1)
    large = wanted > 5
    assert ((pairs - wanted) ** 2 / wanted)[large].sum() < 110, "neighbouring positions are independent"


def test_impossible_arguments_are_refused() -> None:
    z = np.zeros((2, 10), np.float32)
    cases = {
        "prompt_index": 1 << 32, "k": 1 << 24, "namespace": 256, "position": -1, "top_k": -1,
        "top_p": 0.0,
    }  # fmt: skip
    for name, value in cases.items():
        with pytest.raises(ContractError, match=name):
            draw(z, keys(2, **{name: value}))
    for value in (1.5, np.nan):
        with pytest.raises(ContractError, match="top_p"):
            draw(z, keys(2, top_p=value))
    with pytest.raises(ContractError, match="does not occur"):
        sample(z, np.ones(2, np.float32), **keys(2), workers=WORKERS[0])
    with pytest.raises(ContractError, match="seeds of sample is int64"):
        sample(z, row_max(z), **{**keys(2), "seeds": np.zeros(2, np.int64)}, workers=WORKERS[0])
    with pytest.raises(ContractError, match="no columns"):
        sample(np.zeros((2, 0), np.float32), np.zeros(2, np.float32), **keys(2), workers=WORKERS[0])
    assert draw(np.zeros((0, 10), np.float32), keys(0)).shape == (0,)
