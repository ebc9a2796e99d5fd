"""Decode steps as CUDA graphs: one a batch bucket, captured at its first use and replayed from then on.

A graph reads and writes fixed buffers; a batch is copied into them, and filled up to the bucket with rows that take no
part. Nothing waits for the host but the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.ops.device.host import DeviceBatch, DeviceHost

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class GraphState:
    """KV pages with the buffers of one bucket."""

    kv: Any
    block_table: torch.Tensor
    slots: torch.Tensor

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return int(self.kv.page_size)

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) of a layer."""
        found: tuple[torch.Tensor, torch.Tensor] = self.kv.pages(layer)
        return found


class DecodeGraph:
    """One bucket's buffers and graph.

    Args:
        host: services of a decode pass of these weights and pages (its batch and state are replaced).
        rows: of the bucket; ``width``: pages of the longest sequence; ``last_position``: largest position.
        body: hidden states of a pass, given the host and the positions for the rotary tables.
        pool: memory pool that graphs share.
    """

    def __init__(
        self,
        host: DeviceHost,
        rows: int,
        width: int,
        last_position: int,
        body: Callable[[DeviceHost, torch.Tensor], torch.Tensor],
        pool: Any,
    ) -> None:
        device = host.batch.tokens.device
        self.rows = rows
        # tokens, positions, slots; negative positions and slots are rows that take no part
        self._integers = torch.full((3, rows), -1, dtype=torch.int64, device=device)
        self._table = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._home = (
            torch.full((3, rows), -1, dtype=torch.int64).pin_memory(),
            torch.zeros_like(self._table, device="cpu").pin_memory(),
        )
        self._copied = torch.cuda.Event()
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._host, self._starts, self._last, self._body = host, starts, last_position, body
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self.hidden: torch.Tensor | None = None

    def _pass(self) -> torch.Tensor:
        tokens, positions, slots = self._integers
        batch = DeviceBatch(
            tokens=tokens.clamp(min=0),
            positions=positions.to(torch.int32),
            starts=self._starts,
            lengths=(1,) * self.rows,
            last_position=self._last,
        )
        state = GraphState(self._host.state.kv, self._table, slots)  # type: ignore[union-attr]
        return self._body(replace(self._host, batch=batch, state=state), batch.positions.clamp(min=0))

    def fill(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int32],
        slots: NDArray[np.int64],
        table: NDArray[np.int32],
    ) -> None:
        """Copy a batch of at most ``rows`` rows into the buffers, without waiting for them to arrive."""
        self._copied.synchronize()  # the staging memory of the batch before may still be read
        count, integers, pages = len(tokens), self._home[0].numpy(), self._home[1].numpy()
        integers[:, count:] = -1
        integers[0, :count], integers[1, :count], integers[2, :count] = tokens, positions, slots
        pages[:count, : table.shape[1]] = table
        self._integers.copy_(self._home[0], non_blocking=True)
        self._table.copy_(self._home[1], non_blocking=True)
        self._copied.record()

    def capture(self) -> None:
        """Run the filled batch once outside of the graph, which compiles its kernels, then capture it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._pass()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph, pool=self._pool):
            self.hidden = self._pass()

    def replay(self) -> torch.Tensor:
        """Hidden states [rows, H] of the filled batch, in the same memory every time."""
        self._graph.replay()
        assert self.hidden is not None
        return self.hidden


def bucket_of(rows: int) -> int | None:
    """The smallest bucket that holds so many rows; None beyond the largest."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), None)
