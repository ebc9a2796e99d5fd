"""Records of a vendor's GEMM: exact keys, strict reading, settings that are looked at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlkernel.errors import ContractError, NumericsError
from rlkernel.kernels.vendor.admission import Admission, AdmissionTable, Library, VendorShape
from rlkernel.kernels.vendor.cublas import INPUTS, differing, operands, require_cublaslt

SHAPE = VendorShape("forward", 32, 64, 48, "bfloat16")
LIBRARY = Library("device", "2.11", "13.0", "130000", "")
RECORD = Admission(SHAPE, LIBRARY, 6144, 0, INPUTS, "2026-11-29T00:00:00+00:00")


def test_a_record_is_found_by_its_exact_key_only(tmp_path: Path) -> None:
    table = AdmissionTable([RECORD])
    path = tmp_path / "table.json"
    table.save(path)
    for found in (table, AdmissionTable.load(path)):
        assert found.find(SHAPE, LIBRARY) == RECORD and RECORD.admitted
        for name, value in (("m", 33), ("n", 65), ("k", 49), ("out", "float32"), ("product", "dgrad")):
            assert found.find(replace(SHAPE, **{name: value}), LIBRARY) is None
        for name in ("device", "torch", "cuda", "cublas", "workspace"):
            assert found.find(SHAPE, replace(LIBRARY, **{name: "other"})) is None
    table.add(replace(RECORD, differing=1))
    found = table.find(SHAPE, LIBRARY)
    assert found is not None and not found.admitted and len(table.records()) == 1
    assert not replace(RECORD, compared=0).admitted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=2), "schema 1"),
        (lambda d: d["records"][0].pop("date"), "record 0 holds"),
        (lambda d: d["records"][0]["shape"].update(batch=1), "record 0, shape"),
        (lambda d: d["records"][0]["library"].pop("cublas"), "record 0, library"),
        (lambda d: d["records"][0].update(differing=-1), "differing is -1"),
        (lambda d: d["records"][0].update(compared=True), "compared is True"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "table.json"
    AdmissionTable([RECORD]).save(path)
    data = json.loads(path.read_text())
    change(data)  # type: ignore[operator]
    path.write_text(json.dumps(data))
    with pytest.raises(ContractError, match=message):
        AdmissionTable.load(path)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("product", ["forward", "dgrad", "wgrad"])
def test_inputs_are_stored_as_the_product_takes_them(product: str, kind: str) -> None:
    shape = VendorShape(product, 5, 7, 12, "bfloat16")  # type: ignore[arg-type]
    a, b = operands(shape, kind, 1, torch.device("cpu"))
    assert a.shape == ((12, 5) if product == "wgrad" else (5, 12)) and a.dtype == torch.bfloat16
    assert b.shape == ((7, 12) if product == "forward" else (12, 7)) and a.is_contiguous() and b.is_contiguous()
    rows, columns = (a.t() if product == "wgrad" else a).double(), (b if product == "forward" else b.t()).double()
    if kind == "cancellation":
        # every product of the second half is the negative of one of the first half
        assert bool(((rows @ columns.t()).abs() < 1e-12).all())
    else:
        assert bool((rows @ columns.t()).abs().max() > 1e-3)


def test_differences_are_counted_by_bits() -> None:
    a = torch.tensor([0.0, 1.0, torch.nan, 2.0])
    b = torch.tensor([-0.0, 1.0, -torch.nan, torch.nan])
    assert int(differing(a, b)) == 2 and int(differing(a, a)) == 0
    assert int(differing(a.bfloat16(), b.bfloat16())) == 2


def test_a_setting_that_is_not_made_is_refused() -> None:
    with pytest.raises(NumericsError, match="split-K"):
        require_cublaslt()
