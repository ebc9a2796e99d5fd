"""The head's kernels in Triton's interpreter, bit for bit.

Statistics of logits in memory are compared with the CPU kernels on any numbers. The interpreter multiplies matrices in
an order of its own, so where a GEMM takes part its operands make every order exact: small integers, or a single product
that is not zero.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu import logprob as cpu
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.kernels.triton import launch_logprob as launch
from rlkernel.kernels.triton.launch import Tile
from rlkernel.kernels.triton.launch_logprob import DeviceRowStatistics, HeadTile, LeafTile, MergeTile
from rlkernel.kernels.triton.launch_logprob_backward import BackwardTuning, linear_logprob_backward
from rlkernel.kernels.triton.launch_sampling import row_statistics
from rlkernel.models.config import ModelConfig
from rlkernel.reference.head import shard_borders
from rlkernel.reference.reductions import matmul
from rlkernel.reference.regions import continued, output

WORKERS = Workers(1)
MERGE = MergeTile(rows=16, block=4, unroll=2)
SMALL = Tile(32, 128, 32, 2, 1, 1)  # few, wide programs: an operation of the interpreter costs the same for any size
FIELDS = ("max", "log_sum", "logprob", "entropy")
MODEL = ModelConfig(
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


def differing(found: DeviceRowStatistics, expected: cpu.RowStatistics) -> dict[str, int]:
    """Elements of each field whose bits differ; every NaN is one pattern."""
    counts = {"digest": int((found.digest.numpy().view(np.uint64) != expected.digest).sum())}
    for name in FIELDS:
        a, b = getattr(found, name).numpy(), np.ascontiguousarray(getattr(expected, name))
        same = (np.isnan(a) & np.isnan(b)) | (a.view(np.uint32) == b.view(np.uint32))
        counts[name] = int((~same).sum())
    return counts


def hazards(rows: int, columns: int, seed: int) -> np.ndarray:
    z = (np.random.default_rng(seed).standard_normal((rows, columns)) * 4).astype(np.float32)
    z[0, ::3] = -np.inf
    z[1, columns // 2] = np.uint32(0xFFC00001).view(np.float32)  # a NaN with a sign and a payload
    z[2, columns // 3] = np.inf
    z[3] = -np.inf
    z[4] = np.where(np.arange(columns) % 7 == 3, np.float32(0.0), np.float32(-0.0))
    z[5, 128:256] = -np.inf
    z[6] = -0.0
    z[7, : columns // 2] = -3e38
    z[7, -1] = 3e38
    return z


def on_cpu(z: np.ndarray, temperature: float, targets: np.ndarray, shards: int) -> cpu.RowStatistics:
    with np.errstate(all="ignore"):
        return cpu.row_statistics(z.copy(), temperature, targets, shards, WORKERS)


@pytest.mark.parametrize(
    ("columns", "shards", "temperature", "tile"),
    [
        (700, 1, 1.0, LeafTile(rows=2, warps=1, piece=8)),
        (700, 2, 0.7, LeafTile(rows=4, warps=2, piece=16)),
        (640, 4, 0.5, LeafTile(rows=1, warps=1, piece=4)),
        (1, 1, 1.3, LeafTile(rows=8, warps=1, piece=16)),
    ],
)
def test_statistics_of_logits_in_memory(columns: int, shards: int, temperature: float, tile: LeafTile) -> None:
    z = hazards(9, columns, columns)
    targets = np.random.default_rng(shards).integers(0, columns, 9)
    with np.errstate(all="ignore"):
        found = row_statistics(
            torch.from_numpy(z), temperature, torch.from_numpy(targets), shards, leaf_tile=tile, merge_tile=MERGE
        )
    assert not any(differing(found, on_cpu(z, temperature, targets, shards)).values())


def test_other_shards_and_one_bit_are_noticed() -> None:
    z = (np.random.default_rng(1).standard_normal((8, 1000)) * 4).astype(np.float32)
    targets = np.zeros(8, np.int64)
    with np.errstate(all="ignore"):
        found = row_statistics(torch.from_numpy(z), 1.0, torch.from_numpy(targets), 2, merge_tile=MERGE)
    assert differing(found, on_cpu(z, 1.0, targets, 1))["log_sum"] > 0
    assert differing(found, on_cpu(z, 1.0, targets, 1))["digest"] == 0, "the digest is free of shards"
    z.view(np.uint32)[3, 500] ^= 1
    assert differing(found, on_cpu(z, 1.0, targets, 2))["digest"] == 2, "both lanes of one row"


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "shards", "temperature", "tile"),
    [
        (20, 40, 300, 2, 0.7, HeadTile(16, 128, 16, 2, 8, 1, 1)),
        (33, 32, 384, 1, 1.0, HeadTile(32, 128, 32, 8, 32, 1, 1)),
        (16, 24, 500, 4, 2.0, HeadTile(16, 256, 32, 1, 16, 1, 1)),
    ],
)
def test_statistics_in_the_epilogue(
    rows: int, depth: int, columns: int, shards: int, temperature: float, tile: HeadTile
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(-3, 4, (rows, depth), generator=generator).float()
    w = torch.randint(-2, 3, (columns, depth), generator=generator).float()
    targets = torch.randint(0, columns, (rows,), generator=generator)
    z = (x.double() @ w.double().T).float().numpy()  # integers: exact in any order
    with np.errstate(all="ignore"):
        partials = launch.Partials(rows, -(-columns // 128), x.device)
        launch.fused_leaves(x, w, targets, temperature, partials, tile)
        found = launch.merge(partials, columns, shards, MERGE)
    assert not any(differing(found, on_cpu(z, temperature, targets.numpy(), shards)).values())
    z[rows // 2, columns // 2] += 1
    assert any(differing(found, on_cpu(z, temperature, targets.numpy(), shards)).values())


def single_products(rows: int, depth: int, columns: int, shards: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and w of which every sum of the head's forward and backward has at most one term in each of its leaves."""
    rng = np.random.default_rng(rows)
    x, w = np.zeros((rows, depth), np.float32), np.zeros((columns, depth), np.float32)
    x[np.arange(rows), rng.permutation(depth)[:rows]] = 2.0 ** rng.integers(-1, 2, rows)
    size = -(-columns // (128 * shards)) * 128
    for shard in range(shards):
        ids = np.arange(shard * size, min((shard + 1) * size, columns))
        if ids.size:
            w[rng.choice(ids, depth), np.arange(depth)] = rng.standard_normal(depth).astype(np.float32) * 3
    return torch.from_numpy(x), torch.from_numpy(w)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "shards", "chunk"),
    [(20, 40, 400, 1, 256), (10, 24, 500, 4, 128), (16, 16, 256, 4, 1024)],
)
def test_gradients(rows: int, depth: int, columns: int, shards: int, chunk: int) -> None:
    temperature = 0.7
    x, w = single_products(rows, depth, columns, shards)
    generator = torch.Generator().manual_seed(columns)
    targets = torch.randint(0, columns, (rows,), generator=generator)
    coefficient = torch.randn(rows, generator=generator)
    running = torch.randn((columns, depth), generator=generator)
    entries = build_contract(MODEL, profile="portable", dtype="float32", topology=Topology(tp=shards)).entries
    z = (x.double() @ w.double().T).float().numpy()
    with np.errstate(all="ignore"):
        expected = cpu.row_statistics(z, temperature, targets.numpy(), shards, WORKERS)
        dz = cpu.logits_gradient(
            z, expected, targets.numpy(), coefficient.numpy(), temperature, WORKERS, False, np.empty_like(z)
        )
    head = entries[("trainer_backward", "lm_head")]
    borders = shard_borders(head, dz.shape[1])
    dx = output(head, matmul(head, torch.from_numpy(dz), w.T.contiguous(), borders=borders))
    weight = continued(entries[("trainer_backward", "lm_head.wgrad")], torch.from_numpy(dz), x, running)

    tuning = BackwardTuning(chunk, 128, SMALL, SMALL, SMALL)
    with np.errstate(all="ignore"):
        found = launch.linear_logprob(
            x, w, targets, temperature, shards, "fma", chunk=chunk, product_tile=SMALL, merge_tile=MERGE
        )
        arguments = (x, w, found, targets, coefficient, temperature, shards)
        grad = running.clone()
        assert torch.equal(linear_logprob_backward(*arguments, grad, "fma", tuning=tuning), dx)
        assert torch.equal(grad.view(torch.int32), weight.view(torch.int32))
        fresh = torch.full_like(grad, torch.nan)
        linear_logprob_backward(*arguments, fresh, "fma", tuning=tuning, fresh=True)
        from_zero = torch.zeros_like(grad)
        linear_logprob_backward(*arguments, from_zero, "fma", tuning=tuning)
    assert torch.equal(fresh, from_zero)
    assert not torch.equal(grad, fresh), "chains that begin elsewhere"


def test_rows_in_two_calls_continue_one_chain() -> None:
    x, w = single_products(20, 40, 300, 1)
    targets, coefficient = torch.arange(20), torch.ones(20)
    tuning = BackwardTuning(128, 128, SMALL, SMALL, SMALL)
    with np.errstate(all="ignore"):
        found = launch.linear_logprob(x, w, targets, 1.0, 1, "fma", product_tile=SMALL, merge_tile=MERGE)
        whole, parts = torch.ones((300, 40)), torch.ones((300, 40))
        dx = linear_logprob_backward(x, w, found, targets, coefficient, 1.0, 1, whole, "fma", tuning=tuning)
        pieces = []
        for rows in (slice(0, 7), slice(7, 20)):
            part = DeviceRowStatistics(*(getattr(found, name)[rows] for name in (*FIELDS, "digest")))
            arguments = (x[rows], w, part, targets[rows], coefficient[rows], 1.0, 1, parts, "fma")
            pieces.append(linear_logprob_backward(*arguments, tuning=tuning))
    assert torch.equal(whole, parts)
    assert torch.equal(dx, torch.cat(pieces))


@pytest.mark.parametrize("columns", [0, 44, 172, 10_000])
def test_kept_logits_are_the_ones_that_would_be_computed_again(columns: int) -> None:
    x, w = single_products(12, 24, 300, 1)
    targets, coefficient = torch.arange(12), torch.ones(12)
    tuning = BackwardTuning(256, 128, SMALL, SMALL, SMALL)
    kept = launch.KeptLogits(columns)
    with np.errstate(all="ignore"):
        found = launch.linear_logprob(
            x, w, targets, 1.0, 1, "fma", chunk=128, product_tile=SMALL, merge_tile=MERGE, keep=kept
        )
        arguments = (x, w, found, targets, coefficient, 1.0, 1)
        once, twice = torch.zeros_like(w), torch.zeros_like(w)
        expected = linear_logprob_backward(*arguments, once, "fma", tuning=tuning)
        assert sorted(kept.pieces) == {0: [], 44: [(256, 300)], 172: [(128, 256), (256, 300)]}.get(
            columns, [(0, 128), (128, 256), (256, 300)]
        )
        assert torch.equal(linear_logprob_backward(*arguments, twice, "fma", tuning=tuning, kept=kept), expected)
        assert torch.equal(once, twice)
        if not columns:
            return
        kept.pieces[256, 300].zero_()  # they are read: other logits give another gradient
        other = linear_logprob_backward(*arguments, torch.zeros_like(w), "fma", tuning=tuning, kept=kept)
    assert not torch.equal(other, expected)


def test_what_is_refused() -> None:
    x, w, targets = torch.zeros((4, 16)), torch.zeros((300, 16)), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ContractError, match="mac='matrix' takes"):
        launch.linear_logprob(x, w, targets, 1.0, 1, "matrix")
    with pytest.raises(ContractError, match="power of two"):
        launch.linear_logprob(x, w, targets, 1.0, 3, "fma")
    with pytest.raises(ContractError, match="positive and finite"):
        launch.linear_logprob(x, w, targets, 0.0, 1, "fma")
    with pytest.raises(ContractError, match="one H"):
        launch.linear_logprob(x, w.T.contiguous(), targets, 1.0, 1, "fma")
    with pytest.raises(ContractError, match="int64 \\[4\\]"):
        launch.linear_logprob(x, w, targets[:3], 1.0, 1, "fma")
    with pytest.raises(ContractError, match="cuBLASLt"):
        launch.linear_logprob(x, w, targets, 1.0, 1, "fma", gemm="vendor")
    with pytest.raises(ContractError, match="without split-K"):
        launch.linear_logprob(x.bfloat16(), w.bfloat16(), targets, 1.0, 1, "matrix", gemm="vendor")
    with pytest.raises(ContractError, match="one or two leaves"):
        launch.linear_logprob(x.bfloat16(), w.bfloat16(), targets, 1.0, 1, "matrix", tile=HeadTile(block_n=64))
