"""Tensor digests against plain Python integers; every kind of change is caught."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu import digest as digest_module
from rlkernel.kernels.cpu.digest import float32_rows_digest, panels_digest, tensor_digest
from rlkernel.kernels.cpu.microkernel import PANEL_WIDTH
from rlkernel.kernels.cpu.panels import pack_rows
from rlkernel.kernels.cpu.threads import Workers
from tests.kernels.arith import bits, hazards, round_bf16

MASK = (1 << 64) - 1


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(2)
    yield pool
    pool.close()


def reference(patterns: list[int], offset: int = 0) -> tuple[int, int]:
    """The definition in unbounded integers."""
    first = second = 0
    for i, pattern in enumerate(patterns):
        v = ((offset + i + 1) * 0x9E3779B97F4A7C15 + pattern) & MASK
        v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & MASK
        first += v ^ (v >> 31)
        v = ((offset + i + 1) * 0xD1B54A32D192ED03 + pattern) & MASK
        v = ((v ^ (v >> 33)) * 0xFF51AFD7ED558CCD) & MASK
        v = ((v ^ (v >> 33)) * 0xC4CEB9FE1A85EC53) & MASK
        second += v ^ (v >> 33)
    return first & MASK, second & MASK


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.int64, np.bool_])
def test_every_element_size(dtype: type, workers: Workers) -> None:
    values: NDArray[Any] = np.random.default_rng(1).integers(0, 200, (7, 31)).astype(dtype)
    patterns = values.reshape(-1).view(f"u{values.dtype.itemsize}").tolist()
    assert tensor_digest(values, workers) == reference(patterns)
    assert tensor_digest(values, workers, index_offset=12345) == reference(patterns, 12345)


def test_layout_in_memory_does_not_matter(workers: Workers) -> None:
    values = hazards(np.random.default_rng(2), (12, 34), "special")
    assert tensor_digest(np.asfortranarray(values), workers) == tensor_digest(values, workers)
    assert tensor_digest(values[:, ::2], workers) == tensor_digest(values[:, ::2].copy(), workers)
    assert tensor_digest(values.reshape(-1), workers) == tensor_digest(values, workers)  # the shape is the manifest's


def test_empty_tensor(workers: Workers) -> None:
    assert tensor_digest(np.zeros((0, 3), np.float32), workers) == (0, 0)


def test_parts_add_up_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_module, "_GRAIN", 1)
    values = hazards(np.random.default_rng(3), (70_000,), "normal")
    digests = []
    for threads in (1, 2, 3):
        pool = Workers(threads)
        whole = tensor_digest(values, pool)
        head, tail = tensor_digest(values[:41], pool), tensor_digest(values[41:], pool, index_offset=41)
        assert whole == ((head[0] + tail[0]) & MASK, (head[1] + tail[1]) & MASK)
        digests.append(whole)
        pool.close()
    assert len(set(digests)) == 1
    assert digests[0] == reference(values.view(np.uint32).tolist())


def test_changes_are_caught_in_both_lanes(workers: Workers) -> None:
    values = hazards(np.random.default_rng(4), (50, 40), "normal")
    values[3, 3] = 0.0
    original = tensor_digest(values, workers)

    def changed(array: object) -> bool:
        lanes = tensor_digest(np.asarray(array), workers)
        return lanes[0] != original[0] and lanes[1] != original[1]

    generator = np.random.default_rng(5)
    for _ in range(64):
        flipped = values.copy()
        flipped.view(np.uint32)[tuple(generator.integers(0, (50, 40)))] ^= np.uint32(1 << generator.integers(0, 32))
        assert changed(flipped)
    swapped = values.copy()
    swapped[10, [5, 6]] = swapped[10, [6, 5]]
    assert changed(swapped)
    assert changed(values.T.copy())
    assert changed(values[:-1])
    assert changed(np.concatenate([values, np.zeros((1, 40), np.float32)]))  # appended zeros count
    negative_zero = values.copy()
    negative_zero[3, 3] = -0.0
    assert changed(negative_zero)


def test_weights_keep_nan_payloads(workers: Workers) -> None:
    quiet, other = (np.array([pattern], np.uint32).view(np.float32) for pattern in (0x7FC00000, 0xFFC00001))
    assert tensor_digest(quiet, workers) != tensor_digest(other, workers)
    assert np.array_equal(float32_rows_digest(quiet[None]), float32_rows_digest(other[None]))


@pytest.mark.parametrize(
    ("first", "rows"),
    [(0, 2 * PANEL_WIDTH + 9), (0, 5), (PANEL_WIDTH - 3, 7), (2 * PANEL_WIDTH + 6, 0), (9, 2 * PANEL_WIDTH)],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_packed_weights_have_the_digest_of_the_logical_tensor(
    first: int, rows: int, bf16: bool, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_module, "_GRAIN", 0)
    w = hazards(np.random.default_rng(6), (2 * PANEL_WIDTH + 9, 37), "special")
    raw = (bits(round_bf16(w)) >> 16).astype(np.uint16) if bf16 else bits(w)
    panels = pack_rows(raw if bf16 else w, workers)
    expected = tensor_digest(raw[first : first + rows], workers)
    assert panels_digest(panels, first, rows, workers, bf16) == expected
    if rows:
        last = (first + rows - 1) // PANEL_WIDTH, 36, (first + rows - 1) % PANEL_WIDTH
        panels.data.view(np.uint32)[last] ^= np.uint32(1 << 16)
        assert panels_digest(panels, first, rows, workers, bf16) != expected
        panels.data.view(np.uint32)[last] ^= np.uint32(1 << 16)
    others = [row for row in (first - 1, first + rows) if 0 <= row < panels.rows]
    for row in others:  # rows outside take no part
        panels.data[row // PANEL_WIDTH, :, row % PANEL_WIDTH] = 1.0
    assert panels_digest(panels, first, rows, workers, bf16) == expected


def test_rows_digest(workers: Workers) -> None:
    z = hazards(np.random.default_rng(7), (5, 333), "special")
    assert np.any(np.isnan(z))
    result = float32_rows_digest(z)
    assert result.dtype == np.uint64 and result.shape == (5, 2)
    canonical = np.where(np.isnan(z), np.uint32(0x7FC00000), z.view(np.uint32))
    for row, pattern in zip(result, canonical, strict=True):
        assert (int(row[0]), int(row[1])) == reference(pattern.tolist())
    assert np.array_equal(float32_rows_digest(z, workers), result)
    z.view(np.uint32)[2, 7] ^= 1
    assert np.flatnonzero((float32_rows_digest(z) != result).all(axis=1)).tolist() == [2]


def test_refusals(workers: Workers) -> None:
    with pytest.raises(ContractError, match="complex128"):
        tensor_digest(np.zeros(3, np.complex128), workers)
    with pytest.raises(ContractError, match="float64"):
        float32_rows_digest(np.zeros((2, 2)))  # type: ignore[arg-type]
    panels = pack_rows(np.zeros((5, 4), np.float32), workers)
    with pytest.raises(ContractError, match=r"rows 3 to 5 .* 5 rows"):
        panels_digest(panels, 3, 3, workers, False)
