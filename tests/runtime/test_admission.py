"""What admits the kernels of a run stands in its contract.json, and what that is bound to in its deployment."""

from __future__ import annotations

import json

import pytest

from rlkernel.contract.canonical import digest
from rlkernel.verify.admission.certificate import certificate_from_json
from rlkernel.verify.admission.sources import specification_digest
from tests.runtime.helpers import Commands, clean


def test_the_certificates_of_a_run_stand_in_its_contract(vime: Commands) -> None:
    ended = vime.run()
    clean(ended)
    contract, evidence = (
        json.loads((ended.directory / name).read_text()) for name in ("contract.json", "evidence.json")
    )
    listed = {}
    for data in contract["certificates"]:
        certificate = certificate_from_json({key: value for key, value in data.items() if key != "digest"})
        assert data["digest"] == certificate.digest() and certificate.target == "cpu"
        listed[data["digest"]] = certificate
    for side in ("trainer", "native-0"):
        facts = evidence[side]["facts"]["certificates"]
        assert {name for names in facts["of"].values() for name in names} == set(listed)
        assert contract["deployment"][side]["admission"]["specification"] == specification_digest()
        for call in evidence[side]["calls"]:  # whatever ran was admitted for this region and case
            assert any(
                (c.region, c.implementation) == (call["region"], call["implementation"]) and call["case"] in c.cases
                for c in listed.values()
            ), call


def test_another_toolchain_is_another_deployment(vime: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    from vime.runtime.places import CpuPlace

    before = CpuPlace().deployment("exact", {})
    monkeypatch.setattr("vime.runtime.places.cpu_toolchain", lambda: (("numba", "0.1"),))
    after = CpuPlace().deployment("exact", {})
    assert digest(before) != digest(after) and after["admission"]["toolchain"] == {"numba": "0.1"}
    assert "admission" not in CpuPlace().deployment("native", {})
