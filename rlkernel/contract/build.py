"""Derives the contract from (model, profile, dtype, topology claims), and its identities. Nothing is typed in twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlkernel.contract.canonical import digest, float32_bits, float64_bits
from rlkernel.contract.claims import STATE_CLAIMS, Topology, require_topology
from rlkernel.contract.entries import Entries
from rlkernel.contract.identity import Identities
from rlkernel.contract.points import SixPoints, points_from_json
from rlkernel.contract.profiles import find_profile
from rlkernel.contract.rope_tables import rope_digest
from rlkernel.errors import ContractError
from rlkernel.models.config import ModelConfig
from rlkernel.models.definition import define_model

FORWARD_CASES = ("rollout_prefill", "rollout_decode", "trainer_score", "trainer_forward", "trainer_recompute")
SCHEMA = 1


@dataclass(frozen=True)
class Contract:
    """The numerical contract of one model: entries by (case, region), claims, constants."""

    config: ModelConfig
    profile: str
    dtype: str
    topology: Topology
    temperature: str
    optimizer: str
    entries: Mapping[tuple[str, str], SixPoints]
    rope: str

    def semantic(self) -> dict[str, Any]:
        """Architecture, dimensions, regions and cases."""
        definition = define_model(self.config)
        return {
            "schema": SCHEMA,
            "model": _config_json(self.config),
            "regions": [
                {
                    "name": r.name,
                    "kind": r.kind,
                    "inputs": list(r.inputs),
                    "outputs": list(r.outputs),
                    "weights": list(r.weights),
                }
                for r in definition.regions
            ],
            "cases": sorted({case for case, _ in self.entries}),
        }

    def numerical_policy(self) -> dict[str, Any]:
        """Six points of every region and case, pinned constants, dtype, topology claims."""
        return {
            "schema": SCHEMA,
            "profile": self.profile,
            "dtype": self.dtype,
            "topology": self.topology.as_json(),
            "state_claims": [{"state": c.state, "invalidated_by": list(c.invalidated_by)} for c in STATE_CLAIMS],
            "temperature": self.temperature,
            "optimizer": self.optimizer,
            "rope_tables": self.rope,
            "entries": {f"{case}/{region}": points.as_json() for (case, region), points in self.entries.items()},
        }

    def identities(self, deployment: Mapping[str, Any]) -> Identities:
        """The three digests; ``deployment`` is plain data about implementations, versions and the device."""
        return Identities(digest(self.semantic()), digest(self.numerical_policy()), digest(dict(deployment)))

    def as_json(self) -> dict[str, Any]:
        """What contract.json holds of it."""
        return {"semantic": self.semantic(), "numerical_policy": self.numerical_policy()}


def _config_json(config: ModelConfig) -> dict[str, Any]:
    data = asdict(config)
    data["rms_norm_eps"] = float32_bits(config.rms_norm_eps)
    data["rope"] = {
        "theta": float64_bits(config.rope.theta),
        "kind": config.rope.kind,
        "parameters": {name: float64_bits(value) for name, value in config.rope.parameters},
    }
    data["eos_token_ids"] = list(config.eos_token_ids)
    return data


def build_contract(
    config: ModelConfig,
    *,
    profile: str = "portable",
    dtype: str = "float32",
    topology: Topology | None = None,
    temperature: float = 1.0,
    optimizer: Mapping[str, Any] | None = None,
) -> Contract:
    """Build the contract; ``optimizer`` is its configuration as canonical data (schedule and constants).

    Raises:
        ContractError: an unknown profile or dtype, a temperature that is not above 0, or a claim that the model's
            dimensions cannot keep.
    """
    found = find_profile(profile, dtype)
    if not temperature > 0:
        raise ContractError(f"temperature {temperature!r}: logits are divided by it, so it must be above 0")
    topology = topology or Topology()
    require_topology(topology, config)
    build = Entries(config, found, dtype, topology)
    entries: dict[tuple[str, str], SixPoints] = {}
    for case in FORWARD_CASES:
        entries.update({(case, kind): points for kind, points in build.forward().items()})
    entries.update({("trainer_backward", kind): points for kind, points in build.backward().items()})
    entries.update({("optimizer_step", kind): points for kind, points in build.optimizer().items()})
    constants = "none" if optimizer is None else digest(dict(optimizer))
    return Contract(
        config, profile, dtype, topology, float32_bits(temperature), constants, entries, rope_digest(config)
    )


def compare_identities(
    one: Identities, other: Identities, contract_one: Contract, contract_other: Contract
) -> list[str]:
    """Why two sides may not run together: each differing field of the semantic or numerical identity."""
    problems = []
    for name in ("semantic", "numerical_policy"):
        if getattr(one, name) == getattr(other, name):
            continue
        fields = _diff(getattr(contract_one, name)(), getattr(contract_other, name)(), name)
        problems += fields or [f"{name}: {getattr(one, name)} on one side, {getattr(other, name)} on the other"]
    return problems


def _diff(a: Any, b: Any, path: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [line for key in sorted(a.keys() | b.keys()) for line in _diff(a.get(key), b.get(key), f"{path}.{key}")]
    return [] if a == b else [f"{path}: {a!r} on one side, {b!r} on the other"]


def entries_from_json(data: Mapping[str, Any]) -> dict[tuple[str, str], SixPoints]:
    """Strict inverse of the policy's ``entries``."""
    result = {}
    for key, value in data.items():
        case, _, region = key.partition("/")
        result[(case, region)] = points_from_json(value, key)
    return result
