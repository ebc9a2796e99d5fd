"""The CPU as a device: the Numba kernels of the portable profile."""

from __future__ import annotations

import platform
from typing import Any

from rlkernel.contract.build import Contract
from rlkernel.ops.composition import cpu_candidates
from rlkernel.verify.admission.bits import Results
from rlkernel.verify.admission.execute import Executor
from rlkernel.verify.admission.step import CpuAdamW, CpuGradientNorm, StepOp, StepProblem
from rlkernel.verify.vectors.problems import executor_of


class CpuBackend:
    """Runs the regions' CPU implementations.

    Args:
        loss: the trainer's policy loss; this package has none of its own.
    """

    name = "cpu"
    profiles = (("portable", "float32"), ("portable", "bfloat16"))

    def __init__(self, loss: StepOp | None = None) -> None:
        self.device = platform.processor() or platform.machine()
        self._ops: dict[str, Any] = {c.region: c.op for c in reversed(cpu_candidates())}
        self._ops |= {"gradient_norm": CpuGradientNorm(), "adamw": CpuAdamW()}
        if loss is not None:
            self._ops["loss"] = loss
        self._executor: Executor | None = None

    def implementation(self, contract: Contract, region: str, case: str) -> str | None:
        """The id of the implementation, in profiles that the CPU executes."""
        known = (contract.profile, contract.dtype) in self.profiles and region in self._ops
        return str(self._ops[region].implementation) if known else None

    def run(self, contract: Contract, region: str, problem: Any, case: str) -> Results:
        """Execute a region's implementation on a problem."""
        if self._executor is None or self._executor.contract is not contract:
            self._executor = executor_of(contract)
        op = self._ops[region]
        if isinstance(problem, StepProblem):
            found: Results = op.run(problem.arguments, self._executor.workers, contract.dtype == "bfloat16")
            return found
        return self._executor.run(op, problem, case)
