"""Chains over rows in Gluon, for CUDA: the weight gradient of a norm, and that of a bias. Definition: docs/numerics.md.

A chain over tokens has one step a row, so only columns run side by side: a program is one warp with COLUMNS columns.
What takes time is reading, so blocks of rows are copied to shared memory STAGES - 1 blocks ahead of the chain.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# renamed after Triton 3.6
_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _copy(
    dy, x, dy_tiles, x_tiles, block, rows, N, column, STRIDE,
    GROUPS: gl.constexpr, PER: gl.constexpr, SLOTS: gl.constexpr, FIRST: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, NORM: gl.constexpr, wide: gl.constexpr,
):  # fmt: skip
    """Start copying a block of rows; what lies beyond the last row is not read."""
    row = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, wide))
    inside = (row < rows)[:, None] & (column < N)[None, :]
    slot = block % STAGES
    _load(dy_tiles.index(slot), dy + row.to(gl.int64)[:, None] * N + column[None, :], mask=inside)
    if NORM:
        token, head = row // (GROUPS * PER), row % (GROUPS * PER)
        place = (token.to(gl.int64) * GROUPS + head // PER) * SLOTS + FIRST + head % PER
        _load(x_tiles.index(slot), x + place[:, None] * STRIDE + column[None, :], mask=inside)
    async_copy.commit_group()


@gluon.jit
def column_chain(
    dy, x, inv_rms, total, rows, width, stride,
    GROUPS: gl.constexpr, PER: gl.constexpr, SLOTS: gl.constexpr, FIRST: gl.constexpr,
    BLOCK: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, NORM: gl.constexpr, VECTOR: gl.constexpr,
):  # fmt: skip
    """With NORM ``total[i] = fma(dy[t, i], x[t, i] * r[t], total[i])``, else ``add(total[i], dy[t, i])``, t ascending.

    Args:
        dy: [rows, N], N = width * VECTOR; ``total``: float32 [N], continued in place; ``inv_rms``: float32 [rows], r.
        x: rows of N elements, row t = (token, head) at ((token * GROUPS + head // PER) * SLOTS + FIRST + head % PER) *
            stride * VECTOR; plain rows are GROUPS = PER = SLOTS = 1, FIRST = 0, stride = width.
        BLOCK: rows copied at a time, at most 32; VECTOR: elements of 16 bytes. Widths come in this unit, so that the
            compiler sees rows that can be copied 16 bytes at a time.
    """
    N = width * VECTOR
    STRIDE = stride * VECTOR
    wide: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 * VECTOR // COLUMNS, COLUMNS // VECTOR], [1, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    dy_tiles = gl.allocate_shared_memory(dy.dtype.element_ty, [STAGES, BLOCK, COLUMNS], plain)
    x_tiles = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, BLOCK, COLUMNS], plain)
    r_tile = gl.allocate_shared_memory(gl.float32, [BLOCK, COLUMNS], plain)
    first = gl.program_id(0) * COLUMNS
    copied = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, wide))
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, line))
    inside = (column < N)[None, :]
    acc = gl.load(total + column[None, :], mask=inside, other=0.0)
    blocks = gl.cdiv(rows, BLOCK)
    for block in range(STAGES - 1):
        _copy(
            dy, x, dy_tiles, x_tiles, block, rows, N, copied, STRIDE, GROUPS, PER, SLOTS, FIRST,
            BLOCK, STAGES, NORM, wide,
        )  # fmt: skip
    lanes = gl.arange(0, BLOCK, gl.SliceLayout(1, line))
    for block in range(blocks):
        async_copy.wait_group(STAGES - 2)
        if NORM:
            row = block * BLOCK + lanes
            r = gl.load(inv_rms + row, mask=row < rows, other=0.0)
            everywhere, _ = gl.broadcast(r[:, None], column[None, :])
            r_tile.store(everywhere)
        dy_rows, x_rows = dy_tiles.index(block % STAGES), x_tiles.index(block % STAGES)
        for t in gl.static_range(BLOCK):
            g = dy_rows.slice(t, 1, 0).load(line).to(gl.float32)
            if NORM:
                scaled = x_rows.slice(t, 1, 0).load(line).to(gl.float32) * r_tile.slice(t, 1, 0).load(line)
                stepped = gl.fma(g, scaled, acc)
            else:
                stepped = acc + g
            acc = gl.where(block * BLOCK + t < rows, stepped, acc)
        _copy(
            dy, x, dy_tiles, x_tiles, block + STAGES - 1, rows, N, copied, STRIDE, GROUPS, PER, SLOTS, FIRST,
            BLOCK, STAGES, NORM, wide,
        )  # fmt: skip
    async_copy.wait_group(0)
    gl.store(total + column[None, :], acc, mask=inside)
