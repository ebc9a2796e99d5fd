"""Which tile a product runs with: read from a table that was measured before, chosen by shape, never tuned in a run.

A tile changes no bit, so the table is no part of a contract; ``python -m benchmarks.gpu.tune`` writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlkernel.errors import ContractError
from rlkernel.kernels.triton.launch import Tile

Layout = Literal["forward", "dgrad", "wgrad"]
SCHEMA = 1
TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class HopperTile:
    """Tuning of the warp-specialised GEMM of sm_90. Nothing here is part of the contract.

    ``stages``: tiles of K in shared memory; ``parts``: in how many parts of its columns a tile is stored;
    ``resident``: programs of a multiprocessor, of which one merges leaves while the other multiplies; ``wide``: 1, or 3
    tiles of columns that a program multiplies side by side (a forward of one chain without a bias); ``paired``: two
    leaves side by side, and all that waits in registers, for small tiles.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    stages: int = 3
    parts: int = 1
    num_warps: int = 8
    resident: int = 1
    wide: int = 1
    paired: bool = False

    def shared_bytes(self, leaves: int, out_size: int, *, four_shared: bool = False) -> int:
        """Shared memory of a multiprocessor's programs, for outputs of ``out_size`` bytes an element.

        ``four_shared``: the first four of eight leaves wait there too.
        """
        loads = self.stages * (self.block_m + self.wide * self.block_n) * self.block_k * 2
        waits = 4 * self.block_m * self.block_n * (2 if four_shared else 1) if leaves > 2 and not self.paired else 0
        # beside what a program allocates the device takes 1 KiB of it for each
        own = loads + self.block_m * self.wide * self.block_n // self.parts * out_size + waits + 256
        return self.resident * own + (self.resident - 1) * 1024


SHARED_BYTES = 227 * 1024
"""Shared memory that a program of sm_90 can have."""
_MULTIPROCESSORS = 132
_REMEMBERED = 4096  # shapes whose choice is kept
_FAR = 4.0  # a factor of two in M


@dataclass(frozen=True)
class Choice:
    """One measured choice: the fastest of what was tried for a product [M, K] x [N, K] on a device.

    ``hopper`` or ``plain`` is the tile, the other one is None; ``split``: leaves by programs of their own.
    """

    layout: Layout
    leaves: int
    m: int
    n: int
    k: int
    split: bool
    hopper: HopperTile | None
    plain: Tile | None
    microseconds: float

    def distance(self, m: int, n: int, k: int) -> float:
        """How far a shape is: factors of two, M counted most, for the number of tiles is what decides."""
        far = (math.log2(max(m, 1) / self.m), math.log2(max(n, 1) / self.n), math.log2(max(k, 1) / self.k))
        return 4 * abs(far[0]) + 2 * abs(far[1]) + abs(far[2])


class TileTable:
    """Choices of one device. Without a fitting one: rules that are safe everywhere."""

    def __init__(self, choices: Iterable[Choice] = ()) -> None:
        self.choices = tuple(choices)
        self._chosen: dict[tuple[Layout, int, int, int, int], Choice] = {}

    def choose(self, layout: Layout, leaves: int, m: int, n: int, k: int) -> Choice:
        """The nearest choice of this layout and number of leaves if it is near, or :func:`default_choice`."""
        key = (layout, leaves, m, n, k)
        if key not in self._chosen:
            if len(self._chosen) >= _REMEMBERED:
                self._chosen.clear()
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    def _choose(self, layout: Layout, leaves: int, m: int, n: int, k: int) -> Choice:
        fitting = [c for c in self.choices if c.layout == layout and c.leaves == leaves]
        nearest = min(fitting, key=lambda c: c.distance(m, n, k), default=None)
        if nearest is None or nearest.distance(m, n, k) >= _FAR:
            return default_choice(layout, leaves, m, n, k)
        return nearest

    def save(self, path: Path, **what: Any) -> None:
        """Write the table as JSON, with ``what`` (date, device, versions) beside it."""
        data = {"schema": SCHEMA, **what, "choices": [asdict(c) for c in self.choices]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> TileTable:
        """Read a table. Raises ContractError with the place of what is missing, unknown or of another schema."""
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("choices"), list):
            raise ContractError(f"{path} is no table of tiles of schema {SCHEMA}")
        return TileTable(_choice(item, f"{path}, choice {i}") for i, item in enumerate(data["choices"]))


def _choice(item: Any, place: str) -> Choice:
    names = {f.name for f in fields(Choice)}
    if not isinstance(item, dict) or set(item) != names:
        raise ContractError(f"{place} holds {sorted(item) if isinstance(item, dict) else item!r}, not {sorted(names)}")
    try:
        hopper = None if item["hopper"] is None else HopperTile(**item["hopper"])
        plain = None if item["plain"] is None else Tile(**item["plain"])
    except TypeError as error:
        raise ContractError(f"{place}: {error}") from error
    if (hopper is None) == (plain is None):
        raise ContractError(f"{place}: exactly one of 'hopper' and 'plain' is a tile")
    return Choice(**{**item, "hopper": hopper, "plain": plain})


def default_choice(layout: Layout, leaves: int, m: int, n: int, k: int) -> Choice:
    """A choice by rule, for sm_90: what was fastest among the shapes that were measured on an H200."""
    tile: HopperTile | None = None
    plain: Tile | None = None
    if m <= 16 and layout == "forward":
        if leaves == 1:
            plain = Tile(16, 32, 256, num_warps=4, num_stages=4)
        else:
            plain = Tile(16, *((64, 128) if leaves <= 4 else (128, 64)), num_warps=4, num_stages=4)
    elif layout == "wgrad":
        tile = HopperTile(128, 128, 64, 8, 4)
    elif m <= 64:
        narrow = n <= 32 * _MULTIPROCESSORS
        tile = HopperTile(64, 32, 128, 8, 8, 1, 4) if narrow else HopperTile(64, 64, 128, 8, 5, 1, 4)
    else:
        tile = min(_large_tiles(leaves), key=lambda pair: pair[1] * _waves(m, n, pair[0]))[0]
    return Choice(
        layout, leaves, max(m, 1), max(n, 1), max(k, 1), leaves > 1 and plain is not None, tile, plain, math.nan
    )


def few_rows_tile(n: int, gated: bool = False) -> HopperTile:
    """A tile for at most 64 rows and n columns, for kernels that start early: small, so that all programs have one.

    ``gated``: the columns are gate and up, stored as their SwiGLU.
    """
    if n <= 16 * _MULTIPROCESSORS and not gated:
        return HopperTile(64, 16, 128, 8, 10, 1, 4)
    if gated and _whole_waves(n, 96) * 3 <= _whole_waves(n, 32):
        return HopperTile(64, 32, 128, 8, 5, 1, 4, wide=3)
    if n <= 128 * _MULTIPROCESSORS:
        return HopperTile(64, 32, 128, 8, 8, 1, 4)
    return HopperTile(64, 128, 128, 8, 4, 1, 4)


def _whole_waves(n: int, columns: int) -> int:
    return -(-n // (columns * _MULTIPROCESSORS))


def _large_tiles(leaves: int) -> list[tuple[HopperTile, float]]:
    """Tiles for more than 64 rows, and what an element of each costs against the largest."""
    waits = leaves > 2
    found = [
        (HopperTile(64, 128, 64, 8, 6 if waits else 8, 1, 4), 1.18),
        (HopperTile(128, 128, 64, 8, 4 if waits else 6), 1.05),
    ]
    return found if leaves > 1 else [*found, (HopperTile(), 1.0)]


def _waves(m: int, n: int, tile: HopperTile) -> int:
    """Elements of the result that one multiprocessor computes, with what the last wave leaves idle."""
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    return -(-tiles // _MULTIPROCESSORS) * tile.block_m * tile.block_n


@cache
def device_table(device_name: str) -> TileTable:
    """The table that was measured on such a device, or an empty one."""
    path = TABLES / (device_name.lower().replace(" ", "_") + ".json")
    return TileTable.load(path) if path.exists() else TileTable()
