"""The embedded trainer and engine, as adapters under test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlkernel.contract.build import build_contract
from rlkernel.contract.schedules import Schedule
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.config import ModelConfig
from rlkernel.models.definition import define_model
from rlkernel.ops.composition import without_certificates
from rlkernel.ops.runner import ModelRunner
from rlkernel.ops.weights import WeightSet
from rlkernel.verify.evidence import Evidence
from vime.adapters.conformance import EngineHarness, TrainerHarness
from vime.rollout.native import EngineConfig, KVShape, NativeEngine
from vime.runtime.sides import side_declaration, side_identities
from vime.train.native.optimizer import OptimizerConfig
from vime.train.native.trainer import NativeTrainer, TrainerConfig

MODEL = ModelConfig("qwen3", 23, 16, 24, 2, 4, 2, 4, 64, qk_norm=True)
OPTIMIZER = OptimizerConfig(Schedule(1e-2))
CONTRACT = build_contract(MODEL, optimizer=OPTIMIZER.as_json())
WORKERS = Workers(1)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Random weights of the small model."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in MODEL.weight_shapes().items():
        value = torch.randn(shape, generator=generator) * 0.3
        result[name] = value + 1 if "norm" in name else value
    return result


def runner(weights: Any, evidence: Evidence) -> ModelRunner:
    """The exact model over packed weights."""
    return ModelRunner(
        define_model(MODEL),
        weights,
        without_certificates("exact"),
        evidence,
        dtype="float32",
        tp=1,
        workers=WORKERS,
        max_position=64,
    )


def packed(values: Any, training: bool) -> WeightSet:
    """Weights in the kernels' form."""
    return WeightSet(define_model(MODEL), values, dtype="float32", tp=1, workers=WORKERS, training=training)


def make_trainer(**settings: Any) -> NativeTrainer:
    """A trainer of the weights of seed 0."""
    initial = tensors(0)
    model = runner(packed(initial, True), Evidence("trainer"))
    config = TrainerConfig(OPTIMIZER, **settings)
    identities = side_identities(CONTRACT, "exact", {})
    return NativeTrainer(model, initial, config, identities, dtype="float32", workers=WORKERS)


def make_engine(**settings: Any) -> NativeEngine:
    """An engine without weights."""
    evidence = Evidence("native-0")
    config = EngineConfig(
        engine_id="native-0",
        max_num_seqs=8,
        max_batched_tokens=48,
        block_size=8,
        num_blocks=120,
        prefix_caching=True,
        max_position=48,
        seed=3,
    )
    return NativeEngine(
        replace(config, **settings),
        identities=side_identities(CONTRACT, "exact", {}),
        kv_shape=KVShape(MODEL.num_layers, MODEL.num_kv_heads, MODEL.head_dim),
        vocab_size=MODEL.vocab_size,
        weights_factory=lambda values: packed(values, False),
        model_factory=lambda weights: runner(weights, evidence),
        evidence=evidence,
    )


def flip(array: np.ndarray) -> None:
    """Flip the lowest bit of a float32 array's fourth element."""
    array.reshape(-1).view(np.uint32)[3] ^= np.uint32(1)


TRAINER = TrainerHarness(
    make=make_trainer,
    corrupt=lambda trainer: flip(trainer._model.weights._rows["layers.1.o_proj"].data),
    vocab_size=MODEL.vocab_size,
    declared=side_declaration(CONTRACT, "exact", "trainer"),
    exact=True,
)
ENGINE = EngineHarness(
    make=make_engine,
    corrupt=lambda engine: flip(engine._weights._served.weights._rows["layers.1.o_proj"].data),
    vocab_size=MODEL.vocab_size,
    declared=side_declaration(CONTRACT, "exact", "native-0"),
    exact=True,
    tensors=tensors,
    longest=48,
    block_size=8,
)
