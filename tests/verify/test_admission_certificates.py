"""Certificates: strict data, bound to sources, toolchain, entries; nothing is picked without a valid one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlkernel.contract.build import build_contract
from rlkernel.errors import ContractError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.presets import PRESETS
from rlkernel.ops.composition import Candidate, compose, cpu_candidates, region_cases
from rlkernel.ops.portable import SwiGlu
from rlkernel.verify.admission.certificate import (
    AdmissionRefused,
    Certificate,
    Link,
    certificate_from_json,
    entry_digests,
    invalid_because,
)
from rlkernel.verify.admission.sources import cpu_toolchain, identity_of, source_digest_of, specification_digest
from rlkernel.verify.admission.store import ensure_certificates, read_certificates, write_certificates

CONTRACT = build_contract(PRESETS["tiny-qwen3"])
WORKERS = Workers(1)


def certificate(op, region, cases) -> Certificate:
    """As admission would make it, without the comparison (which other tests run)."""
    identity = identity_of(op, "cpu")
    return Certificate(
        implementation=identity.implementation,
        source=identity.source,
        region=region,
        cases=tuple(cases),
        profile=CONTRACT.profile,
        dtype=CONTRACT.dtype,
        entries=entry_digests(CONTRACT, region, cases),
        target="cpu",
        toolchain=identity.toolchain,
        specification=identity.specification,
        shape_classes=("few rows",),
        hazards=("normal",),
        links=(Link("interpreter", identity.implementation, 1000),),
        budget="quick",
    )


def certificates() -> list[Certificate]:
    cases = region_cases(CONTRACT)
    return [certificate(c.op, c.region, cases[c.region]) for c in cpu_candidates() if c.region in cases]


def test_certificates_survive_a_strict_round_trip():
    for item in certificates():
        again = certificate_from_json(json.loads(json.dumps(item.as_json())))
        assert again == item and again.digest() == item.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown fields"),
        ({"source": None}, "a string is expected"),
        ({"schema": 99}, "schema 1 can be read"),
        ({"links": []}, "at least one link"),
        ({"links": [{"left": "a", "right": "b", "outputs": 0}]}, "a positive integer"),
        ({"links": [{"left": "a", "right": "b", "outputs": 1.5}]}, "a positive integer"),
        ({"cases": "trainer_forward"}, "a list of strings"),
        ({"entries": [["one"]]}, "pairs of strings"),
    ],
)
def test_anything_else_is_no_certificate(change, message):
    data = {**certificates()[0].as_json(), **change}
    with pytest.raises(ContractError, match=message):
        certificate_from_json(data)


def test_a_missing_field_is_named():
    data = certificates()[0].as_json()
    del data["toolchain"]
    with pytest.raises(ContractError, match=r"missing fields \['toolchain'\]"):
        certificate_from_json(data)


def test_a_composition_is_picked_by_certificate():
    composition = compose(CONTRACT, certificates())
    assert composition.implementations()["rms_norm"] == "cpu.rms_norm"
    assert len(composition.certificates) == len(region_cases(CONTRACT))


VOIDS = {
    "the kernel changed after admission": {"source": "0" * 64},
    "the toolchain is another one (numba": {
        "toolchain": tuple((name, "0.1" if name == "numba" else version) for name, version in cpu_toolchain())
    },
    "it is for target gfx942, not cpu": {"target": "gfx942"},
    "the interpreter or the admission's own problems changed": {"specification": "1" * 64},
    "it covers trainer_forward, not rollout_prefill": {"cases": ("trainer_forward",)},
    "it was made for another entry of rollout_prefill/swiglu": {"entries": (("rollout_prefill/swiglu", "2" * 64),)},
}


@pytest.mark.parametrize("reason", list(VOIDS))
def test_a_void_certificate_admits_nothing_and_there_is_no_fallback(reason):
    changed = [replace(c, **VOIDS[reason]) if c.region == "swiglu" else c for c in certificates()]
    with pytest.raises(ContractError) as caught:
        compose(CONTRACT, changed)
    sentence = str(caught.value)
    assert sentence.startswith("1 regions have no admitted implementation") and reason in sentence
    assert "cpu.swiglu is refused" in sentence and "vime admit --all" in sentence


def test_every_candidate_is_listed_with_its_reason_and_the_next_one_is_taken():
    class Other(SwiGlu):
        implementation = "test.other_swiglu"

    others = [Candidate("swiglu", Other()), *cpu_candidates()]
    assert compose(CONTRACT, certificates(), others).op("swiglu").implementation == "cpu.swiglu"
    without = [c for c in certificates() if c.region != "swiglu"]
    both = r"test.other_swiglu is refused .*it has no certificate.*cpu.swiglu is refused"
    with pytest.raises(ContractError, match=both):
        compose(CONTRACT, without, others)
    with pytest.raises(ContractError, match="swiglu: there is no candidate"):
        compose(CONTRACT, certificates(), [c for c in cpu_candidates() if c.region != "swiglu"])


def test_a_certificate_of_other_constants_is_void():
    other = build_contract(replace(PRESETS["tiny-qwen3"], rms_norm_eps=1e-5))
    item = next(c for c in certificates() if c.region == "rms_norm")
    op = next(c.op for c in cpu_candidates() if c.region == "rms_norm")
    assert invalid_because(item, identity_of(op, "cpu"), CONTRACT, "rms_norm", "trainer_forward") == []
    (reason,) = invalid_because(item, identity_of(op, "cpu"), other, "rms_norm", "trainer_forward")
    assert "another entry of trainer_forward/rms_norm" in reason


def test_source_digests_belong_to_the_implementation():
    digests = {c.region: source_digest_of(c.op) for c in cpu_candidates()}
    assert digests["rms_norm"] == digests["swiglu"] != digests["logprob"]
    assert len(specification_digest()) == 64


def test_missing_certificates_are_made_once_and_kept(tmp_path):
    said: list[str] = []
    candidates = [(c.region, c.op) for c in cpu_candidates() if c.region in ("swiglu", "residual_add")]
    given = {"folders": [tmp_path], "keep": tmp_path, "say": said.append}
    first = ensure_certificates(CONTRACT, candidates, WORKERS, **given)
    assert {c.region for c in first.made} == {"swiglu", "residual_add"} and len(said) == 2
    second = ensure_certificates(CONTRACT, candidates, WORKERS, **given)
    assert second.made == () and set(second.certificates) == set(first.certificates) and len(said) == 2
    # a certificate of other sources is not taken, whatever else it says
    for path in tmp_path.glob("swiglu*"):
        path.unlink()
    write_certificates([replace(next(c for c in first.made if c.region == "swiglu"), source="0" * 64)], tmp_path)
    third = ensure_certificates(CONTRACT, candidates, WORKERS, **given)
    assert [c.region for c in third.made] == ["swiglu"]


def test_a_damaged_file_counts_as_absent_and_is_named(tmp_path):
    said: list[str] = []
    write_certificates(certificates()[:2], tmp_path)
    (tmp_path / "broken.json").write_text('{"schema": 1')
    assert len(read_certificates(tmp_path, said.append)) == 2
    assert "broken.json cannot be read" in said[0]


def test_a_kernel_that_deviates_gets_no_certificate_at_first_use(tmp_path):
    class Wrong(SwiGlu):
        implementation = "test.wrong"

        def forward(self, region, inputs, host):
            (y,), saved = super().forward(region, inputs, host)
            return (y[::-1].copy(),), saved

    with pytest.raises(AdmissionRefused, match=r"test.wrong is not admitted for swiglu"):
        ensure_certificates(CONTRACT, [("swiglu", Wrong())], WORKERS, folders=[tmp_path], keep=tmp_path)
    assert not list(tmp_path.iterdir())
