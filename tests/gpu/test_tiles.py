"""Tables of tiles, and the rule that sends products: no GPU is needed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlkernel.errors import ContractError
from rlkernel.kernels import products
from rlkernel.kernels.products import Products
from rlkernel.kernels.triton.launch import Tile
from rlkernel.kernels.triton.tiles import (
    SHARED_BYTES,
    TABLES,
    Choice,
    HopperTile,
    TileTable,
    default_choice,
)
from rlkernel.kernels.vendor.admission import Admission, AdmissionTable, Library, VendorShape

LIBRARY = Library("device", "2.11", "13.0", "130000", "")


def _choice(m: int, tile: HopperTile | Tile, *, leaves: int = 1, split: bool = False) -> Choice:
    hopper, plain = (tile, None) if isinstance(tile, HopperTile) else (None, tile)
    return Choice("forward", leaves, m, 4096, 4096, split, hopper, plain, 1.0)


def test_the_nearest_choice_of_the_layout_and_leaves_is_taken(tmp_path: Path) -> None:
    few, many, split = (
        _choice(8, Tile(16, 32, 64)),
        _choice(4096, HopperTile()),
        _choice(8, Tile(), leaves=4, split=True),
    )
    table = TileTable([few, many, split])
    path = tmp_path / "table.json"
    table.save(path, device="none")
    for read in (table, TileTable.load(path)):
        assert read.choose("forward", 1, 5, 4096, 4096) == few
        assert read.choose("forward", 1, 3000, 6144, 4096) == many
        assert read.choose("forward", 4, 7, 4096, 4096) == split
        far = read.choose("forward", 4, 3000, 6144, 4096)
        assert far.plain is None and math.isnan(far.microseconds)  # none of the table is near
        assert read.choose("dgrad", 1, 8, 4096, 4096).microseconds != few.microseconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=2), "schema 1"),
        (lambda d: d["choices"][0].pop("k"), "choice 0 holds"),
        (lambda d: d["choices"][0]["hopper"].update(speed=1), "speed"),
        (lambda d: d["choices"][0].update(hopper=None), "exactly one"),
        (lambda d: d["choices"][0].update(hopper=None, plain={"block_m": 17}), "block_m"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "table.json"
    TileTable([_choice(64, HopperTile())]).save(path)
    data = json.loads(path.read_text())
    change(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))
    with pytest.raises(ContractError, match=message):
        TileTable.load(path)


@pytest.mark.parametrize(
    ("layout", "leaves"), [("wgrad", 1), *((layout, n) for layout in ("forward", "dgrad") for n in (1, 2, 4, 8))]
)
def test_choices_fit_the_device(layout: str, leaves: int) -> None:
    size = 4 if layout == "wgrad" else 2
    for m in (1, 16, 17, 64, 65, 256, 257, 4096):
        choice = default_choice(layout, leaves, m, 4096, 4096)  # type: ignore[arg-type]
        assert (choice.hopper is None) != (choice.plain is None) and math.isnan(choice.microseconds)
        if choice.hopper is not None:
            assert choice.hopper.shared_bytes(leaves, size) <= SHARED_BYTES


def test_recorded_tables_can_be_read() -> None:
    for path in TABLES.glob("*.json"):
        for choice in TileTable.load(path).choices:
            size = 4 if choice.layout == "wgrad" else 2
            assert choice.hopper is None or choice.hopper.shared_bytes(choice.leaves, size) <= SHARED_BYTES


def _products(monkeypatch: pytest.MonkeyPatch, table: AdmissionTable | None, major: int = 9) -> Products:
    properties = SimpleNamespace(name="device", major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(products, "use_cublaslt", lambda: None)
    monkeypatch.setattr(products, "this_library", lambda device: LIBRARY)
    return Products("matrix", torch.device("cuda"), admissions=table)


def _record(m: int, differing: int = 0, library: Library = LIBRARY) -> Admission:
    return Admission(VendorShape("forward", m, 4096, 4096, "bfloat16"), library, 100, differing, ("normal",), "today")


def test_only_what_was_admitted_goes_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Library("device", "2.12", "13.0", "130000", "")
    found = _products(monkeypatch, AdmissionTable([_record(32), _record(64), _record(128, 1), _record(256, 0, other)]))
    route = {m: found.describe("forward", m, 4096, 4096) for m in (1, 32, 33, 64, 128, 256)}
    assert [route[m].kernel for m in (1, 32, 64)] == ["vendor"] * 3 and route[1].rows == 32
    assert all(route[m].kernel != "vendor" for m in (33, 128, 256))
    assert "was not compared with 33 rows" in route[33].why and "was not compared" in route[256].why
    assert "differed in 1 of 100" in route[128].why
    assert found.describe("forward", 64, 4096, 4096, leaves=2).kernel == "hopper"
    assert found.describe("forward", 64, 4096, 4096, plain=False).kernel == "hopper"
    assert found.describe("forward", 64, 4096, 4096, out="float32").kernel == "hopper"
    assert found.describe("dgrad", 64, 4096, 4096).kernel == "hopper"


def test_without_a_table_the_library_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _products(monkeypatch, None)
    assert found.describe("forward", 64, 4096, 4096).kernel == "hopper"
    with pytest.raises(ContractError, match="admit nothing"):
        found.admit("forward", 64, 4096, 4096, "bfloat16")
    assert _products(monkeypatch, None, major=8).describe("forward", 64, 4096, 4096).kernel == "plain"


def test_tokens_that_break_a_step_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _products(monkeypatch, None)
    dy, x = torch.zeros((24, 8)).bfloat16(), torch.zeros((24, 16)).bfloat16()
    with pytest.raises(ContractError, match="multiples of 16"):
        found.wgrad(dy, x, torch.zeros((8, 16)))
    with pytest.raises(ContractError, match="the weight gradient is"):
        found.wgrad(dy[:16], x[:16], torch.zeros((8, 15)))
