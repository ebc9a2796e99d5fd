"""Builds the two sides of a run, engine and trainer, from plain data: in this process or in a child."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rlkernel.contract.build import Contract, build_contract
from rlkernel.contract.canonical import digest
from rlkernel.contract.claims import Topology
from rlkernel.contract.identity import Identities
from rlkernel.contract.schedules import Schedule
from rlkernel.kernels.cpu.jit import source_digest
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.config import ModelConfig, RopeConfig
from rlkernel.models.definition import define_model
from rlkernel.models.tokenizer import Tokenizer
from rlkernel.ops.runner import ModelRunner
from rlkernel.verify.evidence import Evidence
from rlkernel.verify.sentinels import ENGINE_CASES, TRAINER_CASES, Declaration, declare
from vime.pipeline.schema import Pipeline
from vime.rollout.native.config import EngineConfig
from vime.rollout.native.engine import NativeEngine
from vime.rollout.native.model import KVShape
from vime.runtime.models import load_pipeline_tokenizer
from vime.runtime.places import Numerics, Place, place_of
from vime.train.native.optimizer import OptimizerConfig

ENGINE_ID = "native-0"


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Plain data of a model configuration."""
    return asdict(config)


def config_from_json(data: Mapping[str, Any]) -> ModelConfig:
    """Inverse of :func:`config_to_json` (lists stand for tuples)."""
    rope = data["rope"]
    parameters = tuple((name, value) for name, value in rope["parameters"])
    values = {**data, "rope": RopeConfig(rope["theta"], rope["kind"], parameters)}
    values["eos_token_ids"] = tuple(data["eos_token_ids"])
    return ModelConfig(**values)


def optimizer_config(pipeline: Pipeline) -> OptimizerConfig:
    """AdamW and its schedule over all updates of the run."""
    settings, train = pipeline.stages.train.optimizer, pipeline.stages.train
    schedule = Schedule(
        peak=settings.learning_rate,
        kind=settings.schedule,
        warmup_updates=settings.warmup_updates,
        total_updates=pipeline.steps * train.updates_per_step,
        final_fraction=settings.final_fraction,
    )
    return OptimizerConfig(
        schedule=schedule,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )


def pipeline_contract(pipeline: Pipeline, config: ModelConfig) -> Contract:
    """The contract that a pipeline asks for. Raises ContractError where the model cannot keep it."""
    return build_contract(
        config,
        profile=pipeline.contract.profile,
        dtype=pipeline.contract.dtype,
        topology=Topology(**pipeline.contract.topology.model_dump()),
        temperature=pipeline.stages.rollout.sampling.temperature,
        optimizer=optimizer_config(pipeline).as_json(),
    )


def side_numerics(name: str) -> Numerics:
    """``exact`` or ``native``, as the pipeline spells it."""
    return "exact" if name == "exact" else "native"


def side_deployment(numerics: str, sources: Mapping[str, str], device: str = "cpu") -> dict[str, Any]:
    """What an embedded side is deployed as: implementations, source digests, versions, device."""
    return place_of(device).deployment(side_numerics(numerics), sources)


def side_identities(contract: Contract, numerics: str, extra: Mapping[str, str], device: str = "cpu") -> Identities:
    """Identities of one side. A ``native`` side keeps no numerical policy of ours: it gets one of its own."""
    found = contract.identities(side_deployment(numerics, extra, device))
    if numerics == "exact":
        return found
    policy = digest({"native": True, "torch": torch.__version__, "dtype": contract.dtype})
    return Identities(found.semantic, policy, found.deployment)


def engine_sources() -> dict[str, str]:
    """Source digests that an embedded engine shows."""
    return {"kernels": source_digest()}


def side_declaration(contract: Contract, numerics: str, side: str, device: str = "cpu") -> Declaration:
    """What an embedded side may run: every entry of the contract in its cases, by its composition."""
    place = place_of(device)
    implementations = place.implementations(side_numerics(numerics))
    if side == "trainer":
        every = {**implementations, **place.step}
        return declare(contract, "the trainer", TRAINER_CASES, every, every_occurrence=True)
    return declare(contract, f"engine {side}", ENGINE_CASES, implementations, every_occurrence=True)


@dataclass(frozen=True)
class SideSpecification:
    """What both sides have in common: model dimensions, contract, threads."""

    pipeline: Pipeline
    config: ModelConfig
    num_blocks: int
    longest_sequence: int

    @property
    def dtype(self) -> str:
        """Activation and weight dtype."""
        return self.pipeline.contract.dtype

    @property
    def tp(self) -> int:
        """Claimed tensor-parallel degree."""
        return self.pipeline.contract.topology.tp

    @property
    def place(self) -> Place:
        """What both sides compute on."""
        return place_of(self.pipeline.device)

    def runner(
        self,
        tensors: Mapping[str, torch.Tensor],
        numerics: str,
        workers: Workers,
        evidence: Evidence,
        *,
        training: bool,
    ) -> ModelRunner:
        """A runner over a copy of the tensors."""
        contract, kind = pipeline_contract(self.pipeline, self.config), side_numerics(numerics)
        return self.place.runner(
            contract,
            self.weights(tensors, numerics, workers, training=training),
            self.place.composition(contract, kind, workers, evidence),
            evidence,
            workers,
            max_position=self.longest_sequence,
        )

    def weights(self, tensors: Mapping[str, torch.Tensor], numerics: str, workers: Workers, *, training: bool) -> Any:
        """A copy of the tensors in the form that the side's kernels read."""
        contract, definition = pipeline_contract(self.pipeline, self.config), define_model(self.config)
        return self.place.weights(contract, definition, tensors, side_numerics(numerics), workers, training=training)

    def as_json(self) -> dict[str, Any]:
        """Plain data, for an engine in another process."""
        return {
            "pipeline": self.pipeline.model_dump(mode="json"),
            "config": config_to_json(self.config),
            "num_blocks": self.num_blocks,
            "longest_sequence": self.longest_sequence,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SideSpecification:
        """Inverse of :meth:`as_json`."""
        pipeline = Pipeline.model_validate(data["pipeline"])
        return cls(pipeline, config_from_json(data["config"]), data["num_blocks"], data["longest_sequence"])


def engine_config(side: SideSpecification, engine_id: str) -> EngineConfig:
    """Scheduling of the native engine as the pipeline says."""
    rollout = side.pipeline.stages.rollout
    return EngineConfig(
        engine_id=engine_id,
        max_num_seqs=rollout.max_num_seqs,
        max_batched_tokens=rollout.max_batched_tokens,
        block_size=rollout.block_size,
        num_blocks=side.num_blocks,
        prefix_caching=rollout.prefix_caching,
        max_position=side.longest_sequence,
        seed=side.pipeline.seed,
    )


def build_engine(side: SideSpecification, engine_id: str, workers: Workers, tokenizer: Tokenizer) -> NativeEngine:
    """The native engine of a run."""
    numerics = side.pipeline.numerics.rollout
    contract = pipeline_contract(side.pipeline, side.config)
    evidence = Evidence(engine_id)
    runners: list[ModelRunner] = []
    memory = side.place.slots(lambda tensors: side.weights(tensors, numerics, workers, training=False))

    def model(weights: Any) -> Any:
        # tables are made once; each commit binds them to other weights
        if not runners:
            composition = side.place.composition(contract, side_numerics(numerics), workers, evidence)
            runners.append(
                side.place.runner(contract, weights, composition, evidence, workers, max_position=side.longest_sequence)
            )
        memory.serve(weights)
        return runners[0].with_weights(weights)

    config = side.config
    return NativeEngine(
        engine_config(side, engine_id),
        identities=side_identities(contract, numerics, engine_sources(), side.pipeline.device),
        kv_shape=KVShape(config.num_layers, config.num_kv_heads, config.head_dim),
        vocab_size=config.vocab_size,
        weights_factory=memory.copy,
        model_factory=model,
        detokenize=tokenizer.decode,
        evidence=evidence,
        kv_factory=side.place.pages(contract.dtype, side_numerics(numerics)),
        probe=workers.probe,
    )


def build_engine_in_child(specification: Mapping[str, Any]) -> NativeEngine:
    """Factory for :class:`vime.runtime.process.ProcessEngine`."""
    side = SideSpecification.from_json(specification["side"])
    workers = Workers(side.pipeline.threads)
    if side.pipeline.threads is not None:
        torch.set_num_threads(side.pipeline.threads)
    tokenizer = load_pipeline_tokenizer(side.pipeline)
    return build_engine(side, specification["engine_id"], workers, tokenizer)
