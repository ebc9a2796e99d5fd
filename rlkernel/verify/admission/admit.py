"""Admission of one implementation for a region: comparison over shape classes and hazards, certificate or refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rlkernel.contract.build import FORWARD_CASES, Contract
from rlkernel.contract.profiles import FMA
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.budget import QUICK, Budget
from rlkernel.verify.admission.certificate import BACKWARD, OPTIMIZER, Certificate, Link, entry_digests
from rlkernel.verify.admission.classes import LINEAR
from rlkernel.verify.admission.comparison import Comparison
from rlkernel.verify.admission.plain import PlainLinear
from rlkernel.verify.admission.sources import identity_of
from rlkernel.verify.admission.step import STEP_REGIONS


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """The interpreter's operations are small: more threads only slow them down. No bit depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cases_of(region: str, contract: Contract) -> tuple[str, ...]:
    """All cases in which a region runs."""
    if region in STEP_REGIONS:
        return (OPTIMIZER,)
    names = {(case, name.partition(".")[0]) for case, name in contract.entries}
    return tuple(case for case in (*FORWARD_CASES, BACKWARD) if (case, region) in names)


def admit(
    candidate: Any,
    region: str,
    case: str | Sequence[str],
    contract: Contract,
    target: str = "cpu",
    budget: Budget = QUICK,
    *,
    workers: Workers | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Compare an implementation with the interpreter of the contract's entries, as integers.

    Args:
        candidate: has ``implementation`` (its id), and ``forward`` and ``backward`` of a region operation, or ``run``
            of a computation of the optimizer step (``gradient_norm``, ``adamw``, ``loss``).
        region, case: what it wants to be picked for; several cases of one region share the interpreter's work.
        target: where it runs, ``cpu`` or that of the candidate's ``device``.
        budget: how much is compared.
        seed: of the values.
        say: gets a sentence for each problem.

    Returns:
        The certificate.

    Raises:
        AdmissionRefused: a bit differs, or the implementation fails; the message names the problem, the first
            difference with both bit patterns, and which of the six points explains it.
        ContractError: the contract has no such region or case, or the target cannot be admitted here.
    """
    cases = (case,) if isinstance(case, str) else tuple(case)
    identity = identity_of(candidate, target)
    entries = entry_digests(contract, region, cases)
    admission = Comparison(candidate, region, contract, workers or Workers(), budget, say)
    shared = groups(region, cases, contract)
    with one_torch_thread():
        for group in shared:
            admission.compare_group(group, seed)
        links = [Link("interpreter", identity.implementation, admission.outputs)]
        if budget.chained and region in LINEAR and contract.entries[(cases[0], region)].primitive("mac") == FMA:
            links += _chain(admission, shared, seed)
    return Certificate(
        implementation=identity.implementation,
        source=identity.source,
        region=region,
        cases=cases,
        profile=contract.profile,
        dtype=contract.dtype,
        entries=entries,
        target=target,
        toolchain=identity.toolchain,
        specification=identity.specification,
        shape_classes=tuple(sorted(admission.shape_classes)),
        hazards=tuple(sorted(admission.hazards)),
        links=tuple(links),
        budget=budget.name,
    )


def _chain(admission: Comparison, shared: Sequence[tuple[str, ...]], seed: int) -> list[Link]:
    """interpreter = plain kernel, and plain kernel = candidate over many more outputs than the interpreter can do."""
    plain = admission.of(PlainLinear())
    compared = 0
    for group in shared:
        plain.compare_group(group[:1], seed)
        compared += admission.compare_long(PlainLinear(), group, seed)
    name = PlainLinear.implementation
    return [Link("interpreter", name, plain.outputs), Link(name, admission.implementation, compared)]


def groups(region: str, cases: tuple[str, ...], contract: Contract) -> list[tuple[str, ...]]:
    """Cases that share problems and entries: the interpreter runs once for each group."""
    found: dict[Any, list[str]] = {}
    for case in cases:
        kind = "paged" if region == "attention" and case.startswith("rollout") else case in (BACKWARD, OPTIMIZER)
        points = tuple(value for name, value in entry_digests(contract, region, (case,)))
        found.setdefault((kind, points), []).append(case)
    return [tuple(group) for group in found.values()]
