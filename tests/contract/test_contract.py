"""The contract is data: strict round trip, and its digests change with anything in it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlkernel.contract.build import FORWARD_CASES, build_contract, compare_identities, entries_from_json
from rlkernel.contract.canonical import canonical_json, digest
from rlkernel.contract.claims import Topology, check_degrees
from rlkernel.contract.differences import differences
from rlkernel.contract.identity import Identities, TensorEntry, manifest_digest
from rlkernel.contract.points import points_from_json
from rlkernel.contract.profiles import PRIMITIVES
from rlkernel.contract.serial import contract_from_json, contract_text, read_contract
from rlkernel.contract.table import Edge, boundaries, describe, table_rows
from rlkernel.errors import ContractError
from rlkernel.models.config import ModelConfig, RopeConfig
from rlkernel.models.definition import define_model

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=64,
    qk_norm=True,
    tied_embeddings=True,
)
ADAMW = {
    "kind": "adamw",
    "schedule": {"kind": "constant", "peak": "f64:3f689374bc6a7efa"},
    "eps": "f64:3e45798ee2308c3a",
}
SIX = ["dependency", "split", "merge order", "precision", "rounding", "primitives"]
ROPE_TABLES = "2df8a147222777f5897705f56f7933f9581cdef9e7ebab58f8ba02c0d2749533"


def _leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return "changed" if value is None else value + "~"


def _changes(data):
    """Every value of plain data, and the data with that value alone changed (one object, changed and restored)."""
    for path, value in list(_leaves(data)):
        target = data
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = _changed(value)
        yield path, data
        target[path[-1]] = value


def _pieces(data, key):
    """Canonical JSON of ``data`` around the value of one key: what comes before it, and after."""
    whole, part = canonical_json(data), canonical_json({key: data[key]})[1:-1]
    assert whole.count(part) == 1
    before, after = whole.split(part)
    return before + canonical_json(key) + b":", after


@pytest.mark.parametrize("profile", ["portable", "hopper", "cdna3"])
def test_every_field_of_both_identities_changes_its_digest(profile):
    """Each point of each entry, each constant, dimension and claim. A change is encoded in its place between bytes that
    did not change: encoding all of the policy for every one of its values would take minutes."""
    contract = build_contract(CONFIG, profile=profile, dtype="bfloat16", topology=Topology(tp=2, dp=2), optimizer=ADAMW)
    seen = set()
    for data in (contract.semantic(), contract.numerical_policy()):
        before = digest(data)
        policy = {key: value for key, value in data.items() if key != "entries"}
        for path, changed in _changes(policy):
            assert digest({**data, **changed}) != before, path
            seen.add(path)
    policy = contract.numerical_policy()
    head, tail = _pieces(policy, "entries")
    for key, entry in policy["entries"].items():
        first, last = _pieces(policy["entries"], key)

        def identity(value, first=first, last=last):
            return hashlib.sha256(head + first + canonical_json(value) + last + tail).hexdigest()

        assert identity(entry) == before  # the pieces are those of the identity itself
        for path, changed in _changes(entry):
            assert identity(changed) != before, (key, path)
            seen.add((key, *path))
    assert len(seen) > 2000


@pytest.mark.parametrize("profile", ["portable", "hopper", "cdna3"])
def test_every_changed_field_of_an_entry_is_refused_or_read_as_another_entry(profile):
    contract = build_contract(CONFIG, profile=profile, dtype="bfloat16", topology=Topology(tp=2))
    refused = 0
    for points in set(contract.entries.values()):
        for path, changed in _changes(points.as_json()):
            try:
                assert points_from_json(changed) != points, path
            except ContractError:
                refused += 1
    assert refused > 100


def test_the_six_points_of_every_region_and_case_are_filled():
    for profile in ("portable", "hopper", "cdna3"):
        for config in (CONFIG, replace(CONFIG, family="qwen2", qk_norm=False, qkv_bias=True, tied_embeddings=False)):
            contract = build_contract(config, profile=profile, dtype="bfloat16", topology=Topology(tp=2, dp=2))
            kinds = {region.kind for region in define_model(config).regions} | {"lm_head"}
            for case in FORWARD_CASES[:4]:
                assert {region for c, region in contract.entries if c == case} == kinds
            layers = kinds - {"embedding", "final_norm", "lm_head", "logprob"}
            assert {region for c, region in contract.entries if c == "trainer_recompute"} == layers
            backward = {region.partition(".")[0] for c, region in contract.entries if c == "trainer_backward"}
            assert backward == kinds
            for row in table_rows(contract):
                points = row.points
                assert points.dependency.inputs and all(points.dependency.inputs) and points.dependency.domain
                assert points.split.leaves or points.split.leaf_size
                assert min(points.split.lanes, points.split.step, points.split.shards) >= 1
                assert all(vars(points.merge).values()) and all(vars(points.precision).values())
                assert points.primitives and all(value in PRIMITIVES for _, value in points.primitives)
                narrowed = points.precision.output != points.precision.state
                assert points.rounding or not narrowed
                words = describe(points)
                assert list(words)[:6] == SIX and all(words.values())


def test_what_one_region_writes_the_next_one_reads():
    contract = build_contract(CONFIG, dtype="bfloat16")
    edges = boundaries(contract)
    assert Edge("lm_head", "logprob", "float32", FORWARD_CASES[:4]) in edges
    assert {edge.dtype for edge in edges if "lm_head" not in (edge.source, edge.target)} == {"bfloat16"}
    assert {edge.target for edge in edges if edge.cases == ("trainer_backward",)} > {"rope", "embedding.wgrad"}
    key = ("trainer_score", "rope")
    points = contract.entries[key]
    other = replace(points, precision=replace(points.precision, inputs="float32"))
    with pytest.raises(ContractError, match="trainer_score: qk_norm writes bfloat16, and rope reads float32"):
        boundaries(replace(contract, entries={**contract.entries, key: other}))


SCRIPT = """
import sys
from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.models.config import ModelConfig, RopeConfig
rope = RopeConfig(5e5, "llama3", (("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
                  ("original_max_position_embeddings", 32.0)))
config = ModelConfig("qwen3", 32, 64, 128, 2, 4, 2, 16, 64, 1e-5, rope, qk_norm=True, tied_embeddings=True)
contract = build_contract(config, dtype="bfloat16", topology=Topology(tp=2), temperature=0.7,
                          optimizer={"schedule": {"kind": "cosine"}, "beta1": "f64:3feccccccccccccd"})
found = contract.identities({})
print(found.semantic, found.numerical_policy, contract.rope)
"""


def test_identities_depend_on_nothing_of_the_machine(tmp_path):
    """Hash seed, locale, time zone, folder, threads and the vector instructions that NumPy may use change nothing."""
    machines = [
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "77", "LC_ALL": "C", "TZ": "Asia/Kathmandu", "OMP_NUM_THREADS": "1", "HOME": "/nowhere"},
        {"NPY_DISABLE_CPU_FEATURES": _dispatched_features(), "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"},
    ]
    root = str(Path(__file__).parents[2])
    seen = set()
    for number, machine in enumerate(machines):
        folder = tmp_path / str(number)
        folder.mkdir()
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": root, **machine}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        seen.add(done.stdout)
    (found,) = seen
    # the one part that is computed with floats, recorded once: every machine has to come to the same
    assert found.split()[2] == ROPE_TABLES


def _dispatched_features():
    """What NumPy would choose among on this machine, beyond the baseline that it was compiled for."""
    from numpy._core._multiarray_umath import __cpu_baseline__, __cpu_dispatch__, __cpu_features__

    return " ".join(f for f in __cpu_dispatch__ if __cpu_features__.get(f) and f not in __cpu_baseline__)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "bfloat16"},
        {"temperature": 0.7},
        {"optimizer": {"schedule": "another"}},
        {"topology": Topology(tp=2)},
        {"topology": Topology(dp=2)},
    ],
)
def test_pinned_constants_enter_the_policy_alone(other):
    one, two = build_contract(CONFIG), build_contract(CONFIG, **other)
    a, b = one.identities({}), two.identities({})
    assert a.semantic == b.semantic
    assert a.numerical_policy != b.numerical_policy
    assert compare_identities(a, b, one, two)
    assert not compare_identities(a, a, one, one)


def test_dimensions_enter_the_semantic_identity():
    one = build_contract(CONFIG)
    two = build_contract(replace(CONFIG, intermediate_size=256))
    (message,) = [m for m in compare_identities(one.identities({}), two.identities({}), one, two) if "semantic" in m]
    assert "intermediate_size" in message and "128" in message and "256" in message


def test_entries_survive_a_strict_round_trip():
    policy = json.loads(canonical_json(build_contract(CONFIG).numerical_policy()))
    entries = entries_from_json(policy["entries"])
    assert entries == dict(build_contract(CONFIG).entries)
    policy["entries"]["trainer_score/attention"]["colour"] = "red"
    with pytest.raises(ContractError, match="unknown fields \\['colour'\\]"):
        entries_from_json(policy["entries"])
    del policy["entries"]["trainer_score/attention"]["colour"]
    del policy["entries"]["trainer_score/attention"]["split"]
    with pytest.raises(ContractError, match="missing fields \\['split'\\]"):
        entries_from_json(policy["entries"])


def test_raw_floats_cannot_be_hashed():
    with pytest.raises(ContractError, match=r"a\.b\[1\] is the raw float 0\.5"):
        canonical_json({"a": {"b": [1, 0.5]}})


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (Topology(tp=3), "power of two"),
        (Topology(cp=2), "only tp and dp"),
        (Topology(tp=4), "num_kv_heads = 2"),
    ],
)
def test_impossible_claims_are_refused_with_the_numbers(topology, words):
    with pytest.raises(ContractError, match=words):
        build_contract(CONFIG, topology=topology)


def test_a_degree_outside_the_claim_is_refused():
    check_degrees(Topology(tp=2), Topology(tp=1))
    with pytest.raises(ContractError, match="tp = 4 is outside the claim"):
        check_degrees(Topology(tp=2), Topology(tp=4))


def test_a_missing_identity_is_a_refusal():
    good = "0" * 64
    Identities(good, good, good)
    with pytest.raises(ContractError, match="numerical_policy"):
        Identities(good, "", good)


def test_a_manifest_depends_on_name_shape_dtype_and_digest_and_not_on_order():
    a, b = TensorEntry("a", (2, 3), "float32", (1, 2)), TensorEntry("b", (6,), "float32", (3, 4))
    base = manifest_digest([a, b])
    assert base == manifest_digest([b, a])
    for other in (
        replace(a, name="c"),
        replace(a, shape=(3, 2)),
        replace(a, dtype="bfloat16"),
        replace(a, lanes=(1, 3)),
    ):
        assert manifest_digest([other, b]) != base
    with pytest.raises(ContractError, match="twice"):
        manifest_digest([a, a])


# ------------------------------------------------------------------------------------------ contracts as files

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
        (_set("semantic", "regions", 0, "kind", to="rope"), r"semantic.regions\[0\].kind: 'embedding' on this version"),
        (_set(*POLICY, "schema", to=99), "numerical_policy.schema: 1 on this version, 99 on the file"),
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
    assert [d.sentence("A", "B") for d in found[3:]] == ["a.e: 0 on A, absent on B", "a.f: absent on A, None on B"]
    one, two = CONTRACTS["plain"], build_contract(CONFIG, dtype="bfloat16")
    for found in differences(one.as_json(), two.as_json()):
        assert found.path[0] == "numerical_policy" and found.left != found.right
