"""A contract from its JSON: the strict inverse of :meth:`Contract.as_json`.

:func:`contract_from_json` and :func:`read_contract` accept what this version makes and nothing else. A contract of
another version may have other entries: :func:`parse_contract` and :func:`parse_contract_file` check all that needs no
builder, and :func:`departures` says what this version would have made otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from rlkernel.contract.build import Contract, build_contract
from rlkernel.contract.canonical import bits_float32, bits_float64, canonical_json
from rlkernel.contract.claims import Topology
from rlkernel.contract.decode import check_fields, decode
from rlkernel.contract.differences import ABSENT, Difference, differences
from rlkernel.contract.points import points_from_json
from rlkernel.contract.structure import structural_problems
from rlkernel.errors import ContractError, ModelError
from rlkernel.models.config import ModelConfig, RopeConfig

SECTIONS = ("semantic", "numerical_policy")
_SEMANTIC = ["schema", "model", "regions", "cases"]
_POLICY = [
    "schema",
    "profile",
    "dtype",
    "topology",
    "state_claims",
    "temperature",
    "optimizer",
    "rope_tables",
    "entries",
]


def contract_from_json(data: Any, where: str = "contract") -> Contract:
    """Read a contract that this version makes; writing it again gives the same data, and so the same identities.

    Args:
        data: what :meth:`Contract.as_json` returned, or the JSON parser made of it.
        where: name of the source, for messages.

    Raises:
        ContractError: what :func:`parse_contract` refuses, or the first field that does not follow from the model,
            profile, dtype and claims by the builder of this version.
    """
    contract = parse_contract(data, where)
    found = departures(contract)
    if found:
        raise ContractError(f"{where}: {departure_sentence(found)}")
    return contract


def departures(contract: Contract) -> list[Difference]:
    """What this version makes otherwise of the contract's own model, profile, dtype, topology, temperature, optimizer.

    ``left`` is this version's value, ``right`` the contract's. Empty: the contract follows.
    """
    built = build_contract(
        contract.config,
        profile=contract.profile,
        dtype=contract.dtype,
        topology=contract.topology,
        temperature=bits_float32(contract.temperature),
        optimizer=contract.optimizer,
    )
    return differences(built.as_json(), contract.as_json())


def departure_sentence(found: list[Difference]) -> str:
    """The first of :func:`departures` in words, and how many more there are."""
    first, others = found[0], len(found) - 1
    path, made = ".".join(first.path), "a contract of this model, profile and claims"
    if first.right is ABSENT:
        text = f"{path} is absent; {made} has it"
    elif first.left is ABSENT:
        text = f"{path} is given; {made} has no such field"
    else:
        text = f"{path} is {first.right!r}; {made} has {first.left!r}"
    return text + (f" (and {others} more {'field' if others == 1 else 'fields'})" if others else "")


def parse_contract(data: Any, where: str = "contract") -> Contract:
    """Read a contract that any version may have made. Its entries need not be those that this version makes.

    Args:
        data: what :meth:`Contract.as_json` returned, or the JSON parser made of it.
        where: name of the source, for messages.

    Raises:
        ContractError: unknown or missing fields, other types, raw floats, numbers out of range, names of cases,
            regions, roles, constants and primitives that are not defined, dtypes that contradict each other, malformed
            bit patterns, another schema, or model regions and states that are not this schema's; each with its path.
    """
    try:
        canonical_json(data)
    except ContractError as error:
        raise ContractError(f"{where}: {error}") from error
    _object(data, list(SECTIONS), where, "a contract")
    semantic, policy = data["semantic"], data["numerical_policy"]
    _object(semantic, _SEMANTIC, f"{where}.semantic", "the semantic part")
    _object(policy, _POLICY, f"{where}.numerical_policy", "the numerical policy")
    path = f"{where}.numerical_policy"
    entries = {}
    for key, value in _object(policy["entries"], None, f"{path}.entries", "").items():
        case, slash, region = key.partition("/")
        if not (case and slash and region):
            raise ContractError(f"{path}.entries has the key {key!r}: CASE/REGION is needed")
        entries[case, region] = points_from_json(value, f"{path}.entries.{key}")
    optimizer = policy["optimizer"]
    if optimizer is not None:
        _object(optimizer, None, f"{path}.optimizer", "")
    contract = Contract(
        config=_config(semantic["model"], f"{where}.semantic.model"),
        profile=decode(str, policy["profile"], f"{path}.profile"),
        dtype=decode(str, policy["dtype"], f"{path}.dtype"),
        topology=decode(Topology, policy["topology"], f"{path}.topology"),
        temperature=decode(str, policy["temperature"], f"{path}.temperature"),
        optimizer=optimizer,
        entries=entries,
        rope=decode(str, policy["rope_tables"], f"{path}.rope_tables"),
    )
    problem = next(structural_problems(contract), None)
    if problem is not None:
        raise ContractError(f"{where}.{problem[0]} {problem[1]}")
    found = differences(contract.as_json(), data)
    if found:
        raise ContractError(
            f"{where} is not what this version makes of its model and claims: "
            + "; ".join(difference.sentence("in this version", "in the file") for difference in found[:5])
        )
    return contract


def read_contract(path: Path) -> Contract:
    """Read a file that ``vime contract export`` of this version wrote.

    Raises ContractError naming what is wrong with it.
    """
    return contract_from_json(_json_of(path), str(path))


def parse_contract_file(path: Path) -> Contract:
    """Read a file that ``vime contract export`` of any version wrote, as :func:`parse_contract` does."""
    return parse_contract(_json_of(path), str(path))


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ContractError(f"{path} is no JSON: {error}") from error


def contract_text(contract: Contract) -> str:
    """The contract as a file: JSON with sorted keys, one value a line."""
    return json.dumps(contract.as_json(), indent=1, sort_keys=True) + "\n"


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ContractError(f"a contract names {sorted({n for n in names if names.count(n) > 1})} twice in one object")
    return found


def _object(data: Any, names: list[str] | None, path: str, what: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ContractError(f"{path} is {data!r}: an object is needed")
    if names is not None:
        check_fields(data, names, path, what)
    return data


def _config(data: Any, path: str) -> ModelConfig:
    hints = get_type_hints(ModelConfig)
    values = dict(_object(data, list(hints), path, "a model"))
    values["rms_norm_eps"] = bits_float32(decode(str, values["rms_norm_eps"], f"{path}.rms_norm_eps"))
    rope = _object(values["rope"], ["theta", "kind", "parameters"], f"{path}.rope", "a rotary embedding")
    parameters = _object(rope["parameters"], None, f"{path}.rope.parameters", "")
    values["rope"] = RopeConfig(
        bits_float64(decode(str, rope["theta"], f"{path}.rope.theta")),
        decode(get_type_hints(RopeConfig)["kind"], rope["kind"], f"{path}.rope.kind"),
        tuple(
            (name, bits_float64(decode(str, value, f"{path}.rope.parameters.{name}")))
            for name, value in sorted(parameters.items())
        ),
    )
    for name, kind in hints.items():
        if name == "bos_token_id":
            if values[name] is not None:
                decode(int, values[name], f"{path}.{name}")
        elif name not in ("rms_norm_eps", "rope"):
            values[name] = decode(kind, values[name], f"{path}.{name}")
    try:
        return ModelConfig(**values)
    except ModelError as error:
        raise ContractError(f"{path}: {error}") from error
