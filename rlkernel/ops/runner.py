"""Runs a model definition over batches: hidden states, log-probabilities, sampling, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlkernel.contract.rope_tables import rope_tables
from rlkernel.errors import ModelError, NumericsError
from rlkernel.kernels.cpu.digest import tensor_digest
from rlkernel.kernels.cpu.logprob import RowStatistics
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.definition import ModelDefinition, Region
from rlkernel.ops.composition import Composition
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import Host, RopeTables, TokenBatch
from rlkernel.ops.weights import WeightSet
from rlkernel.verify.evidence import Evidence

Trace = Callable[[str, str, Any], None]


@dataclass
class Tape:
    """What a training forward kept: per region its saved values, or per layer its input and output digest."""

    batch: TokenBatch
    rows: NDArray[np.int64]
    targets: NDArray[np.int64]
    temperature: float
    hidden: Any
    statistics: RowStatistics
    saved: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[int, Any] = field(default_factory=dict)
    output_digests: dict[int, Any] = field(default_factory=dict)
    kept: Any = None
    """What the head keeps for its backward beside its input rows."""


class ModelRunner:
    """One side's model: a definition, its weights, a composition, and the evidence of what ran.

    Args:
        dtype: ``float32`` or ``bfloat16``, the contract's.
        tp: the claimed tensor-parallel degree (leaves of row-parallel reductions, vocabulary shards).
        max_position: longest sequence; the rotary tables have this many rows.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        weights: WeightSet,
        composition: Composition,
        evidence: Evidence,
        *,
        dtype: str,
        tp: int,
        workers: Workers,
        max_position: int,
    ) -> None:
        self.definition, self.weights, self.composition, self.evidence = definition, weights, composition, evidence
        self._dtype, self._tp, self._workers, self._max_position = dtype, tp, workers, max_position
        cos, sin = rope_tables(definition.config, max_position)
        self._rope = RopeTables(cos, sin)
        self.trace: Trace | None = None

    def with_weights(self, weights: Any) -> Self:
        """The same runner over other weights; tables and evidence are shared."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.weights = weights
        return other

    def _host(self, batch: TokenBatch, case: str, state: Any, gradients: Any = None) -> Any:
        self._check_positions(batch)
        return Host(
            config=self.definition.config,
            bf16=self._dtype == "bfloat16",
            tp=self._tp,
            case=case,
            batch=batch,
            weights=self.weights,
            rope=self._rope,
            workers=self._workers,
            state=state,
            gradients=gradients,
        )

    def _check_positions(self, batch: TokenBatch) -> None:
        if batch.positions.size and int(batch.positions.max()) >= self._max_position:
            raise ModelError(
                f"position {int(batch.positions.max())} is beyond the {self._max_position} positions of this runner"
            )

    def _run(self, region: Region, ports: dict[str, Any], host: Any) -> Any:
        op = self.composition.op(region.kind)
        outputs, saved = op.forward(region, [ports[name] for name in region.inputs], host)
        ports.update(zip(region.outputs, outputs, strict=True))
        self.evidence.ran(region.kind, host.case, op.implementation, len(host.batch.tokens))
        if self.trace is not None:
            for name, value in zip(region.outputs, outputs, strict=True):
                self.trace(region.name, name, value)
        return saved

    def hidden(self, batch: TokenBatch, state: Any, case: str) -> Any:
        """Normed hidden states [N, H] of a batch. Engines give their KV state; without one, whole sequences."""
        host = self._host(batch, case, state)
        ports: dict[str, Any] = {"tokens": host.batch.tokens}
        last_use = self._last_use()
        for region in self.definition.body:
            self._run(region, ports, host)
            for name in last_use.get(region.name, ()):
                del ports[name]
        return ports["hidden"]

    def _last_use(self) -> dict[str, list[str]]:
        last: dict[str, str] = {}
        for region in self.definition.body:
            last.update(dict.fromkeys(region.inputs, region.name))
        result: dict[str, list[str]] = {}
        for port, region_name in last.items():
            result.setdefault(region_name, []).append(port)
        return result

    def logprobs(self, hidden_rows: Any, targets: NDArray[np.int64], temperature: float, case: str) -> RowStatistics:
        """Log-probabilities, entropies and distribution digests of rows [R, H] for target ids [R]."""
        self._check_targets(targets)
        host = self._host(_rows_batch(len(targets)), case, None)
        self.evidence.ran("logprob", case, self.composition.head.implementation, len(targets))
        found: RowStatistics = self.composition.head.forward(
            self.definition.head, hidden_rows, targets, temperature, host
        )
        return found

    def sample(
        self, hidden_rows: Any, keys: SamplingKeys, temperature: float, case: str
    ) -> tuple[NDArray[np.int64], RowStatistics]:
        """Draw one token a row of [R, H]."""
        host = self._host(_rows_batch(len(keys.k)), case, None)
        self.evidence.ran("logprob", case, self.composition.head.implementation, len(keys.k))
        drawn, statistics = self.composition.head.sample(self.definition.head, hidden_rows, keys, temperature, host)
        return drawn, statistics

    def _check_targets(self, targets: NDArray[np.int64]) -> None:
        if targets.size and (int(targets.min()) < 0 or int(targets.max()) >= self.definition.config.vocab_size):
            raise ModelError(
                f"target ids reach from {int(targets.min())} to {int(targets.max())}; "
                f"the vocabulary has {self.definition.config.vocab_size}"
            )

    def forward(
        self,
        batch: TokenBatch,
        rows: NDArray[np.int64],
        targets: NDArray[np.int64],
        temperature: float,
        *,
        checkpointing: bool = False,
    ) -> Tape:
        """Training forward over whole sequences.

        ``rows`` [R], ascending, are the batch rows whose hidden state predicts ``targets`` [R]. With ``checkpointing``
        only each layer's input is kept, with the digest of its output; the backward recomputes the layer and compares.
        """
        self._check_targets(targets)
        host = self._host(batch, "trainer_forward", None)
        ports: dict[str, Any] = {"tokens": host.batch.tokens}
        saved: dict[str, Any] = {}
        checkpoints: dict[int, Any] = {}
        digests: dict[int, Any] = {}
        last_use = self._last_use()
        for region in self.definition.body:
            if checkpointing and region.layer is not None and region.layer not in checkpoints:
                checkpoints[region.layer] = ports[f"stream.{2 * region.layer}"]
            kept = self._run(region, ports, host)
            if not (checkpointing and region.layer is not None):
                saved[region.name] = kept
            if checkpointing and region.layer is not None and region.outputs[0] == f"stream.{2 * region.layer + 2}":
                digests[region.layer] = self._digest(ports[region.outputs[0]])
            for name in last_use.get(region.name, ()):
                del ports[name]
        hidden = ports["hidden"][rows]
        self.evidence.ran("logprob", "trainer_forward", self.composition.head.implementation, len(targets))
        statistics, kept = self._head_forward(hidden, targets, temperature, host)
        return Tape(batch, rows, targets, temperature, hidden, statistics, saved, checkpoints, digests, kept)

    def _head_forward(
        self, hidden: Any, targets: NDArray[np.int64], temperature: float, host: Any
    ) -> tuple[RowStatistics, Any]:
        """Statistics, and what the head's backward takes of them (nothing here: it computes them again)."""
        return self.composition.head.forward(self.definition.head, hidden, targets, temperature, host), None

    def _head_backward(self, tape: Tape, coefficient: NDArray[np.float32], host: Any) -> Any:
        """Gradient of the head's input rows [R, H]; continues its weight gradient."""
        host.row_starts = np.searchsorted(tape.rows, tape.batch.starts).astype(np.int32)
        head = self.composition.head
        return head.backward(self.definition.head, tape.hidden, tape.targets, tape.temperature, coefficient, host)

    def _digest(self, value: Any) -> Any:
        """Both lanes of an activation's digest."""
        array = value if isinstance(value, np.ndarray) else value.float().numpy()  # bfloat16 widens exactly
        return tensor_digest(np.ascontiguousarray(array), self._workers)

    def backward(self, tape: Tape, coefficient: NDArray[np.float32], gradients: Any) -> None:
        """Continue the weight gradients with this tape's tokens; ``coefficient`` [R] = d loss / d logprob.

        Raises NumericsError if a recomputed layer does not give the bits of the forward.
        """
        host = self._host(tape.batch, "trainer_backward", None, gradients)
        self.evidence.ran("logprob", host.case, self.composition.head.implementation, len(tape.targets))
        d_rows = self._head_backward(tape, coefficient, host)
        grads: dict[str, Any] = {"hidden": _scatter_rows(d_rows, tape.rows, len(tape.batch.tokens))}
        saved = dict(tape.saved)
        for region in reversed(self.definition.body):
            if region.layer is not None and region.name not in saved:
                saved.update(self._recompute(region.layer, tape))
            op = self.composition.op(region.kind)
            outputs = [grads.pop(name) for name in region.outputs]
            inputs = op.backward(region, saved.pop(region.name), outputs, host)
            self.evidence.ran(region.kind, host.case, op.implementation, len(tape.batch.tokens))
            for name, value in zip(region.inputs, inputs, strict=False):
                grads[name] = self._meet(grads[name], value, host) if name in grads else value

    def _meet(self, stream: Any, branch: Any, host: Any) -> Any:
        add = self.composition.op("residual_add")
        (total,), _ = add.forward(self.definition.body[-2], [stream, branch], host)
        return total

    def _recompute(self, layer: int, tape: Tape) -> dict[str, Any]:
        host = self._host(tape.batch, "trainer_recompute", None)
        ports: dict[str, Any] = {f"stream.{2 * layer}": tape.checkpoints[layer]}
        saved = {}
        for region in self.definition.body:
            if region.layer == layer:
                saved[region.name] = self._run(region, ports, host)
        self._confirm(layer, tape.output_digests[layer], self._digest(ports[f"stream.{2 * layer + 2}"]))
        return saved

    def _confirm(self, layer: int, before: Any, again: Any) -> None:
        """Raise NumericsError unless a recomputed layer has the digest of the forward's."""
        if again != before:
            raise NumericsError(
                f"layer {layer}: the recomputed output has digest {again[0]:016x}{again[1]:016x}, "
                f"the forward had {before[0]:016x}{before[1]:016x}"
            )


def _rows_batch(rows: int) -> TokenBatch:
    """A batch that only says how many rows the head works on."""
    return TokenBatch(np.zeros(rows, np.int64), np.zeros(rows, np.int32), np.array([0, rows], np.int32))


def _scatter_rows(values: Any, rows: NDArray[np.int64], total: int) -> Any:
    """Rows placed into [total, H] of zeros; a row is named at most once."""
    if isinstance(values, np.ndarray):
        result = np.zeros((total, values.shape[1]), values.dtype)
    else:
        result = values.new_zeros((total, values.shape[1]))
    result[rows] = values
    return result
