"""Decode steps as CUDA graphs: one a batch bucket, captured at its first use and replayed from then on.

A graph reads and writes fixed buffers; a batch is copied into them, and filled up to the bucket with rows that take no
part. A second graph draws the tokens, while the host is done with the first: it is one a temperature, for that is a
number in its kernels. Nothing waits for the host but the sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.kernels.triton.launch_sampling import DeviceSamplingKeys
from rlkernel.ops.device.host import DeviceBatch, DeviceHost
from rlkernel.ops.head import SamplingKeys

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MAX_DRAWS = 4
"""Graphs of a bucket that draw tokens; other temperatures are drawn without one."""
_ALIGNMENT = 256


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


class Staging:
    """Named arrays that reach the device by one copy: a pinned buffer, and one of the same layout there.

    Args:
        arrays: name -> dtype and shape.
    """

    def __init__(self, device: torch.device, arrays: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        places, size = {}, 0
        for name, (dtype, shape) in arrays.items():
            places[name] = (size, size + dtype.itemsize * math.prod(shape))
            size = -(-places[name][1] // _ALIGNMENT) * _ALIGNMENT
        self._home = torch.zeros(size, dtype=torch.uint8).pin_memory()
        self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event()
        self.home: dict[str, NDArray[Any]] = {}
        self.there: dict[str, torch.Tensor] = {}
        for name, (dtype, shape) in arrays.items():
            first, last = places[name]
            self.home[name] = self._home[first:last].view(dtype).view(shape).numpy()
            self.there[name] = self._there[first:last].view(dtype).view(shape)

    def wait(self) -> None:
        """Until the arrays at home may be written again."""
        self._copied.synchronize()

    def send(self) -> None:
        """Copy them, without waiting for them to arrive."""
        self._there.copy_(self._home, non_blocking=True)
        self._copied.record()


def captured(work: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Run ``work`` once outside of a graph, which compiles its kernels, then capture it: the graph and its result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = work()
    return graph, found


class DecodeGraph:
    """One bucket's buffers and graph, and the graphs that draw tokens from its hidden states.

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
        self.rows, self.count = rows, 0
        arrays = {"tokens": torch.int64, "positions": torch.int32, "rotated": torch.int32, "slots": torch.int64}
        self._staging = Staging(
            device, {n: (dtype, (rows,)) for n, dtype in arrays.items()} | {"table": (torch.int32, (rows, width))}
        )
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._host, self._starts, self._last, self._body = host, starts, last_position, body
        self._graph: torch.cuda.CUDAGraph | None = None
        self.pool = pool
        self.hidden: torch.Tensor | None = None
        self.draws: dict[tuple[float, bool], DrawGraph] = {}

    def _pass(self) -> torch.Tensor:
        there = self._staging.there
        batch = DeviceBatch(
            tokens=there["tokens"],
            positions=there["positions"],
            starts=self._starts,
            lengths=(1,) * self.rows,
            last_position=self._last,
        )
        state = GraphState(self._host.state.kv, there["table"], there["slots"])  # type: ignore[union-attr]
        return self._body(replace(self._host, batch=batch, state=state), there["rotated"])

    def fill(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int32],
        slots: NDArray[np.int64],
        table: NDArray[np.int32],
    ) -> None:
        """Copy a batch of at most ``rows`` rows into the buffers, without waiting for them to arrive."""
        self._staging.wait()  # the staging memory of the batch before may still be read
        home, count = self._staging.home, len(tokens)
        home["tokens"][:count], home["slots"][:count] = tokens, slots
        home["positions"][:count] = home["rotated"][:count] = positions
        # negative positions and slots are rows that take no part
        home["tokens"][count:] = home["rotated"][count:] = 0
        home["positions"][count:] = home["slots"][count:] = -1
        home["table"][:count, : table.shape[1]] = table
        self._staging.send()
        self.count = count

    def holds(self, hidden: torch.Tensor) -> bool:
        """Whether these are the hidden states of the last replay, all its rows."""
        own = self.hidden
        return own is not None and len(hidden) == self.count and hidden.data_ptr() == own.data_ptr()

    def capture(self) -> None:
        """Run the filled batch once outside of the graph, which compiles its kernels, then capture it."""
        self._graph, self.hidden = captured(self._pass, self.pool)

    def replay(self) -> torch.Tensor:
        """Hidden states [rows, H] of the filled batch, in the same memory every time."""
        assert self._graph is not None and self.hidden is not None
        self._graph.replay()
        return self.hidden


class DrawGraph:
    """Draws a token for every row of a bucket's hidden states, and brings it home with its statistics.

    Args:
        rows: of the bucket.
        draw: tokens and statistics as words int64 [n], given the keys.
        pool: memory pool that graphs share.
    """

    def __init__(
        self,
        device: torch.device,
        rows: int,
        draw: Callable[[DeviceSamplingKeys], torch.Tensor],
        pool: Any,
    ) -> None:
        dtypes = {f.name: torch.int64 for f in fields(DeviceSamplingKeys)}
        dtypes |= {"greedy": torch.bool, "top_p": torch.float64}
        self._staging = Staging(device, {name: (dtype, (rows,)) for name, dtype in dtypes.items()})
        self._staging.home["top_p"][:] = 1
        self._draw, self._pool = draw, pool
        self._home: torch.Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done = torch.cuda.Event()

    def fill(self, keys: SamplingKeys) -> None:
        """Copy the keys of at most so many rows into the buffers; rows beyond them draw by old keys, for nobody."""
        self._staging.wait()
        count = len(keys.k)
        for name, home in self._staging.home.items():
            values = getattr(keys, name)
            home[:count] = values.view(np.int64) if values.dtype == np.uint64 else values
        self._staging.send()

    def capture(self) -> None:
        """Run once outside of the graph, then capture it."""
        keys = DeviceSamplingKeys(**self._staging.there)
        self._home = torch.empty_like(self._draw(keys), device="cpu").pin_memory()
        self._graph, _ = captured(self._work, self._pool)

    def _work(self) -> None:
        assert self._home is not None
        self._home.copy_(self._draw(DeviceSamplingKeys(**self._staging.there)), non_blocking=True)

    def replay(self) -> NDArray[np.int64]:
        """What was drawn, as words. It waits for the device."""
        assert self._graph is not None and self._home is not None
        self._graph.replay()
        self._done.record()
        self._done.synchronize()
        return self._home.numpy().copy()


def bucket_of(rows: int) -> int | None:
    """The smallest bucket that holds so many rows; None beyond the largest."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), None)
