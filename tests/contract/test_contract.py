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
from rlkernel.contract.identity import Identities, TensorEntry, manifest_digest
from rlkernel.contract.points import points_from_json
from rlkernel.contract.profiles import PRIMITIVES
from rlkernel.contract.table import Edge, boundaries, describe, table_rows
from rlkernel.errors import ContractError
from rlkernel.models.config import ModelConfig
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
