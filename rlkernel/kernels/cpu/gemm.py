"""The fp32 FMA-chain GEMM of the portable profile. Definitions: docs/numerics.md.

Weights are packed once into panels of PANEL_WIDTH columns, ``[depth][PANEL_WIDTH]`` each, so that the
micro-kernel streams them. Tiles, panels, blocks of the depth and threads are tuning: each output is one ascending
chain over the depth (per leaf), whatever surrounds it. The depth is cut into blocks that keep a panel in
the second-level cache; between blocks the accumulators rest in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import carray, int64, types
from numba import float32 as f32

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.jit import c_function, device_function, kernel
from rlkernel.kernels.cpu.memory import aligned_empty
from rlkernel.kernels.cpu.microkernel import MAX_ROWS, PAIR_ROWS, PANEL_WIDTH, fma_pair, fma_tile
from rlkernel.kernels.cpu.panels import Panels
from rlkernel.kernels.cpu.primitives import round_bf16
from rlkernel.kernels.cpu.spinning import BOX_WORDS, FIELDS, array_at, claim, collect, post, put_array, take
from rlkernel.kernels.cpu.threads import Workers

Array = np.ndarray[Any, Any]

DEPTH_BLOCK = 512  # PANEL_WIDTH * 512 floats: 128 KiB at the widest panel
_BUFFER_BLOCKS = 16  # row blocks that share one leaf buffer
_ROW_GROUP = 48  # row blocks that meet all panels in turn: their part of a stays in the second-level cache
_MOST_PARTS = 3  # matrices that one product can be cut into (q, k, v); one number, so that one kernel is compiled
_EMPTY = np.zeros(0, np.float32)
# Estimates that only decide when another thread pays: waking one costs 15 us, several times that on a busy machine;
# one that listens begins at once.
_TASK_NANOSECONDS = 40_000.0
_SHARED_NANOSECONDS = 4_000.0
_CHUNKS = 6  # that a thread takes one after the other where all are equally fast
_COUNTER_WORDS = 16  # counters of parts lie on cache lines of their own
_FMA_PER_NANOSECOND = 50.0
_ELEMENTS_PER_NANOSECOND = 18.0


@device_function
def _chains(block_first, block_last, blocks, rows, a, a_row, a_k, k_first, k_last, b, b_base, c, c_base, c_row, going):
    """Chains over k_first..k_last of the row blocks; c_base is the place of the matrix's row 0."""
    k = k_first
    while True:
        k_end = min(k + DEPTH_BLOCK, k_last)
        for block in range(block_first, block_last):
            row = rows * block // blocks
            count = rows * (block + 1) // blocks - row
            fma_tile(
                count, a, row * a_row + k * a_k, a_row, a_k, b, b_base + k * PANEL_WIDTH, 0,
                c, c_base + row * c_row, c_row, k_end - k, going or k > k_first,
            )  # fmt: skip
        k = k_end
        if k >= k_last:
            break


@device_function
def _merge_leaves(buffer, leaves, size):
    """Balanced binary tree over ``leaves`` (a power of two) parts of ``buffer``, in place; the root lies in part 0."""
    stride = 1
    while stride < leaves:
        for leaf in range(0, leaves, 2 * stride):
            left, right = leaf * size, (leaf + stride) * size
            for i in range(size):
                buffer[left + i] = buffer[left + i] + buffer[right + i]
        stride *= 2


@device_function
def _buffer_size(rows, columns, leaves, end0, end1):
    """Elements that :func:`_matmul_in` needs for outputs that it cannot write in place; 0 if there are none."""
    aligned = end0 % PANEL_WIDTH == 0 and end1 % PANEL_WIDTH == 0 and columns % PANEL_WIDTH == 0
    return 0 if leaves == 1 and aligned else leaves * min(rows, _BUFFER_BLOCKS * MAX_ROWS) * PANEL_WIDTH


@device_function
def _matmul_in(
    buffer, first, last, a, rows, depth, real, blocks, group_blocks, b, columns, leaves, bias, has_bias, bf16, end0,
    end1, c0, c1, c2,
):  # fmt: skip
    """Output tasks first..last, ordered by group of row blocks, panel, row block. All arrays flat.

    Elements of the depth from ``real`` on are left out of every chain; a leaf without another one is +0.

    Columns before end0 are the matrix c0, those before end1 c1, the others c2 (passing a tuple would take longer).
    """
    bounds = (0, end0, end1, columns)
    outputs = (c0, c1, c2)
    panels = -(-columns // PANEL_WIDTH)
    leaf_depth = depth // leaves
    task = first
    while task < last:
        group_first = task // (panels * group_blocks) * group_blocks
        group_size = min(blocks, group_first + group_blocks) - group_first
        within = task - panels * group_first
        p = within // group_size
        block_first = group_first + within - p * group_size
        block_last = min(group_first + group_size, block_first + last - task)
        column = p * PANEL_WIDTH
        end = min(column + PANEL_WIDTH, columns)
        part = 0
        while bounds[part + 1] <= column:
            part += 1
        direct = leaves == 1 and column + PANEL_WIDTH <= bounds[part + 1]
        if not direct:
            block_last = min(block_last, block_first + _BUFFER_BLOCKS)
        task += block_last - block_first
        row_first = rows * block_first // blocks
        row_last = rows * block_last // blocks
        b_base = p * depth * PANEL_WIDTH
        if direct:
            width = bounds[part + 1] - bounds[part]
            c_base = column - bounds[part]
            if rows <= PAIR_ROWS and task < last and column + 2 * PANEL_WIDTH <= bounds[part + 1]:
                fma_pair(
                    rows, a, 0, depth, 1, b, b_base, depth * PANEL_WIDTH, outputs[part], c_base, width, depth, False
                )  # fmt: skip
                task += 1
                end = column + 2 * PANEL_WIDTH
            else:
                _chains(
                    block_first, block_last, blocks, rows, a, depth, 1, 0, depth, b, b_base, outputs[part], c_base,
                    width, False,
                )  # fmt: skip
        else:
            size = (row_last - row_first) * PANEL_WIDTH
            for leaf in range(leaves):
                c_base = leaf * size - row_first * PANEL_WIDTH
                k_first = leaf * leaf_depth
                k_last = min(k_first + leaf_depth, real)
                if k_first >= k_last:
                    buffer[leaf * size : (leaf + 1) * size] = 0.0
                    continue
                _chains(
                    block_first, block_last, blocks, rows, a, depth, 1, k_first, k_last, b, b_base,
                    buffer, c_base, PANEL_WIDTH, False,
                )  # fmt: skip
            _merge_leaves(buffer, leaves, size)
        while column < end:
            width = bounds[part + 1] - bounds[part]
            count = min(end, bounds[part + 1]) - column
            c_base = column - bounds[part]
            c = outputs[part]
            if not direct:
                for row in range(row_first, row_last):
                    source = (row - row_first) * PANEL_WIDTH + column - p * PANEL_WIDTH
                    for j in range(count):
                        c[c_base + row * width + j] = buffer[source + j]
            if has_bias:
                for row in range(row_first, row_last):
                    for j in range(count):
                        c[c_base + row * width + j] = c[c_base + row * width + j] + bias[column + j]
            if bf16:
                for row in range(row_first, row_last):
                    for j in range(count):
                        c[c_base + row * width + j] = round_bf16(c[c_base + row * width + j])
            column += count
            part += 1


@kernel
def _matmul(
    first, last, a, rows, depth, real, blocks, group_blocks, b, columns, leaves, bias, has_bias, bf16, end0, end1,
    c0, c1, c2,
):  # fmt: skip
    """:func:`_matmul_in` with memory of its own. Raises MemoryError."""
    buffer = np.empty(_buffer_size(rows, columns, leaves, end0, end1), np.float32)
    _matmul_in(
        buffer, first, last, a, rows, depth, real, blocks, group_blocks, b, columns, leaves, bias, has_bias, bf16,
        end0, end1, c0, c1, c2,
    )  # fmt: skip


@device_function
def _chunks(
    buffer, taken, own, parts, chunk, tasks, a, rows, depth, real, blocks, group_blocks, b, columns, leaves, bias,
    has_bias, bf16, end0, end1, c0, c1, c2,
):  # fmt: skip
    """Compute chunks of tasks until all are taken: those of this thread's own part first, then what others have left.

    A thread that has the same part in every call finds its panels in its own cache. Nothing is allocated here, and so
    nothing raised: a worker's error would reach nobody.
    """
    for i in range(parts):
        part = (own + i) % parts
        part_first, part_last = tasks * part // parts, tasks * (part + 1) // parts
        while True:
            first = part_first + take(taken, part * _COUNTER_WORDS, chunk)
            if first >= part_last:
                break
            last = min(first + chunk, part_last)
            _matmul_in(
                buffer, first, last, a, rows, depth, real, blocks, group_blocks, b, columns, leaves, bias, has_bias,
                bf16, end0, end1, c0, c1, c2,
            )  # fmt: skip
            take(taken, parts * _COUNTER_WORDS, last - first)


def _run_job(pointer):  # type: ignore[no-untyped-def]
    f = carray(pointer, (BOX_WORDS - FIELDS,), int64)  # type: ignore[call-overload]
    taken, one = array_at(f, 13, int64(0)), f32(0.0)
    a, b, bias = array_at(f, 15, one), array_at(f, 17, one), array_at(f, 19, one)
    c0, c1, c2 = array_at(f, 21, one), array_at(f, 23, one), array_at(f, 25, one)
    _chunks(
        array_at(f, 29, one), taken, f[27], f[28], f[0], f[1], a, f[2], f[3], f[4], f[5], f[6], b, f[7], f[8], bias,
        f[9] != 0, f[10] != 0, f[11], f[12], c0, c1, c2,
    )  # fmt: skip


@cache
def _job() -> int:
    """Address of the C function that computes a share of :func:`_matmul_shared`."""
    return int(c_function(types.void(types.CPointer(types.int64)), _run_job).address)


@kernel
def _matmul_shared(
    boxes, job, tasks, least, a, rows, depth, real, blocks, group_blocks, b, columns, leaves, bias, has_bias, bf16,
    end0, end1, c0, c1, c2,
):  # fmt: skip
    """:func:`_matmul` of all tasks, shared with the threads that listen; each takes ``least`` tasks or more at a time.

    Whoever is done sooner takes more: the threads' speeds differ on a machine that others use too.
    """
    # all memory before the first claim: whoever has claimed a box has to come to its collection
    claimed = np.zeros(len(boxes), np.bool_)
    taken = np.zeros((len(boxes) + 2) * _COUNTER_WORDS, np.int64)  # of every part, and behind them how much is done
    size = -(-_buffer_size(rows, columns, leaves, end0, end1) // 16) * 16
    buffers = np.empty((len(boxes) + 1) * size, np.float32)
    parts = 1
    for i in range(len(boxes)):
        if (parts + 1) * least <= tasks and claim(boxes[i]):
            claimed[i] = True
            parts += 1
    chunk = -(-tasks // (_CHUNKS * parts * least)) * least
    if parts == 1:
        chunk = tasks
    part = 0
    for i in range(len(boxes)):
        if claimed[i]:
            box = boxes[i]
            part += 1
            integers = (
                chunk, tasks, rows, depth, real, blocks, group_blocks, columns, leaves, int64(has_bias), int64(bf16),
                end0, end1,
            )  # fmt: skip
            for j in range(13):
                box[FIELDS + j] = integers[j]
            put_array(box, 13, taken)
            put_array(box, 15, a)
            put_array(box, 17, b)
            put_array(box, 19, bias)
            put_array(box, 21, c0)
            put_array(box, 23, c1)
            put_array(box, 25, c2)
            box[FIELDS + 27] = part
            box[FIELDS + 28] = parts
            put_array(box, 29, buffers[part * size : (part + 1) * size])
            post(box, job)
    _chunks(
        buffers[:size], taken, 0, parts, chunk, tasks, a, rows, depth, real, blocks, group_blocks, b, columns, leaves,
        bias, has_bias, bf16, end0, end1, c0, c1, c2,
    )  # fmt: skip
    for i in range(len(boxes)):
        if claimed[i]:
            collect(boxes[i])
    if taken[parts * _COUNTER_WORDS] != tasks:
        raise RuntimeError("a worker thread did not end its share of a product")
    return len(buffers)  # used after the last collection, so that their memory is not given back before


def grain_of(rows: int, depth: int, pays: float | None = None) -> int:
    """Least number of tasks (a panel by ``rows`` rows) that take so many nanoseconds; as many as a waking pays for."""
    if pays is None:
        pays = _TASK_NANOSECONDS
    nanoseconds = depth * PANEL_WIDTH * max(rows / _FMA_PER_NANOSECOND, 1 / _ELEMENTS_PER_NANOSECOND)
    return max(1, int(pays / max(nanoseconds, 1.0)))


def check_float32(name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Raises ContractError naming the array unless it is C-contiguous float32 of this shape."""
    if array.dtype != np.float32 or array.shape != shape or not array.flags.c_contiguous:
        layout = "C-contiguous" if array.flags.c_contiguous else "not C-contiguous"
        raise ContractError(
            f"{name} must be C-contiguous float32 of shape {list(shape)}; "
            f"it is {layout} {array.dtype} of shape {list(array.shape)}"
        )


def _check_left(a: Array, panels: Panels) -> int:
    """Number of rows of the left operand. Raises ContractError unless it fits the panels."""
    if a.ndim != 2:
        raise ContractError(f"the left operand of a matmul has 2 axes, not {a.ndim}")
    check_float32("the left operand of a matmul", a, (a.shape[0], panels.depth))
    return int(a.shape[0])


def matmul(
    a: Array,
    panels: Panels,
    workers: Workers,
    *,
    leaves: int = 1,
    real: int | None = None,
    bias: Array | None = None,
    bf16: bool = False,
    out: Array | None = None,
) -> Array:
    """``out[m, n] = chain over k of (a[m, k], w[n, k])`` for packed ``w``; float32 ``[M, N]``.

    Args:
        a: float32 ``[M, K]``, C-contiguous.
        leaves: the depth is cut into so many equal parts, each a chain from +0, merged as a balanced binary tree.
        real: elements of the depth from here on are padding, which no chain takes in; none without it.
        bias: float32 ``[N]``, added (``add.rn``) after the chain or tree.
        bf16: round the result to bfloat16 (held in float32).
        out: float32 ``[M, N]`` to write into.

    Raises:
        ContractError: shapes or dtypes do not fit, ``leaves`` is no power of two that divides the depth, or ``real``
            lies outside it, or is given for one leaf.
    """
    rows = _check_left(a, panels)
    if out is None:
        out = aligned_empty((rows, panels.rows))
    else:
        check_float32("the output of a matmul", out, (rows, panels.rows))
    _run_matmul(a, panels, [out], workers, leaves, bias, bf16, real)
    return out


def matmul_parts(
    a: Array, panels: Panels, widths: Sequence[int], workers: Workers, *, bias: Array | None = None, bf16: bool = False
) -> list[Array]:
    """:func:`matmul` whose columns are cut into one to three consecutive matrices, arrays float32 ``[M, width]``.

    Raises:
        ContractError: as :func:`matmul`; the widths are not positive or do not add up to the packed rows.
    """
    if not 1 <= len(widths) <= _MOST_PARTS or min(widths) < 1 or sum(widths) != panels.rows:
        raise ContractError(f"parts of {list(widths)} columns are not a cut of {panels.rows} columns")
    rows = _check_left(a, panels)
    parts = [aligned_empty((rows, width)) for width in widths]
    _run_matmul(a, panels, parts, workers, 1, bias, bf16)
    return parts


def _run_matmul(
    a: Array,
    panels: Panels,
    outputs: list[Array],
    workers: Workers,
    leaves: int,
    bias: Array | None,
    bf16: bool,
    real: int | None = None,
) -> None:
    if leaves < 1 or leaves & (leaves - 1) or panels.depth % leaves:
        raise ContractError(
            f"a depth of {panels.depth} cannot be cut into {leaves} equal leaves of a balanced tree; "
            "the number of leaves is a power of two that divides the depth"
        )
    if real is not None and (leaves == 1 or not 0 <= real <= panels.depth):
        raise ContractError(
            f"{real} real elements of a depth of {panels.depth} in {leaves} leaves: padding lies behind the real "
            "elements of several leaves; one leaf is packed without any"
        )
    if bias is not None:
        check_float32("the bias of a matmul", bias, (panels.rows,))
    rows = a.shape[0]
    if rows == 0 or panels.rows == 0:
        return
    blocks = -(-rows // MAX_ROWS)
    group_blocks = -(-blocks // -(-blocks // _ROW_GROUP))
    first = outputs[0]
    end0 = end1 = first.shape[1]
    second = third = _EMPTY
    if len(outputs) > 1:
        second, end1 = outputs[1].reshape(-1), end0 + outputs[1].shape[1]
    if len(outputs) > 2:
        third = outputs[2].reshape(-1)
    tasks = panels.data.shape[0] * blocks
    arguments = (
        a.reshape(-1), rows, panels.depth, panels.depth if real is None else real, blocks, group_blocks,
        panels.data.reshape(-1), panels.rows, leaves, _EMPTY if bias is None else bias, bias is not None, bool(bf16),
        end0, end1, first.reshape(-1), second, third,
    )  # fmt: skip
    task_rows = -(-rows // blocks)
    least = grain_of(task_rows, panels.depth, _SHARED_NANOSECONDS)
    if rows <= PAIR_ROWS:
        least += least % 2  # panels go by pairs
    boxes = workers.listeners() if tasks >= 2 * least else None
    if boxes is not None:
        _matmul_shared(boxes, _job(), tasks, least, *arguments)
        return
    grain = grain_of(task_rows, panels.depth)
    if 2 * least <= tasks < 2 * grain:
        workers.wake()  # too short to wait for those that sleep, but the next product can have them
    workers.run(_matmul, tasks, *arguments, grain=grain)
