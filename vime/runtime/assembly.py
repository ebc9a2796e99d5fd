"""Puts the two sides of a run together: contract, trainer, engine, transport."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rlkernel.contract.build import Contract
from rlkernel.contract.identity import Identities
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.verify.admission.first_use_step import StepFirstUse
from rlkernel.verify.claims import ClaimRegister
from rlkernel.verify.evidence import Evidence
from rlkernel.verify.sentinels import Declaration
from vime.pipeline.prepare import Prepared
from vime.pipeline.schema import Pipeline
from vime.rollout.interface import CommittedVersion
from vime.runtime.identities import IdentityExchange, trainer_sources
from vime.runtime.models import load_pipeline_model
from vime.runtime.process import ProcessEngine
from vime.runtime.sides import (
    ENGINE_ID,
    SideSpecification,
    build_engine,
    build_engine_in_child,
    optimizer_config,
    pipeline_contract,
    side_declaration,
    side_identities,
)
from vime.sync.drive import Channel, LocalChannel
from vime.sync.participant import Participant
from vime.sync.transport import Transport
from vime.sync.transports import make_transport
from vime.train.interface import ScoredSample, Trainer, TrainSample
from vime.train.losses import LossConfig
from vime.train.native.trainer import NativeTrainer, TrainerConfig
from vime.types import GeneratedSample, RolloutRequest


class RunEngine(Protocol):
    """An engine as the run loop drives it, in this process or another."""

    @property
    def engine_id(self) -> str: ...

    def identities(self) -> Identities: ...

    def channel(self) -> Channel:
        """The way for the messages of a sync."""

    def committed(self) -> CommittedVersion | None: ...

    def generate(self, requests: Sequence[RolloutRequest]) -> Iterator[GeneratedSample]: ...

    def score(self, sample: TrainSample, temperature: float) -> ScoredSample:
        """An independent forward over a whole sequence with the served weights."""

    def evidence(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class LocalEngine:
    """The embedded engine, with the transport's receiving end."""

    def __init__(self, engine: Any, transport: Transport) -> None:
        self.native, self._participant = engine, Participant(engine, transport)

    @property
    def engine_id(self) -> str:
        return str(self.native.engine_id)

    def channel(self) -> Channel:
        """It has answered as soon as it was asked."""
        return LocalChannel(self._participant)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


@dataclass
class Sides:
    """Everything that computes. ``initial`` are the weights before the first step."""

    contract: Contract
    trainer: Trainer
    engine: RunEngine
    transport: Transport
    workers: Workers
    initial: Mapping[str, torch.Tensor]
    source: str
    numerics: Mapping[str, str]
    """Side (``trainer``, or an engine's id) -> ``exact`` or ``native``."""
    declared: Mapping[str, Declaration]
    """Side -> what it may run."""
    exchange: IdentityExchange
    claims: ClaimRegister

    def check_identities(self) -> dict[str, dict[str, str]]:
        """Exchange and compare the identities of all sides, as they show them now. Raises InvariantViolation."""
        shown = {"trainer": self.trainer.identities(), self.engine.engine_id: self.engine.identities()}
        return self.exchange.compare(shown, self.numerics)

    def close(self) -> None:
        """End engines and threads; nothing of the weights that were sent stays behind."""
        self.engine.close()
        self.transport.close()
        self.trainer.close()
        self.workers.close()


SidesFactory = Callable[[Prepared, Path], Sides]


def trainer_config(pipeline: Pipeline) -> TrainerConfig:
    """How a step is trained."""
    train = pipeline.stages.train
    with_kl = train.loss.kl.coefficient > 0
    return TrainerConfig(
        optimizer=optimizer_config(pipeline),
        loss=LossConfig(
            policy=train.loss.kind,
            clip_low=train.loss.clip_low,
            clip_high=train.loss.clip_high,
            kl=train.loss.kl.estimator if with_kl else "none",
            kl_coefficient=train.loss.kl.coefficient,
            normalise=train.loss.normalise,
        ),
        temperature=pipeline.stages.rollout.sampling.temperature,
        updates_per_step=train.updates_per_step,
        micro_batch_samples=train.micro_batch_samples,
        activation_checkpointing=train.activation_checkpointing,
        data_parallel_leaves=pipeline.contract.topology.dp,
    )


def assemble(prepared: Prepared, run_directory: Path) -> Sides:
    """Build both sides of a checked pipeline; nothing has run and no weights are published yet."""
    pipeline = prepared.pipeline
    if pipeline.threads is not None:
        torch.set_num_threads(pipeline.threads)
    workers = Workers(pipeline.threads)
    loaded = load_pipeline_model(pipeline)
    side = SideSpecification(pipeline, prepared.config, prepared.num_blocks, prepared.longest_sequence)
    contract = pipeline_contract(pipeline, prepared.config)
    numerics = pipeline.numerics.trainer
    config = trainer_config(pipeline)
    reference = None
    if config.loss.needs_reference:
        reference = side.runner(loaded.tensors, numerics, workers, Evidence("reference"), training=False)
    evidence = Evidence("trainer")
    trainer = NativeTrainer(
        side.runner(loaded.tensors, numerics, workers, evidence, training=True),
        loaded.tensors,
        config,
        side_identities(contract, numerics, trainer_sources(prepared), pipeline.device),
        dtype=pipeline.contract.dtype,
        workers=workers,
        reference=reference,
        backend=side.place.trainer(workers, pipeline.stages.train.moments),
        first_use=StepFirstUse(contract, evidence) if numerics == "exact" else None,
    )
    folder = run_directory / "weights"
    shutil.rmtree(folder, ignore_errors=True)  # publications that a killed process left; this one holds the lock
    transport = make_transport(pipeline.stages.sync.transport, folder)
    engine: RunEngine
    if pipeline.placement == "colocated":
        engine = LocalEngine(build_engine(side, ENGINE_ID, workers, prepared.tokenizer), transport)
    else:
        specification = {
            "engine_id": ENGINE_ID,
            "side": side.as_json(),
            "transport": transport.name,
            "transport_folder": str(folder),
        }
        engine = ProcessEngine(build_engine_in_child, specification)
    by_side = {"trainer": numerics, ENGINE_ID: pipeline.numerics.rollout}
    return Sides(
        contract,
        trainer,
        engine,
        transport,
        workers,
        loaded.tensors,
        loaded.source,
        numerics=by_side,
        declared={side: side_declaration(contract, kind, side, pipeline.device) for side, kind in by_side.items()},
        exchange=IdentityExchange(contract),
        claims=ClaimRegister(contract),
    )
