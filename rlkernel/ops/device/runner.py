"""Runs a model definition on a GPU: NumPy batches in, statistics and tokens out, everything between on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.contract.build import Contract
from rlkernel.contract.rope_tables import rope_tables
from rlkernel.errors import NumericsError
from rlkernel.kernels.cpu.logprob import RowStatistics
from rlkernel.kernels.triton.launch_digest import tensor_digest
from rlkernel.kernels.triton.launch_logprob import DeviceRowStatistics
from rlkernel.kernels.triton.launch_sampling import DeviceSamplingKeys
from rlkernel.models.definition import ModelDefinition
from rlkernel.ops.composition import Composition
from rlkernel.ops.device.host import DeviceBatch, DeviceHost
from rlkernel.ops.device.weights import DeviceWeights
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import TokenBatch
from rlkernel.ops.runner import ModelRunner, Tape
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

    def logprobs(self, hidden_rows: Any, targets: NDArray[np.int64], temperature: float, case: str) -> RowStatistics:
        """Log-probabilities, entropies and distribution digests of rows [R, H] for target ids [R]."""
        self._check_targets(targets)
        self.evidence.ran("logprob", case, self.composition.head.implementation, len(targets))
        found, _ = self._head_forward(hidden_rows, targets, temperature, self._rows_host(len(targets), case))
        return found

    def _rows_host(self, rows: int, case: str) -> DeviceHost:
        """Services of the head, which has no batch of tokens."""
        nothing = TokenBatch(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(1, np.int32))
        return self._host(nothing, case, None)

    def sample(
        self, hidden_rows: Any, keys: SamplingKeys, temperature: float, case: str
    ) -> tuple[NDArray[np.int64], RowStatistics]:
        """Draw one token a row of [R, H]."""
        head = self.composition.head
        self.evidence.ran("logprob", case, head.implementation, len(keys.k))
        truncation = bool((keys.top_k > 0).any() or (keys.top_p < 1).any())
        host = self._rows_host(len(keys.k), case)
        tokens, found = head.sample(
            self.definition.head, hidden_rows.contiguous(), self._keys(keys), temperature, host, truncation
        )
        return tokens.cpu().numpy(), on_host(found)

    def _keys(self, keys: SamplingKeys) -> DeviceSamplingKeys:
        return DeviceSamplingKeys(
            **{f.name: self._placed(_signed(getattr(keys, f.name))) for f in fields(DeviceSamplingKeys)}
        )

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


def _signed(values: NDArray[Any]) -> NDArray[Any]:
    """The same bits as int64, for uint64."""
    return values.view(np.int64) if values.dtype == np.uint64 else values


def on_host(found: DeviceRowStatistics) -> RowStatistics:
    """Statistics as NumPy arrays, in one transfer of floats and one of digests."""
    values = torch.stack([found.max, found.log_sum, found.logprob, found.entropy]).cpu().numpy()
    digest = found.digest.cpu().numpy().view(np.uint64)
    if digest.shape != (values.shape[1], 2):
        raise NumericsError(f"digests of {values.shape[1]} rows have the shape {digest.shape}")
    return RowStatistics(values[0], values[1], values[2], values[3], digest)
