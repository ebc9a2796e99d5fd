"""The linear log-probability executed from its contract entry: statistics, digest, gradient, and sampling's inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.entries import VOCABULARY
from rlkernel.contract.points import SixPoints
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu import sampling
from rlkernel.kernels.cpu.logprob import RowStatistics
from rlkernel.models.definition import Region
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import Host
from rlkernel.reference.arith import div, fma32, maximum, mul, sub
from rlkernel.reference.digest import rows_digest
from rlkernel.reference.lookup import primitive
from rlkernel.reference.primitives import LN2, LOG2E
from rlkernel.reference.reductions import matmul, tree
from rlkernel.reference.regions import Array, ReferenceOp, array, continued, output, whole_steps

Tensor = torch.Tensor
Unary = Callable[[Tensor], Tensor]
NEGATIVE_INFINITY = float("-inf")


def scalar(value: float, like: Tensor) -> Tensor:
    """A float32 constant that broadcasts against ``like``."""
    return torch.full((), value, dtype=torch.float32, device=like.device).expand_as(like)


class _Sums:
    """Maximum, sum of exponentials and sum of weighted differences, each [R, parts]."""

    def __init__(self, m: Tensor, s: Tensor, u: Tensor) -> None:
        self.m, self.s, self.u = m, s, u


def statistics(points: SixPoints, z: Tensor, targets: Tensor) -> RowStatistics:
    """Statistics of divided logits z [R, V] (real vocabulary) for target ids [R].

    Raises ContractError if the entry reduces over anything but the real vocabulary.
    """
    if points.dependency.domain != VOCABULARY:
        raise ContractError(f"log-probabilities over {points.dependency.domain!r} are not defined")
    exp2, log2 = primitive(points.primitive("exp2")), primitive(points.primitive("log2"))
    leaves = _leaves(points, z, exp2)
    shards = _shards(points, leaves, exp2)
    largest = shards.m[:, 0]
    for t in range(1, shards.m.shape[1]):
        largest = maximum(largest, shards.m[:, t])
    w = exp2(mul(sub(shards.m, largest[:, None].expand_as(shards.m)), scalar(LOG2E, shards.m)))
    live = shards.m != NEGATIVE_INFINITY
    zero = torch.zeros_like(w)
    moved = fma32(shards.s, sub(shards.m, largest[:, None].expand_as(shards.m)), shards.u)
    s = tree(torch.where(live, mul(shards.s, w), zero), 1)
    u = tree(torch.where(live, mul(moved, w), zero), 1)
    log_sum = mul(log2(s), scalar(LN2, s))
    chosen = z.gather(1, targets[:, None])[:, 0]
    logprob = sub(sub(chosen, largest), log_sum)
    entropy = sub(log_sum, div(u, s))
    bad = z.isnan().any(1) | (z == float("inf")).any(1) | (z == NEGATIVE_INFINITY).all(1)
    nan = torch.full_like(logprob, float("nan"))
    return RowStatistics(
        max=array(largest),
        log_sum=array(log_sum),
        logprob=array(torch.where(bad, nan, logprob)),
        entropy=array(torch.where(bad, nan, entropy)),
        digest=rows_digest(array(z)),
    )


def _leaves(points: SixPoints, z: Tensor, exp2: Unary) -> _Sums:
    size = points.split.leaf_size
    multiple = int(points.constant("padding_multiple"))
    padding = -z.shape[1] % multiple
    padded = torch.nn.functional.pad(z, (0, padding), value=NEGATIVE_INFINITY)
    padded = padded.reshape(len(z), padded.shape[1] // size, size)
    real = torch.nn.functional.pad(torch.ones_like(z, dtype=torch.bool), (0, padding)).reshape(padded.shape)
    m = torch.full(padded.shape[:2], NEGATIVE_INFINITY, device=z.device)
    for column in range(size):
        m = torch.where(real[:, :, column], maximum(m, padded[:, :, column]), m)
    difference = sub(padded, m[:, :, None].expand_as(padded))
    e = exp2(mul(difference, scalar(LOG2E, padded)))
    e = torch.where(real & (m != NEGATIVE_INFINITY)[:, :, None], e, torch.zeros_like(e))
    term = torch.where(e == 0, torch.zeros_like(e), mul(e, difference))
    return _Sums(m, tree(e, 2), tree(term, 2))


def _shards(points: SixPoints, leaves: _Sums, exp2: Unary) -> _Sums:
    shards = points.split.shards
    m, s, u = (x.reshape(len(x), shards, x.shape[1] // shards) for x in (leaves.m, leaves.s, leaves.u))
    largest = m[:, :, 0]
    for leaf in range(1, m.shape[2]):
        largest = maximum(largest, m[:, :, leaf])
    total, weighted = torch.zeros_like(largest), torch.zeros_like(largest)
    for leaf in range(m.shape[2]):
        difference = sub(m[:, :, leaf], largest)
        w = exp2(mul(difference, scalar(LOG2E, difference)))
        live = m[:, :, leaf] != NEGATIVE_INFINITY
        moved = torch.where(w == 0, u[:, :, leaf], fma32(s[:, :, leaf], difference, u[:, :, leaf]))
        total = torch.where(live, fma32(s[:, :, leaf], w, total), total)
        weighted = torch.where(live, fma32(moved, w, weighted), weighted)
    return _Sums(largest, total, weighted)


class ReferenceLinearLogprob(ReferenceOp):
    """The model's head."""

    def _logits(self, case: str, region: Region, x: Tensor, temperature: float, host: Host) -> Tensor:
        z = matmul(self.interpreter.points(case, "lm_head"), x, self.interpreter.weight(host, region.weights[0]))
        return div(z, scalar(temperature, z))

    def forward(
        self, region: Region, x: Array, targets: NDArray[np.int64], temperature: float, host: Host
    ) -> RowStatistics:
        """Statistics of rows x [R, H] for target ids [R]."""
        points = self.entry(host, "logprob")
        z = self._logits(host.case, region, self.interpreter.tensor(x), temperature, host)
        return statistics(points, z, torch.from_numpy(targets).to(z.device))

    def sample(
        self, region: Region, x: Array, keys: SamplingKeys, temperature: float, host: Host
    ) -> tuple[NDArray[np.int64], RowStatistics]:
        """Draw one token a row by the CPU's sampler from interpreted logits."""
        points = self.entry(host, "logprob")
        z = self._logits(host.case, region, self.interpreter.tensor(x), temperature, host)
        logits = np.ascontiguousarray(array(z))
        largest = statistics(points, z, torch.zeros(len(z), dtype=torch.int64, device=z.device)).max
        drawn = sampling.sample(logits, largest, **vars(keys), workers=host.workers)
        return drawn, statistics(points, z, torch.from_numpy(drawn).to(z.device))

    def backward(
        self,
        region: Region,
        x: Array,
        targets: NDArray[np.int64],
        temperature: float,
        coefficient: Array,
        host: Host,
    ) -> Any:
        """d loss / d x from the coefficients d loss / d logprob; continues the head's weight gradient."""
        forward = self.interpreter.points("trainer_forward", "logprob")
        rows = self.interpreter.tensor(x)
        z = self._logits("trainer_forward", region, rows, temperature, host)
        found = statistics(forward, z, torch.from_numpy(targets).to(z.device))
        points = self.entry(host, "logprob")
        exp2 = primitive(points.primitive("exp2"))
        m, log_sum = (self.interpreter.tensor(v)[:, None].expand_as(z) for v in (found.max, found.log_sum))
        p = exp2(mul(sub(sub(z, m), log_sum), scalar(LOG2E, z)))
        hot = torch.zeros_like(z)
        hot[torch.arange(len(z)), torch.from_numpy(targets).to(z.device)] = 1.0
        c = div(self.interpreter.tensor(coefficient), scalar(temperature, z[:, 0]))
        dz = output(points, mul(sub(hot, p), c[:, None].expand_as(z)))
        wgrad, name = self.entry(host, "lm_head.wgrad"), region.weights[0]
        running = self.interpreter.tensor(self.grad(host, name))
        starts = [0, len(rows)] if host.row_starts is None else host.row_starts
        steps = [whole_steps(wgrad, starts, matrix) for matrix in (dz, rows)]
        self.grad(host, name)[:] = array(continued(wgrad, steps[0], steps[1], running))
        dgrad = self.entry(host, "lm_head")
        weight = self.interpreter.weight(host, name)
        borders = shard_borders(dgrad, dz.shape[1])
        return array(output(dgrad, matmul(dgrad, dz, weight.T.contiguous(), borders=borders)))


def shard_borders(points: SixPoints, vocabulary: int) -> list[int]:
    """Where the real ids of each shard begin, and where the last ones end; a shard of padding alone has none."""
    from rlkernel.contract.entries import VOCABULARY_LEAF

    shards = points.split.leaves
    size = -(-vocabulary // (VOCABULARY_LEAF * shards)) * VOCABULARY_LEAF
    return [min(shard * size, vocabulary) for shard in range(shards + 1)] if shards > 1 else [0, vocabulary]
