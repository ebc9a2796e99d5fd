"""Admission in processes: the same certificates as in one, refusals and deaths told in the parent's words."""

from __future__ import annotations

import os

import pytest

from rlkernel.contract.build import build_contract
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.presets import PRESETS
from rlkernel.ops.composition import cpu_candidates
from rlkernel.ops.portable import SwiGlu
from rlkernel.verify.admission.admit import admit, cases_of
from rlkernel.verify.admission.certificate import AdmissionRefused
from rlkernel.verify.admission.parallel import shares
from rlkernel.verify.admission.store import ensure_certificates, read_certificates, write_certificates

CONTRACT = build_contract(PRESETS["tiny-qwen3"])
WORKERS = Workers(1)


class Reversed(SwiGlu):
    """The rows in reverse order."""

    implementation = "test.reversed"

    def forward(self, region, inputs, host):
        (y,), saved = super().forward(region, inputs, host)
        return (y[::-1].copy(),), saved


class Dying(SwiGlu):
    """Ends its process."""

    implementation = "test.dying"

    def forward(self, region, inputs, host):
        os._exit(41)


def of(*regions):
    return [(c.region, c.op) for c in cpu_candidates() if c.region in regions]


def test_processes_make_the_certificates_of_one(tmp_path):
    said: list[str] = []
    candidates = of("residual_add", "rope")
    alone = ensure_certificates(CONTRACT, candidates, WORKERS, folders=[tmp_path / "a"], keep=tmp_path / "a")
    given = {"folders": [tmp_path / "b"], "keep": tmp_path / "b", "processes": 2, "say": said.append}
    apart = ensure_certificates(CONTRACT, candidates, WORKERS, **given)
    assert apart.made == alone.made and len(apart.made) == 2
    assert set(read_certificates(tmp_path / "b")) == set(apart.made)
    assert sum("none differs" in line for line in said) == 2 and said[-1].startswith("2 of 2 compared after")
    again = ensure_certificates(CONTRACT, candidates, WORKERS, **given)
    assert again.made == () and again.certificates == apart.certificates and len(said) == 4


def test_a_refusal_is_the_same_and_what_was_kept_stays(tmp_path):
    with pytest.raises(AdmissionRefused) as alone:
        ensure_certificates(CONTRACT, [("swiglu", Reversed())], WORKERS, folders=[tmp_path], keep=tmp_path)
    candidates = [*of("o_proj"), ("swiglu", Reversed())]
    with pytest.raises(AdmissionRefused) as apart:
        ensure_certificates(CONTRACT, candidates, WORKERS, folders=[tmp_path], keep=tmp_path, processes=2)
    assert str(apart.value) == str(alone.value) and apart.value.report == alone.value.report
    assert {c.region for c in read_certificates(tmp_path)} <= {"o_proj"}


def test_a_process_that_dies_is_named(tmp_path):
    candidates = [*of("residual_add"), ("swiglu", Dying())]
    with pytest.raises(ContractError, match=r"admission of test.dying for swiglu: its process ended with exit code 41"):
        ensure_certificates(CONTRACT, candidates, WORKERS, folders=[tmp_path], keep=tmp_path, processes=2)


def test_certificates_of_processes_that_cannot_be_kept_hold_all_the_same(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    candidates = of("residual_add", "rope")
    found = ensure_certificates(CONTRACT, candidates, WORKERS, folders=[tmp_path], keep=blocked, processes=2)
    assert len(found.made) == 2 and "cannot be kept" in found.notes[-1] and len(found.notes) == 1


def test_a_long_region_is_compared_in_shares_and_what_was_kept_is_not_compared_again(tmp_path):
    cases = cases_of("attention", CONTRACT)
    parts = shares("attention", cases, CONTRACT)
    assert len(parts) == 3 and sorted(case for part in parts for case in part) == sorted(cases)
    assert shares("swiglu", cases, CONTRACT) == [cases]
    (op,) = (op for _, op in of("attention"))
    write_certificates([admit(op, "attention", parts[0], CONTRACT, workers=WORKERS)], tmp_path)
    given = {"folders": [tmp_path], "keep": tmp_path, "processes": 2}
    found = ensure_certificates(CONTRACT, of("attention"), WORKERS, **given)
    assert [c.cases for c in found.certificates] == parts and [c.cases for c in found.made] == parts[1:]
    # one process takes the certificates of several
    assert ensure_certificates(CONTRACT, of("attention"), WORKERS, folders=[tmp_path], keep=tmp_path).made == ()
