"""The GPU at hand as a device: the Triton kernels of the profiles that its architecture has."""

from __future__ import annotations

from typing import Any

import torch

from rlkernel.contract.build import Contract
from rlkernel.verify.admission.bits import Results
from rlkernel.verify.admission.execute import Executor
from rlkernel.verify.admission.sources import device_target
from rlkernel.verify.admission.step import StepProblem
from rlkernel.verify.vectors.device import Backend
from rlkernel.verify.vectors.problems import executor_of

PROFILES: dict[str, tuple[tuple[str, str], ...]] = {
    "sm_90": (("portable", "float32"), ("portable", "bfloat16"), ("hopper", "bfloat16")),
    "gfx942": (("portable", "float32"), ("portable", "bfloat16"), ("cdna3", "bfloat16")),
}
"""Target -> pairs (profile, dtype) that its kernels execute."""


def gpu_backend() -> Backend | str:
    """A backend of the first GPU, or a sentence that says why there is none."""
    if not torch.cuda.is_available():
        return "this machine has no GPU that torch can use"
    place = torch.device("cuda", 0)
    target, name = device_target("cuda:0"), torch.cuda.get_device_name(0)
    if target not in PROFILES:
        return f"{name} is {target}; there are profiles for {' and '.join(PROFILES)}"
    try:
        return GpuBackend(target, name, PROFILES[target], place)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return "Triton, which the kernels of this GPU are written in, is not installed: pip install -e '.[triton]'"


class GpuBackend:
    """Runs the regions' plain Triton implementations on a device."""

    def __init__(self, name: str, device: str, profiles: tuple[tuple[str, str], ...], place: torch.device) -> None:
        from rlkernel.verify.admission.device import device_candidates

        self.name, self.device, self.profiles, self._place = name, device, profiles, place
        self._candidates = device_candidates
        self._bound: tuple[Contract, dict[str, Any], Executor] | None = None

    def _of(self, contract: Contract) -> tuple[dict[str, Any], Executor]:
        if self._bound is None or self._bound[0] is not contract:
            self._bound = (contract, dict(self._candidates(contract, self._place)), executor_of(contract))
        return self._bound[1:]

    def implementation(self, contract: Contract, region: str, case: str) -> str | None:
        """The id of the implementation, in profiles that the device executes."""
        ops, _ = self._of(contract)
        known = (contract.profile, contract.dtype) in self.profiles and region in ops
        return str(ops[region].implementation) if known else None

    def run(self, contract: Contract, region: str, problem: Any, case: str) -> Results:
        """Execute a region's implementation on a problem; results come back as NumPy float32."""
        ops, executor = self._of(contract)
        if isinstance(problem, StepProblem):
            found: Results = ops[region].run(problem.arguments, executor.workers, contract.dtype == "bfloat16")
            return found
        return executor.run(ops[region], problem, case)
