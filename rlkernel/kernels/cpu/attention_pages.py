"""Pages of keys and values: where attention reads them.

K pages are f32[P, KVH, D, page], transposed so that keys are the vector axis of the scores; V pages are
f32[P, KVH, page, D]. The page size never enters a result.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import float32 as f32
from numba import int64

from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.attention_tile import KEY_BLOCK, copy_eight, copy_sixteen, element_address, prefetch
from rlkernel.kernels.cpu.jit import device_function, kernel
from rlkernel.kernels.cpu.memory import aligned_zeros
from rlkernel.kernels.cpu.threads import Workers

F32 = np.ndarray[Any, np.dtype[np.float32]]
I32 = np.ndarray[Any, np.dtype[np.int32]]
I64 = np.ndarray[Any, np.dtype[np.int64]]

_CACHE_LINE = 16  # float32 in 64 bytes
PAGE_UNIT = 8  # a page holds a multiple of this many keys


@device_function
def gather_keys(k_pages, table, kv_head, start, count, block):
    """Copy keys ``start .. start + count`` (rounded up to 8, still inside their pages) to ``block`` [D, 64]."""
    kv_heads, depth, page = k_pages.shape[1], k_pages.shape[2], k_pages.shape[3]
    step = int64(2 * PAGE_UNIT) if page % (2 * PAGE_UNIT) == 0 else int64(PAGE_UNIT)
    for unit in range(start, start + count, step):
        origin = (int64(table[unit // page]) * kv_heads + kv_head) * depth * page + unit % page
        source = element_address(k_pages, origin)
        target = element_address(block, unit - start)
        if step == PAGE_UNIT:
            for d in range(depth):
                copy_eight(source + 4 * d * page, target + 4 * d * KEY_BLOCK)
        else:
            for d in range(depth):
                copy_sixteen(source + 4 * d * page, target + 4 * d * KEY_BLOCK)


@device_function
def gather_values(v_pages, table, kv_head, start, count, block, padded):
    """Copy values ``start .. start + count`` to ``block`` [64, padded]; columns past D are +0."""
    kv_heads, page, depth = v_pages.shape[1], v_pages.shape[2], v_pages.shape[3]
    for j in range(count):
        key = start + j
        origin = ((int64(table[key // page]) * kv_heads + kv_head) * page + key % page) * depth
        source, target = element_address(v_pages, origin), element_address(block, j * padded)
        whole = depth // 8 * 8
        for d in range(0, whole, 8):
            copy_eight(source + 4 * d, target + 4 * d)
        row = block[j * padded : (j + 1) * padded]
        for d in range(whole, depth):
            row[d] = v_pages[table[key // page], kv_head, key % page, d]
        for d in range(depth, padded):
            row[d] = f32(0.0)


@numba.njit(nogil=True, error_model="numpy", fastmath=False, forceinline=False)
def fetch_ahead(k_pages, v_pages, table, kv_head, start, count):
    """Ask for the lines of keys and values ``start .. start + count``, all at once instead of one after another."""
    kv_heads, depth, page = k_pages.shape[1], k_pages.shape[2], k_pages.shape[3]
    step = min(page, int64(KEY_BLOCK))
    for key in range(start, start + count, step):  # keys first: they are needed first
        origin = (int64(table[key // page]) * kv_heads + kv_head) * depth * page + key % page
        keys = element_address(k_pages, origin)
        for d in range(depth):
            for at in range(0, min(step, start + count - key), _CACHE_LINE):
                prefetch(keys + 4 * (d * page + at))
    for key in range(start, start + count, step):
        origin = ((int64(table[key // page]) * kv_heads + kv_head) * page + key % page) * depth
        values = element_address(v_pages, origin)
        for at in range(0, min(step, start + count - key) * depth, _CACHE_LINE):
            prefetch(values + 4 * at)


def expect(name: str, array: Any, dtype: type) -> Any:
    """The array, C-contiguous (copied if it is not); another dtype is a ContractError."""
    if array.dtype != dtype:
        raise ContractError(f"{name} is {array.dtype}; {np.dtype(dtype).name} is expected")
    return np.ascontiguousarray(array)


def page_size(k_pages: F32, v_pages: F32) -> int:
    """Keys a page; pages that do not fit together, or cannot be used in place, are a ContractError."""
    for name, pages in (("K pages", k_pages), ("V pages", v_pages)):
        if pages.ndim != 4 or pages.dtype != np.float32 or not pages.flags.c_contiguous:
            raise ContractError(
                f"{name} must be a C-contiguous float32 array of 4 dimensions, not {pages.dtype} {pages.shape} "
                f"with strides {pages.strides}"
            )
    count, kv_heads, depth, page = k_pages.shape
    if page == 0 or page % PAGE_UNIT:
        raise ContractError(f"a page of {page} keys is not possible; a positive multiple of {PAGE_UNIT} is")
    expected = (count, kv_heads, page, depth)
    if v_pages.shape != expected:
        raise ContractError(f"V pages {v_pages.shape} do not fit K pages {k_pages.shape}: {expected} does")
    return int(page)


@kernel
def _append(first, last, k, v, k_pages, v_pages, slots):
    """Copy rows ``first .. last`` of k and v to their slots; K is transposed inside its page."""
    page = k_pages.shape[3]
    for n in range(first, last):
        target, offset = slots[n] // page, slots[n] % page
        for head in range(k.shape[1]):
            for d in range(k.shape[2]):
                k_pages[target, head, d, offset] = k[n, head, d]
                v_pages[target, head, offset, d] = v[n, head, d]


def append_kv(k: F32, v: F32, k_pages: F32, v_pages: F32, slots: I64, workers: Workers | None) -> None:
    """Write keys and values f32[N, KVH, D] into the pages, at ``slots`` (int64[N], page * page_size + offset).

    K pages are f32[P, KVH, D, page] (keys are the vector axis), V pages f32[P, KVH, page, D]. Slots are distinct.

    Raises:
        ContractError: shapes do not fit, or a slot lies outside the pages.
    """
    page = page_size(k_pages, v_pages)
    k, v, slots = expect("k", k, np.float32), expect("v", v, np.float32), expect("slots", slots, np.int64)
    expected = (slots.shape[0], k_pages.shape[1], k_pages.shape[2])
    if k.shape != expected or v.shape != expected:
        raise ContractError(
            f"append_kv: k {k.shape} and v {v.shape} should both be {expected} for these slots and pages"
        )
    if slots.size and not (int(slots.min()) >= 0 and int(slots.max()) < k_pages.shape[0] * page):
        raise ContractError(
            f"append_kv: slots {int(slots.min())}..{int(slots.max())} reach outside the {k_pages.shape[0] * page} "
            f"slots of {k_pages.shape[0]} pages of {page}"
        )
    if slots.size and workers is not None:
        workers.run(_append, slots.shape[0], k, v, k_pages, v_pages, slots, grain=32)
    elif slots.size:
        _append(0, slots.shape[0], k, v, k_pages, v_pages, slots)


def pages_from_sequences(
    k: F32, v: F32, starts: I32, page: int = 64, workers: Workers | None = None
) -> tuple[F32, F32, I32]:
    """Pages of a training batch: every sequence from position 0 in its own zero-padded pages.

    Args: k, v f32[N, KVH, D]; starts int32[S + 1]; page: keys a page; without workers the calling thread copies.
    Returns: ``(k_pages, v_pages, block_table int32[S, B])``, unused table entries are 0.
    """
    begin = starts[:-1].astype(np.int64)
    counts = starts[1:] - begin
    needed = -(-counts // page)
    first = np.cumsum(needed) - needed
    width = int(needed.max(initial=1))
    columns = np.arange(width)
    table = np.where(columns < needed[:, None], first[:, None] + columns, 0).astype(np.int32)
    k_pages = aligned_zeros((int(needed.sum()), k.shape[1], k.shape[2], page))
    v_pages = aligned_zeros((int(needed.sum()), k.shape[1], page, k.shape[2]))
    slots = np.repeat(first * page - begin, counts) + np.arange(k.shape[0])
    append_kv(k, v, k_pages, v_pages, slots, workers)
    return k_pages, v_pages, table
