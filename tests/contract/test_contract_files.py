"""Contracts as files: strict round trip, and differences by field."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlkernel.contract.build import build_contract
from rlkernel.contract.canonical import canonical_json
from rlkernel.contract.claims import Topology
from rlkernel.contract.differences import ABSENT, differences
from rlkernel.contract.serial import contract_from_json, contract_text, read_contract
from rlkernel.errors import ContractError
from rlkernel.models.config import RopeConfig
from tests.contract.test_contract import ADAMW, CONFIG

YARN = RopeConfig(1e4, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 16.0)))
CONTRACTS = {
    "plain": build_contract(CONFIG),
    "everything": build_contract(
        replace(CONFIG, rope=YARN, rms_norm_eps=1e-5, bos_token_id=1, eos_token_ids=(0, 3)),
        profile="hopper",
        dtype="bfloat16",
        topology=Topology(tp=2, dp=4),
        temperature=0.7,
        optimizer=ADAMW,
    ),
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_survives_a_strict_round_trip(name, tmp_path):
    contract = CONTRACTS[name]
    (tmp_path / "c.json").write_text(contract_text(contract))
    again = read_contract(tmp_path / "c.json")
    assert again == contract
    assert again.identities({}) == contract.identities({})
    assert canonical_json(again.as_json()) == canonical_json(contract.as_json())


def _altered(change, name="everything"):
    data = json.loads(contract_text(CONTRACTS[name]))
    change(data)
    return data


def _set(*path, to):
    def change(data):
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = to

    return change


POLICY, MODEL, ENTRY = (
    ("numerical_policy",),
    ("semantic", "model"),
    ("numerical_policy", "entries", "trainer_score/rope"),
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("colour", to="red"), r"contract: unknown fields \['colour'\]"),
        (lambda d: d.pop("semantic"), r"missing fields \['semantic'\]"),
        (_set(*MODEL, "colour", to=1), r"semantic.model: unknown fields \['colour'\]"),
        (_set(*MODEL, "hidden_size", to="64"), "semantic.model.hidden_size is '64': int is needed"),
        (_set(*MODEL, "qk_norm", to=1), "semantic.model.qk_norm is 1: bool is needed"),
        (_set(*MODEL, "num_layers", to=True), "semantic.model.num_layers is True: int is needed"),
        (_set(*MODEL, "num_layers", to=0), "num_layers = 0: at least 1 is needed"),
        (_set(*MODEL, "family", to="gpt2"), "semantic.model.family is 'gpt2': one of 'llama'"),
        (_set(*MODEL, "rms_norm_eps", to="1e-6"), "'1e-6' is no bit pattern"),
        (_set(*MODEL, "rms_norm_eps", to=1e-6), "rms_norm_eps is the raw float 1e-06"),
        (_set(*MODEL, "rope", "kind", to="magic"), "semantic.model.rope.kind is 'magic'"),
        (_set(*MODEL, "rope", "parameters", "factor", to="f32:3f800000"), "'f32:3f800000' is no bit pattern: f64"),
        (_set("semantic", "cases", to=[]), "semantic.cases"),
        (
            _set("semantic", "regions", 0, "kind", to="rope"),
            r"semantic.regions.embedding.kind: 'embedding' in this version",
        ),
        (_set(*POLICY, "schema", to=99), "numerical_policy.schema: 1 in this version, 99 in the file"),
        (_set(*POLICY, "temperature", to=0.7), "numerical_policy.temperature is the raw float 0.7"),
        (_set(*POLICY, "temperature", to="warm"), "'warm' is no bit pattern"),
        (_set(*POLICY, "topology", "tp", to="2"), "topology.tp is '2': int is needed"),
        (_set(*POLICY, "topology", "xp", to=1), r"topology: unknown fields \['xp'\]"),
        (_set(*POLICY, "state_claims", to=[]), "numerical_policy.state_claims"),
        (_set(*POLICY, "optimizer", to=[]), r"numerical_policy.optimizer is \[\]: an object is needed"),
        (_set(*POLICY, "entries", "rope", to={}), "the key 'rope': CASE/REGION is needed"),
        (_set(*ENTRY, "split", "leaves", to=1.0), "raw float 1.0"),
        (_set(*ENTRY, "split", "leaves", to="1"), "trainer_score/rope.split.leaves is '1': int is needed"),
        (_set(*ENTRY, "merge", "leaf", to="shuffle"), "merge.leaf is 'shuffle': one of 'none'"),
        (_set(*ENTRY, "primitives", to=[["fma", "fast.fma"]]), "fma is 'fast.fma', which is not defined"),
        (_set(*ENTRY, "primitives", to=[["fma"]]), r"primitives\[0\] has 1 elements: 2 are needed"),
        (_set(*ENTRY, "rounding", 0, "mode", to="towards_zero"), r"rounding\[0\].mode is 'towards_zero'"),
        (lambda d: d["numerical_policy"]["entries"]["trainer_score/rope"].pop("merge"), r"missing fields \['merge'\]"),
    ],
)
def test_whatever_is_unknown_missing_or_of_another_type_is_refused_with_its_place(change, words):
    with pytest.raises(ContractError, match=words):
        contract_from_json(_altered(change))


def test_files_that_are_no_contract_are_refused(tmp_path):
    with pytest.raises(ContractError, match="cannot be read"):
        read_contract(tmp_path / "none.json")
    for text, words in (
        ("{", "is no JSON"),
        ("[]", "an object is needed"),
        ('{"semantic": 1, "semantic": 2}', "twice"),
    ):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ContractError, match=words):
            read_contract(tmp_path / "c.json")


def test_differences_name_the_field_and_both_values():
    assert differences({"a": [1, 2]}, {"a": [1, 2]}) == []
    found = differences(
        {"a": {"b": [["mac", "x"], ["add", "y"]], "c": [1, 2], "d": 1, "e": 0}},
        {"a": {"b": [["mac", "z"], ["add", "y"]], "c": [1, 3], "d": True, "f": None}},
    )
    assert [(".".join(d.path), d.left, d.right) for d in found[:3]] == [
        ("a.b.mac", "x", "z"),
        ("a.c[1]", 2, 3),
        ("a.d", 1, True),
    ]
    assert [d.sentence("on A", "on B") for d in found[3:]] == [
        "a.e: 0 on A, absent on B",
        "a.f: absent on A, None on B",
    ]
    one, two = CONTRACTS["plain"], build_contract(CONFIG, dtype="bfloat16")
    for found in differences(one.as_json(), two.as_json()):
        assert found.path[0] == "numerical_policy" and found.left != found.right


def test_lists_of_named_objects_are_compared_by_name_and_order():
    one = [{"name": "a", "x": 1}, {"name": "b", "x": 2}, {"name": "c", "x": 3}]
    assert differences(one, [dict(item) for item in one]) == []
    found = differences({"l": one}, {"l": [one[0], {"name": "c", "x": 4}]})
    assert [(d.path, d.left, d.right) for d in found] == [(("l", "b"), one[1], ABSENT), (("l", "c", "x"), 3, 4)]
    swapped = differences({"l": one}, {"l": [one[0], one[2], one[1]]})
    assert [(d.path, d.left, d.right) for d in swapped] == [(("l", "order"), "b", "c")]
    repeated = differences({"l": one}, {"l": [one[0], one[0], one[2]]})
    assert repeated and repeated[0].path[0].startswith("l")
