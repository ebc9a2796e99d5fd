"""Bits of the head's kernels on a GPU of sm_90 against the contract's interpreter: counts, never tolerances.

    python -m benchmarks.gpu.head_bits --out results.json

Statistics with distribution digests (which compare every logit), gradients, sampling with all its options (against the
CPU kernels, which the reference samples with), tensor digests; over tuning that changes no bit. ``must_differ`` breaks
the definition on purpose: there, equal outputs are the failure. Exit code 1 if anything differs or failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.cases import Case, main, once
from benchmarks.gpu.reference_calls import contract
from benchmarks.hopper_bits import hazard
from rlkernel.contract.constants import LOG2E
from rlkernel.kernels.cpu import digest as cpu_digest
from rlkernel.kernels.cpu import logprob as cpu_logprob
from rlkernel.kernels.cpu import sampling as cpu_sampling
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.kernels.triton.launch import MultiplyAccumulate, Tile
from rlkernel.kernels.triton.launch_digest import rows_digest, tensor_digest
from rlkernel.kernels.triton.launch_logprob import DeviceRowStatistics, Gemm, HeadTile, LeafTile, linear_logprob
from rlkernel.kernels.triton.launch_logprob_backward import BackwardTuning, linear_logprob_backward
from rlkernel.kernels.triton.launch_logprob_hopper import HopperHeadTile
from rlkernel.kernels.triton.launch_sampling import DeviceSamplingKeys, row_statistics, sample
from rlkernel.reference import head as reference
from rlkernel.reference.arith import div, mul, sub
from rlkernel.reference.head import shard_borders
from rlkernel.reference.primitives import exp2_full
from rlkernel.reference.reductions import matmul
from rlkernel.reference.regions import continued, output

DEVICE = "cuda"
FIELDS = ("max", "log_sum", "logprob", "entropy")
CLASSES = ("normal", "wide spread", "subnormal results", "cancellation", "zeros", "NaN and infinity")
LEAF_TILES = (LeafTile(), LeafTile(1, 4, 16), LeafTile(4, 1, 8))
HEAD_TILES = (HeadTile(), HeadTile(128, 256, 64, 8, 4, 8, 3), HeadTile(128, 128, 32, 1, 8, 8, 2))
HOPPER_TILES = (HopperHeadTile(), HopperHeadTile(group_m=1, stages=3, registers=112))
SMALL = Tile(32, 32, 16, 8, 2, 2)
Tensor = torch.Tensor


def vendor() -> None:
    """Settings under which cuBLASLt's products are the matrix unit's single chain."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def outputs(found: Any) -> list[Tensor]:
    """Statistics as tensors that can be compared: digests as halves of their words."""
    tensors = [torch.as_tensor(getattr(found, name)).to(DEVICE) for name in FIELDS]
    digest = found.digest if isinstance(found.digest, Tensor) else torch.from_numpy(found.digest.view(np.int64))
    return [*tensors, digest.to(DEVICE).contiguous().view(torch.int32)]


def logits(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of every kind that is special."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    z = torch.randn((rows, columns), generator=generator, device=DEVICE) * 4
    place = torch.arange(columns, device=DEVICE)
    z[0, ::3] = -torch.inf
    z[1, columns // 2] = torch.nan
    z[2, columns // 3] = torch.inf
    z[3] = -torch.inf
    z[4] = torch.where(place % 7 == 3, 0.0, -0.0)
    z[5, 128:256] = -torch.inf
    z[6] = -0.0
    z[7, : columns // 2] = -3e38
    z[7, -1] = 3e38
    z[8:12] = z[8:12].round()  # ties
    z[12] = torch.nan
    return z


def divided(z: Tensor, temperature: float) -> Tensor:
    return div(z, reference.scalar(float(np.float32(temperature)), z))


def statistics_in_memory() -> Iterator[Case]:
    for n, (rows, columns, shards, temperature) in enumerate(
        ((64, 151936, 1, 1.0), (32, 700, 2, 0.7), (512, 5001, 4, 0.5), (16, 128, 1, 1.3), (16, 13, 2, 1.0))
    ):
        z = logits(rows, columns, n)
        targets = torch.arange(rows, device=DEVICE) * 97 % columns
        points = contract("hopper", "bfloat16", shards).entries[("rollout_decode", "logprob")]
        expected = once(
            lambda p=points, z=z, t=temperature, i=targets: outputs(reference.statistics(p, divided(z, t), i))
        )
        for tile in LEAF_TILES:

            def kernel(
                z: Tensor = z, t: float = temperature, i: Tensor = targets, s: int = shards, tile: LeafTile = tile
            ) -> list[Tensor]:
                return outputs(row_statistics(z, t, i, s, leaf_tile=tile))

            config = f"{tile}, temperature {temperature}, {columns % 128} columns in the last leaf, {shards} shards"
            yield Case(config, f"{rows}x{columns}", kernel, expected)


class Problem:
    """Operands of one head, and what the interpreter makes of them."""

    def __init__(
        self, name: str, rows: int, depth: int, columns: int, shards: int, temperature: float, profile: str, dtype: str
    ) -> None:
        self.name, self.shards, self.temperature = name, shards, temperature
        self.mac: MultiplyAccumulate = "fma" if profile == "portable" else "matrix"
        self.entries = contract(profile, dtype, shards).entries
        width = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.x, w = hazard(name, rows, depth, 2, width), hazard(name, columns, depth, 3, width)
        self.w = w * 0.25 if name == "normal" else w
        generator = torch.Generator(DEVICE).manual_seed(4)
        self.targets = torch.randint(0, columns, (rows,), generator=generator, device=DEVICE)
        self.coefficient = torch.randn(rows, generator=generator, device=DEVICE)
        self.running = torch.randn((columns, depth), generator=generator, device=DEVICE) * 0.1
        self.logits = once(self._logits)
        self.expected = once(self._statistics)
        self.forward = once(lambda: outputs(self.expected()))
        self.backward = once(self._backward)

    def _logits(self) -> Tensor:
        points = self.entries[("trainer_forward", "lm_head")]
        return divided(matmul(points, self.x.float(), self.w.float()), self.temperature)

    def _statistics(self) -> Any:
        return reference.statistics(self.entries[("trainer_forward", "logprob")], self.logits(), self.targets)

    def _backward(self) -> list[Tensor]:
        z, found = self.logits(), self.expected()
        top, log_sum = (torch.from_numpy(v.copy()).to(DEVICE)[:, None].expand_as(z) for v in (found.max, found.log_sum))
        p = exp2_full(mul(sub(sub(z, top), log_sum), reference.scalar(LOG2E, z)))
        hot = torch.zeros_like(z)
        hot[torch.arange(len(z)), self.targets] = 1.0
        c = divided(self.coefficient, self.temperature)
        entries = self.entries
        dz = output(entries[("trainer_backward", "logprob")], mul(sub(hot, p), c[:, None].expand_as(z)))
        weight = continued(entries[("trainer_backward", "lm_head.wgrad")], dz, self.x.float(), self.running)
        head = entries[("trainer_backward", "lm_head")]
        dx = output(head, matmul(head, dz, self.w.float().T.contiguous(), borders=shard_borders(head, dz.shape[1])))
        return [dx, weight]

    def statistics(self, gemm: Gemm, shards: int | None = None, **tuning: Any) -> DeviceRowStatistics:
        vendor()
        return linear_logprob(
            self.x, self.w, self.targets, self.temperature, shards or self.shards, self.mac, gemm=gemm, **tuning
        )

    def gradients(
        self, gemm: Gemm, tuning: BackwardTuning | None, parts: int, shards: int | None = None
    ) -> list[Tensor]:
        """dx and the continued weight gradient, rows given in so many calls."""
        found, grad, pieces = self.statistics("triton", product_tile=SMALL), self.running.clone(), []
        size = len(self.x) // parts
        for first in range(0, len(self.x), size):
            rows = slice(first, first + size)
            part = DeviceRowStatistics(*(getattr(found, name)[rows] for name in (*FIELDS, "digest")))
            pieces.append(
                linear_logprob_backward(
                    self.x[rows], self.w, part, self.targets[rows], self.coefficient[rows], self.temperature,
                    shards or self.shards, grad, self.mac, gemm=gemm, tuning=tuning,
                )
            )  # fmt: skip
        return [torch.cat(pieces), grad]


def statistics_of_products() -> Iterator[Case]:
    shapes = ((130, 256, 1000, 2, 0.7), (64, 512, 20096, 4, 1.0), (48, 64, 4224, 1, 2.0))
    for n, (rows, depth, columns, shards, temperature) in enumerate(shapes):
        for name in (CLASSES, ("normal",), ("normal", "cancellation"))[n]:
            problem = Problem(name, rows, depth, columns, shards, temperature, "hopper", "bfloat16")
            what = f"{name}, {rows}x{depth}x{columns}"
            config = f"temperature {temperature}, {shards} shards, {columns % 128} columns in the last leaf"
            for tile in HEAD_TILES[: 3 if n == 0 else 1]:
                yield Case(
                    f"triton {tile}, {config}", what, lambda p=problem, t=tile: outputs(p.statistics("triton", tile=t)),
                    problem.forward,
                )  # fmt: skip
            for hopper in HOPPER_TILES:
                yield Case(
                    f"hopper {hopper}, {config}", what,
                    lambda p=problem, t=hopper: outputs(p.statistics("hopper", hopper_tile=t)), problem.forward,
                )  # fmt: skip
            for chunk in (128, 8448):
                yield Case(
                    f"vendor {chunk}, {config}", what,
                    lambda p=problem, c=chunk: outputs(p.statistics("vendor", chunk=c)), problem.forward,
                )  # fmt: skip


def gradients() -> Iterator[Case]:
    tunings = {
        "small": BackwardTuning(256, 128),
        "large": BackwardTuning(
            16896, 256, Tile(128, 256, 64, 8, 8, 3), Tile(128, 256, 64, 8, 8, 3), Tile(256, 128, 64, 8, 8, 3)
        ),
    }
    gemms: tuple[Gemm, ...] = ("triton", "hopper", "vendor")
    for shards, temperature, columns in ((1, 1.0, 2000), (4, 0.7, 1992)):
        for name in ("normal", "wide spread", "zeros"):
            problem = Problem(name, 64, 256, columns, shards, temperature, "hopper", "bfloat16")
            for gemm in gemms:
                for size, tuning in tunings.items():
                    for parts in (1, 2):
                        yield Case(
                            f"{gemm} {size}, {shards} shards, temperature {temperature}",
                            f"{name}, 64x256x{columns} in {parts} calls",
                            lambda p=problem, g=gemm, t=tuning, n=parts: p.gradients(g, t, n),
                            problem.backward,
                        )


def portable() -> Iterator[Case]:
    tuning = BackwardTuning(256, 128, SMALL, SMALL, SMALL)
    for dtype, shards, temperature in (("float32", 2, 0.7), ("bfloat16", 1, 1.0)):
        for name in ("normal", "zeros"):
            problem = Problem(name, 40, 72, 700, shards, temperature, "portable", dtype)
            yield Case(
                f"portable {dtype} {shards}", f"{name}, statistics",
                lambda p=problem: outputs(p.statistics("triton", product_tile=SMALL, chunk=256)), problem.forward,
            )  # fmt: skip
            yield Case(
                f"portable {dtype} {shards} backward", f"{name}, gradients",
                lambda p=problem: p.gradients("triton", tuning, 2), problem.backward,
            )  # fmt: skip


def _keys(rows: int, columns: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "seeds": rng.integers(0, 1 << 63, rows).astype(np.uint64) * np.uint64(2) + np.uint64(1),
        "prompt_index": rng.integers(0, 1 << 32, rows),
        "k": rng.integers(0, 1 << 24, rows),
        "namespace": rng.integers(0, 2, rows),
        "position": rng.integers(0, 1 << 32, rows),
        "greedy": rng.random(rows) < 0.25,
        "top_k": np.where(rng.random(rows) < 0.5, 0, rng.integers(1, columns + 5, rows)),
        "top_p": np.where(rng.random(rows) < 0.4, 1.0, rng.random(rows) * 0.98 + 0.01),
    }


def device_keys(keys: dict[str, np.ndarray[Any, Any]]) -> DeviceSamplingKeys:
    """Keys of the CPU's sampler on the device."""
    return DeviceSamplingKeys(
        **{
            name: torch.from_numpy(value.view(np.int64) if value.dtype == np.uint64 else value).to(DEVICE)
            for name, value in keys.items()
        }
    )


def _sampled(z: Tensor, temperature: float, shards: int, keys: dict[str, Any]) -> list[Tensor]:
    workers, host = Workers(8), divided(z, temperature).cpu().numpy()
    zeros = np.zeros(len(z), np.int64)
    with np.errstate(all="ignore"):
        largest = cpu_logprob.row_statistics(host.copy(), 1.0, zeros, shards, workers).max
        tokens = cpu_sampling.sample(host, largest, **keys, workers=workers)
        found = cpu_logprob.row_statistics(host, 1.0, tokens, shards, workers)
    return [torch.from_numpy(tokens.astype(np.int32)).to(DEVICE), *outputs(found)]


def _graph(z: Tensor, temperature: float, keys: DeviceSamplingKeys, shards: int, truncation: bool) -> list[Tensor]:
    """The same through a CUDA graph that was captured on other logits and other keys."""
    other = z.roll(1, 0).contiguous()
    names = vars(keys)
    moved = DeviceSamplingKeys(**{name: value.roll(1, 0).contiguous() for name, value in names.items()})
    sample(other, temperature, moved, shards, truncation=truncation)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, found = sample(other, temperature, moved, shards, truncation=truncation)
    other.copy_(z)
    for name, value in names.items():
        getattr(moved, name).copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    return [tokens.to(torch.int32), *outputs(found)]


def sampling() -> Iterator[Case]:
    shapes = ((64, 151936, 1, 1.0), (32, 700, 2, 0.7), (48, 32001, 4, 0.5), (512, 4096, 8, 1.3))
    for n, (rows, columns, shards, temperature) in enumerate(shapes):
        z, keys = logits(rows, columns, 20 + n), _keys(rows, columns, n)
        plain = keys | {"top_k": keys["top_k"] * 0, "top_p": keys["top_p"] * 0 + 1}
        for truncation, given in ((True, keys), (False, plain)):
            expected = once(lambda z=z, t=temperature, s=shards, k=given: _sampled(z, t, s, k))
            config = f"{rows}x{columns}, truncation {truncation}"

            def eager(
                z: Tensor = z, t: float = temperature, s: int = shards, k: dict[str, Any] = given, c: bool = truncation
            ) -> list[Tensor]:
                tokens, found = sample(z, t, device_keys(k), s, truncation=c)
                return [tokens.to(torch.int32), *outputs(found)]

            def graph(
                z: Tensor = z, t: float = temperature, s: int = shards, k: dict[str, Any] = given, c: bool = truncation
            ) -> list[Tensor]:
                return _graph(z, t, device_keys(k), s, c)

            yield Case(config, "eager", eager, expected)
            yield Case(config, "CUDA graph", graph, expected)


def digests() -> Iterator[Case]:
    workers = Workers(8)
    generator = torch.Generator(DEVICE).manual_seed(5)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64):
        for count in (1, 4097, 1000003):
            size = dtype.itemsize
            raw = torch.randint(0, 256, (count * size,), generator=generator, device=DEVICE, dtype=torch.uint8)
            x = raw.view(dtype)
            words = raw.cpu().numpy().view(f"u{size}")

            def expected(words: Any = words) -> Tensor:
                lanes = np.array(cpu_digest.tensor_digest(words, workers, index_offset=7), np.uint64)
                return torch.from_numpy(lanes.view(np.int64)).to(DEVICE).view(torch.int32)

            yield Case(str(dtype), f"{count}", lambda x=x: tensor_digest(x, 7).view(torch.int32), expected)
    z = logits(32, 151936, 6)

    def rows() -> Tensor:
        lanes = cpu_digest.float32_rows_digest(z.cpu().numpy(), workers)
        return torch.from_numpy(lanes.view(np.int64)).to(DEVICE).view(torch.int32)

    yield Case("rows", "32x151936", lambda: rows_digest(z).view(torch.int32), rows)


def must_differ() -> Iterator[Case]:
    """Each case is 1 where the broken call was noticed."""
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)

    def noticed(left: list[Tensor], right: list[Tensor]) -> Tensor:
        return one if any(not torch.equal(a, b.to(a.dtype)) for a, b in zip(left, right, strict=True)) else one * 0

    problem = Problem("normal", 64, 256, 2000, 4, 0.7, "hopper", "bfloat16")
    broken: dict[str, Callable[[], Tensor]] = {
        "statistics of another number of shards": lambda: noticed(
            outputs(problem.statistics("triton", 2))[1:4], problem.forward()[1:4]
        ),
        "input gradient of another number of shards": lambda: noticed(
            problem.gradients("triton", None, 1, 2)[:1], problem.backward()[:1]
        ),
        "weight gradient of calls that are no whole steps": lambda: noticed(
            problem.gradients("triton", None, 8)[1:], problem.backward()[1:]
        ),
        "digest of torch's own order of products": lambda: noticed(
            [rows_digest(divided(problem.x.float() @ problem.w.float().T, 0.7)).view(torch.int32)],
            problem.forward()[4:],
        ),
    }
    for what, run in broken.items():
        yield Case("broken", what, run, lambda: one)


if __name__ == "__main__":
    parts = (gradients, sampling, digests, must_differ, statistics_of_products, statistics_in_memory, portable)
    sys.exit(main(__doc__.splitlines()[0], "benchmarks.gpu.head_bits", parts))
