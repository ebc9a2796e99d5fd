"""Executes a candidate or the interpreter on a problem and returns named results."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np

from rlkernel.contract.build import Contract
from rlkernel.contract.rope_tables import rope_tables
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.config import ModelConfig
from rlkernel.models.definition import define_model
from rlkernel.ops.gradients import Gradients
from rlkernel.ops.host import Host, RopeTables
from rlkernel.ops.weights import WeightSet
from rlkernel.reference.head import ReferenceLinearLogprob
from rlkernel.reference.regions import Interpreter, reference_ops
from rlkernel.verify.admission.bits import Results
from rlkernel.verify.admission.problem import Problem


class ProblemWeights(WeightSet):
    """Packed weights as in a run, and the logical tensors that the interpreter and plain functions read."""

    def __init__(self, problem: Problem, contract: Contract, workers: Workers) -> None:
        self.tensors = dict(problem.tensors)
        super().__init__(
            define_model(problem.config),
            problem.tensors,
            dtype=contract.dtype,
            tp=contract.topology.tp,
            workers=workers,
            training=bool(problem.grads) or problem.head is not None,
        )


@lru_cache(maxsize=8)
def _tables(config: ModelConfig) -> RopeTables:
    return RopeTables(*rope_tables(config, config.max_position))


def tables(config: ModelConfig) -> RopeTables:
    """Rotary tables of a probe's model; other dimensions than the head's do not enter them."""
    from dataclasses import replace

    return _tables(replace(config, vocab_size=1, hidden_size=1, intermediate_size=1, num_heads=1, num_kv_heads=1))


class Executor:
    """Runs operations on problems of one contract."""

    def __init__(self, contract: Contract, workers: Workers) -> None:
        self.contract, self.workers = contract, workers
        self._weights: tuple[Problem, ProblemWeights] | None = None

    def weights(self, problem: Problem) -> ProblemWeights:
        """Packed weights of a problem; those of the last one are kept."""
        if self._weights is None or self._weights[0].tensors is not problem.tensors:
            self._weights = (problem, ProblemWeights(problem, self.contract, self.workers))
        return self._weights[1]

    def gradients(self, problem: Problem) -> Gradients:
        """Buffers of the region's weight gradients, started as the problem says."""
        shapes = problem.config.weight_shapes()
        chosen = {name: shapes[name] for name in problem.region.weights}
        tied = (
            problem.region.weights[0] if problem.region.kind == "embedding" and problem.config.tied_embeddings else None
        )
        gradients = Gradients(chosen, tied_embedding=tied)
        for name in chosen:
            if name in problem.start:
                self.buffer(problem, gradients, name)[:] = problem.start[name]
        return gradients

    @staticmethod
    def buffer(problem: Problem, gradients: Gradients, name: str) -> Any:
        """The chain that a region continues for a logical weight."""
        return gradients.embedding(name) if problem.region.kind == "embedding" else gradients.buffer(name)

    def host(self, problem: Problem, case: str, gradients: Gradients | None = None) -> Host:
        """The services of one execution."""
        state: Any = None if problem.pages is None else problem.pages.copy()
        return Host(
            config=problem.config,
            bf16=self.contract.dtype == "bfloat16",
            tp=self.contract.topology.tp,
            case=case,
            batch=problem.batch,
            weights=self.weights(problem),
            rope=tables(problem.config),
            workers=self.workers,
            state=state,
            gradients=gradients,
            read_rows=None if problem.read is None else np.array(problem.read, np.int64),
        )

    def run(self, op: Any, problem: Problem, case: str) -> Results:
        """Outputs of a forward case, or the gradients of ``trainer_backward``, by name."""
        if case != "trainer_backward":
            return self._forward(op, problem, case)
        if problem.head is not None:
            return self._head_backward(op, problem)
        gradients = self.gradients(problem)
        host = self.host(problem, "trainer_forward")
        _, saved = op.forward(problem.region, list(problem.inputs), host)
        found = op.backward(problem.region, saved, list(problem.grads), self.host(problem, case, gradients))
        results = {f"gradient of {n}": g for n, g in zip(_inputs(problem), found, strict=False)}
        return {**results, **self._weight_gradients(problem, gradients)}

    def _weight_gradients(self, problem: Problem, gradients: Gradients) -> dict[str, Any]:
        return {f"gradient of {name}": self.buffer(problem, gradients, name).copy() for name in problem.region.weights}

    def _forward(self, op: Any, problem: Problem, case: str) -> Results:
        if problem.head is None:
            outputs, _ = op.forward(problem.region, list(problem.inputs), self.host(problem, case))
            if problem.read is not None:
                outputs = tuple(value[list(problem.read)] for value in outputs)
            return dict(zip((_short(name) for name in problem.region.outputs), outputs, strict=True))
        host = self.host(problem, case)
        found = op.forward(problem.region, problem.inputs[0], problem.head.targets, problem.head.temperature, host)
        return {item.name: getattr(found, item.name) for item in fields(found)}

    def _head_backward(self, op: Any, problem: Problem) -> Results:
        head, gradients = problem.head, self.gradients(problem)
        assert head is not None
        host = self.host(problem, "trainer_backward", gradients)
        dx = op.backward(problem.region, problem.inputs[0], head.targets, head.temperature, head.coefficient, host)
        return {"gradient of hidden": dx, **self._weight_gradients(problem, gradients)}


def _short(port: str) -> str:
    return port.rpartition(".")[2] if not port.startswith("stream") else "stream"


def _inputs(problem: Problem) -> list[str]:
    return [_short(name) for name in problem.region.inputs]


def reference_operation(contract: Contract, kind: str) -> Any:
    """The interpreter of a region kind of a contract, with the interface of an implementation."""
    interpreter = Interpreter(contract)
    return ReferenceLinearLogprob(interpreter) if kind == "logprob" else reference_ops(interpreter)[kind]


def contiguous(results: Results) -> Results:
    """The same results in memory of their own, as C-contiguous arrays."""
    return {name: np.ascontiguousarray(value) for name, value in results.items()}
