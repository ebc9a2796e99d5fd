"""Decode attention for sm_90 in Gluon: one query row a sequence, the arithmetic of ``attention_decode.decode_split``.

The layouts are chosen here. The weights of a key block go to the second product's left operand, which every warp holds
whole: there a thread has every eighth key of a row, so that a lane of the row sum is a chain of its own, without the
other warps. Keys and values of the next block are on their way while one is worked on.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from rlkernel.kernels.triton.gluon_parts import exp2_full, lane_total, larger, launch_dependents, wait_for_prior

KEYS = gl.constexpr(128)
_ROWS = gl.constexpr(16)  # of the matrix unit's tile


@gluon.jit
def _fetch(
    cache, tile, first, high, table, D: gl.constexpr, STEP: gl.constexpr, PAGE: gl.constexpr, loads: gl.constexpr
):  # fmt: skip
    """Start to copy keys or values from ``first`` on, zeros from ``high`` on, as a group of copies."""
    j = first + gl.arange(0, KEYS, gl.SliceLayout(1, loads))
    d = gl.arange(0, D, gl.SliceLayout(0, loads))
    page = gl.load(table + j // PAGE, mask=j < high, other=0).to(gl.int64)
    places = ((page * PAGE + j % PAGE) * STEP)[:, None] + d[None, :]
    async_copy.async_copy_global_to_shared(tile, cache + places, mask=(j < high)[:, None])
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["table_step", "splits"])
def decode_split_hopper(
    q, k, v, part, part_m, part_l, out, positions, table, table_step, splits, scale2,
    QH: gl.constexpr, KVH: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, SPLIT: gl.constexpr,
    SINGLE: gl.constexpr, V_SLOTS: gl.constexpr, OVERLAPS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Partial softmax of one query row a sequence over one split of its keys, of the ``hopper`` profile in bfloat16.

    Arguments and grid: ``attention_decode.decode_split``; D is 64 or 128, QH / KVH at most 16.

    Args:
        out: [S, QH, D], written with SINGLE, where no sequence has more than one split: what the merge would give.
        V_SLOTS: 2: values are copied a block ahead, as keys are; 1: for two programs a multiprocessor.
        OVERLAPS: programs start while the kernel before runs, and wait for it here.
    """
    GROUP: gl.constexpr = QH // KVH
    gl.static_assert(GROUP <= 16, "the query heads of a group are the rows of one tile")
    unit: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, num_warps], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=unit, k_width=2)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=unit, k_width=2)
    loads: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [num_warps, 1], [1, 0])
    tiles: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, unit)
    kv_head, split, sequence = gl.program_id(0), gl.program_id(1), gl.program_id(2).to(gl.int64)
    if OVERLAPS:
        launch_dependents()
        wait_for_prior()
    position = gl.load(positions + sequence)
    low = split * SPLIT
    head = kv_head * GROUP + gl.arange(0, _ROWS, rows)
    present = gl.arange(0, _ROWS, rows) < GROUP
    width = gl.arange(0, D, gl.SliceLayout(0, unit))
    m = gl.full((_ROWS,), float("-inf"), gl.float32, rows)
    sums = gl.full((_ROWS,), 0.0, gl.float32, rows)
    acc = gl.zeros((_ROWS, D), gl.float32, unit)
    if low <= position:
        high = gl.minimum(low + SPLIT, position + 1)
        my_table = table + sequence * table_step
        my_k, my_v = k + kv_head * D, v + kv_head * D
        k_tiles = gl.allocate_shared_memory(k.dtype.element_ty, [2, KEYS, D], tiles)
        v_tiles = gl.allocate_shared_memory(v.dtype.element_ty, [V_SLOTS, KEYS, D], tiles)
        _fetch(my_k, k_tiles.index(0), low, high, my_table, D, KVH * D, PAGE, loads)
        if V_SLOTS == 2:
            _fetch(my_v, v_tiles.index(0), low, high, my_table, D, KVH * D, PAGE, loads)
        member = gl.arange(0, _ROWS, gl.SliceLayout(1, loads))
        d = gl.arange(0, D, gl.SliceLayout(0, loads))
        places = (sequence * QH + kv_head * GROUP + member)[:, None] * D + d[None, :]
        q_tile = gl.load(q + places, mask=(member < GROUP)[:, None], other=0.0)
        query = gl.convert_layout(q_tile, left)
        column = gl.arange(0, KEYS, gl.SliceLayout(0, unit))
        for block in range(gl.cdiv(high - low, KEYS)):
            first = low + block * KEYS
            slot = block % 2
            if V_SLOTS == 1:
                _fetch(my_v, v_tiles.index(0), first, high, my_table, D, KVH * D, PAGE, loads)
            _fetch(my_k, k_tiles.index(1 - slot), first + KEYS, high, my_table, D, KVH * D, PAGE, loads)
            if V_SLOTS == 2:
                _fetch(my_v, v_tiles.index(1 - slot), first + KEYS, high, my_table, D, KVH * D, PAGE, loads)
            # the groups of this block's keys; what comes after them may still be on its way
            async_copy.wait_group(1 + V_SLOTS)
            keys = k_tiles.index(slot).permute((1, 0)).load(right)
            s = mma_v2(query, keys, gl.zeros((_ROWS, KEYS), gl.float32, unit)) * scale2
            visible = (first + column <= position)[None, :]
            new = larger(m, gl.reduce(gl.where(visible, s, float("-inf")), 1, larger))
            alpha = exp2_full(m - new)
            alpha = gl.where(m == float("-inf"), gl.where(new == new, 0.0, new), alpha)
            x = gl.where(visible, s - new[:, None], float("-inf"))
            p = gl.inline_asm_elementwise(
                "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
            )
            weights = gl.convert_layout(p.to(gl.bfloat16), left)
            total = gl.convert_layout(lane_total(weights.to(gl.float32), _ROWS, KEYS), rows)
            sums = gl.fma(sums, alpha, total)
            m = new
            async_copy.wait_group(V_SLOTS)
            values = v_tiles.index(slot % V_SLOTS).load(right)
            acc = mma_v2(weights, values, acc * alpha[:, None])
        async_copy.wait_group(0)
        if not SINGLE:
            place = (sequence * splits + split) * QH + head
            gl.store(part + place[:, None] * D + width[None, :], acc, mask=present[:, None])
            gl.store(part_m + place, m, mask=present)
            gl.store(part_l + place, sums, mask=present)
    if SINGLE:
        # the merge of one split, as attention_decode.decode_merge writes it
        weight = exp2_full(m - m)
        total = gl.fma(sums, weight, gl.full((_ROWS,), 0.0, gl.float32, rows))
        scale, _ = gl.broadcast(weight[:, None], acc)
        result = gl.fma(acc, scale, gl.zeros((_ROWS, D), gl.float32, unit))
        wide, _ = gl.broadcast(total[:, None], acc)
        value = gl.where(position >= 0, gl.div_rn(result, wide), 0.0)
        place = (sequence * QH + head)[:, None] * D + width[None, :]
        gl.store(out + place, value.to(out.dtype.element_ty), mask=present[:, None])
