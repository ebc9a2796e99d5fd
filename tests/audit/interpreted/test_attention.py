"""The attention kernels in Triton's interpreter: indexing, masks, pages and splits; orders written out also as bits.

``tl.dot`` is numpy's product there: what passes through it is compared closely, not bit for bit; the bits are
compared on a GPU (benchmarks/gpu/attention_bits.py). Key blocks and splits are small, to have several of both.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.contract.points import SixPoints
from rlkernel.kernels.triton import launch_attention as launch
from rlkernel.kernels.triton.attention_backward import row_dots, row_statistics
from rlkernel.kernels.triton.attention_block import lane_total
from rlkernel.kernels.triton.attention_points import AttentionPoints, attention_points, backward_points
from rlkernel.kernels.triton.launch_attention import AttentionTile
from rlkernel.models.config import ModelConfig
from rlkernel.reference.arith import fma32
from rlkernel.reference.attention import attend, attend_backward
from rlkernel.reference.reductions import add_chain, tree

DEPTH, HEADS, KV_HEADS, PAGE = 16, 2, 1, 8
LENGTHS = (1, 40, 17)
TILE = AttentionTile(16, 16, 4, 1, programs=3)


def _entries(lanes: int) -> tuple[SixPoints, SixPoints]:
    config = ModelConfig(
        family="llama", vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DEPTH, max_position=64,
    )  # fmt: skip
    contract = build_contract(config, profile="portable", dtype="float32", topology=Topology())
    forward = contract.entries[("trainer_forward", "attention")]
    merge = replace(forward.merge, lanes="balanced_tree" if lanes > 1 else "none")
    constants = tuple((name, "16" if name == "key_block" else value) for name, value in forward.constants)
    forward = replace(
        forward, split=replace(forward.split, leaf_size=32, lanes=lanes), merge=merge, constants=constants
    )
    return forward, contract.entries[("trainer_backward", "attention")]


def _close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.isfinite(ours).all()) and float((ours - expected).abs().max()) < 1e-5


def _draw(rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn((rows, n, DEPTH), generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS))


def _starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)


def _varlen(points: AttentionPoints, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with np.errstate(all="ignore"):
        return launch.attention_varlen(q, k, v, _starts(LENGTHS), max(LENGTHS), points, tile=TILE)


@pytest.mark.parametrize("lanes", [1, 8])
def test_whole_sequences(lanes: int) -> None:
    forward, backward = _entries(lanes)
    q, k, v, dout = _draw(sum(LENGTHS))
    out, lse2 = _varlen(attention_points(forward), q, k, v)
    begin = 0
    for n in LENGTHS:
        rows = slice(begin, begin + n)
        for head in range(HEADS):
            want, want_lse = attend(forward, q[rows, head], k[rows, 0], v[rows, 0], torch.arange(n))
            assert _close(out[rows, head], want) and _close(lse2[rows, head], want_lse)
        begin += n
    if lanes > 1:
        return  # the backward has no lanes
    with np.errstate(all="ignore"):
        found = launch.attention_backward(
            dout, q, k, v, out, lse2, _starts(LENGTHS), max(LENGTHS), backward_points(backward), dq_tile=TILE,
            dkv_tile=TILE,
        )  # fmt: skip
    begin = 0
    for n in LENGTHS:
        rows = slice(begin, begin + n)
        want_all = attend_backward(backward, dout[rows], q[rows], k[rows, 0], v[rows, 0], out[rows], lse2[rows])
        for ours, want in zip((found[0][rows], found[1][rows, 0], found[2][rows, 0]), want_all, strict=True):
            assert _close(ours, want)
        begin += n


def _pages(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages in an order of their own; slots beyond the sequences hold NaN."""
    order = [7, 2, 9, 0, 5, 3, 8, 1, 4, 6]
    caches = [torch.full((len(order) + 1, PAGE, KV_HEADS, DEPTH), torch.nan) for _ in range(2)]
    table, slots, at = torch.full((len(LENGTHS), 6), len(order), dtype=torch.int32), [], 0
    for s, n in enumerate(LENGTHS):
        for j in range(n):
            if j % PAGE == 0:
                table[s, j // PAGE] = order[at]
                at += 1
            slots.append(int(table[s, j // PAGE]) * PAGE + j % PAGE)
    launch.append_kv(k, v, *caches, torch.tensor(slots))
    return caches[0], caches[1], table


def test_pages_chunks_and_decoding_are_the_whole_sequences() -> None:
    points = attention_points(_entries(8)[0])
    q, k, v, _ = _draw(sum(LENGTHS))
    out, lse2 = _varlen(points, q, k, v)
    k_cache, v_cache, table = _pages(k, v)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in LENGTHS])
    starts = _starts(LENGTHS)
    with np.errstate(all="ignore"):
        found = launch.attention_paged(q, k_cache, v_cache, table, starts, positions, 40, 40, points, tile=TILE)
        assert _close(found[0], out) and _close(found[1], lse2)
        late = torch.tensor([0, *range(21, 41), *range(50, 58)])  # the ends of the sequences, as chunks
        found = launch.attention_paged(
            q[late].contiguous(), k_cache, v_cache, table, _starts((1, 20, 8)), positions[late].contiguous(), 20, 40,
            points, tile=TILE,
        )  # fmt: skip
        assert _close(found[0], out[late]) and _close(found[1], lse2[late])
        last = starts[1:].long() - 1
        for splits in (2, 4):
            found = launch.attention_decode(
                q[last].contiguous(), k_cache, v_cache, table, positions[last].contiguous(), splits, points, tile=TILE
            )
            assert _close(found[0], out[last]) and _close(found[1], lse2[last])
        idle = positions[last].clone()
        idle[1] = -1
        found = launch.attention_decode(q[last].contiguous(), k_cache, v_cache, table, idle, 2, points, tile=TILE)
        assert not found[0][1].any() and bool((found[1][1] == -torch.inf).all()) and _close(found[0][2], out[last[2]])
        table[1, 2] = table[2, 0]  # a page of another sequence: the comparison sees it
        found = launch.attention_decode(
            q[last].contiguous(), k_cache, v_cache, table, positions[last].contiguous(), 2, points, tile=TILE
        )
    assert not _close(found[0][1], out[last[1]]) and _close(found[0][2], out[last[2]])


@triton.jit
def _lane_totals(x, out, ROWS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr):
    row, key = tl.arange(0, ROWS), tl.arange(0, KEYS)
    total = lane_total(tl.load(x + row[:, None] * KEYS + key[None, :]), ROWS, KEYS, LANES)
    tl.store(out + row, total)


def test_row_sum_of_lanes() -> None:
    x, out = torch.rand((16, 128), generator=torch.Generator().manual_seed(1)), torch.empty(16)
    _lane_totals[(1,)](x, out, ROWS=16, KEYS=128, LANES=8)
    expected = {lanes: tree(add_chain(x.reshape(16, -1, lanes).transpose(0, 1)), 1) for lanes in (4, 8, 16)}
    assert torch.equal(out, expected[8])
    assert not torch.equal(out, expected[4]) and not torch.equal(out, expected[16])


def test_row_dots() -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn((6, 48), generator=generator), torch.randn((6, 48), generator=generator)
    out = torch.full((8,), torch.nan)
    row_dots[(1,)](a, b, out, 6, D=48, ROWS=16)
    total = torch.zeros(6)
    for d in range(48):
        total = fma32(a[:, d], b[:, d], total)
    assert torch.equal(out[:6], total) and bool(out[6:].isnan().all())
    assert not torch.equal(total, (a * b).sum(1))
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)  # 1 and 2 rows of 2 heads
    lse2, found = torch.randn((3, 2), generator=generator), torch.full((2, 2, 12), torch.nan)
    row_statistics[(1, 2, 2)](a, b, lse2, found[0], found[1], starts, 12, QH=2, D=48, ROWS=16)
    columns = [0, 4, 5]
    assert torch.equal(found[0][:, columns], lse2.T) and torch.equal(found[1][:, columns], total.reshape(3, 2).T)
    assert int(found.isnan().sum()) == found.numel() - 12
