"""Every scalar primitive over all 2^32 inputs: Numba on the CPU against the torch reference, on a GPU if there is one.

    python -m benchmarks.primitives_exhaustive                  # all patterns
    python -m benchmarks.primitives_exhaustive --every 200      # every 200th block: two minutes on a small CPU

Unary primitives take every float32 pattern. ``max.f32``, ``add``, ``mul``, ``div`` and ``fma`` take every pattern as
one operand and, as the others, patterns that a fixed hash gives. ``ex2.approx.ftz.sm90`` is no CPU kernel: its model is
compared between CPU and GPU over every input that is not positive, and with the instruction itself on an sm_90 GPU.
NaNs are compared as one pattern.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import float32 as f32

from hardware.cuda.exp2 import ex2_approx_ftz_sm90
from rlkernel.kernels.cpu import primitives as cpu
from rlkernel.kernels.cpu.jit import kernel
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.reference import arith, primitives

RESULT = Path("benchmarks/results/primitives_exhaustive.json")
BLOCK = 1 << 22
BLOCKS = (1 << 32) // BLOCK
Torch = Callable[..., torch.Tensor]


@kernel
def _exp2_full(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = cpu.exp2_full(a[i])


@kernel
def _exp2_p3(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = cpu.exp2_p3(a[i])


@kernel
def _log2_full(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = cpu.log2_full(a[i])


@kernel
def _sigmoid(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = cpu.sigmoid(a[i])


@kernel
def _sqrt(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = np.sqrt(a[i])


@kernel
def _reciprocal(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = f32(1.0) / a[i]


@kernel
def _cast_bf16(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = cpu.round_bf16(a[i])


@kernel
def _maximum(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = cpu.maximum(a[i], b[i])


@kernel
def _add(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = a[i] + b[i]


@kernel
def _mul(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = a[i] * b[i]


@kernel
def _div(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = a[i] / b[i]


@kernel
def _fma(first, last, a, b, c, out):
    for i in range(first, last):
        out[i] = cpu.fma(a[i], b[i], c[i])


@dataclass(frozen=True)
class Pair:
    """A primitive on both sides and the number of its operands."""

    name: str
    operands: int
    numba: Any
    torch: Torch


PAIRS = (
    Pair("exp2.full", 1, _exp2_full, primitives.exp2_full),
    Pair("exp2.p3", 1, _exp2_p3, primitives.exp2_p3),
    Pair("log2.full", 1, _log2_full, primitives.log2_full),
    Pair("sigmoid", 1, _sigmoid, primitives.sigmoid),
    Pair("sqrt.rn.f32", 1, _sqrt, arith.sqrt),
    Pair("div.rn.f32 of 1", 1, _reciprocal, lambda x: arith.div(1.0, x)),
    Pair("cast.bf16", 1, _cast_bf16, arith.cast_bf16),
    Pair("max.f32", 2, _maximum, arith.maximum),
    Pair("add.rn.f32", 2, _add, arith.add),
    Pair("mul.rn.f32", 2, _mul, arith.mul),
    Pair("div.rn.f32", 2, _div, arith.div),
    Pair("fma.rn.f32", 3, _fma, arith.fma32),
)


def patterns(block: int) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Every pattern of a block, and two operands to go with them: half near in exponent, half anything."""
    first = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.uint64)
    result = [first.astype(np.uint32)]
    for multiplier in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        mixed = (first + np.uint64(1)) * np.uint64(multiplier)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        anything = (mixed >> np.uint64(32)).astype(np.uint32)
        near = (result[0] & np.uint32(0x7F800000)) ^ (anything & np.uint32(0x81FFFFFF))
        result.append(np.where(mixed & np.uint64(1), anything, near).astype(np.uint32))
    return [pattern.view(np.float32) for pattern in result]


def compare(pairs: tuple[Pair, ...], blocks: range, device: str, workers: Workers) -> Iterator[dict[str, Any]]:
    """Counts of each primitive over the blocks of patterns."""
    out = np.empty(BLOCK, np.float32)
    wrong, first = {pair.name: 0 for pair in pairs}, dict[str, Any]()
    for block in blocks:
        operands = patterns(block)
        there = [torch.from_numpy(x).to(device) for x in operands]
        for pair in pairs:
            workers.run(pair.numba, BLOCK, *operands, out)
            ours = arith.canonical_bits(torch.from_numpy(out).to(device))
            bad = ours != arith.canonical_bits(pair.torch(*there[: pair.operands]))
            count = int(bad.sum())
            wrong[pair.name] += count
            if count and pair.name not in first:
                at = int(bad.nonzero()[0])
                first[pair.name] = [f"0x{int(x.view(np.uint32)[at]):08X}" for x in operands[: pair.operands]]
    for pair in pairs:
        yield {"primitive": pair.name, "inputs": len(blocks) * BLOCK, "differing": wrong[pair.name],
               "first": first.get(pair.name)}  # fmt: skip


def _not_positive(blocks: range) -> list[int]:
    """The blocks of patterns from 0x80000000 on: -0, negative values, NaN."""
    return [block for block in blocks if block >= BLOCKS // 2]


def compare_exp2(blocks: range, device: str) -> dict[str, Any]:
    """The model of the hardware exp2 on the CPU and on the device, over the blocks that hold no positive input."""
    wrong = total = 0
    for block in _not_positive(blocks):
        x = torch.from_numpy(patterns(block)[0])
        one = arith.canonical_bits(ex2_approx_ftz_sm90(x))
        other = arith.canonical_bits(ex2_approx_ftz_sm90(x.to(device))).cpu()
        wrong, total = wrong + int((one != other).sum()), total + BLOCK
    return {"primitive": "ex2.approx.ftz.sm90 (model, CPU = device)", "inputs": total, "differing": wrong}


def compare_instruction(blocks: range) -> dict[str, Any]:
    """The instruction of this GPU against the model, over the blocks that hold no positive input."""
    import triton
    import triton.language as tl

    @triton.jit
    def instruction(x_ptr, y_ptr, size: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * size + tl.arange(0, size)
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [tl.load(x_ptr + at)], dtype=tl.float32, is_pure=True, pack=1
        )
        tl.store(y_ptr + at, y)

    wrong = total = 0
    for block in _not_positive(blocks):
        x = torch.from_numpy(patterns(block)[0]).cuda()
        y = torch.empty_like(x)
        instruction[(BLOCK // 1024,)](x, y, 1024)
        wrong += int((arith.canonical_bits(y) != arith.canonical_bits(ex2_approx_ftz_sm90(x))).sum())
        total += BLOCK
    return {"primitive": "ex2.approx.ftz.sm90 (instruction = model)", "inputs": total, "differing": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--every", type=int, default=1, help="take only every n-th of the 1,024 blocks of 2^22 patterns"
    )
    parser.add_argument("--offset", type=int, default=0, help="the first block")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of primitives")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    arith.require_ieee("cpu")
    arith.require_ieee(options.device)
    blocks, started = range(options.offset, BLOCKS, options.every), time.time()
    chosen = tuple(pair for pair in PAIRS if not options.only or pair.name in options.only)
    rows = list(compare(chosen, blocks, options.device, Workers(options.threads)))
    if options.device == "cuda":
        rows.append(compare_exp2(blocks, "cuda"))
        if torch.cuda.get_device_capability() == (9, 0):
            rows.append(compare_instruction(blocks))
    for row in rows:
        print(f"{row['primitive']:44} {row['inputs']:>13,} inputs  {row['differing']} differ  {row.get('first') or ''}")
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    result = {"cpu": platform.processor() or platform.machine(), "device": name, "torch": torch.__version__,
              "rows": rows, "seconds": round(time.time() - started, 1)}  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.output}: {result['seconds']} s")
    raise SystemExit(1 if any(row["differing"] for row in rows) else 0)


if __name__ == "__main__":
    main()
