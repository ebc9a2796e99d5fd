"""Attention kernels on a GPU against the interpreter of the contract and against themselves, bits counted.

    python -m benchmarks.gpu.attention_bits --out result.json [--only SECTION ...]

``differing`` counts elements whose bits are not equal (every NaN is one value).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.contract.points import SixPoints
from rlkernel.kernels.triton import launch_attention as launch
from rlkernel.kernels.triton.attention_points import attention_points, backward_points
from rlkernel.kernels.triton.launch_attention import AttentionTile
from rlkernel.models.config import ModelConfig
from rlkernel.reference.arith import canonical_bits
from rlkernel.reference.attention import attend, attend_backward

DEVICE = "cuda"
LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025)
LONG = (2047, 2048, 2049, 4097)
Item = dict[str, Any]
Tensors = tuple[torch.Tensor, ...]


def entries(profile: str, dtype: str, depth: int) -> tuple[SixPoints, SixPoints]:
    """The forward and backward entries of attention."""
    config = ModelConfig(
        family="llama", vocab_size=256, hidden_size=4 * depth, intermediate_size=64, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=depth, max_position=8192,
    )  # fmt: skip
    contract = build_contract(config, profile=profile, dtype=dtype, topology=Topology())
    return contract.entries[("trainer_forward", "attention")], contract.entries[("trainer_backward", "attention")]


def compare(what: str, ours: torch.Tensor, expected: torch.Tensor) -> Item:
    """Count elements whose bits differ."""
    if ours.shape != expected.shape:
        raise ValueError(f"{what}: {list(ours.shape)} against {list(expected.shape)}")
    if ours.dtype != expected.dtype:
        expected = expected.to(ours.dtype)
    wrong = canonical_bits(ours) != canonical_bits(expected)
    differing = int(wrong.sum())
    item: Item = {"what": what, "compared": ours.numel(), "differing": differing, "nan": int(torch.isnan(ours).sum())}
    if differing:
        place = tuple(int(x) for x in wrong.nonzero()[0])
        item["first"] = {"index": place, "ours": float(ours[place]), "expected": float(expected[place])}
        item["last_index"] = [int(x) for x in wrong.nonzero()[-1]]
    return item


def total(what: str, items: list[Item]) -> Item:
    """Items of one kind as one."""
    result: Item = {"what": what, "cases": len(items)}
    for key in ("compared", "differing", "nan"):
        result[key] = sum(item[key] for item in items)
    bad = [item for item in items if item["differing"]]
    return result | ({"failed": bad[:3]} if bad else {})


def starts_of(lengths: tuple[int, ...]) -> torch.Tensor:
    """int32 offsets of packed sequences."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


def draw(kind: str, rows: int, heads: tuple[int, int], depth: int, dtype: torch.dtype, seed: int) -> Tensors:
    """q [rows, QH, D], k and v [rows, KVH, D] of one kind of values."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(count: int) -> torch.Tensor:
        return torch.randn((rows, count, depth), generator=generator, device=DEVICE)

    q, k, v = normal(heads[0]), normal(heads[1]), normal(heads[1])
    if kind == "ties":
        q, k, v = q.round(), k.round(), v.round()
    elif kind == "equal scores":
        k = k[:1].expand_as(k)
    elif kind == "cancellation":
        k = torch.cat([k[..., : depth // 2], -k[..., : depth // 2] * (1 + 2.0**-7)], -1)
        q = torch.cat([q[..., : depth // 2], q[..., : depth // 2]], -1)
        v = v * torch.where(torch.arange(rows, device=DEVICE)[:, None, None] % 2 == 0, 1.0, -1.0)
    elif kind == "spread":
        spread = torch.randint(-12, 12, q.shape, generator=generator, device=DEVICE)
        q, v = q * 2.0**spread, v * 2.0 ** torch.randint(-60, 60, v.shape, generator=generator, device=DEVICE)
    elif kind == "peaked":
        q = q * 30
    elif kind == "large":
        v = v * 2.0**120
        q, k = q * 2.0**8, k * 2.0**8
    elif kind == "subnormal":
        v = v * 2.0**-130
        q, k = q * 2.0**-62, k * 2.0**-62
    elif kind == "nan and inf":
        # in queries and keys; a NaN value would be multiplied by the zeros of masked keys
        if rows > 2:
            q[rows // 2, 0, 3] = torch.nan
            k[2 * rows // 3, 1 % heads[1], 0] = torch.inf
            k[rows - 2, 0, 5] = torch.nan
            q[rows // 3, 1, 1] = -torch.inf
    elif kind == "nan in values":
        v[rows // 2, 0, 3], v[rows - 2, 1 % heads[1], 0] = torch.nan, -torch.inf
    elif kind != "normal":
        raise ValueError(kind)
    return tuple(x.to(dtype).contiguous() for x in (q, k, v))


KINDS = ("normal", "ties", "equal scores", "cancellation", "spread", "peaked", "large", "subnormal", "nan and inf")


def reference(points: SixPoints, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> Tensors:
    """All heads of one sequence: q [n, QH, D], k, v [L, KVH, D] -> (out [n, QH, D], lse2 [n, QH])."""
    group = q.shape[1] // k.shape[1]
    parts = [
        attend(points, q[:, h].float(), k[:, h // group].float(), v[:, h // group].float(), positions)
        for h in range(q.shape[1])
    ]
    return torch.stack([out for out, _ in parts], 1), torch.stack([lse for _, lse in parts], 1)


def paged(k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], page: int, seed: int) -> Tensors:
    """Caches of shuffled pages that hold the packed k and v, everything else NaN -> (k_cache, v_cache, table)."""
    needed = [-(-n // page) for n in lengths]
    count, width = sum(needed) + 3, max(needed) + 1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    caches = [torch.full((count, page, *x.shape[1:]), torch.nan, dtype=x.dtype, device=DEVICE) for x in (k, v)]
    table = torch.full((len(lengths), width), order[-1], dtype=torch.int32, device=DEVICE)
    slots, at = [], 0
    for s, n in enumerate(lengths):
        mine = order[at : at + needed[s]]
        at += needed[s]
        table[s, : needed[s]] = torch.tensor(mine, dtype=torch.int32)
        slots += [mine[j // page] * page + j % page for j in range(n)]
    launch.append_kv(k, v, *caches, torch.tensor(slots, dtype=torch.int64, device=DEVICE))
    return (*caches, table)


def against_reference(
    profile: str,
    dtype: str,
    depth: int,
    lengths: tuple[int, ...],
    kinds: tuple[str, ...],
    heads: tuple[int, int] = (4, 2),
) -> Iterator[Item]:
    """Varlen forward and backward of packed sequences."""
    forward, backward = entries(profile, dtype, depth)
    points, gradient_points = attention_points(forward), backward_points(backward)
    for kind in kinds:
        torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        parts = [draw(kind, n, heads, depth, torch_dtype, 17 * n + i) for i, n in enumerate(lengths)]
        q, k, v = (torch.cat(group).contiguous() for group in zip(*parts, strict=True))
        starts = starts_of(lengths)
        out, lse2 = launch.attention_varlen(q, k, v, starts, max(lengths), points)
        items, offset = [], 0
        expected_out, expected_lse = torch.empty_like(out), torch.empty_like(lse2)
        for n, (q_part, k_part, v_part) in zip(lengths, parts, strict=True):
            place = slice(offset, offset + n)
            want, want_lse = reference(forward, q_part, k_part, v_part, torch.arange(n, device=DEVICE))
            expected_out[place], expected_lse[place] = want.to(out.dtype), want_lse
            items.append(compare(f"out, length {n}", out[place], want))
            items.append(compare(f"lse2, length {n}", lse2[place], want_lse))
            offset += n
        yield total(f"forward {profile} {dtype} D={depth} {kind}", items)
        if kind in ("large", "nan and inf"):
            continue
        dout = draw("normal", len(q), heads, depth, torch_dtype, 5)[0]
        if kind == "cancellation":
            dout = dout.round()
        gradients = launch.attention_backward(
            dout, q, k, v, expected_out, expected_lse, starts, max(lengths), gradient_points
        )
        items, offset, group = [], 0, heads[0] // heads[1]
        for n in lengths:
            place = slice(offset, offset + n)
            for h in range(heads[1]):
                mine = slice(h * group, (h + 1) * group)
                want = attend_backward(
                    backward, dout[place, mine].float(), q[place, mine].float(), k[place, h].float(),
                    v[place, h].float(), expected_out[place, mine].float(), expected_lse[place, mine],
                )  # fmt: skip
                found = (gradients[0][place, mine], gradients[1][place, h], gradients[2][place, h])
                for name, ours, expected in zip(("dq", "dk", "dv"), found, want, strict=True):
                    items.append(compare(f"{name}, length {n}, KV head {h}", ours, expected))
            offset += n
        yield total(f"backward {profile} {dtype} D={depth} {kind}", items)


def four_cases(
    profile: str, dtype: str, depth: int, lengths: tuple[int, ...], page: int, heads: tuple[int, int]
) -> Iterator[Item]:
    """Training forward = paged prefill = chunks = decode, pages shuffled and stale slots NaN."""
    forward, _ = entries(profile, dtype, depth)
    points = attention_points(forward)
    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    q, k, v = draw("normal", sum(lengths), heads, depth, torch_dtype, 3)
    starts, longest = starts_of(lengths), max(lengths)
    out, lse2 = launch.attention_varlen(q, k, v, starts, longest, points)
    name = f"{profile} {dtype} D={depth} page {page}"
    k_cache, v_cache, table = paged(k, v, lengths, page, 1)
    positions = torch.cat([torch.arange(n, dtype=torch.int32, device=DEVICE) for n in lengths])
    found = launch.attention_paged(q, k_cache, v_cache, table, starts, positions, longest, longest, points)
    yield compare(f"prefill = training, {name}: out", found[0], out)
    yield compare(f"prefill = training, {name}: lse2", found[1], lse2)
    # chunks: keys of later chunks are not there yet
    seen = torch.zeros(len(q), dtype=torch.bool, device=DEVICE)
    items, cuts = [], [0, 1, 37, 128, 300, 517, 1000, 2040, 2055, 1 << 30]
    for low, high in pairwise(cuts):
        spans = [(min(low, n), min(high, n)) for n in lengths]
        counts = tuple(b - a for a, b in spans)
        if not sum(counts):
            continue
        rows = torch.cat(
            [torch.arange(int(starts[s]) + a, int(starts[s]) + b, device=DEVICE) for s, (a, b) in enumerate(spans)]
        )
        ends = tuple(b for _, b in spans)
        seen_rows = [torch.arange(int(starts[s]), int(starts[s]) + b, device=DEVICE) for s, b in enumerate(ends)]
        visible = torch.cat(seen_rows)
        caches = (
            paged(k[visible].contiguous(), v[visible].contiguous(), tuple(max(1, b) for b in ends), page, low + 2)
            if min(ends) > 0
            else None
        )
        if caches is None:
            continue
        found = launch.attention_paged(
            q[rows].contiguous(),
            *caches,
            starts_of(counts),
            positions[rows].contiguous(),
            max(counts),
            max(ends),
            points,
        )
        items.append(compare(f"rows {low}..{high}: out", found[0], out[rows]))
        items.append(compare(f"rows {low}..{high}: lse2", found[1], lse2[rows]))
        seen[rows] = True
    yield total(f"chunks = training, {name}, {int(seen.sum())} of {len(q)} rows", items)
    splits = -(-longest // points.split)
    items = []
    for back in (0, 1, 2, 15, 63, 64, 127, 128, 200, 511, 512, 2047, 2048):
        chosen = [s for s, n in enumerate(lengths) if n > back]
        at = torch.tensor([lengths[s] - 1 - back for s in chosen], dtype=torch.int32, device=DEVICE)
        rows = starts[chosen].long() + at
        found = launch.attention_decode(
            q[rows].contiguous(), k_cache, v_cache, table[chosen].contiguous(), at, splits + back % 3, points
        )
        items.append(compare(f"decode, {back} before the end: out", found[0], out[rows]))
        items.append(compare(f"decode, {back} before the end: lse2", found[1], lse2[rows]))
    yield total(f"decode = training, {name}", items)


def hopper_lengths() -> Iterator[Item]:
    yield from against_reference("hopper", "bfloat16", 128, LENGTHS, ("normal",))


def hopper_lengths_64() -> Iterator[Item]:
    yield from against_reference("hopper", "bfloat16", 64, LENGTHS, ("normal",))


def hopper_other_depths() -> Iterator[Item]:
    for depth in (80, 256):
        yield from against_reference("hopper", "bfloat16", depth, (1, 130, 600), ("normal",))


def hopper_long() -> Iterator[Item]:
    yield from against_reference("hopper", "bfloat16", 128, LONG, ("normal",), (1, 1))


def hopper_hazards() -> Iterator[Item]:
    yield from against_reference("hopper", "bfloat16", 128, (5, 129, 700), KINDS[1:])


def hopper_cases() -> Iterator[Item]:
    yield from four_cases("hopper", "bfloat16", 128, LENGTHS, 16, (8, 2))
    yield from four_cases("hopper", "bfloat16", 128, (3000, 77, 2048, 4096), 64, (8, 1))


def hopper_cases_64() -> Iterator[Item]:
    yield from four_cases("hopper", "bfloat16", 64, (900, 77, 2048, 513), 8, (6, 2))


def portable_float32() -> Iterator[Item]:
    yield from against_reference("portable", "float32", 64, (1, 17, 63, 64, 65, 200, 577), ("normal", "spread", "ties"))


def portable_bfloat16() -> Iterator[Item]:
    yield from against_reference("portable", "bfloat16", 80, (1, 17, 65, 200, 577), ("normal", "subnormal", "spread"))


def portable_cases() -> Iterator[Item]:
    yield from four_cases("portable", "float32", 64, (1, 40, 64, 65, 577, 1100), 8, (4, 2))
    yield from four_cases("portable", "bfloat16", 64, (1, 40, 64, 65, 577), 16, (4, 4))


FORWARD_TILES = tuple(
    AttentionTile(rows, 64, warps, stages, programs)
    for rows, warps, stages, programs in (
        (64, 4, 1, 0), (128, 8, 2, 0), (128, 8, 1, 0), (64, 4, 2, 0), (64, 4, 1, 100), (64, 8, 2, 77), (32, 4, 2, 0),
        (32, 2, 1, 0), (16, 4, 2, 0), (16, 1, 1, 0), (16, 2, 2, 31), (128, 4, 1, 0), (128, 16, 2, 0),
        (64, 2, 1, 0), (64, 4, 3, 0), (32, 1, 1, 0), (32, 4, 1, 50), (128, 8, 3, 0), (16, 4, 1, 0), (16, 2, 1, 0),
        (64, 8, 1, 0),
    )
)  # fmt: skip
BACKWARD_TILES = tuple(
    AttentionTile(rows, columns, warps, stages)
    for rows, columns, warps, stages in (
        (64, 64, 4, 2), (64, 128, 8, 2), (128, 64, 8, 2), (32, 64, 4, 1), (64, 32, 4, 2), (16, 128, 4, 1),
        (128, 32, 8, 1),
        (32, 32, 2, 2), (16, 16, 1, 1), (64, 128, 4, 1),
        (64, 64, 4, 1), (64, 64, 8, 2), (32, 128, 4, 1), (128, 32, 4, 1), (16, 32, 2, 1), (16, 64, 2, 2),
        (32, 32, 4, 1), (32, 16, 1, 1), (64, 16, 4, 1), (128, 16, 4, 1), (16, 16, 2, 2), (32, 64, 2, 1),
    )
)  # fmt: skip


def tiles(part: int, parts: int) -> Iterator[Item]:
    """Tunings of the plain hopper kernels against one of them."""
    forward, backward = entries("hopper", "bfloat16", 128)
    points, gradient_points = attention_points(forward), backward_points(backward)
    lengths = (4096, 1, 900, 2049, 511)
    heads = (16, 4)
    q, k, v = draw("normal", sum(lengths), heads, 128, torch.bfloat16, 11)
    dout = draw("normal", sum(lengths), heads, 128, torch.bfloat16, 12)[0]
    starts, longest = starts_of(lengths), max(lengths)
    first = launch.attention_varlen(q, k, v, starts, longest, points, tile=FORWARD_TILES[0])
    for tile in FORWARD_TILES[1 + part :: parts]:
        try:
            result = launch.attention_varlen(q, k, v, starts, longest, points, tile=tile)
        except OutOfResources as problem:
            yield {"what": f"forward {tile}", "compared": 0, "differing": 0, "nan": 0, "does not fit": str(problem)}
            continue
        for name, ours, expected in zip(("out", "lse2"), result, first, strict=True):
            yield compare(f"forward {tile}: {name}", ours, expected)
    arguments = (dout, q, k, v, *first, starts, longest, gradient_points)
    base = launch.attention_backward(*arguments, dq_tile=BACKWARD_TILES[0], dkv_tile=BACKWARD_TILES[0])
    for tile in BACKWARD_TILES[1 + part :: parts]:
        try:
            found = launch.attention_backward(*arguments, dq_tile=tile, dkv_tile=tile)
        except OutOfResources as problem:
            yield {"what": f"backward {tile}", "compared": 0, "differing": 0, "nan": 0, "does not fit": str(problem)}
            continue
        for name, ours, expected in zip(("dq", "dk", "dv"), found, base, strict=True):
            yield compare(f"backward {tile}: {name}", ours, expected)


def tiles_0() -> Iterator[Item]:
    yield from tiles(0, 4)


def tiles_1() -> Iterator[Item]:
    yield from tiles(1, 4)


def tiles_2() -> Iterator[Item]:
    yield from tiles(2, 4)


def tiles_3() -> Iterator[Item]:
    yield from tiles(3, 4)


SPECIALISED_LENGTHS = (
    (1, 2, 15, 16, 17, 64, 127, 128, 129),
    (511, 512, 513, 1),
    (2047, 2048, 2049),
    (4095, 4096, 4097),
    (300, 0, 4100, 1, 2177, 77),
)
"""Packed batches: edges of tiles, blocks and splits; an empty sequence; lengths that are no multiple of anything."""


def specialised(depth: int, heads: tuple[int, int], *, gradients: bool, pingpong: bool = False) -> Iterator[Item]:
    """The warp-specialised kernels against the plain ones."""
    from rlkernel.kernels.triton.launch_attention_hopper import backward_hopper, varlen_hopper

    forward, backward = entries("hopper", "bfloat16", depth)
    points, gradient_points = attention_points(forward), backward_points(backward)
    cases = [(lengths, "normal") for lengths in SPECIALISED_LENGTHS]
    cases += [((5, 129, 700, 2200), kind) for kind in (*KINDS[1:], "nan in values")]
    for number, (lengths, kind) in enumerate(cases):
        q, k, v = draw(kind, sum(lengths), heads, depth, torch.bfloat16, 21 + number)
        starts, longest = starts_of(lengths), max(lengths)
        expected = launch.attention_varlen(q, k, v, starts, longest, points, tile=FORWARD_TILES[0])
        name = f"D={depth}, heads {heads}, sequences of {lengths}, {kind}"
        if not gradients:
            out, lse2 = torch.empty_like(q), torch.empty_like(expected[1])
            varlen_hopper(q, k, v, starts, longest, points, out, lse2, pingpong)
            torch.cuda.synchronize()
            yield compare(f"out {name}", out, expected[0])
            yield compare(f"lse2 {name}", lse2, expected[1])
            continue
        dout = draw("normal", sum(lengths), heads, depth, torch.bfloat16, 22)[0]
        arguments = (dout, q, k, v, *expected, starts, longest, gradient_points)
        base = launch.attention_backward(*arguments, dq_tile=BACKWARD_TILES[0], dkv_tile=AttentionTile(32, 64, 4, 2))
        found = tuple(torch.empty_like(x) for x in (q, k, v))
        backward_hopper(*arguments, *found)
        torch.cuda.synchronize()
        for what, ours, want in zip(("dq", "dk", "dv"), found, base, strict=True):
            yield compare(f"{what} {name}", ours, want)


def hopper_specialised() -> Iterator[Item]:
    yield from specialised(128, (8, 2), gradients=False)


def hopper_specialised_groups() -> Iterator[Item]:
    for heads in ((2, 2), (8, 1)):
        yield from specialised(128, heads, gradients=False)


def hopper_specialised_64() -> Iterator[Item]:
    yield from specialised(64, (8, 2), gradients=False)


def hopper_specialised_gradients() -> Iterator[Item]:
    yield from specialised(128, (8, 2), gradients=True)


def hopper_specialised_gradients_groups() -> Iterator[Item]:
    for heads in ((2, 2), (8, 1)):
        yield from specialised(128, heads, gradients=True)


def hopper_specialised_gradients_64() -> Iterator[Item]:
    yield from specialised(64, (8, 2), gradients=True)


SECTIONS: tuple[Callable[[], Iterator[Item]], ...] = (
    hopper_lengths,
    hopper_lengths_64,
    hopper_other_depths,
    hopper_long,
    hopper_hazards,
    hopper_cases,
    hopper_cases_64,
    portable_float32,
    portable_bfloat16,
    portable_cases,
    hopper_specialised,
    hopper_specialised_groups,
    hopper_specialised_64,
    hopper_specialised_gradients,
    hopper_specialised_gradients_groups,
    hopper_specialised_gradients_64,
    tiles_0,
    tiles_1,
    tiles_2,
    tiles_3,
)


def run_section(section: Callable[[], Iterator[Item]]) -> dict[str, Any]:
    """Run one section; what it raises is recorded, so that the others still run."""
    began = time.monotonic()
    items: list[Item] = []
    error = {}
    try:
        for item in section():
            items.append(item)
            print(json.dumps(item), flush=True)
    except Exception as problem:  # recorded in the result: one broken section must not hide the others
        error = {"error": f"{type(problem).__name__}: {problem}"[:3000], "traceback": traceback.format_exc()[-3000:]}
        print(json.dumps(error), flush=True)
    return {
        "section": section.__name__,
        "compared": sum(item["compared"] for item in items),
        "differing": sum(item["differing"] for item in items),
        "seconds": round(time.monotonic() - began, 2),
        **error,
        "items": items,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [section.__name__ for section in SECTIONS]
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], choices=names, help="sections; all without it")
    arguments = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {
        "what": "attention kernels against the interpreter of the contract and against themselves",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.gpu.attention_bits " + " ".join(sys.argv[1:]),
        "device": properties.name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "sections": [],
    }
    for section in SECTIONS:
        if not arguments.only or section.__name__ in arguments.only:
            result["sections"].append(run_section(section))
            result["compared"] = sum(s["compared"] for s in result["sections"])
            result["differing"] = sum(s["differing"] for s in result["sections"])
            result["failed_sections"] = [s["section"] for s in result["sections"] if "error" in s]
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("compared", "differing", "failed_sections")}))
    return 1 if result["differing"] or result["failed_sections"] else 0


if __name__ == "__main__":
    sys.exit(main())
