"""Attention, backward: bits against the reference, and everything that must not change them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu import attention_backward as module
from rlkernel.kernels.cpu.attention import attention, pages_from_sequences
from rlkernel.kernels.cpu.attention_backward import attention_backward
from rlkernel.kernels.cpu.threads import Workers
from tests.kernels import attention_reference as reference
from tests.kernels.arith import F32, assert_same_bits, bits, differs
from tests.kernels.attention_reference import Sequences, sequences


@pytest.fixture(scope="module")
def workers() -> Any:
    threads = Workers(2)
    yield threads
    threads.close()


def forward(batch: Sequences, workers: Workers, bf16: bool) -> tuple[F32, F32]:
    k_pages, v_pages, table = pages_from_sequences(batch.k, batch.v, batch.starts)
    return attention(batch.q, k_pages, v_pages, table, batch.starts, batch.positions, batch.scales[1], workers, bf16)


def gradients(batch: Sequences, workers: Workers, bf16: bool) -> tuple[F32, F32, F32]:
    out, lse2 = forward(batch, workers, bf16)
    scales = batch.scales
    return attention_backward(batch.dout, batch.q, batch.k, batch.v, out, lse2, batch.starts, *scales, workers, bf16)


def expected(batch: Sequences, s: int, workers: Workers, bf16: bool, **twin: bool) -> tuple[F32, F32, F32]:
    rows = batch.rows(s)
    out, lse2 = (x[rows] for x in forward(batch, workers, bf16))
    return reference.backward(batch.dout[rows], batch.q[rows], batch.k[rows], batch.v[rows], out, lse2, bf16, **twin)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("shape", [(3, 1, 16), (2, 2, 64), (8, 1, 16), (1, 1, 128), (4, 2, 20)])
def test_bits(workers: Workers, shape: tuple[int, int, int], bf16: bool) -> None:
    lengths = [1, 2, 17, 63, 64, 65, 130]
    batch = sequences(lengths, *shape, bf16)
    actual = gradients(batch, workers, bf16)
    for s in range(len(lengths)):
        for x, y in zip(actual, expected(batch, s, workers, bf16), strict=True):
            assert_same_bits(x[batch.rows(s)], y)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", ["spread", "subnormal", "signed_zeros", "special", "cancellation"])
def test_bits_of_hazards(workers: Workers, kind: str, bf16: bool) -> None:
    batch = sequences([7, 70], 3, 1, 16, bf16, kind=kind)
    actual = gradients(batch, workers, bf16)
    for s in range(2):
        for x, y in zip(actual, expected(batch, s, workers, bf16), strict=True):
            assert_same_bits(x[batch.rows(s)], y)


def test_definition_is_observable(workers: Workers) -> None:
    """Negative twins: chains in another order do not have the kernel's bits."""
    batch = sequences([130], 3, 1, 16, False)
    actual = gradients(batch, workers, False)
    for twin, changed in (
        ("keys_descending", (True, False, False)),
        ("rows_descending", (False, True, True)),
        ("heads_descending", (False, True, True)),
    ):
        other = expected(batch, 0, workers, False, **{twin: True})
        assert tuple(differs(x, y) for x, y in zip(actual, other, strict=True)) == changed, twin


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_batch_and_threads_change_nothing(threads: int) -> None:
    lengths = [3, 130, 0, 64, 1, 340, 17]
    batch = sequences(lengths, 4, 2, 32, True)
    pool, alone = Workers(threads), Workers(1)
    together = gradients(batch, pool, True)
    for s in range(len(lengths)):
        rows = batch.rows(s)
        arrays = (x[rows] for x in (batch.q, batch.k, batch.v, batch.dout))
        single = gradients(Sequences(*arrays, np.array([0, lengths[s]], np.int32)), alone, True)
        for x, y in zip(together, single, strict=True):
            assert np.array_equal(bits(x[rows]), bits(y))
    pool.close()


def test_pieces_equal_the_whole_pass() -> None:
    """One long sequence is one pass on one thread and pieces of rows and of keys on three."""
    batch = sequences([450], 3, 1, 16, False)
    one, three = Workers(1), Workers(3)
    assert len(module._plan(batch.starts, 1, 1)[0]) == 1
    items, bounds = module._plan(batch.starts, 1, 3)
    assert len(items) == 8 and list(bounds) == sorted(bounds) and bounds[0] == 0 and bounds[-1] == 8
    for x, y in zip(gradients(batch, one, False), gradients(batch, three, False), strict=True):
        assert np.array_equal(bits(x), bits(y))
    three.close()


@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_nan_reaches_only_its_dependents(workers: Workers, where: str) -> None:
    """A NaN at (row 70 of the second sequence, last head); nothing multiplies a masked zero by it."""
    batch = sequences([80, 140], 4, 2, 16, False)
    clean = gradients(batch, workers, False)
    first, at = 80, 80 + 70
    arrays = {name: getattr(batch, name).copy() for name in ("q", "k", "v", "dout")}
    arrays[where][at, -1] = np.nan
    dq, dk, dv = gradients(Sequences(**arrays, starts=batch.starts), workers, False)
    touched_q, touched_kv = np.zeros(dq.shape[:2], bool), np.zeros(dk.shape[:2], bool)
    touched_v = touched_kv
    if where in ("q", "dout"):
        touched_q[at, 3] = True
        touched_kv[first : at + 1, 1] = True
    else:
        touched_q[at:, 2:] = True
        touched_kv[first:, 1] = True  # rows from `at` on see the NaN and pass it to every key they see
    if where == "v":  # dv depends on P and dout only
        touched_v = np.zeros_like(touched_kv)
    for value, before, touched in ((dq, clean[0], touched_q), (dk, clean[1], touched_kv), (dv, clean[2], touched_v)):
        assert np.array_equal(bits(value[~touched]), bits(before[~touched]))
        assert np.isnan(value[touched]).all()


@pytest.mark.parametrize(("bf16", "bound"), [(False, 3e-6), (True, 1e-2)])
def test_accuracy(workers: Workers, bf16: bool, bound: float) -> None:
    """Against float64 autograd, relative to the largest gradient."""
    batch = sequences([300], 6, 2, 64, bf16)
    q, k, v = (torch.from_numpy(x).double().transpose(0, 1).requires_grad_() for x in (batch.q, batch.k, batch.v))
    result = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), is_causal=True
    )
    result.backward(torch.from_numpy(batch.dout).double().transpose(0, 1))
    for x, leaf in zip(gradients(batch, workers, bf16), (q, k, v), strict=True):
        assert leaf.grad is not None
        exact = leaf.grad.transpose(0, 1).numpy()
        assert np.abs(x - exact).max() < bound * np.abs(exact).max()


def test_nothing_to_do(workers: Workers) -> None:
    batch = sequences([0], 2, 1, 16, False)
    assert [x.shape for x in gradients(batch, workers, False)] == [(0, 2, 16), (0, 1, 16), (0, 1, 16)]


def test_bad_arguments_are_named(workers: Workers) -> None:
    batch = sequences([20, 30], 2, 1, 16, False)
    out, lse2 = forward(batch, workers, False)
    good: dict[str, Any] = {
        "dout": batch.dout, "q": batch.q, "k": batch.k, "v": batch.v, "out": out, "lse2": lse2, "starts": batch.starts,
        "scale": batch.scales[0], "scale2": batch.scales[1], "workers": workers, "bf16": False,
    }  # fmt: skip
    attention_backward(**good)
    for wrong, message in (
        ({"dout": batch.dout[1:]}, "should have the shape of q"),
        ({"lse2": lse2[:, :1]}, "its first two"),
        ({"k": batch.k[1:]}, "do not fit q"),
        ({"starts": batch.starts[:-1]}, "starts must rise from 0 to the 50 rows"),
        ({"v": batch.v.astype(np.float64)}, "v is float64; float32 is expected"),
    ):
        with pytest.raises(ContractError, match=message):
            attention_backward(**{**good, **wrong})
