"""Builds runners over random weights for the tests of the operations."""

from __future__ import annotations

import numpy as np
import torch

from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.config import ModelConfig
from rlkernel.models.definition import define_model
from rlkernel.ops.composition import without_certificates
from rlkernel.ops.host import TokenBatch
from rlkernel.ops.runner import ModelRunner
from rlkernel.ops.weights import DTYPES, WeightSet
from rlkernel.verify.evidence import Evidence


def config(**changes) -> ModelConfig:
    values = dict(
        family="qwen3",
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=128,
        qk_norm=True,
        qkv_bias=False,
        tied_embeddings=True,
    )
    return ModelConfig(**{**values, **changes})


def tensors(model: ModelConfig, dtype: str = "float32", seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, shape in model.weight_shapes().items():
        value = torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.2)
        if "norm" in name:
            value = value + 1.0
        result[name] = value.to(DTYPES[dtype])
    return result


def runner(model: ModelConfig, weights=None, dtype="float32", tp=1, threads=2, training=True, numerics="exact"):
    workers = Workers(threads)
    definition = define_model(model)
    weights = tensors(model, dtype) if weights is None else weights
    if numerics == "exact":
        packed = WeightSet(definition, weights, dtype=dtype, tp=tp, workers=workers, training=training)
    else:
        from rlkernel.kernels.torch_native.weights import TorchWeightSet

        packed = TorchWeightSet(definition, weights, dtype=dtype, workers=workers)
    return ModelRunner(
        definition,
        packed,
        without_certificates(numerics),
        Evidence("test"),
        dtype=dtype,
        tp=tp,
        workers=workers,
        max_position=model.max_position,
    )


def batch(*sequences) -> TokenBatch:
    lengths = [len(s) for s in sequences]
    return TokenBatch(
        np.concatenate([np.asarray(s, np.int64) for s in sequences]),
        np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
    )


class Pages:
    """A KV state for one growing set of sequences, pages handed out in a scrambled order."""

    def __init__(self, model: ModelConfig, sequences: int, page_size: int, pages_each: int, seed: int = 0):
        self.page_size = page_size
        total = sequences * pages_each
        order = np.random.default_rng(seed).permutation(total).astype(np.int32)
        self.block_table = order.reshape(sequences, pages_each)
        shape = (total, model.num_kv_heads)
        self._pages = [
            (
                np.full((*shape, model.head_dim, page_size), np.nan, np.float32),
                np.full((*shape, page_size, model.head_dim), np.nan, np.float32),
            )
            for _ in range(model.num_layers)
        ]
        self.slots = np.zeros(0, np.int64)

    def pages(self, layer: int):
        return self._pages[layer]

    def place(self, part: TokenBatch) -> None:
        slots = []
        for s in range(len(part.starts) - 1):
            for position in part.positions[part.starts[s] : part.starts[s + 1]]:
                page = int(self.block_table[s, position // self.page_size])
                slots.append(page * self.page_size + int(position) % self.page_size)
        self.slots = np.asarray(slots, np.int64)
