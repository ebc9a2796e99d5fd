"""Derives the contract from (model, profile, dtype, topology claims), and its identities. Nothing is typed in twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from rlkernel.contract.canonical import bits_float32, canonical_json, digest, float32_bits, float64_bits
from rlkernel.contract.claims import STATE_CLAIMS, Topology, require_topology
from rlkernel.contract.differences import Difference, differences
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
    optimizer: Mapping[str, Any] | None
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
        return dict(self._policy)

    @cached_property
    def _policy(self) -> dict[str, Any]:
        # hundreds of entries, asked for at every exchange of identities and for every view
        return {
            "schema": SCHEMA,
            "profile": self.profile,
            "dtype": self.dtype,
            "topology": self.topology.as_json(),
            "state_claims": [{"state": c.state, "invalidated_by": list(c.invalidated_by)} for c in STATE_CLAIMS],
            "temperature": self.temperature,
            "optimizer": None if self.optimizer is None else dict(self.optimizer),
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
    # kernels take epsilon in float32: what the contract pins is that value
    config = replace(config, rms_norm_eps=bits_float32(float32_bits(config.rms_norm_eps)))
    topology = topology or Topology()
    require_topology(topology, config)
    build = Entries(config, found, dtype, topology)
    entries: dict[tuple[str, str], SixPoints] = {}
    recomputed = {region.kind for region in define_model(config).regions if region.layer is not None}
    for case in FORWARD_CASES:
        kinds = build.forward().items()
        # activation checkpointing recomputes layers, and nothing outside of them
        entries.update({(case, k): points for k, points in kinds if case != "trainer_recompute" or k in recomputed})
    entries.update({("trainer_backward", kind): points for kind, points in build.backward().items()})
    entries.update({("optimizer_step", kind): points for kind, points in build.optimizer().items()})
    canonical_json(optimizer)  # refuses whatever is not canonical data
    return Contract(
        config, profile, dtype, topology, float32_bits(temperature), optimizer, entries, rope_digest(config)
    )


def compare_identities(
    one: Identities,
    other: Identities,
    contract_one: Contract,
    contract_other: Contract,
    names: tuple[str, str] = ("one side", "the other"),
) -> list[str]:
    """Why two sides may not run together: each differing field of the semantic or numerical identity."""
    problems = []
    for name in ("semantic", "numerical_policy"):
        left, right = getattr(one, name), getattr(other, name)
        if left == right:
            continue
        fields = differences(getattr(contract_one, name)(), getattr(contract_other, name)(), (name,))
        problems += [found.sentence(*names) for found in fields or [Difference((name,), left, right)]]
    return problems


def entries_from_json(data: Mapping[str, Any]) -> dict[tuple[str, str], SixPoints]:
    """Strict inverse of the policy's ``entries``."""
    result = {}
    for key, value in data.items():
        case, _, region = key.partition("/")
        result[(case, region)] = points_from_json(value, key)
    return result
