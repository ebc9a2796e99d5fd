"""Sampling and digests in Triton's interpreter against the CPU kernels: tokens, statistics and lanes bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu import digest as cpu_digest
from rlkernel.kernels.cpu import logprob as cpu_logprob
from rlkernel.kernels.cpu import sampling as cpu_sampling
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.kernels.triton.launch_digest import Part, TensorDigests, rows_digest, tensor_digest
from rlkernel.kernels.triton.launch_logprob import LeafTile, MergeTile
from rlkernel.kernels.triton.launch_sampling import DeviceSamplingKeys, sample
from rlkernel.ops.head import SamplingKeys

WORKERS = Workers(1)
MERGE = MergeTile(rows=16, block=4, unroll=2)
COLUMNS = 200
ROWS = 16


def hazards() -> np.ndarray:
    z = (np.random.default_rng(1).standard_normal((ROWS, COLUMNS)) * 3).astype(np.float32)
    z[1, ::3] = -np.inf
    z[2, 100] = np.nan
    z[3, 66:68] = np.inf
    z[4] = -np.inf
    z[5] = np.where(np.arange(COLUMNS) % 7 == 3, np.float32(0.0), np.float32(-0.0))
    z[6:10] = np.round(z[6:10])  # ties
    z[10] = np.nan
    z[11, :5] = -np.nan
    z[12, :150] = -np.inf
    return z


def keys() -> SamplingKeys:
    rng = np.random.default_rng(2)
    return SamplingKeys(
        seeds=rng.integers(0, 1 << 63, ROWS).astype(np.uint64) * np.uint64(2) + np.uint64(1),
        prompt_index=rng.integers(0, 1 << 32, ROWS),
        k=rng.integers(0, 1 << 24, ROWS),
        namespace=rng.integers(0, 2, ROWS),
        position=rng.integers(0, 1 << 32, ROWS),
        greedy=np.arange(ROWS) % 5 == 1,
        top_k=np.where(np.arange(ROWS) % 2, 0, rng.integers(1, COLUMNS + 5, ROWS)),
        top_p=np.where(np.arange(ROWS) % 3 == 2, 1.0, rng.random(ROWS) * 0.98 + 0.01),
    )


def on_device(values: SamplingKeys) -> DeviceSamplingKeys:
    return DeviceSamplingKeys(
        **{
            name: torch.from_numpy(value.view(np.int64) if value.dtype == np.uint64 else value)
            for name, value in vars(values).items()
        }
    )


def on_cpu(z: np.ndarray, values: SamplingKeys) -> np.ndarray:
    divided = z.copy()
    with np.errstate(all="ignore"):
        found = cpu_logprob.row_statistics(divided, 0.7, np.zeros(ROWS, np.int64), 2, WORKERS)
        return cpu_sampling.sample(divided, found.max, **vars(values), workers=WORKERS)


def drawn(z: np.ndarray, values: SamplingKeys, truncation: bool) -> tuple[np.ndarray, object]:
    tile = LeafTile(rows=8, warps=1, piece=8)
    with np.errstate(all="ignore"):
        tokens, found = sample(
            torch.from_numpy(z), 0.7, on_device(values), 2, truncation=truncation, leaf_tile=tile, merge_tile=MERGE
        )
    return tokens.numpy(), found


def test_tokens_and_their_statistics() -> None:
    z, values = hazards(), keys()
    expected = on_cpu(z, values)
    tokens, found = drawn(z, values, True)
    assert np.array_equal(tokens, expected)
    with np.errstate(all="ignore"):
        statistics = cpu_logprob.row_statistics(z.copy(), 0.7, expected, 2, WORKERS)
    for name in ("max", "log_sum", "logprob", "entropy"):
        a, b = getattr(found, name).numpy(), getattr(statistics, name)
        assert ((np.isnan(a) & np.isnan(b)) | (a.view(np.uint32) == b.view(np.uint32))).all(), name
    assert np.array_equal(found.digest.numpy().view(np.uint64), statistics.digest)


def test_rows_that_are_cut_are_refused_where_the_batch_is_not_prepared_for_them() -> None:
    z, values = hazards(), keys()
    tokens, _ = drawn(z, values, False)
    cut = ~values.greedy & (((values.top_k > 0) & (values.top_k < COLUMNS)) | (values.top_p < 1))
    assert 0 < cut.sum() < ROWS
    assert np.array_equal(tokens, np.where(cut, -1, on_cpu(z, values)))


@pytest.mark.parametrize("name", ["seeds", "prompt_index", "k", "namespace", "position"])
def test_every_counter_enters_the_draw(name: str) -> None:
    z = (np.random.default_rng(3).standard_normal((ROWS, COLUMNS)) * 0.1).astype(np.float32)
    plain = replace(keys(), greedy=np.zeros(ROWS, bool), top_k=np.zeros(ROWS, np.int64), top_p=np.ones(ROWS))
    other = replace(plain, **{name: getattr(plain, name) ^ getattr(plain, name).dtype.type(1)})
    before, after = drawn(z, plain, False)[0], drawn(z, other, False)[0]
    assert np.array_equal(before, on_cpu(z, plain))
    assert np.array_equal(after, on_cpu(z, other))
    assert (before != after).sum() > ROWS // 2


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.uint64])
@pytest.mark.parametrize("count", [0, 1, 4097, 20001])
def test_tensor_digests(dtype: type, count: int) -> None:
    data = np.random.default_rng(count).integers(0, 256, count * np.dtype(dtype).itemsize).astype(np.uint8).view(dtype)
    with np.errstate(all="ignore"):
        found = tensor_digest(torch.from_numpy(data), (1 << 40) + 7).numpy().view(np.uint64)
        expected = cpu_digest.tensor_digest(data, WORKERS, index_offset=(1 << 40) + 7)
        assert tuple(int(lane) for lane in found) == expected
        if count:
            assert (
                tuple(int(lane) for lane in tensor_digest(torch.from_numpy(data)).numpy().view(np.uint64)) != expected
            )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [48, 7, 20001])
def test_digests_of_many_tensors_are_those_of_each(kind: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    matrix = torch.randn((6, width), generator=generator).to(kind)
    first, second = np.array([4, 0, 3]), np.array([5, 1])  # two tensors whose rows lie scattered in one matrix
    others = [torch.randn(shape, generator=generator).to(kind) for shape in ((3, 5), (1,), (0, 4), (2, 9000))]
    logical = [matrix[first], others[0], others[1], matrix[second], others[2], others[3]]
    parts = [
        Part(matrix, first), Part(others[0]), Part(others[1]), Part(matrix, second), Part(others[2]), Part(others[3])
    ]  # fmt: skip
    digests = TensorDigests(parts)
    for _ in range(2):
        with np.errstate(all="ignore"):
            found = digests().numpy().view(np.uint64)
        for tensor, lanes in zip(logical, found, strict=True):
            bits = tensor.reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
            expected = cpu_digest.tensor_digest(bits.view({2: np.uint16, 4: np.uint32}[bits.itemsize]), WORKERS)
            assert tuple(map(int, lanes)) == expected
        # the next call reads what is there then
        bit = matrix.view({2: torch.int16, 4: torch.int32}[matrix.element_size()])
        bit[5, width - 1] ^= 1
        logical[0], logical[3] = matrix[first], matrix[second]
    with pytest.raises(ContractError, match="C-contiguous"):
        TensorDigests([Part(matrix.T)])


def test_canonical_nan_of_activations_only() -> None:
    patterns = torch.tensor([0x7FC0, 0xFFC0 - 0x10000, 0x7F81, 5], dtype=torch.int16).view(torch.bfloat16)
    plain = torch.tensor([0x7FC0, 0x7FC0, 0x7FC0, 5], dtype=torch.int16).view(torch.bfloat16)
    with np.errstate(all="ignore"):
        assert torch.equal(tensor_digest(patterns, canonical=True), tensor_digest(plain))
        assert not torch.equal(tensor_digest(patterns), tensor_digest(plain))
        with pytest.raises(ContractError, match="no canonical NaN"):
            tensor_digest(torch.zeros(3, dtype=torch.int64), canonical=True)


def test_digests_of_rows() -> None:
    z = np.random.default_rng(4).standard_normal((3, 20000)).astype(np.float32)
    z[1, 5] = np.nan
    z[2, :3] = np.uint32(0xFFC00001).view(np.float32)
    with np.errstate(all="ignore"):
        found = rows_digest(torch.from_numpy(z)).numpy().view(np.uint64)
        assert np.array_equal(found, cpu_digest.float32_rows_digest(z))
        z.view(np.uint32)[0, 19999] ^= 1
        assert not np.array_equal(found[0], cpu_digest.float32_rows_digest(z)[0])


def test_what_is_refused() -> None:
    z, values = torch.zeros((ROWS, COLUMNS)), on_device(keys())
    with pytest.raises(ContractError, match="C-contiguous float32"):
        sample(z.T, 1.0, values, 1, truncation=False)
    with pytest.raises(ContractError, match="top_p of the keys"):
        sample(z, 1.0, replace(values, top_p=values.top_p.float()), 1, truncation=False)
    with pytest.raises(ContractError, match="power of two"):
        sample(z, 1.0, values, 6, truncation=False)
    with pytest.raises(ContractError, match="C-contiguous tensor"):
        tensor_digest(z.T)
