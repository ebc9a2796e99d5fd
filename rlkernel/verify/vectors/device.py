"""Runs the vectors on the device at hand and compares each answer's digest with what the interpreter predicted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlkernel.contract.build import Contract
from rlkernel.errors import RlkernelError
from rlkernel.verify.admission.admit import one_torch_thread
from rlkernel.verify.admission.bits import Results, compare
from rlkernel.verify.vectors.files import Vector, VectorFile
from rlkernel.verify.vectors.problems import (
    Group,
    executor_of,
    groups,
    inputs_digest,
    interpret,
    model_contract,
    numbered,
    results_digest,
)

Status = Literal["equal", "differs", "failed", "no kernel", "other inputs"]


class Backend(Protocol):
    """What runs regions on one device.

    ``name`` is the target, ``device`` a description, ``profiles`` pairs (profile, dtype) that it claims.
    """

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def profiles(self) -> tuple[tuple[str, str], ...]: ...

    def implementation(self, contract: Contract, region: str, case: str) -> str | None:
        """The id of what computes a region in a case here; None: nothing does."""

    def run(self, contract: Contract, region: str, problem: Any, case: str) -> Results:
        """Execute it."""


@dataclass(frozen=True)
class Answer:
    """One vector in one case on one device; ``sentence`` says what is wrong."""

    vector: Vector
    case: str
    implementation: str
    status: Status
    sentence: str = ""


def verify(
    file: VectorFile,
    backend: Backend,
    say: Callable[[str], None] = lambda _: None,
    regions: Collection[str] = (),
) -> list[Answer]:
    """Run every vector of a profile in each of its cases; of ``regions`` alone, if there are any.

    A vector whose inputs this machine generates with other bits is ``other inputs``: it says nothing of the device.
    """
    answers = []
    with one_torch_thread():
        for model in dict.fromkeys(vector.model for vector in file.vectors):
            contract = model_contract(model, file.profile, file.dtype)
            own_vectors = [v for v in file.vectors if v.model == model and v.region in (regions or (v.region,))]
            known = {(v.region, v.cases, v.problem): v for v in own_vectors}
            for group in groups(contract):
                if regions and group.region not in regions:
                    continue
                say(f"{file.profile} {file.dtype}, {model}: {group.region}")
                if all(backend.implementation(contract, group.region, case) is None for case in group.cases):
                    own = [known.pop(key) for key in list(known) if key[:2] == (group.region, group.cases)]
                    answers += [_absent(vector, case, contract, backend) for vector in own for case in group.cases]
                    continue
                for name, problem in numbered(contract, group):
                    key = (group.region, group.cases, name)
                    vector = known.pop(key, None)
                    if vector is None:
                        vector = Vector(model, *key, inputs="", outputs=0, answer="")
                    answers += [_answer(vector, contract, group, problem, case, backend) for case in group.cases]
            answers += [
                Answer(vector, case, "-", "other inputs", "this code makes no such problem")
                for vector in known.values()
                for case in vector.cases
            ]
    return answers


def _absent(vector: Vector, case: str, contract: Contract, backend: Backend) -> Answer:
    return Answer(vector, case, "-", "no kernel", f"{backend.name} has no kernel for it in {contract.profile}")


def _answer(vector: Vector, contract: Contract, group: Group, problem: Any, case: str, backend: Backend) -> Answer:
    name = backend.implementation(contract, group.region, case)
    if name is None:
        return _absent(vector, case, contract, backend)
    if inputs_digest(problem) != vector.inputs:
        return Answer(vector, case, name, "other inputs", "the inputs made here have other bits than the vector's")
    try:
        found = backend.run(contract, group.region, problem, case)
    except (RlkernelError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
        return Answer(vector, case, name, "failed", f"{type(error).__name__}: {error}")
    if results_digest(found) == vector.answer:
        return Answer(vector, case, name, "equal")
    return Answer(vector, case, name, "differs", _first_difference(vector, contract, group, problem, case, found))


def _first_difference(vector: Vector, contract: Contract, group: Group, problem: Any, case: str, found: Results) -> str:
    """The bit, by interpreting the problem here."""
    expected = interpret(contract, executor_of(contract), group, problem, case)
    if results_digest(expected) != vector.answer:
        return "the interpreter on this machine does not give the shipped answer either: its torch or NumPy is at fault"
    _, difference = compare(expected, found)
    return "-" if difference is None else difference.sentence()


@dataclass(frozen=True)
class Line:
    """Answers of one region and case."""

    region: str
    case: str
    implementation: str
    answers: tuple[Answer, ...]

    @property
    def outputs(self) -> int:
        """Outputs whose digest was found equal."""
        return sum(a.vector.outputs for a in self.answers if a.status == "equal")

    @property
    def status(self) -> Status:
        """The worst one."""
        order: tuple[Status, ...] = ("differs", "failed", "other inputs", "no kernel", "equal")
        return min((a.status for a in self.answers), key=order.index)

    @property
    def first(self) -> Answer:
        """The first answer with the worst status."""
        return next(a for a in self.answers if a.status == self.status)


def lines(answers: Sequence[Answer]) -> list[Line]:
    """One line a region and case, in the order of the answers."""
    keys = dict.fromkeys((a.vector.region, a.case) for a in answers)
    result = []
    for region, case in keys:
        own = tuple(a for a in answers if (a.vector.region, a.case) == (region, case))
        names = [a.implementation for a in own if a.implementation != "-"]
        result.append(Line(region, case, ", ".join(dict.fromkeys(names)) or "-", own))
    return result
