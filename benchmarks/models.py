"""One checkpoint as both sides run it: a model runner or engine of ours, and transformers' model."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import CLOCKS
from rlkernel.contract.build import build_contract
from rlkernel.kernels.cpu.gemm import matmul
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.definition import define_model
from rlkernel.models.dtypes import Dtype
from rlkernel.models.loading import LoadedModel, load_model
from rlkernel.ops.composition import without_certificates
from rlkernel.ops.host import TokenBatch
from rlkernel.ops.runner import ModelRunner
from rlkernel.ops.weights import WeightSet
from rlkernel.verify.evidence import Evidence
from vime.rollout.native.config import EngineConfig, blocks_of
from vime.rollout.native.engine import NativeEngine
from vime.rollout.native.model import KVShape

MAX_POSITION = 2048


def sequences_batch(tokens: np.ndarray[Any, Any]) -> TokenBatch:
    """Whole sequences of one length, int64 [S, L], as a flat batch."""
    count, length = tokens.shape
    positions = np.tile(np.arange(length, dtype=np.int32), count)
    return TokenBatch(tokens.reshape(-1), positions, np.arange(0, count * length + 1, length, dtype=np.int32))


def build_runner(model: LoadedModel, workers: Workers, *, training: bool = False) -> ModelRunner:
    """A runner of the portable profile over a copy of the checkpoint's tensors."""
    definition = define_model(model.config)
    weights = WeightSet(definition, model.tensors, dtype=model.dtype, tp=1, workers=workers, training=training)
    return ModelRunner(
        definition,
        weights,
        without_certificates("exact"),
        Evidence("benchmark"),
        dtype=model.dtype,
        tp=1,
        workers=workers,
        max_position=min(MAX_POSITION, model.config.max_position),
    )


def logits_of(runner: ModelRunner, batch: TokenBatch, workers: Workers) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits of every token, float32 [N, V], before any temperature: what the head's log-probabilities start from."""
    hidden = runner.hidden(batch, None, "trainer_score")
    return matmul(hidden, runner.weights.rows(runner.definition.head), workers)


def transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    """The peer: transformers' own class for the checkpoint, attention by torch's scaled_dot_product_attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()


class Models:
    """A checkpoint, loaded once; the sides are built when they are first asked for."""

    def __init__(self, folder: Path, threads: int, dtype: Dtype = "float32", clock: str = "wall") -> None:
        self.folder, self.workers, self.clock = folder, Workers(threads), CLOCKS[clock]
        self.loaded = load_model(folder, dtype)

    @cached_property
    def runner(self) -> ModelRunner:
        return build_runner(self.loaded, self.workers)

    @cached_property
    def trainer(self) -> ModelRunner:
        return build_runner(self.loaded, self.workers, training=True)

    @cached_property
    def peer(self) -> Any:
        return transformers_model(self.folder, torch.float32)

    def engine(self, sequences: int, longest: int, block_size: int) -> NativeEngine:
        """The embedded engine with the checkpoint committed, and KV blocks for all sequences."""
        config, runner = self.loaded.config, self.runner
        engine = NativeEngine(
            EngineConfig(
                engine_id="benchmark",
                max_num_seqs=sequences,
                max_batched_tokens=4096,
                block_size=block_size,
                num_blocks=sequences * (blocks_of(longest, block_size) + 1),
                prefix_caching=False,
                max_position=longest,
                seed=0,
            ),
            identities=build_contract(config, dtype=self.loaded.dtype).identities({"benchmark": "cpu"}),
            kv_shape=KVShape(config.num_layers, config.num_kv_heads, config.head_dim),
            vocab_size=config.vocab_size,
            weights_factory=lambda tensors: WeightSet(
                runner.definition, tensors, dtype=self.loaded.dtype, tp=1, workers=self.workers
            ),
            model_factory=runner.with_weights,
            evidence=runner.evidence,
        )
        engine.commit_weights(0, engine.stage_weights(0, self.loaded.tensors))
        return engine
