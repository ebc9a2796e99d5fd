"""The contract is data: strict round trip, and its digests change with anything in it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from rlkernel.contract.build import build_contract, compare_identities, entries_from_json
from rlkernel.contract.canonical import canonical_json, digest
from rlkernel.contract.claims import Topology, check_degrees
from rlkernel.contract.identity import Identities, TensorEntry, manifest_digest
from rlkernel.errors import ContractError
from rlkernel.models.config import ModelConfig

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


def test_every_field_of_both_identities_changes_its_digest():
    contract = build_contract(CONFIG)
    for data in (contract.semantic(), contract.numerical_policy()):
        before, seen = digest(data), set()
        for path, value in _leaves(data):
            other = copy.deepcopy(data)
            target = other
            for step in path[:-1]:
                target = target[step]
            target[path[-1]] = _changed(value)
            after = digest(other)
            assert after != before, path
            seen.add(path)
        assert len(seen) > 100


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
