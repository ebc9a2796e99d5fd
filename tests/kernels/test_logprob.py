"""Row statistics and the logits' gradient: bits against the reference, special rows, independence, accuracy."""

from __future__ import annotations

import numpy as np
import pytest

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.logprob import RowStatistics, logits_gradient, row_statistics
from tests.kernels import arith, rowref
from tests.kernels.arith import F32
from tests.kernels.rowref import FineWorkers

WORKERS = [FineWorkers(1), FineWorkers(2), FineWorkers(3)]
FIELDS = ("max", "log_sum", "logprob", "entropy")


def check(logits: F32, temperature: float, shards: int, seed: int = 0) -> None:
    rows, columns = logits.shape
    generator = np.random.default_rng(seed)
    targets = generator.integers(0, columns, rows)
    g = generator.standard_normal(rows).astype(np.float32)
    expected = [rowref.row_statistics(logits[i], temperature, int(targets[i]), shards) for i in range(rows)]
    for workers in WORKERS:
        z = logits.copy()
        ours = row_statistics(z, temperature, targets, shards, workers)
        assert ours.digest.shape == (rows, 2)
        for i, row in enumerate(expected):
            arith.assert_same_bits(z[i], row["z"])
            for name in FIELDS:
                arith.assert_same_bits(getattr(ours, name)[i], row[name])
            assert tuple(int(lane) for lane in ours.digest[i]) == row["digest"]
        for bf16 in (False, True):
            dz = logits_gradient(z, ours, targets, g, temperature, workers, bf16)
            for i, row in enumerate(expected):
                want = rowref.logits_gradient(
                    row["z"], row["max"], row["log_sum"], int(targets[i]), g[i], temperature, bf16
                )
                arith.assert_same_bits(dz[i], want)


@pytest.mark.parametrize("kind", arith.HAZARDS)
@pytest.mark.parametrize(
    ("shape", "shards"), [((2, 1), 1), ((3, 127), 1), ((4, 1000), 1), ((2, 1000), 4), ((0, 50), 1)]
)
def test_bits_are_those_of_the_reference(shape: tuple[int, int], shards: int, kind: str) -> None:
    with np.errstate(all="ignore"):
        check(arith.hazards(np.random.default_rng(shape[1]), shape, kind), 1.0, shards)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1e-3, 3.0])
@pytest.mark.parametrize("shards", [1, 2, 8])
def test_temperatures_and_shards(temperature: float, shards: int) -> None:
    # 8 shards of 700 columns: two leaves are short or empty, the last shards hold nothing
    check((np.random.default_rng(1).standard_normal((2, 700)) * 8).astype(np.float32), temperature, shards)


def special_rows() -> dict[str, F32]:
    base = (np.random.default_rng(2).standard_normal(400) * 3).astype(np.float32)
    rows = {name: base.copy() for name in ("nan", "negative nan", "inf", "some -inf", "leaf of -inf", "far")}
    rows["nan"][300] = np.nan
    rows["negative nan"][5] = np.uint32(0xFFC00001).view(np.float32)
    rows["inf"][200] = np.inf
    rows["some -inf"][1::3] = -np.inf
    rows["leaf of -inf"][128:256] = -np.inf
    rows["far"][:256] = -3e38
    rows["far"][399] = 3e38
    rows["all -inf"] = np.full(400, -np.inf, np.float32)
    rows["equal"] = np.zeros(400, np.float32)
    rows["zeros of both signs"] = np.where(np.arange(400) % 7 == 3, 0.0, -0.0).astype(np.float32)
    rows["negative zeros"] = np.full(400, -0.0, np.float32)
    return rows


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", special_rows())
def test_special_rows(name: str, shards: int) -> None:
    row = special_rows()[name]
    with np.errstate(all="ignore"):
        check(row[None].copy(), 1.0, shards)
        result = row_statistics(row[None].copy(), 1.0, np.array([399]), shards, WORKERS[0])
    if name in ("nan", "negative nan", "inf", "all -inf"):
        assert np.isnan(result.logprob[0]) and np.isnan(result.entropy[0])
    else:
        assert np.isfinite(result.logprob[0]) and np.isfinite(result.entropy[0])


def test_nan_in_any_column_gives_nan_wherever_the_target_is() -> None:
    base = np.random.default_rng(3).standard_normal((1, 300)).astype(np.float32)
    for column in range(0, 300, 13):
        z = base.copy()
        z[0, column] = np.nan
        assert np.isnan(row_statistics(z, 1.0, np.array([7]), 2, WORKERS[0]).logprob[0])


def test_a_target_at_minus_infinity() -> None:
    z = np.zeros((1, 10), np.float32)
    z[0, 4] = -np.inf
    assert row_statistics(z, 1.0, np.array([4]), 1, WORKERS[0]).logprob[0] == -np.inf


def test_all_nan_patterns_have_one_digest() -> None:
    rows = np.zeros((3, 200), np.float32)
    rows.view(np.uint32)[:, 50] = [0x7FC00000, 0xFFC00000, 0x7F800001]
    digest = row_statistics(rows, 1.0, np.zeros(3, np.int64), 1, WORKERS[0]).digest
    assert np.all(digest == digest[0])
    other = np.zeros((1, 200), np.float32)
    other.view(np.uint32)[0, 50] = 1
    assert np.all(row_statistics(other, 1.0, np.zeros(1, np.int64), 1, WORKERS[0]).digest != digest[0])


def test_rows_do_not_depend_on_the_batch() -> None:
    logits = (np.random.default_rng(4).standard_normal((5, 2000)) * 4).astype(np.float32)
    targets = np.arange(5) * 300
    together = row_statistics(logits.copy(), 0.9, targets, 2, WORKERS[2])
    for i in range(5):
        alone = row_statistics(logits[i : i + 1].copy(), 0.9, targets[i : i + 1], 2, WORKERS[0])
        for name in FIELDS:
            arith.assert_same_bits(getattr(alone, name)[0], getattr(together, name)[i])
        assert np.array_equal(alone.digest[0], together.digest[i])


def test_other_leaves_and_shards_and_plain_formulas_are_noticed() -> None:
    logits = (np.random.default_rng(5).standard_normal((32, 2000)) * 4).astype(np.float32)
    targets = np.zeros(32, np.int64)
    ours = row_statistics(logits.copy(), 1.0, targets, 1, WORKERS[0])
    small = [rowref.row_statistics(row, 1.0, 0, 1, leaf=64) for row in logits]
    assert arith.differs(ours.log_sum, np.array([s["log_sum"] for s in small])), "leaves of 64 columns"
    assert arith.differs(ours.entropy, np.array([s["entropy"] for s in small]))
    sharded = row_statistics(logits.copy(), 1.0, targets, 4, WORKERS[0])
    assert arith.differs(ours.log_sum, sharded.log_sum), "another number of shards"
    assert np.array_equal(ours.digest, sharded.digest), "the digest is free of shards"
    plain = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, dtype=np.float32))
    assert arith.differs(ours.log_sum, plain), "NumPy's own"
    flipped = logits.copy()
    flipped[3].view(np.uint32)[77] ^= 1
    assert np.all(row_statistics(flipped, 1.0, targets, 1, WORKERS[0]).digest[3] != ours.digest[3]), "one bit"


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
def test_accuracy_against_float64(scale: float) -> None:
    logits = (np.random.default_rng(6).standard_normal((8, 5000)) * scale).astype(np.float32)
    targets = np.arange(8) * 500
    z = logits.copy()
    ours = row_statistics(z, 0.8, targets, 2, WORKERS[0])
    z64 = z.astype(np.float64)
    log_p = z64 - np.log(np.exp(z64 - z64.max(1, keepdims=True)).sum(1, keepdims=True)) - z64.max(1, keepdims=True)
    assert np.abs(ours.logprob - log_p[np.arange(8), targets]).max() < 5e-6
    assert np.abs(ours.entropy + (np.exp(log_p) * log_p).sum(1)).max() < 5e-6
    g = np.linspace(-1, 1, 8).astype(np.float32)
    dz = logits_gradient(z, ours, targets, g, 0.8, WORKERS[0], False)
    onehot = np.zeros_like(z64)
    onehot[np.arange(8), targets] = 1
    assert np.abs(dz - (onehot - np.exp(log_p)) * g[:, None] / np.float32(0.8)).max() < 2e-6


def test_gradient_in_place_has_the_same_bits() -> None:
    z = np.random.default_rng(7).standard_normal((3, 500)).astype(np.float32)
    targets, g = np.array([0, 499, 250]), np.ones(3, np.float32)
    statistics = row_statistics(z, 1.0, targets, 1, WORKERS[0])
    apart = logits_gradient(z, statistics, targets, g, 1.0, WORKERS[0], True)
    assert logits_gradient(z, statistics, targets, g, 1.0, WORKERS[1], True, out=z) is z
    arith.assert_same_bits(z, apart)


def test_impossible_arguments_are_refused() -> None:
    z, targets = np.zeros((2, 10), np.float32), np.array([0, 9])
    workers = WORKERS[0]
    for temperature in (0.0, -1.0, np.nan, np.inf, 1e-60):
        with pytest.raises(ContractError, match="temperature"):
            row_statistics(z, temperature, targets, 1, workers)
    for shards in (0, 3, -2):
        with pytest.raises(ContractError, match="power of two"):
            row_statistics(z, 1.0, targets, shards, workers)
    with pytest.raises(ContractError, match=r"targets of row_statistics\[1\] is 10"):
        row_statistics(z, 1.0, targets + np.array([0, 1]), 1, workers)
    with pytest.raises(ContractError, match="no columns"):
        row_statistics(np.zeros((2, 0), np.float32), 1.0, targets, 1, workers)
    with pytest.raises(ContractError, match="z of row_statistics is float64"):
        row_statistics(z.astype(np.float64), 1.0, targets, 1, workers)  # type: ignore[arg-type]
    one = np.zeros(1, np.float32)
    short = RowStatistics(max=one, log_sum=one, logprob=one, entropy=one, digest=np.zeros((1, 2), np.uint64))
    with pytest.raises(ContractError, match=r"statistics\.max of logits_gradient"):
        logits_gradient(z, short, targets, np.zeros(2, np.float32), 1.0, workers, False)
