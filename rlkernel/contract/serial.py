"""A contract from its JSON: the strict inverse of :meth:`Contract.as_json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from rlkernel.contract.build import Contract
from rlkernel.contract.canonical import bits_float32, bits_float64, canonical_json
from rlkernel.contract.claims import Topology
from rlkernel.contract.decode import check_fields, decode
from rlkernel.contract.differences import differences
from rlkernel.contract.points import points_from_json
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
    """Read a contract; writing it again gives the same data, and so the same identities.

    Args:
        data: what :meth:`Contract.as_json` returned, or the JSON parser made of it.
        where: name of the source, for messages.

    Raises:
        ContractError: unknown or missing fields, other types, raw floats, undefined primitives, or regions and claims
            that do not follow from the model; each with its path.
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
    bits_float32(contract.temperature)
    found = differences(contract.as_json(), data)
    if found:
        raise ContractError(
            f"{where} is not what this version makes of its model and claims: "
            + "; ".join(difference.sentence("in this version", "in the file") for difference in found[:5])
        )
    return contract


def read_contract(path: Path) -> Contract:
    """Read a file that ``vime contract export`` wrote. Raises ContractError naming what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ContractError(f"{path} is no JSON: {error}") from error
    return contract_from_json(data, str(path))


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
