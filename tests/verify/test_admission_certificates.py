"""Certificates: strict data, bound to sources, toolchain, entries; nothing is picked without a valid one."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from rlkernel.contract.build import build_contract
from rlkernel.errors import ContractError, NumericsError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.presets import PRESETS
from rlkernel.ops.composition import Candidate, compose, cpu_candidates, region_cases
from rlkernel.ops.portable import SwiGlu
from rlkernel.verify.admission.admit import admit, cases_of
from rlkernel.verify.admission.budget import FULL, QUICK
from rlkernel.verify.admission.certificate import (
    AdmissionRefused,
    Certificate,
    Link,
    certificate_from_json,
    entry_digests,
    invalid_because,
)
from rlkernel.verify.admission.classes import ALONE, required_classes
from rlkernel.verify.admission.first_use import with_first_use_checks
from rlkernel.verify.admission.generate_wide import admission_problems
from rlkernel.verify.admission.sources import (
    cpu_toolchain,
    files_of_class,
    files_of_function,
    identity_of,
    source_digest_of,
    specification_digest,
)
from rlkernel.verify.admission.step import STEP_REGIONS
from rlkernel.verify.admission.step_wide import admission_step_problems
from rlkernel.verify.admission.store import (
    ensure_certificates,
    read_certificates,
    valid_certificates,
    write_certificates,
)
from rlkernel.verify.admission.user import find_function
from tests.ops.helpers import batch, runner

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
        shape_classes=tuple(sorted(set().union(*(required_classes(region, case) for case in cases)))),
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
        ({"budget": "enormous"}, "it is one of quick, full"),
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
    "it was not compared on these shapes: a row without its neighbours, an odd number of elements, few rows, one row, "
    "rows beside NaN, zero rows": {"shape_classes": ("many rows",)},
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
    assert sentence.count("is refused") == 1 and sentence.count(reason) <= 2


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


KERNEL = """
from rlkernel.ops.portable import SwiGlu
import math

class Own(SwiGlu):
    implementation = "own.swiglu"
"""
CHANGED = """
    def forward(self, region, inputs, host):
        (y,), saved = super().forward(region, inputs, host)
        y.reshape(-1).view("uint32")[:1] ^= 1
        return (y,), saved
"""


def own_kernel(folder, text):
    """The class Own of a file, imported anew."""
    path = folder / "own_kernel.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("own_kernel", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_kernel"] = module
    spec.loader.exec_module(module)
    return module.Own()


def test_a_kernel_changed_after_admission_is_refused(tmp_path):
    op = own_kernel(tmp_path, KERNEL)
    cases = region_cases(CONTRACT)["swiglu"]
    admitted = admit(op, "swiglu", cases, CONTRACT, workers=WORKERS)
    others = [c for c in cpu_candidates() if c.region != "swiglu"]
    known = [admitted, *certificates()]
    assert compose(CONTRACT, known, [Candidate("swiglu", op), *others]).op("swiglu") is op

    changed = own_kernel(tmp_path, KERNEL + CHANGED)
    sentence = "own.swiglu is refused .*the kernel changed after admission: its sources have digest"
    with pytest.raises(ContractError, match=sentence):
        compose(CONTRACT, known, [Candidate("swiglu", changed), *others])
    with pytest.raises(AdmissionRefused, match=r"own.swiglu is not admitted for swiglu"):
        ensure_certificates(CONTRACT, [("swiglu", changed)], WORKERS, folders=[tmp_path], keep=tmp_path)

    # whoever forges the digest meets the check of the first use on live operands
    forged = replace(admitted, source=source_digest_of(changed))
    picked = compose(CONTRACT, [forged, *certificates()], [Candidate("swiglu", changed), *others])
    r = runner(PRESETS["tiny-qwen3"], threads=1)
    r.composition = with_first_use_checks(picked, CONTRACT, r.evidence)
    with pytest.raises(NumericsError, match=r"\(swiglu, trainer_score\).*on live operands"):
        r.hidden(batch(np.arange(5)), None, "trainer_score")


def test_a_changed_file_of_a_certificate_does_not_count(tmp_path):
    given = {"folders": [tmp_path], "keep": tmp_path}
    candidates = [(c.region, c.op) for c in cpu_candidates() if c.region == "residual_add"]
    (made,) = ensure_certificates(CONTRACT, candidates, WORKERS, **given).made
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    data["certificate"]["links"][0]["outputs"] += 1
    path.write_text(json.dumps(data))
    said: list[str] = []
    assert read_certificates(tmp_path, said.append) == []
    assert "does not count: it was changed after it was written" in said[0]
    again = ensure_certificates(CONTRACT, candidates, WORKERS, **given)
    assert again.made == (made,) and "changed after it was written" in again.notes[0]
    path.write_text(json.dumps(data["certificate"]))
    assert read_certificates(tmp_path, said.append) == [] and "no object with a certificate" in said[-1]


def test_another_toolchain_is_compared_again_and_told(tmp_path):
    candidates = [(c.region, c.op) for c in cpu_candidates() if c.region == "residual_add"]
    old = tuple((name, "0.1" if name == "numpy" else version) for name, version in cpu_toolchain())
    item = next(c for c in certificates() if c.region == "residual_add")
    write_certificates([replace(item, toolchain=old)], tmp_path)
    said: list[str] = []
    found = ensure_certificates(CONTRACT, candidates, WORKERS, folders=[tmp_path], keep=tmp_path, say=said.append)
    assert len(found.made) == 1
    assert "a certificate that was kept does not count: the toolchain is another one (numpy 0.1 -> " in said[0]


def test_a_quick_certificate_does_not_stand_for_a_full_one(tmp_path):
    item = next(c for c in certificates() if c.region == "rope")
    op = next(c.op for c in cpu_candidates() if c.region == "rope")
    cases = region_cases(CONTRACT)["rope"]
    both = [item, replace(item, budget="full", links=(Link("interpreter", "cpu.rope", 7),))]
    assert valid_certificates(both[:1], op, CONTRACT, "rope", cases, "cpu", FULL) == ([], [])
    assert valid_certificates(both[1:], op, CONTRACT, "rope", cases, "cpu", FULL) == (both[1:], [])
    assert valid_certificates(both, op, CONTRACT, "rope", cases, "cpu", QUICK) == (both[:1], [])


def test_certificates_that_cannot_be_kept_hold_for_this_process(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    candidates = [(c.region, c.op) for c in cpu_candidates() if c.region == "residual_add"]
    found = ensure_certificates(CONTRACT, candidates, WORKERS, folders=[blocked], keep=blocked)
    assert len(found.made) == 1 and "cannot be kept" in found.notes[-1]


REGIONS = sorted({*region_cases(CONTRACT), *STEP_REGIONS})


@pytest.mark.parametrize("region", REGIONS)
def test_shape_classes_that_count_are_those_that_are_compared(region):
    for case in cases_of(region, CONTRACT):
        problems = (
            admission_step_problems(region, 0) if region in STEP_REGIONS else admission_problems(CONTRACT, region, case)
        )
        classes = {p.shape_class for p in problems}
        if any(getattr(p, "alone", ()) for p in problems):
            classes.add(ALONE)
        assert required_classes(region, case) == classes, case


def test_source_digests_belong_to_the_implementation(tmp_path):
    digests = {c.region: source_digest_of(c.op) for c in cpu_candidates()}
    assert digests["rms_norm"] == digests["swiglu"] != digests["logprob"]
    assert len(specification_digest()) == 64
    one, same = (own_kernel(tmp_path, KERNEL) for _ in range(2))
    assert source_digest_of(one) == source_digest_of(same)
    assert len(files_of_class(type(one))) == 2  # its own, and that of the class it inherits from


def test_a_function_is_bound_to_the_modules_beside_it(tmp_path):
    (tmp_path / "bound_helper.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "bound_kernel.py").write_text(
        "import numpy\nfrom bound_helper import half\n\ndef f(x):\n    return half(x)\n"
    )
    names = [path.name for path in files_of_function(find_function(f"{tmp_path}/bound_kernel.py:f"))]
    assert names == ["bound_helper.py", "bound_kernel.py"]
    with pytest.raises(ContractError, match=r"source file of .* cannot be found"):
        files_of_function(len)


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
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert len(read_certificates(tmp_path, said.append)) == 2
    assert "broken.json does not count" in said[0]
    assert "deep.json does not count: it is nested too deeply" in said[1]


def test_a_kernel_that_deviates_gets_no_certificate_at_first_use(tmp_path):
    class Wrong(SwiGlu):
        implementation = "test.wrong"

        def forward(self, region, inputs, host):
            (y,), saved = super().forward(region, inputs, host)
            return (y[::-1].copy(),), saved

    with pytest.raises(AdmissionRefused, match=r"test.wrong is not admitted for swiglu"):
        ensure_certificates(CONTRACT, [("swiglu", Wrong())], WORKERS, folders=[tmp_path], keep=tmp_path)
    assert not list(tmp_path.iterdir())
