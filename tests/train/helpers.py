"""A small real trainer over random weights."""

from __future__ import annotations

import numpy as np
import torch

from rlkernel.contract.identity import Identities
from rlkernel.contract.schedules import Schedule
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.config import ModelConfig
from rlkernel.models.definition import define_model
from rlkernel.ops.composition import without_certificates
from rlkernel.ops.runner import ModelRunner
from rlkernel.ops.weights import WeightSet
from rlkernel.verify.evidence import Evidence
from vime.train.interface import TrainSample
from vime.train.native.optimizer import OptimizerConfig
from vime.train.native.trainer import NativeTrainer, TrainerConfig
from vime.types import SampleId

IDENTITIES = Identities("1" * 64, "2" * 64, "3" * 64)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODEL = ModelConfig("qwen3", 40, 32, 48, 2, 4, 2, 8, 64, qk_norm=True, tied_embeddings=True)


def tensors(dtype: str = "float32", seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in MODEL.weight_shapes().items():
        value = torch.randn(shape, generator=generator) * 0.2
        result[name] = (value + 1 if "norm" in name else value).to(DTYPES[dtype])
    return result


def runner(weights, dtype="float32", threads=1, training=True) -> ModelRunner:
    definition, workers = define_model(MODEL), Workers(threads)
    packed = WeightSet(definition, weights, dtype=dtype, tp=1, workers=workers, training=training)
    return ModelRunner(
        definition,
        packed,
        without_certificates("exact"),
        Evidence("trainer"),
        dtype=dtype,
        tp=1,
        workers=workers,
        max_position=64,
    )


def trainer(dtype="float32", threads=1, seed=0, reference=None, optimizer=None, **config) -> NativeTrainer:
    weights = tensors(dtype, seed)
    optimizer = optimizer or OptimizerConfig(Schedule(1e-2))
    return NativeTrainer(
        runner(weights, dtype, threads),
        weights,
        TrainerConfig(optimizer, **config),
        IDENTITIES,
        dtype=dtype,
        workers=Workers(threads),
        reference=reference,
    )


def samples(groups: int = 3, size: int = 2, seed: int = 0) -> list[TrainSample]:
    """Whole sequences of varying length, in sample order, without log-probabilities."""
    random = np.random.default_rng(seed)
    result = []
    for prompt in range(groups):
        question = tuple(int(t) for t in random.integers(0, MODEL.vocab_size, 2 + prompt))
        for k in range(size):
            count = int(random.integers(1, 7))
            tokens = tuple(int(t) for t in random.integers(0, MODEL.vocab_size, count))
            advantage = float(random.normal())
            result.append(TrainSample(SampleId("train", prompt, k), question, tokens, np.ones(count, bool), advantage))
    return result


def with_old(trained: NativeTrainer, batch: list[TrainSample]) -> list[TrainSample]:
    """Give every sample the trainer's own log-probabilities as the old ones."""
    scores = trained.score(batch).samples
    return [
        TrainSample(s.sample_id, s.prompt_token_ids, s.token_ids, s.loss_mask, s.advantage, score.logprobs)
        for s, score in zip(batch, scores, strict=True)
    ]
