"""A small model on the CPU's runner and on the device's, whose kernels Triton's interpreter runs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlkernel.contract.build import build_contract
from rlkernel.contract.claims import Topology
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.config import ModelConfig
from rlkernel.models.definition import define_model
from rlkernel.ops.composition import Composition, without_certificates
from rlkernel.ops.device.head import LinearLogprob
from rlkernel.ops.device.regions import device_ops
from rlkernel.ops.device.runner import DeviceRunner
from rlkernel.ops.device.weights import DeviceWeights
from rlkernel.ops.host import TokenBatch
from rlkernel.ops.runner import ModelRunner
from rlkernel.ops.weights import WeightSet
from rlkernel.verify.admission.first_use_device import with_device_first_use_checks
from rlkernel.verify.evidence import Evidence

PLACE = torch.device("cpu")
TIED = "model.embed_tokens.weight"


def config(**changes: Any) -> ModelConfig:
    """One layer, two KV groups; everything else as small as the kernels take it."""
    values: dict[str, Any] = {
        "family": "qwen3",
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 32,
        "qk_norm": True,
        "tied_embeddings": True,
    }
    return ModelConfig(**{**values, **changes})


def tensors(model: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random logical weights, float32."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + ("norm" in name)
        for name, shape in model.weight_shapes().items()
    }


def runners(model: ModelConfig, tp: int = 1, seed: int = 0) -> tuple[ModelRunner, DeviceRunner]:
    """The same weights on both."""
    definition, weights, workers = define_model(model), tensors(model, seed), Workers(1)
    packed = WeightSet(definition, weights, dtype="float32", tp=tp, workers=workers, training=True)
    cpu = ModelRunner(
        definition, packed, without_certificates("exact"), Evidence("cpu"), dtype="float32", tp=tp, workers=workers,
        max_position=model.max_position,
    )  # fmt: skip
    contract = build_contract(model, topology=Topology(tp=tp))
    own = DeviceWeights(definition, weights, dtype="float32", tp=tp, device=PLACE)
    evidence, plain = Evidence("device"), Composition("exact", device_ops(), LinearLogprob())
    composition = with_device_first_use_checks(plain, contract, evidence, PLACE)
    return cpu, DeviceRunner(
        definition, own, composition, evidence, contract, max_position=model.max_position
    )  # fmt: skip


def batch(*lengths: int, seed: int = 0) -> TokenBatch:
    """Whole sequences of random tokens."""
    rows = sum(lengths)
    tokens = np.random.default_rng(seed).integers(0, 40, rows)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    return TokenBatch(tokens, positions, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def equal(found: Any, expected: Any) -> bool:
    """Whether all bits are equal, a tensor of the device against a NumPy array."""
    mine = found.numpy() if isinstance(found, torch.Tensor) else found
    assert mine.shape == expected.shape and mine.dtype == expected.dtype, (mine.dtype, expected.dtype)
    width = np.dtype(f"u{expected.dtype.itemsize}")
    return bool((np.ascontiguousarray(mine).view(width) == np.ascontiguousarray(expected).view(width)).all())
