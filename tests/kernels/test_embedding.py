"""Embedding rows and the gradient's order of additions."""

from __future__ import annotations

import numpy as np
import pytest

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.embedding import embedding, embedding_gradient
from tests.kernels import arith
from tests.kernels.arith import F32, add32
from tests.kernels.rowref import FineWorkers

WORKERS = [FineWorkers(1), FineWorkers(2), FineWorkers(3)]


def reference(dh: F32, ids: np.ndarray, grad: F32) -> F32:
    grad = grad.copy()
    for row, token in zip(dh, ids, strict=True):
        grad[token] = add32(grad[token], row)
    return grad


@pytest.mark.parametrize("kind", arith.HAZARDS)
@pytest.mark.parametrize("shape", [(1, 5), (40, 33), (0, 8), (100, 1)])
def test_gradient_bits(shape: tuple[int, int], kind: str) -> None:
    generator = np.random.default_rng(shape[1])
    dh = arith.hazards(generator, shape, kind)
    start = arith.hazards(generator, (7, shape[1]), kind)
    ids = generator.integers(0, 7, shape[0])
    for workers in WORKERS:
        grad = start.copy()
        embedding_gradient(dh, ids, grad, workers)
        arith.assert_same_bits(grad, reference(dh, ids, start))


def test_micro_batches_continue_and_token_order_matters() -> None:
    generator = np.random.default_rng(1)
    dh = arith.hazards(generator, (64, 16), "normal")
    ids = generator.integers(0, 3, 64)
    whole, parts, reverse = (np.zeros((3, 16), np.float32) for _ in range(3))
    embedding_gradient(dh, ids, whole, WORKERS[1])
    for first, last in ((0, 5), (5, 40), (40, 64)):
        embedding_gradient(dh[first:last], ids[first:last], parts, WORKERS[0])
    arith.assert_same_bits(parts, whole)
    embedding_gradient(dh[::-1].copy(), ids[::-1].copy(), reverse, WORKERS[0])
    assert arith.differs(reverse, whole)


def test_rows_are_copied_with_all_their_bits() -> None:
    table = np.arange(1 << 12, dtype=np.uint32).reshape(64, 64).view(np.float32).copy()
    table[3] = np.uint32(0x7F800001).view(np.float32)  # a signalling NaN stays what it is
    ids = np.array([3, 0, 63, 3])
    assert np.array_equal(embedding(table, ids).view(np.uint32), table.view(np.uint32)[ids])


def test_ids_outside_the_table_are_refused() -> None:
    table, dh = np.zeros((5, 4), np.float32), np.zeros((2, 4), np.float32)
    for bad, words in ((5, r"ids of .*\[1\] is 5"), (-1, r"ids of .*\[1\] is -1")):
        with pytest.raises(ContractError, match=words):
            embedding(table, np.array([0, bad]))
        with pytest.raises(ContractError, match=words):
            embedding_gradient(dh, np.array([0, bad]), table, WORKERS[0])
    with pytest.raises(ContractError, match="ids of embedding is int32"):
        embedding(table, np.zeros(2, np.int32))  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="dh of embedding_gradient"):
        embedding_gradient(dh, np.array([0]), table, WORKERS[0])
