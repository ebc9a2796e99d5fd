"""Problems of attention: block and split borders, hazards by head, pages with stale NaN, decode and chunked prefill."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlkernel.contract.build import Contract
from rlkernel.verify.admission import double_rounding
from rlkernel.verify.admission.problem import (
    Array,
    Pages,
    Problem,
    find_region,
    probe_config,
    sequence_batch,
    weights_of,
)
from rlkernel.verify.admission.values import FINITE_HAZARDS, SPECIAL_HAZARDS, Generator, generator, make

_SPLIT_READ_WHOLE = 512
"""Keys of a split up to which the interpreter computes every row of a sequence that crosses its border."""


def _heads(rng: Generator, rows: int, hazards: tuple[str, ...], each: int, depth: int, bf16: bool) -> Array:
    """[rows, len(hazards) * each, depth]: one class of values a KV head."""
    parts = [make(hazard, rng, (rows, depth), bf16) for hazard in hazards for _ in range(each)]
    return np.ascontiguousarray(np.stack(parts, axis=1))


def whole(
    contract: Contract, shape_class: str, lengths: list[int], hazards: tuple[str, ...], group: int, seed: int,
    backward: bool, alone: tuple[int, ...] = (),
) -> Problem:  # fmt: skip
    """Whole sequences from position 0, without KV state."""
    bf16, depth = contract.dtype == "bfloat16", contract.config.head_dim
    config = probe_config(contract, num_heads=group * len(hazards), num_kv_heads=len(hazards))
    batch = sequence_batch(lengths)
    rows = len(batch.tokens)
    rng = generator(seed, "attention", shape_class, lengths, hazards, backward)
    q = _heads(rng, rows, hazards, group, depth, bf16)
    k = _heads(rng, rows, hazards, 1, depth, bf16)
    v = _heads(rng, rows, hazards[1:] + hazards[:1], 1, depth, bf16)
    problem = Problem(
        shape_class, f"sequences of {lengths}, {len(hazards)} KV heads x {group} x {depth}", hazards,
        find_region(config, "attention"), config, batch, (q, k, v), weights_of(config, contract.dtype, {}),
        alone=alone, views=bool(alone),
    )  # fmt: skip
    if backward:
        grad = _heads(rng, rows, tuple(h for h in ("normal", *hazards[1:]) for _ in range(group)), 1, depth, bf16)
        problem = replace(problem, grads=(grad,))
    return problem


def _cancelling(problem: Problem) -> Problem:
    """Pairs of equal keys with opposite values: what is left of a row is what the roundings of its chains leave."""
    q, k, v = (x.copy() for x in problem.inputs)
    pairs = len(k) // 2 * 2
    k[1:pairs:2], v[1:pairs:2] = k[0:pairs:2], -v[0:pairs:2]
    return replace(problem, hazards=("exact cancellation",), inputs=(q, k, v))


def _double_rounding(problem: Problem, seed: int) -> Problem:
    """Scores (in a backward also products of values with gradients) whose chains meet a tail and then a tie."""
    rng = generator(seed, "attention", "double rounding", problem.name)

    def paired(x: Array) -> Array:
        y = np.zeros_like(x)
        y[..., 0], y[..., 1] = double_rounding.pairs(rng, x.shape[:-1], 1)
        return y

    q, k, v = problem.inputs
    grads = tuple(paired(g) for g in problem.grads)
    return replace(
        problem,
        hazards=(double_rounding.HAZARD,),
        inputs=(paired(q), paired(k), paired(v) if grads else v),
        grads=grads,
    )


def _split_borders(contract: Contract, split: int, seed: int) -> Problem:
    """One sequence with rows on both sides of a split's border; of a long one only rows about the border are read."""
    problem = whole(contract, "split borders", [split + 18], ("normal",), 1, seed, False)
    if split <= _SPLIT_READ_WHOLE:
        return problem
    read = (0, split // 2, *range(split - 2, split + 18))
    return replace(problem, name=f"{problem.name}, {len(read)} rows read", read=read)


def _pages(
    rng: Generator, first: list[int], lengths: list[int], page: int, kv_heads: int, depth: int, bf16: bool, spare: int
) -> Pages:
    """Scrambled pages that hold the keys before ``first``; every other slot is NaN, also in pages of no sequence."""
    blocks = max(-(-(p + n) // page) for p, n in zip(first, lengths, strict=True))
    total = blocks * len(first) + spare
    order = rng.permutation(total)[: blocks * len(first)].astype(np.int32).reshape(len(first), blocks)
    k_pages = np.full((total, kv_heads, depth, page), np.nan, np.float32)
    v_pages = np.full((total, kv_heads, page, depth), np.nan, np.float32)
    slots = []
    for s, (start, length) in enumerate(zip(first, lengths, strict=True)):
        for j in range(start + length):
            block, offset = int(order[s, j // page]), j % page
            if j < start:
                k_pages[block, :, :, offset] = make("normal", rng, (kv_heads, depth), bf16)
                v_pages[block, :, offset, :] = make("normal", rng, (kv_heads, depth), bf16)
            else:
                slots.append(block * page + offset)
    return Pages(page, order, np.array(slots, np.int64), k_pages, v_pages)


def paged(
    contract: Contract, shape_class: str, first: list[int], lengths: list[int], page: int, group: int, seed: int,
    hazards: tuple[str, ...] = ("normal",), alone: tuple[int, ...] = (),
) -> Problem:  # fmt: skip
    """Queries whose earlier keys lie in pages."""
    bf16, depth = contract.dtype == "bfloat16", contract.config.head_dim
    config = probe_config(
        contract, num_heads=group * len(hazards), num_kv_heads=len(hazards), max_position=max(600, *first) + 64
    )
    batch = sequence_batch(lengths, first)
    rng = generator(seed, "paged", shape_class, first, lengths, page, hazards)
    rows = len(batch.tokens)
    q = _heads(rng, rows, hazards, group, depth, bf16)
    k = _heads(rng, rows, hazards, 1, depth, bf16)
    v = _heads(rng, rows, hazards, 1, depth, bf16)
    pages = _pages(rng, first, lengths, page, len(hazards), depth, bf16, spare=2)
    return Problem(
        shape_class, f"{lengths} rows at positions {first}, pages of {page}, {group} heads x {depth}",
        hazards, find_region(config, "attention"), config, batch, (q, k, v),
        weights_of(config, contract.dtype, {}), pages=pages, alone=alone,
    )  # fmt: skip


def attention_problems(contract: Contract, case: str, seed: int) -> list[Problem]:
    """Problems of attention in a case: with pages for an engine's cases, whole sequences for a trainer's."""
    entry = contract.entries[("trainer_forward", "attention")]
    block, split = int(entry.constant("key_block")), entry.split.leaf_size

    def ties(problem: Problem) -> list[Problem]:
        # chains over bfloat16 values cannot show a double rounding
        return [] if contract.dtype == "bfloat16" else [_double_rounding(problem, seed)]

    if case == "trainer_backward":
        return [
            *ties(whole(contract, "few rows", [20], ("normal",), 2, seed + 2, True)),
            whole(contract, "few rows", [5, 1, 2], FINITE_HAZARDS, 1, seed, True, alone=(0, 1)),
            whole(contract, "block borders", [block - 1, 1, block, block + 1], ("normal",), 2, seed, True),
            _cancelling(whole(contract, "few rows", [24], ("normal",), 2, seed + 1, True)),
            whole(contract, "several blocks", [2 * block + 6], ("normal", "ties"), 2, seed, True),
            whole(contract, "few rows", [9], (*SPECIAL_HAZARDS, "normal"), 1, seed, True),
            whole(contract, "an empty sequence", [2, 0, 1, 0], ("normal",), 1, seed, True),
        ]
    if case.startswith("trainer"):
        return [
            *ties(whole(contract, "few rows", [20], ("normal",), 2, seed + 2, False)),
            whole(contract, "few rows", [7, 1, 2], FINITE_HAZARDS + SPECIAL_HAZARDS, 1, seed, False, alone=(0, 1)),
            whole(contract, "block borders", [block - 1, 1, block, block + 1], ("normal", "large"), 3, seed, False),
            _cancelling(whole(contract, "several blocks", [block + 12], ("normal",), 1, seed, False)),
            whole(contract, "fully masked blocks", [3 * block + 2, 3], ("ties", "exponent spread"), 1, seed, False),
            _split_borders(contract, split, seed),
            whole(contract, "an empty sequence", [2, 0, 1, 0], ("normal",), 1, seed, False),
        ]
    decode = [0, 1, block - 1, block, 2 * block + 1, split - 1, split, split + block + 3]
    return [
        *ties(paged(contract, "few rows", [0], [20], 8, 2, seed + 2)),
        paged(contract, "stale NaN in unused pages", [0, 5, 9], [1, 1, 2], 8, 2, seed, FINITE_HAZARDS, alone=(0, 2)),
        paged(contract, "one row each", decode, [1] * len(decode), 16, 2, seed, alone=(3, 7)),
        paged(contract, "chunks", [0, block - 3, split - 5], [20, 10, 9], 2 * block, 1, seed),
        paged(contract, "pages of one block", [block, 2], [block + 1, 3], block, 3, seed, ("normal", "large")),
        paged(contract, "few rows", [3, 0], [2, 4], 8, 1, seed, SPECIAL_HAZARDS),
    ]
