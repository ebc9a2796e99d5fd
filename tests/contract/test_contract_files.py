"""Contracts as files: strict round trip, and differences by field."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlkernel.contract.build import build_contract
from rlkernel.contract.canonical import canonical_json
from rlkernel.contract.claims import Topology
from rlkernel.contract.differences import ABSENT, differences
from rlkernel.contract.serial import (
    contract_from_json,
    contract_text,
    departures,
    parse_contract,
    parse_contract_file,
    read_contract,
)
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


ATTENTION = (*POLICY, "entries", "rollout_decode/attention")


def _rename_role(data):
    data["numerical_policy"]["entries"]["rollout_decode/attention"]["primitives"][0][0] = "multiply"


def _swap(name):
    def change(data):
        pair = data["numerical_policy"]["entries"]["rollout_decode/attention"][name]
        pair[0], pair[1] = pair[1], pair[0]

    return change


def _invent(case, region):
    def change(data):
        entries = data["numerical_policy"]["entries"]
        entries[f"{case}/{region}"] = entries["rollout_decode/attention"]

    return change


def _all_float32(data):
    """A contract in bfloat16 whose entries are those of one in float32."""
    other = build_contract(CONFIG).numerical_policy()
    data["numerical_policy"].update(json.loads(json.dumps({**other, "dtype": "bfloat16"})))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set(*ATTENTION, "split", "lanes", to=-3), r"decode/attention\.split\.lanes is -3: at least 1 is needed"),
        (_set(*ATTENTION, "split", "lanes", to=512), "split.lanes is 512: at most 256"),
        (_set(*ATTENTION, "split", "leaves", to=2), "split has leaves 2 and leaf_size 2048: exactly one"),
        (_set(*ATTENTION, "primitives", to=[]), "decode/attention.primitives is empty"),
        (_rename_role, "primitives has the role 'multiply'; there are mac, "),
        (_set(*ATTENTION, "primitives", 0, 1, to="copy"), "primitives.mac is 'copy', which plays no such role"),
        (_set(*ATTENTION, "primitives", 1, 0, to="mac"), r"primitives names \['mac'\] twice"),
        (_set(*ATTENTION, "constants", 0, 1, to="64x"), "constants.key_block is '64x': a whole number above 0"),
        (_set(*ATTENTION, "constants", 0, 1, to="0"), "constants.key_block is '0': a whole number above 0"),
        (_set(*ATTENTION, "constants", 1, 1, to="f32:7fc00000"), "constants.scale2 is f32:7fc00000"),
        (_set(*ATTENTION, "constants", 1, 1, to="0.5"), "constants.scale2: '0.5' is no bit pattern"),
        (_set(*ATTENTION, "constants", 1, 0, to="scale3"), "constants has 'scale3'"),
        (_set(*ATTENTION, "precision", "state", to="float16"), "precision.state is 'float16': a contract in bfloat16"),
        (
            _set(*ATTENTION, "precision", "output", to="float32"),
            "precision.output is 'float32': attention has bfloat16",
        ),
        (_set(*ATTENTION, "rounding", 0, "to", to="float16"), "narrows 'weights' to 'float16'"),
        (_set(*ATTENTION, "rounding", 0, "site", to="output"), r"rounding names \['output'\] twice"),
        (_set(*ATTENTION, "dependency", "inputs", to=[]), "dependency.inputs is \\[\\]"),
        (_set(*ATTENTION, "dependency", "domain", to=""), "dependency.domain is empty"),
        (_invent("rollout_decode", "foo"), "decode/foo: the case rollout_decode of this model has no region 'foo'"),
        (_invent("optimizer_step", "attention"), "the case optimizer_step of this model has no region 'attention'"),
        (_invent("rollout_draft", "attention"), "there is no case 'rollout_draft'"),
        (_set(*POLICY, "temperature", to="f32:7fc00000"), "temperature is f32:7fc00000 .nan.: a finite number above 0"),
        (_set(*POLICY, "temperature", to="f32:00000000"), "temperature is f32:00000000 .0.0.: a finite number above 0"),
        (_set(*POLICY, "temperature", to="f32:7f800000"), "temperature is f32:7f800000 .inf."),
        (_set(*POLICY, "rope_tables", to="0" * 63), "rope_tables is '0+': a SHA-256"),
        (_set(*POLICY, "profile", to="volta"), "numerical_policy: profile 'volta' is unknown"),
        (_set(*POLICY, "dtype", to="float32"), "profile 'hopper' has dtype bfloat16, not 'float32'"),
        (_all_float32, "precision.inputs is 'float32': embedding has bfloat16 in a contract in bfloat16"),
        (
            _set(*POLICY, "topology", "tp", to=3),
            "contract.numerical_policy: topology.tp = 3: a claimed degree is a power of two",
        ),
        (_set(*POLICY, "optimizer", "eps", to="f64:3e45"), "numerical_policy.optimizer.eps: 'f64:3e45' is no bit"),
        (_set(*MODEL, "rms_norm_eps", to="f32:7fc00000"), "semantic.model.rms_norm_eps is nan"),
        (_set(*MODEL, "rope", "theta", to="f64:fff0000000000000"), "semantic.model.rope.theta is -inf"),
    ],
)
def test_what_no_version_makes_is_refused_by_both_readers(change, words):
    data = _altered(change)
    with pytest.raises(ContractError, match=words):
        parse_contract(data)
    with pytest.raises(ContractError, match=words):
        contract_from_json(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            _set(*ATTENTION, "split", "lanes", to=4),
            "contract: numerical_policy.entries.rollout_decode/attention.split.lanes is 4; a contract of this model, "
            "profile and claims has 8$",
        ),
        (_set(*ATTENTION, "constants", 1, 1, to="f32:3eb8aa3a"), "constants.scale2 is 'f32:3eb8aa3a'; .* has 'f32:"),
        (_set(*ATTENTION, "primitives", 0, 1, to="fma.rn.f32"), "primitives.mac is 'fma.rn.f32'; .*'mma.bf16.sm90'"),
        (_swap("primitives"), "rollout_decode/attention.primitives.order is 'weights_exp2'; .* has 'mac'"),
        (_swap("rounding"), r"rollout_decode/attention.rounding\[0\]"),
        (
            lambda d: d["numerical_policy"]["entries"].pop("rollout_decode/attention"),
            "entries.rollout_decode/attention is absent; .* has it$",
        ),
        (_invent("trainer_backward", "attention.wgrad"), "attention.wgrad is given; .* has no such field$"),
        (_set(*POLICY, "rope_tables", to="0" * 64), "numerical_policy.rope_tables is '0{64}'; .* has '[0-9a-f]{64}'$"),
        (_set(*POLICY, "topology", "tp", to=1), r"entries\.\S+ is .* has .* \(and \d+ more fields\)$"),
    ],
)
def test_what_does_not_follow_from_the_model_is_refused_and_can_still_be_compared(change, words, tmp_path):
    data = _altered(change)
    with pytest.raises(ContractError, match=words):
        contract_from_json(data)
    (tmp_path / "c.json").write_text(json.dumps(data))
    with pytest.raises(ContractError, match=words.removeprefix("contract: ")):
        read_contract(tmp_path / "c.json")
    parsed = parse_contract_file(tmp_path / "c.json")
    assert canonical_json(parsed.as_json()) == canonical_json(data)  # as it stands in the file, not as it should be
    assert departures(parsed) and parsed != CONTRACTS["everything"]


@pytest.mark.parametrize("profile", ["portable", "hopper", "cdna3"])
@pytest.mark.parametrize("other", [{}, {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "head_dim": 18}])
def test_what_this_version_makes_follows(profile, other):
    for dtype in ("float32", "bfloat16") if profile == "portable" else ("bfloat16",):
        contract = build_contract(
            replace(CONFIG, **other), profile=profile, dtype=dtype, topology=Topology(tp=2, dp=2), optimizer=ADAMW
        )
        assert departures(contract) == []
        assert contract_from_json(contract.as_json()) == contract


def test_every_changed_field_of_the_policy_is_refused():
    """One bit, one number, one name at a time, in every distinct place of the entries and beside them."""
    data = json.loads(contract_text(CONTRACTS["everything"]))
    seen = set()
    for path, value in list(_leaves(data["numerical_policy"])):
        if path[0] in ("optimizer", "temperature"):
            continue  # chosen by the user: another one is another contract, and a sound one
        place = (path[2:], value) if path[0] == "entries" else path
        if place in seen:
            continue
        seen.add(place)
        change = _set("numerical_policy", *path, to=_other(value))
        altered = _altered(change)
        with pytest.raises(ContractError):
            contract_from_json(altered)
    assert len(seen) > 100


def _leaves(value, path=()):
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _other(value):
    if isinstance(value, int):
        return value + 1
    if value.startswith(("f32:", "f64:")):
        return value[:-1] + format(int(value[-1], 16) ^ 1, "x")
    return "0" * 64 if len(value) == 64 else value + "x"


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
