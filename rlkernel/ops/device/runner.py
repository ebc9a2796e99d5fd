"""Runs a model definition on a GPU: NumPy batches in, statistics and tokens out, everything between on the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.build import Contract
from rlkernel.contract.rope_tables import rope_tables
from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.logprob import RowStatistics
from rlkernel.kernels.products import FEW_ROWS
from rlkernel.kernels.triton.launch_digest import tensor_digest
from rlkernel.kernels.triton.launch_logprob import DeviceRowStatistics
from rlkernel.kernels.triton.launch_sampling import DeviceSamplingKeys
from rlkernel.models.definition import ModelDefinition
from rlkernel.ops.composition import Composition
from rlkernel.ops.device import linear
from rlkernel.ops.device.fused import FusedBody
from rlkernel.ops.device.graphs import MAX_DRAWS, DecodeGraph, DrawGraph, bucket_of
from rlkernel.ops.device.host import DeviceBatch, DeviceHost
from rlkernel.ops.device.weights import DeviceWeights
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import TokenBatch
from rlkernel.ops.runner import ModelRunner, Tape
from rlkernel.verify.admission.first_use import Extents, extents_of, joined, larger
from rlkernel.verify.evidence import Evidence


@dataclass(frozen=True)
class DeviceState:
    """KV pages of a device with the tables of one batch (:class:`rlkernel.ops.device.host.DeviceKVState`)."""

    kv: Any
    block_table: torch.Tensor
    slots: torch.Tensor

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return int(self.kv.page_size)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) of a layer, each [P, page, KVH, D]."""
        found: tuple[torch.Tensor, torch.Tensor] = self.kv.pages(layer)
        return found


class DeviceRunner(ModelRunner):
    """One side's model on a GPU, with the interface of :class:`rlkernel.ops.runner.ModelRunner`.

    Hidden states are tensors of the device; a KV state's tables are NumPy arrays, its pages tensors; gradients are
    :class:`rlkernel.ops.device.gradients.DeviceGradients`.

    Args:
        contract: its entries say what the kernels execute.
        max_position: longest sequence; the rotary tables have this many rows.
    """

    def __init__(
        self,
        definition: ModelDefinition,
        weights: DeviceWeights,
        composition: Composition,
        evidence: Evidence,
        contract: Contract,
        *,
        max_position: int,
    ) -> None:
        self.definition, self.composition, self.evidence = definition, composition, evidence
        self.weights = weights  # type: ignore[assignment]
        self._contract, self._device, self._max_position = contract, weights.device, max_position
        self._tables = tuple(self._placed(table) for table in rope_tables(definition.config, max_position))
        self._unconfirmed: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._fused = FusedBody(definition)
        self._kinds = Counter(region.kind for region in definition.body)
        self._compared: dict[str, Extents] = {}
        self._graphs: dict[tuple[int, int, int], DecodeGraph] = {}
        self._last: DecodeGraph | None = None
        self._pool: Any = None
        self._nothing: DeviceBatch | None = None
        self.trace = None

    def _placed(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _host(self, batch: TokenBatch, case: str, state: Any, gradients: Any = None) -> DeviceHost:
        self._check_positions(batch)
        if state is not None:
            state = DeviceState(state.kv, self._placed(state.block_table), self._placed(state.slots))
        return DeviceHost(
            contract=self._contract,
            config=self.definition.config,
            case=case,
            batch=DeviceBatch(
                tokens=self._placed(batch.tokens),
                positions=self._placed(batch.positions),
                starts=self._placed(batch.starts),
                lengths=tuple(np.diff(batch.starts).tolist()),
                last_position=int(batch.positions.max(initial=-1)),
            ),
            weights=self.weights,  # type: ignore[arg-type]
            cos=self._tables[0],
            sin=self._tables[1],
            state=state,
            gradients=gradients,
        )

    def hidden(self, batch: TokenBatch, state: Any, case: str) -> Any:
        """Normed hidden states [N, H] of a batch, by the fused kernels, in decode as a CUDA graph.

        The first pass of a case, and of every graph, and every later one with more rows or longer sequences by a
        quarter, is computed by the regions one after the other as well. A trace sees these regions alone.

        Raises:
            NumericsError: the fused kernels gave another bit than the regions.
        """
        if self.trace is not None or not len(batch.tokens):
            return super().hidden(batch, state, case)
        bucket = bucket_of(len(batch.tokens)) if self._device.type == "cuda" and case == "rollout_decode" else None
        if bucket is not None and state is not None:
            return self._replayed(batch, state, case, bucket)
        host = self._host(batch, case, state)
        if not self._larger(case, batch):
            found = self._fused(host)
            self._count(case, len(batch.tokens))
            return found
        expected = super().hidden(batch, state, case)
        return self._agreed(self._fused(host), expected, case, batch)

    def _replayed(self, batch: TokenBatch, state: Any, case: str, bucket: int) -> torch.Tensor:
        """A decode step by the graph of its bucket, captured where there is none of these weights and pages."""
        key, what = (id(self.weights), id(state.kv), bucket), f"{case}, graph of {bucket} rows"
        graph, count = self._graphs.get(key), len(batch.tokens)
        if graph is not None and not self._larger(what, batch):
            graph.fill(batch.tokens, batch.positions, state.slots, state.block_table)
            found = graph.replay()[:count]
            self._last = graph
            self._count(case, count)
            self._fact("graph_replays")
            return found
        expected = super().hidden(batch, state, case)
        if graph is None:
            graph = self._graphs[key] = self._captured(batch, state, case, bucket)
        graph.fill(batch.tokens, batch.positions, state.slots, state.block_table)
        self._last = graph
        return self._agreed(graph.replay()[:count], expected, what, batch)

    def _captured(self, batch: TokenBatch, state: Any, case: str, bucket: int) -> DecodeGraph:
        """A new graph of a bucket."""
        host = self._host(batch, case, state)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        if bucket > FEW_ROWS:  # with fewer rows the own kernel starts early, which the library's do not
            self._fused.admit(host, bucket)
            head = self.definition.head
            linear.admit(host.points("lm_head"), bucket, host.weights.matrix(head), torch.float32)
        width = -(-self._max_position // state.page_size)
        graph = DecodeGraph(host, bucket, width, self._max_position - 1, self._fused, self._pool)
        graph.fill(batch.tokens, batch.positions, state.slots, state.block_table)
        graph.capture()
        self._fact("graphs_captured")
        return graph

    def _larger(self, what: str, batch: TokenBatch) -> bool:
        """Whether no pass of this size was compared."""
        return larger(extents_of("attention", batch), self._compared.get(what))

    def _agreed(self, found: torch.Tensor, expected: torch.Tensor, what: str, batch: TokenBatch) -> torch.Tensor:
        """The fused kernels' result, if it has the bits of the regions'."""
        digests = torch.stack([self._digest(found), self._digest(expected)]).cpu()
        if not torch.equal(digests[0], digests[1]):
            raise NumericsError(
                f"{what}: the fused kernels give hidden states {list(found.shape)} with digest {_hex(digests[0])}, the "
                f"regions one after the other {_hex(digests[1])}"
            )
        reached = self._compared[what] = joined(extents_of("attention", batch), self._compared.get(what))
        facts = self.evidence.facts.setdefault("fused_first_use", {})
        before = facts.get(what, {"calls": 0, "outputs": 0})
        facts[what] = {
            "calls": before["calls"] + 1, "outputs": before["outputs"] + found.numel(), "differing": 0,
            "rows": reached[0], "keys": reached[1],
        }  # fmt: skip
        return found

    def _count(self, case: str, tokens: int) -> None:
        """One fused pass counts as one execution of every region."""
        for kind, times in self._kinds.items():
            self.evidence.ran(kind, case, self.composition.op(kind).implementation, tokens, times)

    def _fact(self, name: str) -> None:
        self.evidence.facts[name] = self.evidence.facts.get(name, 0) + 1

    def logprobs(self, hidden_rows: Any, targets: NDArray[np.int64], temperature: float, case: str) -> RowStatistics:
        """Log-probabilities, entropies and distribution digests of rows [R, H] for target ids [R]."""
        self._check_targets(targets)
        self.evidence.ran("logprob", case, self.composition.head.implementation, len(targets))
        found, _ = self._head_forward(hidden_rows, targets, temperature, self._rows_host(case))
        return found

    def _rows_host(self, case: str) -> DeviceHost:
        """Services of the head, which has no batch of tokens."""
        if self._nothing is None:
            none = TokenBatch(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(1, np.int32))
            self._nothing = self._host(none, case, None).batch
        return DeviceHost(
            contract=self._contract,
            config=self.definition.config,
            case=case,
            batch=self._nothing,
            weights=self.weights,  # type: ignore[arg-type]
            cos=self._tables[0],
            sin=self._tables[1],
        )

    def sample(
        self, hidden_rows: Any, keys: SamplingKeys, temperature: float, case: str
    ) -> tuple[NDArray[np.int64], RowStatistics]:
        """Draw one token a row of [R, H]."""
        head = self.composition.head
        self.evidence.ran("logprob", case, head.implementation, len(keys.k))
        truncation = bool((keys.top_k > 0).any() or (keys.top_p < 1).any())
        graph = self._last
        if graph is not None and graph.holds(hidden_rows):
            draw = graph.draws.get((temperature, truncation))
            if draw is not None:
                draw.fill(keys)
                self._fact("draw_replays")
                return unpacked(draw.replay(), graph.rows, graph.count)
            if not truncation and len(graph.draws) < MAX_DRAWS:
                return self._first_draw(graph, hidden_rows, keys, temperature, truncation, case)
        return drawn_on_host(*self._drawn(hidden_rows, self._keys(keys), temperature, truncation, case))

    def _drawn(
        self, hidden: torch.Tensor, keys: DeviceSamplingKeys, temperature: float, truncation: bool, case: str
    ) -> tuple[torch.Tensor, DeviceRowStatistics]:
        found: tuple[torch.Tensor, DeviceRowStatistics] = self.composition.head.sample(
            self.definition.head, hidden.contiguous(), keys, temperature, self._rows_host(case), truncation
        )
        return found

    def _first_draw(
        self,
        graph: DecodeGraph,
        hidden: torch.Tensor,
        keys: SamplingKeys,
        temperature: float,
        truncation: bool,
        case: str,
    ) -> tuple[NDArray[np.int64], RowStatistics]:
        """Draw without a graph and by one that is captured now, which must agree.

        Raises NumericsError if they differ in a bit.
        """
        expected = packed(*self._drawn(hidden, self._keys(keys), temperature, truncation, case)).cpu().numpy()
        rows, whole = graph.rows, graph.hidden
        assert whole is not None

        def draw(given: DeviceSamplingKeys) -> torch.Tensor:
            return packed(*self._drawn(whole, given, temperature, truncation, case))

        found = DrawGraph(self._device, rows, draw, graph.pool)
        found.fill(keys)
        found.capture()
        result = unpacked(found.replay(), rows, graph.count)
        alone = unpacked(expected, graph.count, graph.count)
        what = f"{case}, tokens of {rows} rows at temperature {temperature}"
        if not _same(result, alone):
            raise NumericsError(f"{what}: the captured graph draws other bits than the same kernels outside of it")
        self.evidence.facts.setdefault("fused_first_use", {})[what] = {"outputs": expected.size, "differing": 0}
        graph.draws[(temperature, truncation)] = found
        self._fact("draws_captured")
        return result

    def _keys(self, keys: SamplingKeys) -> DeviceSamplingKeys:
        """The keys on the device, by one transfer of 64-bit words."""
        names = [f.name for f in fields(DeviceSamplingKeys)]
        words = np.stack([_words(getattr(keys, name)) for name in names])
        rows = dict(zip(names, self._placed(words), strict=True))
        rows["greedy"] = rows["greedy"] != 0
        rows["top_p"] = rows["top_p"].view(torch.float64)
        return DeviceSamplingKeys(**rows)

    def _head_forward(
        self, hidden: Any, targets: NDArray[np.int64], temperature: float, host: Any
    ) -> tuple[RowStatistics, DeviceRowStatistics]:
        found = self.composition.head.forward(
            self.definition.head, hidden.contiguous(), self._placed(targets), temperature, host
        )
        return on_host(found), found

    def _head_backward(self, tape: Tape, coefficient: NDArray[np.float32], host: Any) -> Any:
        host.row_starts = tuple(np.searchsorted(tape.rows, tape.batch.starts).tolist())
        return self.composition.head.backward(
            self.definition.head, tape.hidden, self._placed(tape.targets), tape.temperature,
            self._placed(coefficient), host, tape.kept,
        )  # fmt: skip

    def backward(self, tape: Tape, coefficient: NDArray[np.float32], gradients: Any) -> None:
        """Continue the weight gradients with this tape's tokens; ``coefficient`` [R] = d loss / d logprob.

        Raises NumericsError if a recomputed layer does not give the bits of the forward: looked at once, at the end.
        """
        self._unconfirmed.clear()
        super().backward(tape, coefficient, gradients)
        if not self._unconfirmed:
            return
        pairs = torch.stack([torch.stack([before, again]) for _, before, again in self._unconfirmed]).cpu()
        for (layer, _, _), (before, again) in zip(self._unconfirmed, pairs.numpy().view(np.uint64), strict=True):
            super()._confirm(layer, tuple(map(int, before)), tuple(map(int, again)))

    def _digest(self, value: Any) -> Any:
        return tensor_digest(value.contiguous(), canonical=True)

    def _confirm(self, layer: int, before: Any, again: Any) -> None:
        self._unconfirmed.append((layer, before, again))


def _hex(lanes: torch.Tensor) -> str:
    return "".join(f"{int(lane):016x}" for lane in lanes.numpy().view(np.uint64))


def _words(values: NDArray[Any]) -> NDArray[np.int64]:
    """Integers, truth values and float64 as 64-bit words."""
    return values.view(np.int64) if values.dtype.itemsize == 8 else values.astype(np.int64)


def packed(tokens: torch.Tensor, found: DeviceRowStatistics) -> torch.Tensor:
    """Drawn tokens int64 [R] and their statistics as words int64 [5 * R], on the device."""
    floats = torch.cat([found.max, found.log_sum, found.logprob, found.entropy])
    return torch.cat([tokens, found.digest.reshape(-1), floats.view(torch.int64)])


def unpacked(words: NDArray[np.int64], rows: int, count: int) -> tuple[NDArray[np.int64], RowStatistics]:
    """The first ``count`` of ``rows`` rows of :func:`packed`."""
    values = words[3 * rows :].view(np.float32).reshape(4, rows)[:, :count]
    digest = words[rows : 3 * rows].view(np.uint64).reshape(rows, 2)[:count]
    return words[:count], RowStatistics(values[0], values[1], values[2], values[3], digest)


def drawn_on_host(tokens: torch.Tensor, found: DeviceRowStatistics) -> tuple[NDArray[np.int64], RowStatistics]:
    """Drawn tokens int64 [R] and their statistics as NumPy arrays, by one transfer."""
    return unpacked(packed(tokens, found).cpu().numpy(), len(tokens), len(tokens))


def _same(
    one: tuple[NDArray[np.int64], RowStatistics], other: tuple[NDArray[np.int64], RowStatistics]
) -> bool:  # fmt: skip
    """Whether tokens and statistics have equal bits."""
    if one[0].tobytes() != other[0].tobytes():
        return False
    names = [f.name for f in fields(RowStatistics)]
    return all(getattr(one[1], name).tobytes() == getattr(other[1], name).tobytes() for name in names)


def on_host(found: DeviceRowStatistics) -> RowStatistics:
    """Statistics as NumPy arrays, in one transfer of floats and one of digests."""
    values = torch.stack([found.max, found.log_sum, found.logprob, found.entropy]).cpu().numpy()
    digest = found.digest.cpu().numpy().view(np.uint64)
    if digest.shape != (values.shape[1], 2):
        raise NumericsError(f"digests of {values.shape[1]} rows have the shape {digest.shape}")
    return RowStatistics(values[0], values[1], values[2], values[3], digest)
