"""Kernels that compute nearly the same function: other reduction orders, and a head that forgets the temperature.

All go by the name of the implementation that they stand in for: evidence and identities cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlkernel.kernels.cpu import gemm, norm
from rlkernel.kernels.cpu.panels import Panels, pack_rows, unpack_row
from rlkernel.ops.composition import Composition
from rlkernel.ops.head import LinearLogprob
from rlkernel.ops.portable import Attention, ColumnParallel, RmsNorm, RowParallel
from tests.runtime.faults import Plant
from vime.runtime.assembly import Sides
from vime.runtime.sides import build_engine_in_child


def reversed_matmul(a: np.ndarray, panels: Panels, workers: Any, **options: Any) -> np.ndarray:
    """The same product, each chain run over k descending."""
    rows = unpack_row(panels, np.arange(panels.rows))
    backwards = pack_rows(np.ascontiguousarray(rows[:, ::-1]), workers)
    return gemm.matmul(np.ascontiguousarray(a[:, ::-1]), backwards, workers, **options)


class ReversedColumns(ColumnParallel):
    """qkv or gate-up, k descending, in some cases only (none named: in all)."""

    def __init__(self, heads: bool, cases: tuple[str, ...] = ()) -> None:
        super().__init__(heads)
        self._cases = cases

    def forward(self, region: Any, inputs: Any, host: Any) -> Any:
        if self._cases and host.case not in self._cases:
            return super().forward(region, inputs, host)
        y = reversed_matmul(inputs[0], host.weights.rows(region), host.workers, bf16=host.bf16)
        cuts = np.cumsum(self._widths(region, host))[:-1]
        return self._shaped([np.ascontiguousarray(part) for part in np.split(y, cuts, axis=1)], host), inputs[0]


class ReversedRows(RowParallel):
    """o_proj or down_proj, k descending."""

    def forward(self, region: Any, inputs: Any, host: Any) -> Any:
        x = np.ascontiguousarray(inputs[0].reshape(len(inputs[0]), -1))
        return (reversed_matmul(x, host.weights.rows(region), host.workers, leaves=host.tp, bf16=host.bf16),), x


class RotatedNorm(RmsNorm):
    """RMSNorm whose sum of squares pairs other neighbours (mere reversal mirrors the tree and keeps its bits)."""

    def forward(self, region: Any, inputs: Any, host: Any) -> Any:
        weight = np.roll(host.weights.vectors[region.weights[0]], 1)
        x = np.roll(inputs[0], 1, axis=1)
        y, inv_rms = norm.rms_norm(x, weight, np.float32(host.config.rms_norm_eps), host.workers, host.bf16)
        return (np.roll(y, -1, axis=1),), (inputs[0], inv_rms)


class ReversedAttention(Attention):
    """Attention whose scores run over the head's dimensions descending."""

    def forward(self, region: Any, inputs: Any, host: Any) -> Any:
        q, k, v = inputs
        q, k = (np.ascontiguousarray(x[:, :, ::-1]) for x in (q, k))
        return super().forward(region, [q, k, v], host)


class _ReversedWeights:
    """Packed rows with k descending."""

    def __init__(self, weights: Any, workers: Any) -> None:
        self._weights, self._workers = weights, workers

    def rows(self, region: Any) -> Panels:
        panels = self._weights.rows(region)
        whole = unpack_row(panels, np.arange(panels.rows))
        return pack_rows(np.ascontiguousarray(whole[:, ::-1]), self._workers)


class ReversedHead(LinearLogprob):
    """Logits, k descending."""

    def forward(self, region: Any, x: Any, targets: Any, temperature: float, host: Any) -> Any:
        return super().forward(region, np.ascontiguousarray(x[:, ::-1]), targets, temperature, _backwards(host))

    def sample(self, region: Any, x: Any, keys: Any, temperature: float, host: Any) -> Any:
        return super().sample(region, np.ascontiguousarray(x[:, ::-1]), keys, temperature, _backwards(host))


def _backwards(host: Any) -> Any:
    return replace(host, weights=_ReversedWeights(host.weights, host.workers))


class RawHead(LinearLogprob):
    """Draws with the temperature, but reports log-probabilities of the logits without it."""

    def sample(self, region: Any, x: Any, keys: Any, temperature: float, host: Any) -> Any:
        tokens, _ = super().sample(region, x, keys, temperature, host)
        return tokens, super().forward(region, x, tokens, 1.0, host)

    def forward(self, region: Any, x: Any, targets: Any, temperature: float, host: Any) -> Any:
        return super().forward(region, x, targets, 1.0, host)


def swapped(composition: Composition, kind: str, op: Any) -> Composition:
    """A composition with another implementation of one region kind, or of the head."""
    if kind == "logprob":
        return replace(composition, head=op)
    return replace(composition, ops={**composition.ops, kind: op})


def engine_runs(kind: str, op: Any) -> Plant:
    """The engine computes one region kind with another kernel."""

    return lambda sides: _alter_engine(sides.engine.native, kind, op)


def _alter_engine(engine: Any, kind: str, op: Any) -> None:
    whole = engine._model_factory

    def factory(weights: Any) -> Any:
        model = whole(weights)
        model.composition = swapped(model.composition, kind, op)
        return model

    engine._model_factory = factory


def build_reversed_engine(specification: Mapping[str, Any]) -> Any:
    """An engine process with another order in one projection."""
    engine = build_engine_in_child(specification)
    _alter_engine(engine, "down_proj", ReversedRows(heads=False))
    return engine


def trainer_runs(kind: str, op: Any) -> Plant:
    """The trainer computes one region kind with another kernel."""

    def plant(sides: Sides) -> None:
        model = sides.trainer._model
        model.composition = swapped(model.composition, kind, op)

    return plant
