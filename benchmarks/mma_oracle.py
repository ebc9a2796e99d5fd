"""The models of the matrix units against MMA-Sim (PyPI ``mmasim`` 2.1.1), bit for bit, by class of inputs.

    python -m benchmarks.mma_oracle                                    # 10^6 dot products a unit and class
    python -m benchmarks.mma_oracle --record tests/hardware/data/mma_vectors.npz   # the vectors of the tests

It needs the extra ``oracle`` (mmasim compiles a C++ file when it is imported), and runs on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hardware.cuda import mma
from hardware.rocm import mfma

ORACLE_VERSION = "2.1.1"
RESULT = Path("benchmarks/results/mma_oracle.json")
_BLOCK = {"cpu": 1 << 15, "cuda": 1 << 18}
Dot = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Format:
    """An operand format: its dtype, the exponents of its values, the fraction bits, the largest finite pattern."""

    dtype: torch.dtype
    lowest: int
    smallest_normal: int
    highest: int
    fraction: int


BF16 = Format(torch.bfloat16, -133, -126, 127, 7)
FP16 = Format(torch.float16, -24, -14, 15, 10)
FP32 = Format(torch.float32, -149, -126, 127, 23)


@dataclass(frozen=True)
class Unit:
    """A unit: its name at the oracle, its operands, products of one call, and our model of the call."""

    name: str
    oracle: tuple[str, str]
    format: Format
    depth: int
    model: Dot


def _mfma_groups(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    dot = mfma.dot_k8_fp16 if a.dtype == torch.float16 else mfma.dot_k8_bf16
    for k in range(0, a.shape[-1], mfma.K_STEP):
        c = dot(a[..., k : k + mfma.K_STEP], b[..., k : k + mfma.K_STEP], c)
    return c


UNITS = (
    Unit("sm_90 wgmma bf16", ("Hopper", "m64n64k16.f32.bf16.bf16"), BF16, 16, mma.dot_k16_bf16),
    Unit("sm_90 wgmma fp16", ("Hopper", "m64n64k16.f32.f16.f16"), FP16, 16, mma.dot_k16_fp16),
    Unit("gfx942 mfma bf16", ("CDNA3", "f32_16x16x16_bf16"), BF16, 16, _mfma_groups),
    Unit("gfx942 mfma fp16", ("CDNA3", "f32_16x16x16_f16"), FP16, 16, _mfma_groups),
    Unit("gfx942 mfma fp32", ("CDNA3", "f32_16x16x4_f32"), FP32, 4, mfma.chain_f32_rows),
)


def oracle_of(unit: Unit) -> Dot:
    """The oracle's function for rows of dot products."""
    from mmasim.amd import MFMA
    from mmasim.nv_ptx import WGMMA

    operation = WGMMA(*unit.oracle) if unit.oracle[0] == "Hopper" else MFMA(*unit.oracle)
    return operation.dpa  # type: ignore[no-any-return]


class Inputs:
    """Random operands a, b ``[n, depth]`` and accumulators c ``[n]`` of one class, as float64."""

    def __init__(self, form: Format, depth: int, count: int, seed: int) -> None:
        self.form, self.shape, self.count = form, (count, depth), count
        self.random = np.random.default_rng(seed)

    def _signs(self, shape: tuple[int, ...]) -> Any:
        return self.random.choice([-1.0, 1.0], shape)

    def _at(self, low: int, high: int, shape: tuple[int, ...]) -> Any:
        """Values of random sign and significand with exponents from low to high."""
        return np.ldexp(
            self._signs(shape) * (1 + self.random.random(shape)), self.random.integers(low, high + 1, shape)
        )

    def _c(self, low: int, high: int) -> Any:
        return self._at(max(low, -149), min(high, 127), (self.count,))

    def normal(self) -> tuple[Any, Any, Any]:
        """Standard normal operands."""
        draw = self.random.standard_normal
        return draw(self.shape), draw(self.shape), draw(self.count) * 4

    def spread(self) -> tuple[Any, Any, Any]:
        """Exponents spread over 2^+-6, so that alignment drops bits."""
        return self._at(-6, 6, self.shape), self._at(-6, 6, self.shape), self._c(-14, 14)

    def whole_range(self) -> tuple[Any, Any, Any]:
        """Exponents over the whole range of the format, opposite in a and b, and a common shift a row."""
        f = self.form
        shift = self.random.integers(max(2 * f.lowest, -149), min(2 * f.highest, 128), (self.count, 1))
        e = self.random.integers(np.maximum(f.lowest, shift - f.highest), np.minimum(f.highest, shift - f.lowest) + 1,
                                 self.shape)  # fmt: skip
        other = np.clip(shift - e + self.random.integers(-8, 9, self.shape), f.lowest, f.highest)
        near = shift[:, 0] + self.random.integers(-16, 17, self.count)
        one = self._at(0, 0, self.shape), self._at(0, 0, self.shape), self._at(0, 0, (self.count,))
        return np.ldexp(one[0], e), np.ldexp(one[1], other), np.ldexp(one[2], np.clip(near, -149, 127))

    def subnormal_inputs(self) -> tuple[Any, Any, Any]:
        """Subnormal operands against large ones, subnormal accumulators."""
        f = self.form
        a = self._at(f.lowest, f.smallest_normal, self.shape)
        b = self._at(f.highest - 8, f.highest - 1, self.shape)
        swap = self.random.random(self.shape) < 0.5
        low = f.lowest + f.highest
        c = np.where(self.random.random(self.count) < 0.3, self._c(-149, -126), self._c(low - 12, low + 12))
        return np.where(swap, a, b), np.where(swap, b, a), c

    def subnormal_results(self) -> tuple[Any, Any, Any]:
        """Products around and below the smallest subnormal float32 (bf16), or the smallest of the format."""
        f = self.form
        half = max(-146 // 2, f.lowest)
        return self._at(half - 4, half + 8, self.shape), self._at(half - 4, half + 4, self.shape), self._c(-149, -124)

    def zeros(self) -> tuple[Any, Any, Any]:
        """Zeros of both signs, ones, a tiny value; accumulators of both zeros."""
        values = np.array([0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 2.0**self.form.lowest])
        c = self.random.choice(np.array([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149)]), self.count)
        a, b = self.random.choice(values, self.shape), self.random.choice(values, self.shape)
        a[self.random.random(self.count) < 0.3] = self.random.choice([0.0, -0.0])
        return a, b, c

    def special(self) -> tuple[Any, Any, Any]:
        """Infinities and NaN among normal operands."""
        a, b, c = self.normal()
        for x, chance in ((a, 0.02), (b, 0.02), (c, 0.1)):
            kind = self.random.random(x.shape)
            x[kind < chance] = np.inf
            x[kind < chance * 2 / 3] = -np.inf
            x[kind < chance / 6] = np.nan
        b[self.random.random(self.shape) < 0.02] = 0.0
        return a, b, c

    def overflow(self) -> tuple[Any, Any, Any]:
        """Products and sums around the largest float32 (bf16), or of the format's largest values."""
        f = self.form
        half = min(63, f.highest)
        return self._at(half - 3, half, self.shape), self._at(half - 3, half, self.shape), self._c(123, 127)

    def cancellation(self) -> tuple[Any, Any, Any]:
        """Pairs that cancel but for small differences; c cancels against the rest."""
        a, b = self._at(-2, 2, self.shape), self._at(-2, 2, self.shape)
        half = self.shape[1] // 2
        a[:, half:] = -a[:, :half]
        nudge = self.random.random((self.count, half)) < 0.3
        b[:, half:] = np.where(nudge, b[:, :half] * (1 + 2.0**-self.form.fraction), b[:, :half])
        total = (self._grid(a) * self._grid(b)).sum(1)
        c = np.where(self.random.random(self.count) < 0.5, -total, self._c(-30, -4))
        return a, b, c * (1 + 2.0**-22 * self.random.integers(-2, 3, self.count))

    def powers_of_two(self) -> tuple[Any, Any, Any]:
        """Powers of two, whose sums lie on borders and ties of the roundings."""
        e = self.random.integers(-7, 8, self.shape)
        c = np.ldexp(self._signs((self.count,)), self.random.integers(-26, 27, self.count))
        return np.ldexp(self._signs(self.shape), e), np.ldexp(self._signs(self.shape), -e // 2), c

    def sparse(self) -> tuple[Any, Any, Any]:
        """Mostly zeros, few values far apart."""
        a, b = self._at(-12, 12, self.shape), self._at(-2, 2, self.shape)
        a[self.random.random(self.shape) < 0.85] = 0.0
        return a, b, np.where(self.random.random(self.count) < 0.3, 0.0, self._c(-30, 16))

    def ties(self) -> tuple[Any, Any, Any]:
        """Half a unit of the result beside c, and a far smaller product that decides the rounding or is lost."""
        top = self.random.integers(-8, 13, self.count)
        last = self.random.choice(np.array([0, 0, 0, 1, 2, 3, (1 << 23) - 1]), self.count)
        c = np.ldexp(self._signs((self.count,)) * (1 + last * 2.0**-23), top)
        half = (1 + 2 * self.random.integers(0, 3, self.count), top - self.random.integers(24, 26, self.count))
        small = (np.ones(self.count), top - self.random.integers(30, 36, self.count))
        return *self._placed(half, small), c

    def tiny_sums(self) -> tuple[Any, Any, Any]:
        """A multiple of the smallest subnormal and a far smaller product; other products and the accumulator are 0."""
        low = max(-149, 2 * self.form.lowest + 9)
        main = (1 + self.random.integers(0, 8, self.count), np.full(self.count, low))
        a, b = self._placed(main, (np.ones(self.count), low - self.random.integers(7, 13, self.count)))
        full = self.random.random(self.count) < 0.3  # no zero among the products
        e = low - self.random.integers(7, 13, self.shape)
        fill = (a == 0) & full[:, None]
        a, b = (
            np.where(fill, np.ldexp(self._signs(self.shape), e // 2), a),
            np.where(fill, np.ldexp(1.0, e - e // 2), b),
        )
        return (
            a,
            b,
            np.where(self.random.random(self.count) < 0.8, self._signs((self.count,)) * 0.0, self._c(-149, -147)),
        )

    def _placed(self, *products: tuple[Any, Any]) -> tuple[Any, Any]:
        """Operands with products ``+-significand * 2^exponent`` at random places of each row, zeros elsewhere."""
        a, b = np.zeros(self.shape), np.zeros(self.shape)
        place, rows = np.argsort(self.random.random(self.shape), 1), np.arange(self.count)
        for index, (significand, e) in enumerate(products):
            a[rows, place[:, index]] = np.ldexp(self._signs((self.count,)) * significand, e // 2)
            b[rows, place[:, index]] = np.ldexp(1.0, e - e // 2)
        return a, b

    def any_bits(self) -> tuple[Any, Any, Any]:
        """Uniform random bit patterns of the formats, everything included."""
        words = np.uint32 if self.form.dtype == torch.float32 else np.uint16
        a, b = (self.random.integers(0, np.iinfo(words).max, self.shape, words, endpoint=True) for _ in range(2))
        c = self.random.integers(0, 1 << 32, self.count, np.uint32).view(np.float32).astype(np.float64)
        return self._widened(a), self._widened(b), c

    def _widened(self, pattern: Any) -> Any:
        integers = torch.from_numpy(pattern.view(np.int32 if pattern.dtype == np.uint32 else np.int16))
        return integers.view(self.form.dtype).double().numpy()

    def _grid(self, x: Any) -> Any:
        return torch.from_numpy(x).float().to(self.form.dtype).double().numpy()

    def tensors(self, kind: str, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Operands in the format and float32 accumulators, on a device."""
        a, b, c = (torch.from_numpy(np.ascontiguousarray(x)).float() for x in getattr(self, kind)())
        return a.to(self.form.dtype).to(device), b.to(self.form.dtype).to(device), c.to(device)


CLASSES = (
    "normal", "spread", "whole_range", "subnormal_inputs", "subnormal_results", "zeros", "special", "overflow",
    "cancellation", "powers_of_two", "sparse", "ties", "tiny_sums", "any_bits",
)  # fmt: skip


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """Elements whose raw bits differ (NaN included: the models give the units' own pattern)."""
    return int((one.view(torch.int32) != other.view(torch.int32)).sum())


def canonical(x: torch.Tensor) -> torch.Tensor:
    """Every NaN as one pattern."""
    return torch.where(x.isnan(), torch.nan, x)


def kinds(results: torch.Tensor) -> dict[str, int]:
    """How many results are of which kind: whether a class reaches what it is meant to reach."""
    size = results.abs()
    subnormal = (size > 0) & (size < 2.0**-126)
    return {
        "nan": int(results.isnan().sum()),
        "infinite": int(results.isinf().sum()),
        "zero": int((results == 0).sum()),
        "subnormal": int(subnormal.sum()),
    }


def compare(unit: Unit, kind: str, count: int, device: str) -> dict[str, Any]:
    """Counts of one unit and class."""
    oracle, wrong, first = oracle_of(unit), 0, None
    seed, done = 0, 0
    reached: Counter[str] = Counter()
    elsewhere: int | None = None
    while done < count:
        block = min(_BLOCK[device], count - done)
        a, b, c = Inputs(unit.format, unit.depth, block, 1000 * CLASSES.index(kind) + seed).tensors(kind, device)
        expected, found = oracle(a, b, c.clone()), unit.model(a, b, c)
        if unit.format is FP32:  # an fma's NaN has no pattern of the unit's own
            expected, found = canonical(expected), canonical(found)
        bad = differing(expected, found)
        if bad and first is None:
            at = int((expected.view(torch.int32) != found.view(torch.int32)).nonzero()[0])
            first = {"a": a[at].tolist(), "b": b[at].tolist(), "c": float(c[at]),
                     "oracle": float(expected[at]), "model": float(found[at])}  # fmt: skip
        wrong, done, seed = wrong + bad, done + block, seed + 1
        reached.update(kinds(found))
        if device != "cpu" and not seed:  # the model's bits on the CPU, for part of the inputs
            here = unit.model(*(x[: _BLOCK["cpu"]].cpu() for x in (a, b, c)))
            elsewhere = differing(canonical(here), canonical(found[: len(here)].cpu()))
    return {
        "unit": unit.name,
        "class": kind,
        "dots": count,
        "differing": wrong,
        "results": dict(reached),
        "cpu_differs": elsewhere,
        "first": first,
    }


def record(path: Path) -> None:
    """Write inputs and the oracle's outputs of every unit and class, as bit patterns."""
    arrays: dict[str, Any] = {}
    for unit in UNITS:
        word = torch.int32 if unit.format is FP32 else torch.int16
        for kind in CLASSES:
            count = 256 if kind in ("ties", "tiny_sums") else 32  # few of those tell neighbouring models apart
            a, b, c = Inputs(unit.format, unit.depth, count, 77 + CLASSES.index(kind)).tensors(kind, "cpu")
            d = oracle_of(unit)(a, b, c.clone())
            for name, x in (
                ("a", a.view(word)),
                ("b", b.view(word)),
                ("c", c.view(torch.int32)),
                ("d", d.view(torch.int32)),
            ):
                arrays[f"{unit.name}/{kind}/{name}"] = x.numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size} bytes")


def run(count: int, device: str) -> Iterator[dict[str, Any]]:
    """Every unit and class."""
    for unit in UNITS:
        for kind in CLASSES:
            yield compare(unit, kind, count, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1_000_000, help="dot products a unit and class")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", type=Path, help="write test vectors here instead of comparing")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if version("mmasim") != ORACLE_VERSION:
        raise SystemExit(f"mmasim {version('mmasim')} is installed; {ORACLE_VERSION} is the oracle (others differ)")
    if options.record:
        record(options.record)
        return
    started, rows = time.time(), []
    for row in run(options.count, options.device):
        rows.append(row)
        print(
            f"{row['unit']:18} {row['class']:18} {row['dots']:9} dots  {row['differing']} differ  {row['results']}",
            flush=True,
        )
        if row["first"]:
            print(f"  first: {row['first']}")
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    result = {"oracle": f"mmasim {ORACLE_VERSION}", "device": name, "torch": torch.__version__, "rows": rows,
              "dots": sum(row["dots"] for row in rows), "differing": sum(row["differing"] for row in rows),
              "seconds": round(time.time() - started, 1)}  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['differing']} of {result['dots']} differ; {options.output}")
    raise SystemExit(1 if result["differing"] or any(row["cpu_differs"] for row in rows) else 0)


if __name__ == "__main__":
    main()
