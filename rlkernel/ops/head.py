"""The linear log-probability on a CPU: LM head, temperature, log-softmax, gather, digest, sampling and its gradient.

Logits exist only for a chunk of rows at a time; the chunk size cannot change a bit, since rows are independent and
weight-gradient chains continue from chunk to chunk in row order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlkernel.kernels.cpu import gemm, gemm_gradient, logprob, sampling
from rlkernel.kernels.cpu.logprob import RowStatistics
from rlkernel.models.definition import Region
from rlkernel.ops.host import Host

Array = NDArray[np.float32]
_LOGITS_PER_CHUNK = 1 << 23  # 32 MiB of float32


@dataclass(frozen=True)
class SamplingKeys:
    """Counters of the generator and the sampler's options, one entry a row (R)."""

    seeds: NDArray[np.uint64]
    prompt_index: NDArray[np.int64]
    k: NDArray[np.int64]
    namespace: NDArray[np.int64]
    position: NDArray[np.int64]
    greedy: NDArray[np.bool_]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]

    def rows(self, first: int, last: int) -> SamplingKeys:
        """The keys of rows ``first <= r < last``."""
        return SamplingKeys(**{name: value[first:last] for name, value in vars(self).items()})


def _concatenate(parts: list[RowStatistics]) -> RowStatistics:
    if len(parts) == 1:
        return parts[0]
    names = list(vars(parts[0])) if parts else []
    return RowStatistics(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


class LinearLogprob:
    """The model's head in the portable profile."""

    implementation = "cpu.linear_logprob"

    def _chunks(self, rows: int, vocabulary: int) -> list[tuple[int, int]]:
        step = max(1, _LOGITS_PER_CHUNK // vocabulary)
        return [(first, min(rows, first + step)) for first in range(0, rows, step)] or [(0, 0)]

    def forward(
        self, region: Region, x: Array, targets: NDArray[np.int64], temperature: float, host: Host
    ) -> RowStatistics:
        """Statistics of rows x [R, H] for target ids [R]."""
        parts = []
        for first, last in self._chunks(len(x), host.config.vocab_size):
            z = gemm.matmul(x[first:last], host.weights.rows(region), host.workers)
            parts.append(logprob.row_statistics(z, np.float32(temperature), targets[first:last], host.tp, host.workers))
        return _concatenate(parts)

    def sample(
        self, region: Region, x: Array, keys: SamplingKeys, temperature: float, host: Host
    ) -> tuple[NDArray[np.int64], RowStatistics]:
        """Draw one token a row and return its statistics."""
        tokens, parts = [], []
        for first, last in self._chunks(len(x), host.config.vocab_size):
            z = gemm.matmul(x[first:last], host.weights.rows(region), host.workers)
            chunk = keys.rows(first, last)
            unknown = np.zeros(last - first, np.int64)
            statistics = logprob.row_statistics(z, np.float32(temperature), unknown, host.tp, host.workers)
            drawn = sampling.sample(z, statistics.max, **vars(chunk), workers=host.workers)
            # the two subtractions of the definition, on the drawn token's logit
            taken = z[np.arange(len(drawn)), drawn]
            tokens.append(drawn)
            parts.append(replace(statistics, logprob=(taken - statistics.max) - statistics.log_sum))
        return np.concatenate(tokens), _concatenate(parts)

    def backward(
        self,
        region: Region,
        x: Array,
        targets: NDArray[np.int64],
        temperature: float,
        coefficient: Array,
        host: Host,
    ) -> Array:
        """d loss / d x [R, H] from the coefficients d loss / d logprob [R]; continues the head's weight gradient."""
        assert host.gradients is not None
        grad = host.gradients.buffer(region.weights[0])
        parts = []
        for first, last in self._chunks(len(x), host.config.vocab_size):
            rows, ids = x[first:last], targets[first:last]
            z = gemm.matmul(rows, host.weights.rows(region), host.workers)
            statistics = logprob.row_statistics(z, np.float32(temperature), ids, host.tp, host.workers)
            dz = logprob.logits_gradient(
                z, statistics, ids, coefficient[first:last], np.float32(temperature), host.workers, host.bf16
            )
            gemm_gradient.weight_gradient(dz, rows, grad, host.workers)
            columns = host.weights.columns(region)
            real = None
            if columns.depth > dz.shape[1]:  # packed in whole vocabulary shards, of which only real ids are added
                real = dz.shape[1]
                dz = np.pad(dz, ((0, 0), (0, columns.depth - real)))
            parts.append(gemm.matmul(dz, columns, host.workers, leaves=host.tp, real=real, bf16=host.bf16))
        return np.concatenate(parts)
