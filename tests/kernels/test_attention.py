"""Paged attention, forward: bits against the reference, and everything that must not change them."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
import torch

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.attention import append_kv, attention, pages_from_sequences
from rlkernel.kernels.cpu.attention_tile import KEY_BLOCK, block_maximum, element_address
from rlkernel.kernels.cpu.threads import Workers
from tests.kernels import attention_reference as reference
from tests.kernels.arith import F32, assert_same_bits, bits, differs
from tests.kernels.attention_reference import Sequences, sequences


@pytest.fixture(scope="module")
def workers() -> Any:
    threads = Workers(2)
    yield threads
    threads.close()


def whole(batch: Sequences, workers: Workers, bf16: bool, page: int = 64) -> tuple[F32, F32]:
    """The training layout: every sequence in pages of its own, all rows at once."""
    k_pages, v_pages, table = pages_from_sequences(batch.k, batch.v, batch.starts, page, workers)
    return attention(batch.q, k_pages, v_pages, table, batch.starts, batch.positions, batch.scales[1], workers, bf16)


def check(batch: Sequences, out: F32, lse2: F32, bf16: bool, most: int = 24) -> None:
    """Compare with the reference; of long sequences only rows at the borders of blocks and splits."""
    for s in range(len(batch.starts) - 1):
        rows = batch.rows(s)
        length = rows.stop - rows.start
        chosen = np.arange(length)
        if length > most:
            borders = [0, 1, 47, 48, 62, 63, 64, 65, 127, 128, 300, 511, 512, 513, 575, 576, length - 2, length - 1]
            chosen = np.unique([p for p in borders if 0 <= p < length])
        q = batch.q[rows][chosen]
        expected = reference.forward(q, batch.k[rows], batch.v[rows], chosen, bf16)
        assert_same_bits(out[rows][chosen], expected[0])
        assert_same_bits(lse2[rows][chosen], expected[1])


SHAPES = [(3, 3, 16), (3, 1, 64), (8, 1, 16), (2, 1, 128), (4, 2, 24), (7, 1, 20)]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_at_block_borders(workers: Workers, shape: tuple[int, int, int], bf16: bool) -> None:
    batch = sequences([1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129], *shape, bf16)
    check(batch, *whole(batch, workers, bf16), bf16)


@pytest.mark.parametrize("bf16", [False, True])
def test_bits_at_split_borders(workers: Workers, bf16: bool) -> None:
    batch = sequences([511, 512, 513, 1030], 2, 1, 16, bf16)
    check(batch, *whole(batch, workers, bf16), bf16)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["spread", "subnormal", "signed_zeros", "special", "cancellation"])
def test_bits_of_hazards(workers: Workers, kind: str, bf16: bool) -> None:
    batch = sequences([5, 70, 530], 3, 1, 16, bf16, kind=kind)
    check(batch, *whole(batch, workers, bf16), bf16)


def test_definition_is_observable(workers: Workers) -> None:
    """Negative twins: a reference with another order or constant does not have the kernel's bits."""
    batch = sequences([640], 2, 1, 16, True)
    out, lse2 = whole(batch, workers, True)
    rows = np.array([40, 300, 600, 639])
    arguments = (batch.q[rows], batch.k, batch.v, rows, True)
    assert_same_bits(out[rows], reference.forward(*arguments)[0])
    assert_same_bits(lse2[rows], reference.forward(*arguments)[1])
    assert differs(out[rows], reference.forward(*arguments, rounded=False)[0])
    for twin in ({"block": 32}, {"split": 256}, {"split": 1 << 20}):  # the order of keys hides behind the rounding
        assert differs(lse2[rows], reference.forward(*arguments, **twin)[1]), twin
    batch = sequences([640], 2, 1, 16, False)
    out, lse2 = whole(batch, workers, False)
    arguments = (batch.q[rows], batch.k, batch.v, rows, False)
    twins: list[dict[str, Any]] = [{"block": 32}, {"split": 256}, {"split": 1 << 20}, {"descending": True}]
    for twin in twins:
        other = reference.forward(*arguments, **twin)
        assert differs(out[rows], other[0]), twin


def shuffled_pages(batch: Sequences, page: int, seed: int = 1) -> tuple[F32, F32, Any, Any]:
    """Empty pages in random order, full of NaN and infinities; ``(k_pages, v_pages, table, slots)``.

    Table entries that no sequence needs point outside the pages.
    """
    generator = np.random.default_rng(seed)
    lengths = np.diff(batch.starts)
    needed = -(-lengths // page)
    order = generator.permutation(int(needed.sum()) + 3)
    table = np.full((len(lengths), int(needed.max()) + 1), 1 << 30, np.int32)
    slots, used = [], 0
    for s, count in enumerate(needed):
        table[s, :count] = order[used : used + count]
        used += count
        keys = np.arange(lengths[s])
        slots.append(table[s, keys // page].astype(np.int64) * page + keys % page)
    junk = np.array([np.nan, np.inf, -np.inf], np.float32)
    shape = (len(order), batch.k.shape[1], batch.k.shape[2], page)
    k_pages = generator.choice(junk, shape)
    v_pages = generator.choice(junk, (shape[0], shape[1], page, shape[2]))
    return k_pages, v_pages, table, np.concatenate(slots)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("depth", [16, 20, 64])
def test_page_size_and_stale_slots_change_nothing(workers: Workers, depth: int, bf16: bool) -> None:
    batch = sequences([1, 9, 64, 77, 530], 3, 1, depth, bf16)
    expected = whole(batch, workers, bf16)
    for page in (8, 16, 24, 64, 96, 128, 1024):
        k_pages, v_pages, table, slots = shuffled_pages(batch, page)
        append_kv(batch.k, batch.v, k_pages, v_pages, slots, workers)
        actual = attention(
            batch.q, k_pages, v_pages, table, batch.starts, batch.positions, batch.scales[1], workers, bf16
        )
        for x, y in zip(actual, expected, strict=True):
            assert np.array_equal(bits(x), bits(y)), page


def test_a_stale_slot_that_is_read_shows(workers: Workers) -> None:
    """Negative twin of the stale slots: the same junk in a slot that is used reaches the rows that use it."""
    batch = sequences([77], 3, 1, 16, False)
    k_pages, v_pages, table, slots = shuffled_pages(batch, 16)
    append_kv(batch.k[:-1], batch.v[:-1], k_pages, v_pages, slots[:-1], workers)
    out, _ = attention(batch.q, k_pages, v_pages, table, batch.starts, batch.positions, batch.scales[1], workers, False)
    assert np.isnan(out[-1]).all() and np.isfinite(out[:-1]).all()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("page", [16, 64])
def test_decode_and_chunks_equal_the_whole(workers: Workers, page: int, bf16: bool) -> None:
    """Keys arrive with their rows, as in an engine; 1, 7, 64 or 250 rows at a time."""
    for length, chunk in ((140, 1), (140, 7), (700, 64), (700, 250)):
        batch = sequences([length], 3, 1, 16, bf16)
        expected = whole(batch, workers, bf16)
        k_pages, v_pages, table, slots = shuffled_pages(batch, page)
        for begin in range(0, length, chunk):
            part = slice(begin, min(begin + chunk, length))
            append_kv(batch.k[part], batch.v[part], k_pages, v_pages, slots[part], workers)
            starts = np.array([0, part.stop - part.start], np.int32)
            positions = np.arange(part.start, part.stop, dtype=np.int32)
            out, lse2 = attention(
                batch.q[part], k_pages, v_pages, table, starts, positions, batch.scales[1], workers, bf16
            )
            assert np.array_equal(bits(out), bits(expected[0][part])), (chunk, begin)
            assert np.array_equal(bits(lse2), bits(expected[1][part])), (chunk, begin)


def test_batched_decode_equals_the_whole(workers: Workers) -> None:
    """The last row of each sequence in one batch, sequences without a row between them."""
    lengths = [1, 5, 64, 65, 200, 513, 77]
    batch = sequences(lengths, 9, 3, 64, True)
    expected = whole(batch, workers, True)
    k_pages, v_pages, table = pages_from_sequences(batch.k, batch.v, batch.starts, 16)
    present = np.array([1, 1, 0, 1, 1, 1, 0], bool)
    last = (batch.starts[1:] - 1)[present]
    starts = np.concatenate(([0], np.cumsum(present))).astype(np.int32)
    actual = attention(
        batch.q[last], k_pages, v_pages, table, starts, batch.positions[last], batch.scales[1], workers, True
    )
    for x, y in zip(actual, expected, strict=True):
        assert np.array_equal(bits(x), bits(y[last]))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batch_and_threads_change_nothing(threads: int) -> None:
    lengths = [3, 130, 64, 1, 540, 17]
    batch = sequences(lengths, 4, 2, 32, True)
    pool = Workers(threads)
    out, lse2 = whole(batch, pool, True)
    alone = Workers(1)
    for s in range(len(lengths)):
        rows = batch.rows(s)
        single = Sequences(
            batch.q[rows], batch.k[rows], batch.v[rows], batch.dout[rows], np.array([0, lengths[s]], np.int32)
        )
        expected = whole(single, alone, True)
        assert np.array_equal(bits(out[rows]), bits(expected[0]))
        assert np.array_equal(bits(lse2[rows]), bits(expected[1]))
    pool.close()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nonfinite_values_reach_only_their_dependents(workers: Workers, where: str, value: float) -> None:
    batch = sequences([100, 200], 4, 2, 16, False)
    expected, _ = whole(batch, workers, False)
    at = 100 + 70
    changed = {name: getattr(batch, name).copy() for name in "qkv"}
    changed[where][at, 1] = value
    out, _ = whole(Sequences(**changed, dout=batch.dout, starts=batch.starts), workers, False)
    touched = np.zeros(out.shape[:2], bool)
    if where == "q":
        touched[at, 1] = True
    else:
        touched[at:, 2:] = True  # KV head 1 serves query heads 2 and 3
    assert np.array_equal(bits(out[~touched]), bits(expected[~touched]))
    different = np.any(bits(out) != bits(expected), axis=-1)
    if where != "k" or np.isnan(value):  # an infinite score may only take all or none of the weight
        assert (different | ~touched).all()
        assert not np.isfinite(out[touched]).all(axis=-1).any()


def test_row_without_a_finite_score_is_nan(workers: Workers) -> None:
    batch = sequences([3], 1, 1, 16, False)
    q, k = np.ones_like(batch.q), batch.k.copy()
    k[0] = -np.inf
    out, lse2 = whole(Sequences(q, k, batch.v, batch.dout, batch.starts), workers, False)
    assert np.isnan(out[0]).all() and np.isnan(lse2[0]).all()
    assert np.isfinite(out[1:]).all() and np.isfinite(lse2[1:]).all()


@pytest.mark.parametrize(("bf16", "bound"), [(False, 2e-6), (True, 1.2e-2)])
def test_accuracy(workers: Workers, bf16: bool, bound: float) -> None:
    batch = sequences([600], 6, 2, 64, bf16)
    out, lse2 = whole(batch, workers, bf16)
    q, k, v = (torch.from_numpy(x).double().transpose(0, 1) for x in (batch.q, batch.k, batch.v))
    scores = q @ k.repeat_interleave(3, 0).transpose(1, 2) / 8
    scores = scores.masked_fill(torch.ones(600, 600, dtype=torch.bool).triu(1), -torch.inf)
    exact = (scores.softmax(-1) @ v.repeat_interleave(3, 0)).transpose(0, 1).numpy()
    assert np.abs(out - exact).max() < bound
    assert np.abs(lse2 - (scores.logsumexp(-1) / np.log(2)).T.numpy()).max() < (5e-3 if bf16 else 5e-6)


@numba.njit
def _block_maximum(values: Any) -> Any:
    return block_maximum(element_address(values, 0))


def test_block_maximum() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        values = generator.standard_normal(KEY_BLOCK).astype(np.float32)
        assert _block_maximum(values) == values.max()
    zeros = np.full(KEY_BLOCK, -0.0, np.float32)
    assert bits(_block_maximum(zeros)) == 0x80000000
    for at in (0, 17, 63):
        mixed = zeros.copy()
        mixed[at] = 0.0
        assert bits(_block_maximum(mixed)) == 0
        mixed[at] = np.nan
        assert np.isnan(_block_maximum(mixed))


def test_nothing_to_do(workers: Workers) -> None:
    batch = sequences([0, 0], 2, 1, 16, False)
    out, lse2 = whole(batch, workers, False)
    assert out.shape == (0, 2, 16) and lse2.shape == (0, 2)


def test_bad_arguments_are_named(workers: Workers) -> None:
    batch = sequences([20, 30], 2, 1, 16, False)
    k_pages, v_pages, table = pages_from_sequences(batch.k, batch.v, batch.starts, 16)
    good: dict[str, Any] = {
        "q": batch.q, "k_pages": k_pages, "v_pages": v_pages, "block_table": table, "starts": batch.starts,
        "positions": batch.positions, "scale2": batch.scales[1], "workers": workers, "bf16": False,
    }  # fmt: skip
    attention(**good)
    outside, short = table.copy(), table[:, :1].copy()
    outside[1, 1] = len(k_pages)
    jump = batch.positions.copy()
    jump[3] = 7
    for wrong, message in (
        ({"block_table": outside}, r"entry \[1, 1\] is 4; pages 0..3 exist"),
        ({"block_table": short}, "1 pages a sequence, 2 are needed"),
        ({"block_table": table.astype(np.int64)}, "block_table is int64; int32 is expected"),
        ({"positions": jump}, "consecutive"),
        ({"positions": batch.positions - 1}, ">= 0"),
        ({"positions": batch.positions[:-1]}, "one a query row"),
        ({"starts": batch.starts[:-1]}, "starts must rise from 0 to the 50 rows"),
        ({"q": batch.q[:, :, :8]}, "2 query heads of 8 do not fit 1 KV heads of 16"),
        ({"q": batch.q.astype(np.float64)}, "q is float64; float32 is expected"),
        ({"v_pages": k_pages[:, :, :8]}, "C-contiguous"),
        ({"v_pages": v_pages[:3]}, "do not fit K pages"),
    ):
        with pytest.raises(ContractError, match=message):
            attention(**{**good, **wrong})
    with pytest.raises(ContractError, match=r"a page of 12 keys is not possible"):
        pages_from_sequences(batch.k, batch.v, batch.starts, 12)
    with pytest.raises(ContractError, match=r"slots 0\.\.64 reach outside the 64 slots"):
        append_kv(batch.k[:2], batch.v[:2], k_pages, v_pages, np.array([0, 64]), workers)
    with pytest.raises(ContractError, match="should both be"):
        append_kv(batch.k, batch.v, k_pages, v_pages, np.array([0, 1]), workers)
