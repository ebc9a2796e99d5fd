"""Known-answer vectors: shipped for every region and case, right on the CPU, and wrong where anything is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from rlkernel.contract.build import FORWARD_CASES
from rlkernel.errors import ContractError
from rlkernel.ops.portable import portable_ops
from rlkernel.verify.vectors import files
from rlkernel.verify.vectors.cpu import CpuBackend
from rlkernel.verify.vectors.device import lines, verify
from rlkernel.verify.vectors.files import read_vectors, write_vectors
from rlkernel.verify.vectors.problems import (
    MODELS,
    PROFILES,
    executor_of,
    groups,
    inputs_digest,
    interpret,
    model_contract,
    numbered,
    results_digest,
)
from vime.cli import verify as command


class Only:
    """A backend that has kernels for some regions, and may change what they give."""

    def __init__(self, regions, change=lambda results: results):
        self._inner, self._regions, self._change = CpuBackend(command.PolicyLoss()), regions, change
        self.name, self.device, self.profiles = "cpu", "test", self._inner.profiles

    def implementation(self, contract, region, case):
        return self._inner.implementation(contract, region, case) if region in self._regions else None

    def run(self, contract, region, problem, case):
        return self._change(self._inner.run(contract, region, problem, case))


@pytest.mark.parametrize(("profile", "dtype"), PROFILES)
def test_vectors_are_shipped_for_every_region_and_case(profile, dtype):
    file = read_vectors(profile, dtype)
    assert set(file.policies) == set(MODELS)
    for model in MODELS:
        contract = model_contract(model, profile, dtype)
        shipped = {(v.region, case) for v in file.vectors if v.model == model for case in v.cases}
        assert shipped == {(group.region, case) for group in groups(contract) for case in group.cases}
        entries = {(name.partition(".")[0], case) for case, name in contract.entries}
        assert {(("logprob" if region == "lm_head" else region), case) for region, case in entries} == shipped
    regions = {v.region for v in file.vectors}
    assert regions == {*portable_ops(), "logprob", "gradient_norm", "adamw", "loss"}
    assert {case for v in file.vectors for case in v.cases} == {*FORWARD_CASES, "trainer_backward", "optimizer_step"}
    assert sum(v.outputs for v in file.vectors) > 1_000_000


def test_the_cpu_gives_every_answer_of_a_dtype():
    file = read_vectors("portable", "float32")
    found = lines(verify(file, CpuBackend(command.PolicyLoss())))
    assert {line.status for line in found} == {"equal"}
    assert sum(line.outputs for line in found) == sum(v.outputs * len(v.cases) for v in file.vectors)


@pytest.mark.parametrize(
    ("profile", "dtype", "region"),
    [("hopper", "bfloat16", "attention"), ("cdna3", "bfloat16", "o_proj"), ("portable", "bfloat16", "swiglu")],
)
def test_the_interpreter_still_predicts_what_is_shipped(profile, dtype, region):
    model = "qk-norm, tp 2"
    shipped = {(v.region, v.cases, v.problem): v for v in read_vectors(profile, dtype).vectors if v.model == model}
    contract = model_contract(model, profile, dtype)
    executor = executor_of(contract)
    checked = 0
    for group in groups(contract):
        if group.region != region:
            continue
        for name, problem in list(numbered(contract, group))[:2]:
            vector = shipped[(group.region, group.cases, name)]
            assert inputs_digest(problem) == vector.inputs
            assert results_digest(interpret(contract, executor, group, problem, group.cases[0])) == vector.answer
            checked += 1
    assert checked >= 4


def test_profiles_do_not_share_their_answers():
    answers = [
        {v.problem: v.answer for v in read_vectors(profile, "bfloat16").vectors if v.region == "down_proj"}
        for profile in ("portable", "hopper", "cdna3")
    ]
    assert answers[0] != answers[1] and answers[1] != answers[2] and answers[0] != answers[2]


def test_one_flipped_bit_is_found_and_named():
    def flip(results):
        changed = {name: value.copy() for name, value in results.items()}
        values = changed[next(iter(changed))].reshape(-1)
        finite = np.flatnonzero(np.isfinite(values))
        if len(finite):
            values.view(np.uint32)[finite[-1]] ^= 1
        return changed

    answers = verify(read_vectors("portable", "float32"), Only({"rms_norm"}, flip))
    asked = [a for a in answers if a.vector.region == "rms_norm" and a.vector.outputs]
    wrong = [a for a in asked if a.status == "differs"]
    assert len(wrong) > 0.8 * len(asked), "a problem whose outputs are all NaN has no bit to flip, others have"
    assert "where the contract gives" in wrong[0].sentence
    assert not command.verdict(lines(answers))


def test_a_region_without_a_kernel_is_named_and_is_not_equal():
    file = read_vectors("portable", "float32")
    found = {line.region: line for line in lines(verify(file, Only({"swiglu"})))}
    assert found["swiglu"].status == "equal" and found["rope"].status == "no kernel"
    assert found["rope"].outputs == 0
    assert not command.verdict([found["rope"]]), "nothing was compared, which is no confirmation"


def test_other_inputs_do_not_blame_the_device():
    file = read_vectors("portable", "float32")
    first = next(v for v in file.vectors if v.region == "swiglu")
    changed = tuple(replace(v, inputs="0" * 32) if v is first else v for v in file.vectors)
    found = lines(verify(replace(file, vectors=changed), Only({"swiglu"})))
    assert {(n.case, n.status) for n in found if n.region == "swiglu"} >= {
        *((case, "other inputs") for case in first.cases),
        ("trainer_backward", "equal"),
    }
    assert not command.verdict(found)


def test_a_vector_that_this_code_does_not_make_is_an_error_too():
    file = read_vectors("portable", "float32")
    extra = replace(next(v for v in file.vectors if v.region == "swiglu"), problem="99. many rows: 7 rows")
    found = verify(replace(file, vectors=(*file.vectors, extra)), Only({"swiglu"}))
    assert [a.status for a in found if a.vector == extra] == ["other inputs"] * len(extra.cases)


def test_a_file_round_trips_and_a_damaged_one_is_refused(tmp_path):
    file = read_vectors("portable", "float32")
    path = write_vectors(file, tmp_path)
    assert read_vectors("portable", "float32", tmp_path) == file
    text = path.read_text()
    for broken in (text[:-5], text.replace('"answer"', '"reply"', 1), text.replace('"schema": 1', '"schema": 2')):
        path.write_text(broken)
        with pytest.raises(ContractError):
            read_vectors("portable", "float32", tmp_path)
    with pytest.raises(ContractError, match="there are no vectors"):
        read_vectors("hopper", "bfloat16", tmp_path)


def test_vectors_of_another_contract_are_refused(tmp_path, monkeypatch):
    write_vectors(read_vectors("portable", "float32"), tmp_path)
    config, topology = MODELS["qk-norm, tp 2"]
    monkeypatch.setitem(files.MODELS, "qk-norm, tp 2", (replace(config, rms_norm_eps=2e-6), topology))
    with pytest.raises(ContractError, match="another contract"):
        read_vectors("portable", "float32", tmp_path)


def test_the_command_prints_a_line_a_region_and_case(monkeypatch):
    monkeypatch.setattr(command, "find_backend", lambda target: Only({"swiglu", "adamw"}))
    result = CliRunner().invoke(command.verify, ["device", "--profile", "portable", "--json"], standalone_mode=False)
    assert result.return_value == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    status = {(r["dtype"], r["region"], r["case"]): r["status"] for r in rows}
    assert status[("bfloat16", "swiglu", "rollout_decode")] == "equal"
    assert status[("float32", "rope", "trainer_forward")] == "no kernel"
    assert all(r["first"] is None for r in rows if r["status"] == "equal")


def test_a_profile_that_the_device_has_not_is_bad_input():
    result = CliRunner().invoke(command.verify, ["device", "--on", "cpu", "--profile", "hopper"])
    assert result.exception is not None and "hopper" in str(result.exception)


def test_a_region_that_was_asked_for_is_the_only_one_compared():
    arguments = ["device", "--on", "cpu", "--profile", "portable", "--region", "loss", "--json"]
    result = CliRunner().invoke(command.verify, arguments, standalone_mode=False)
    assert result.return_value == 0, result.output
    rows = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    assert {r["region"] for r in rows} == {"loss"} and all(r["outputs_equal"] > 0 for r in rows)
    result = CliRunner().invoke(command.verify, ["device", "--on", "cpu", "--region", "swigul"])
    assert "swigul" in str(result.exception) and "swiglu" in str(result.exception)
