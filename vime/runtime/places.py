"""What a side computes on: the CPU or a GPU, each with its weights, runner, KV pages, optimizer and admission."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from rlkernel.contract.build import Contract
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.kernels.torch_native.weights import TorchWeightSet
from rlkernel.models.definition import ModelDefinition
from rlkernel.ops.composition import Candidate, Composition, compose, cpu_candidates, without_certificates
from rlkernel.ops.runner import ModelRunner
from rlkernel.ops.weights import WeightSet
from rlkernel.verify.admission.first_use import with_first_use_checks
from rlkernel.verify.admission.parallel import processes_here
from rlkernel.verify.admission.sources import cpu_toolchain, specification_digest
from rlkernel.verify.admission.store import Admitted, ensure_certificates
from rlkernel.verify.evidence import Evidence
from vime.rollout.native.engine import KVFactory
from vime.rollout.native.model import PagedKV
from vime.runtime.deployment import describe_deployment
from vime.train.admission import step_candidates
from vime.train.native.backend import CpuBackend, TrainerBackend
from vime.train.native.optimizer import OPTIMIZER_IMPLEMENTATIONS

if TYPE_CHECKING:
    from rlkernel.kernels.torch_native.device import TorchDeviceWeights
    from rlkernel.ops.device.weights import DeviceWeights

Numerics = Literal["exact", "native"]
Tensors = Mapping[str, torch.Tensor]


class WeightMemory:
    """Makes an engine's copies of weights.

    Args:
        make: logical tensors -> weights, a copy.
        reuses: whether a version takes the memory of the one before the served one.
    """

    def __init__(self, make: Callable[[Tensors], Any], *, reuses: bool) -> None:
        self._make, self._reuses = make, reuses
        self._made: list[Any] = []
        self._served: Any = None

    def copy(self, tensors: Tensors) -> Any:
        """Weights that are not the served ones. Raises ModelError as ``make``."""
        free = [weights for weights in self._made if weights is not self._served]
        if free:
            free[0].update(tensors)
            return free[0]
        weights = self._make(tensors)
        if self._reuses:
            self._made.append(weights)
        return weights

    def serve(self, weights: Any) -> None:
        """These weights are served from now on: their memory is not written before others are."""
        self._served = weights


class Place(Protocol):
    """One kind of device. ``step`` names what computes each region of case ``optimizer_step``."""

    step: Mapping[str, str]

    def implementations(self, numerics: Numerics) -> dict[str, str]:
        """Region kind -> implementation of a model's forward and backward."""

    def deployment(self, numerics: Numerics, sources: Mapping[str, str]) -> dict[str, Any]:
        """What a side is deployed as: implementations, source digests, versions, device, what admits its kernels."""

    def admitted(self, contract: Contract, numerics: Numerics, workers: Workers) -> Admitted:
        """Certificates of everything that a side computes with; those that are missing here are made now.

        Raises:
            AdmissionRefused: an implementation's bits are not the contract's.
        """

    def composition(self, contract: Contract, numerics: Numerics, workers: Workers, evidence: Evidence) -> Composition:
        """Implementations that are admitted for every region and case.

        Raises:
            AdmissionRefused: an implementation's bits are not the contract's.
        """

    def weights(
        self, contract: Contract, definition: ModelDefinition, tensors: Tensors, numerics: Numerics, workers: Workers,
        *, training: bool,
    ) -> Any:  # fmt: skip
        """A copy of the tensors in the form that the kernels read."""

    def runner(
        self, contract: Contract, weights: Any, composition: Composition, evidence: Evidence, workers: Workers,
        *, max_position: int,
    ) -> ModelRunner:  # fmt: skip
        """A runner over those weights."""

    def slots(self, make: Callable[[Tensors], Any]) -> WeightMemory:
        """Where an engine keeps the weights that ``make`` copies for it: the served and the staged ones."""

    def pages(self, dtype: str, numerics: Numerics = "exact") -> KVFactory:
        """Makes an engine's KV pages."""

    def trainer(self, workers: Workers, moments: Literal["device", "host"] = "device") -> TrainerBackend:
        """Where a trainer's tensors live."""


class CpuPlace:
    """Numba kernels, or for the ``native`` arm torch's own."""

    step: Mapping[str, str] = OPTIMIZER_IMPLEMENTATIONS

    def implementations(self, numerics: Numerics) -> dict[str, str]:
        """Of the composition that a side gets."""
        return without_certificates(numerics).implementations()

    def deployment(self, numerics: Numerics, sources: Mapping[str, str]) -> dict[str, Any]:
        """With the processor as device."""
        found = describe_deployment(self.implementations(numerics), sources)
        return found if numerics != "exact" else {**found, "admission": _bound_to("cpu", cpu_toolchain())}

    def admitted(self, contract: Contract, numerics: Numerics, workers: Workers) -> Admitted:
        """Of the CPU kernels, made in seconds. The ``native`` arm keeps no contract: nothing is admitted for it."""
        if numerics != "exact":
            return Admitted((), ())
        candidates = [(candidate.region, candidate.op) for candidate in cpu_candidates()]
        return ensure_certificates(contract, [*candidates, *step_candidates()], workers)

    def composition(self, contract: Contract, numerics: Numerics, workers: Workers, evidence: Evidence) -> Composition:
        """First uses are checked on live operands."""
        if numerics != "exact":
            return without_certificates("native")
        admitted = self.admitted(contract, numerics, workers)
        composition = compose(contract, admitted.certificates)
        evidence.facts["certificates"] = _told(admitted)
        return with_first_use_checks(composition, contract, evidence)

    def weights(
        self, contract: Contract, definition: ModelDefinition, tensors: Tensors, numerics: Numerics, workers: Workers,
        *, training: bool,
    ) -> WeightSet | TorchWeightSet:  # fmt: skip
        """Packed panels, or torch tensors."""
        if numerics == "exact":
            dtype, tp = contract.dtype, contract.topology.tp
            return WeightSet(definition, tensors, dtype=dtype, tp=tp, workers=workers, training=training)
        return TorchWeightSet(definition, tensors, dtype=contract.dtype, workers=workers)

    def runner(
        self, contract: Contract, weights: Any, composition: Composition, evidence: Evidence, workers: Workers,
        *, max_position: int,
    ) -> ModelRunner:  # fmt: skip
        """In this process's threads."""
        return ModelRunner(
            weights.definition, weights, composition, evidence, dtype=contract.dtype, tp=contract.topology.tp,
            workers=workers, max_position=max_position,
        )  # fmt: skip

    def slots(self, make: Callable[[Tensors], Any]) -> WeightMemory:
        """New memory for every version."""
        return WeightMemory(make, reuses=False)

    def pages(self, dtype: str, numerics: Numerics = "exact") -> KVFactory:
        """float32 in both dtypes."""
        return PagedKV

    def trainer(self, workers: Workers, moments: Literal["device", "host"] = "device") -> TrainerBackend:
        """Main memory."""
        return CpuBackend(workers)


class GpuPlace:
    """Triton kernels on one GPU, or for the ``native`` arm torch's own.

    Args:
        device: a torch device.
    """

    def __init__(self, device: torch.device) -> None:
        from vime.train.native.device import DEVICE_IMPLEMENTATIONS

        self.device = device
        self.step: Mapping[str, str] = DEVICE_IMPLEMENTATIONS

    def implementations(self, numerics: Numerics) -> dict[str, str]:
        """Of the composition that a side gets."""
        return self._plain(numerics).implementations()

    def _plain(self, numerics: Numerics) -> Composition:
        from rlkernel.ops.device.head import LinearLogprob
        from rlkernel.ops.device.regions import device_ops

        if numerics == "exact":
            return Composition("exact", device_ops(), LinearLogprob())
        from rlkernel.kernels.torch_native.device import native_composition

        return native_composition(tuple(device_ops()))

    def deployment(self, numerics: Numerics, sources: Mapping[str, str]) -> dict[str, Any]:
        """With the GPU as device, and the kernels' sources."""
        from rlkernel.verify.admission.device import SOURCES
        from rlkernel.verify.admission.sources import device_target, digest_of_modules, torch_toolchain

        name = str(self.device)
        own = {"rlkernel.kernels.triton": digest_of_modules(SOURCES), **sources}
        found = describe_deployment(self.implementations(numerics), own)
        target, toolchain = device_target(name), torch_toolchain(name)
        found["device"] = {"kind": "gpu", "target": target, **dict(toolchain)}
        return found if numerics != "exact" else {**found, "admission": _bound_to(target, toolchain)}

    def admitted(self, contract: Contract, numerics: Numerics, workers: Workers) -> Admitted:
        """Of the GPU's kernels, with its compiler, and of the loss, which the CPU computes; none for ``native``."""
        if numerics != "exact":
            return Admitted((), ())
        return self._admitted(self._faced(contract), contract, workers)

    def _faced(self, contract: Contract) -> tuple[tuple[str, Any], ...]:
        from rlkernel.verify.admission.device import device_candidates

        return device_candidates(contract, self.device)

    def _admitted(self, faced: tuple[tuple[str, Any], ...], contract: Contract, workers: Workers) -> Admitted:
        own = ensure_certificates(
            contract, faced, workers, target=faced[0][1].target, processes=processes_here(), say=_say
        )
        loss = ensure_certificates(contract, [pair for pair in step_candidates() if pair[0] == "loss"], workers)
        notes = dict.fromkeys((*own.notes, *loss.notes))
        return Admitted((*own.certificates, *loss.certificates), (*own.made, *loss.made), tuple(notes))

    def composition(self, contract: Contract, numerics: Numerics, workers: Workers, evidence: Evidence) -> Composition:
        """Admitted on this GPU; first uses are checked on live operands."""
        if numerics != "exact":
            return self._plain(numerics)
        from rlkernel.verify.admission.first_use_device import with_device_first_use_checks

        faced = self._faced(contract)
        admitted = self._admitted(faced, contract, workers)
        chosen = compose(contract, admitted.certificates, [Candidate(region, op) for region, op in faced])
        evidence.facts["certificates"] = _told(admitted)
        faced_ops: dict[str, Any] = dict(chosen.ops)
        ops = {kind: op.op for kind, op in faced_ops.items()}
        admitted_ops = Composition("exact", ops, chosen.head.op, chosen.certificates)
        return with_device_first_use_checks(admitted_ops, contract, evidence, self.device)

    def weights(
        self, contract: Contract, definition: ModelDefinition, tensors: Tensors, numerics: Numerics, workers: Workers,
        *, training: bool,
    ) -> DeviceWeights | TorchDeviceWeights:  # fmt: skip
        """Fused matrices on the GPU; one form serves forward and backward."""
        if numerics != "exact":
            from rlkernel.kernels.torch_native.device import TorchDeviceWeights

            return TorchDeviceWeights(definition, tensors, dtype=contract.dtype, device=self.device)
        from rlkernel.ops.device.weights import DeviceWeights

        return DeviceWeights(definition, tensors, dtype=contract.dtype, tp=contract.topology.tp, device=self.device)

    def runner(
        self, contract: Contract, weights: Any, composition: Composition, evidence: Evidence, workers: Workers,
        *, max_position: int,
    ) -> ModelRunner:  # fmt: skip
        """On the GPU."""
        from rlkernel.ops.device.runner import DeviceRunner

        if composition.numerics != "exact":
            from rlkernel.kernels.torch_native.device import TorchDeviceRunner

            return TorchDeviceRunner(
                weights.definition, weights, composition, evidence, contract, max_position=max_position
            )
        return DeviceRunner(weights.definition, weights, composition, evidence, contract, max_position=max_position)

    def slots(self, make: Callable[[Tensors], Any]) -> WeightMemory:
        """Two sets that take turns, so that graphs that were captured over one stay valid."""
        return WeightMemory(make, reuses=True)

    def pages(self, dtype: str, numerics: Numerics = "exact") -> KVFactory:
        """On the GPU, in the contract's dtype."""
        from rlkernel.ops.weights import DTYPES
        from vime.rollout.native.device import DevicePagedKV

        null = torch.nan if numerics == "exact" else 0.0
        return partial(DevicePagedKV, dtype=DTYPES[dtype], device=self.device, null=null)

    def trainer(self, workers: Workers, moments: Literal["device", "host"] = "device") -> TrainerBackend:
        """GPU memory; the optimizer's moments there or in the host's."""
        from vime.train.native.device import DeviceBackend

        return DeviceBackend(self.device, workers, moments)


def _say(sentence: str) -> None:
    """Where people look who wait for a comparison; the run's own output stays what it is."""
    print(f"vime: {sentence}", file=sys.stderr, flush=True)


def _told(admitted: Admitted) -> dict[str, Any]:
    of: dict[str, list[str]] = {}
    for c in admitted.certificates:
        of.setdefault(f"{c.region}/{c.implementation}", []).append(c.digest())
    return {
        "of": of,
        "made_at_first_use": sorted({c.region for c in admitted.made}),
        "notes": list(admitted.notes),
    }


def _bound_to(target: str, toolchain: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """What certificates on this machine are bound to, beside the sources: another one of these makes them void."""
    return {"target": target, "toolchain": dict(toolchain), "specification": specification_digest()}


def place_of(device: str) -> Place:
    """The place that a pipeline's ``device`` names: ``cpu``, or ``cuda`` for the first GPU."""
    return CpuPlace() if device == "cpu" else GpuPlace(torch.device("cuda", 0))
