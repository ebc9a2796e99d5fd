"""The shipped vectors: one JSON file a profile and dtype, written by the interpreter, read strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlkernel.contract.identity import Identities
from rlkernel.errors import ContractError
from rlkernel.verify.vectors.problems import (
    MODELS,
    executor_of,
    groups,
    inputs_digest,
    interpret,
    model_contract,
    numbered,
    outputs_of,
    results_digest,
)

FOLDER = Path(__file__).parent / "data"
SCHEMA = 1


@dataclass(frozen=True)
class Vector:
    """One problem and the digest of what the contract gives for it.

    ``cases`` have the same entry and so the same answer; ``inputs`` and ``answer`` are digests; ``outputs`` counts
    elements.
    """

    model: str
    region: str
    cases: tuple[str, ...]
    problem: str
    inputs: str
    outputs: int
    answer: str


@dataclass(frozen=True)
class VectorFile:
    """The vectors of a profile and dtype; ``policies`` are the numerical identities of the models that they are for."""

    profile: str
    dtype: str
    policies: dict[str, str]
    vectors: tuple[Vector, ...]


def policy_digest(model: str, profile: str, dtype: str) -> str:
    """The numerical identity of a vector model's contract."""
    found: Identities = model_contract(model, profile, dtype).identities({})
    return found.numerical_policy


def predict(profile: str, dtype: str, say: Callable[[str], None] = lambda _: None) -> VectorFile:
    """Interpret every region and case of the vector models."""
    vectors = []
    for model in MODELS:
        contract = model_contract(model, profile, dtype)
        executor = executor_of(contract)
        for group in groups(contract):
            for name, problem in numbered(contract, group):
                results = interpret(contract, executor, group, problem, group.cases[0])
                vectors.append(
                    Vector(model, group.region, group.cases, name, inputs_digest(problem), outputs_of(results),
                           results_digest(results))
                )  # fmt: skip
            say(f"{profile} {dtype}, {model}: {group.region} {', '.join(group.cases)}")
    policies = {model: policy_digest(model, profile, dtype) for model in MODELS}
    return VectorFile(profile, dtype, policies, tuple(vectors))


def path_of(profile: str, dtype: str, folder: Path = FOLDER) -> Path:
    """Where the vectors of a profile lie."""
    return folder / f"{profile}-{dtype}.json"


def write_vectors(file: VectorFile, folder: Path = FOLDER) -> Path:
    """One line a vector, so that a change of one is a change of one line."""
    head = {"schema": SCHEMA, "profile": file.profile, "dtype": file.dtype, "policies": file.policies}
    lines = [json.dumps(asdict(vector), separators=(",", ":")) for vector in file.vectors]
    text = json.dumps(head)[:-1] + ', "vectors": [\n' + ",\n".join(lines) + "\n]}\n"
    path = path_of(file.profile, file.dtype, folder)
    path.write_text(text)
    return path


def _vector(data: Any, path: Path) -> Vector:
    expected = set(Vector.__dataclass_fields__)
    if not isinstance(data, dict) or set(data) != expected:
        raise ContractError(f"{path}: a vector has the fields {sorted(expected)}, not {data!r}")
    return Vector(**{**data, "cases": tuple(data["cases"])})


def read_vectors(profile: str, dtype: str, folder: Path = FOLDER) -> VectorFile:
    """The shipped vectors of a profile and dtype.

    Raises:
        ContractError: there are none, the file is damaged, or it was made for another contract than this code builds.
    """
    path = path_of(profile, dtype, folder)
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ContractError(f"there are no vectors of profile {profile!r} with dtype {dtype!r} ({path})") from None
    except ValueError as error:
        raise ContractError(f"the vectors {path} cannot be read: {error}") from None
    if not isinstance(data, dict) or set(data) != {"schema", "profile", "dtype", "policies", "vectors"}:
        raise ContractError(f"the vectors {path} have other fields than schema, profile, dtype, policies and vectors")
    if (data["schema"], data["profile"], data["dtype"]) != (SCHEMA, profile, dtype):
        raise ContractError(f"the vectors {path} are of schema {data['schema']}, {data['profile']} {data['dtype']}")
    for model, policy in data["policies"].items():
        if model not in MODELS or policy != policy_digest(model, profile, dtype):
            raise ContractError(
                f"the vectors {path} were made for another contract of model {model!r}: write them again with "
                "`vime verify predict`"
            )
    return VectorFile(profile, dtype, data["policies"], tuple(_vector(item, path) for item in data["vectors"]))
