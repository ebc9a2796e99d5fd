"""The inputs of the vectors: two small models a profile, every region and case, hazards included, at a fixed seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from rlkernel.contract.build import FORWARD_CASES, Contract, build_contract
from rlkernel.contract.claims import Topology
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.config import ModelConfig
from rlkernel.ops.portable import portable_ops
from rlkernel.verify.admission.admit import groups as cases_that_share
from rlkernel.verify.admission.bits import Results, pattern
from rlkernel.verify.admission.certificate import BACKWARD
from rlkernel.verify.admission.execute import Executor, reference_operation
from rlkernel.verify.admission.generate import problems_of
from rlkernel.verify.admission.problem import Problem
from rlkernel.verify.admission.step import STEP_REGIONS, ReferenceStep, StepProblem, step_problems

SEED = 20261129
PROFILES = (("portable", "float32"), ("portable", "bfloat16"), ("hopper", "bfloat16"), ("cdna3", "bfloat16"))
MODELS: dict[str, tuple[ModelConfig, Topology]] = {
    "qk-norm, tp 2": (
        ModelConfig(
            family="qwen3", vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_layers=1, num_heads=4,
            num_kv_heads=2, head_dim=64, max_position=600, rms_norm_eps=1e-6, qk_norm=True,
        ),
        Topology(tp=2),
    ),
    "bias, tied, tp 1": (
        ModelConfig(
            family="qwen2", vocab_size=1024, hidden_size=1024, intermediate_size=2048, num_layers=1, num_heads=4,
            num_kv_heads=2, head_dim=128, max_position=600, rms_norm_eps=1e-5, qkv_bias=True, tied_embeddings=True,
        ),
        Topology(),
    ),
}  # fmt: skip
OPTIMIZER = "optimizer_step"


def model_contract(model: str, profile: str, dtype: str) -> Contract:
    """The contract of one of :data:`MODELS`."""
    config, topology = MODELS[model]
    return build_contract(config, profile=profile, dtype=dtype, topology=topology)


@dataclass(frozen=True)
class Group:
    """Cases of a region that have equal entries and take the same problems."""

    region: str
    cases: tuple[str, ...]


def groups(contract: Contract) -> Iterator[Group]:
    """Every region and case of a contract, in a fixed order."""
    names = {(case, name.partition(".")[0]) for case, name in contract.entries}
    for region in (*portable_ops(), "logprob"):
        cases = tuple(case for case in (*FORWARD_CASES, BACKWARD) if (case, region) in names)
        for shared in cases_that_share(region, cases, contract):
            yield Group(region, shared)
    for region in STEP_REGIONS:
        yield Group(region, (OPTIMIZER,))


def group_problems(contract: Contract, group: Group) -> Sequence[Problem | StepProblem]:
    """The problems of a group, always the same ones."""
    if group.region in STEP_REGIONS:
        return step_problems(group.region, SEED)
    found = problems_of(contract, group.region, group.cases[0], SEED)
    return [problem for problem in found if not problem.bulk]


def numbered(contract: Contract, group: Group) -> Iterator[tuple[str, Problem | StepProblem]]:
    """The problems of a group with names that part them."""
    for number, problem in enumerate(group_problems(contract, group), 1):
        yield f"{number}. {problem.shape_class}: {problem.name}", problem


def interpret(contract: Contract, executor: Executor, group: Group, problem: Any, case: str) -> Results:
    """What the interpreter of the contract's entry gives."""
    if isinstance(problem, StepProblem):
        reference = ReferenceStep(contract, group.region)
        return reference.run(problem.arguments, executor.workers, contract.dtype == "bfloat16")
    return executor.run(reference_operation(contract, group.region), problem, case)


def executor_of(contract: Contract) -> Executor:
    """One thread is enough: problems are small."""
    return Executor(contract, Workers(1))


def _feed(total: Any, value: Any) -> None:
    if value is None or isinstance(value, str | int | float | bool):
        total.update(repr(value).encode())
    elif isinstance(value, torch.Tensor):
        _feed(total, value.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else value.numpy())
    elif isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        total.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value):
            total.update(f"{name}=".encode())
            _feed(total, value[name])
    elif isinstance(value, tuple | list):
        for item in value:
            _feed(total, item)
    elif is_dataclass(value):
        _feed(total, {item.name: getattr(value, item.name) for item in fields(value)})
    else:
        raise TypeError(f"{type(value).__name__} is no input of a problem")


def inputs_digest(problem: Problem | StepProblem) -> str:
    """32 hexadecimal digits of SHA-256 over every input: a generator that changed must not look like a device."""
    total = hashlib.sha256()
    if isinstance(problem, StepProblem):
        _feed(total, problem.arguments)
    else:
        _feed(total, [problem.inputs, problem.grads, problem.start, problem.tensors, problem.batch, problem.pages,
                      problem.head])  # fmt: skip
    return total.hexdigest()[:32]


def results_digest(results: Results) -> str:
    """32 hexadecimal digits of SHA-256 over the outputs' names, shapes and bits, every NaN as one pattern."""
    total = hashlib.sha256()
    for name in sorted(results):
        bits = pattern(results[name])
        total.update(f"{name}{bits.dtype.str}{bits.shape}".encode() + bits.tobytes())
    return total.hexdigest()[:32]


def outputs_of(results: Results) -> int:
    """Elements of all outputs."""
    return sum(int(value.size) for value in results.values())
