"""Small models with random weights, the same bits on every machine.

Numbers come from Philox4x32-10 in integer operations, keyed by (seed, tensor name, element), so that they depend
neither on the order in which tensors are made nor on any library's generator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.errors import ModelError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.config import ModelConfig, RopeConfig
from rlkernel.models.dtypes import Dtype, bfloat16_bits, check_dtype
from rlkernel.models.loading import LoadedModel
from rlkernel.models.near_normal import near_normal
from rlkernel.models.tokenizer import Tokenizer, character_tokenizer

_PART = 1 << 16
_VOCABULARY = character_tokenizer().vocab_size

#: Two layers of width 64 over the character vocabulary. They learn short string tasks within minutes on a CPU.
PRESETS: dict[str, ModelConfig] = {
    "tiny-qwen3": ModelConfig(
        family="qwen3",
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=512,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        qk_norm=True,
        bos_token_id=1,
        eos_token_ids=(0,),
    ),
    "tiny-llama": ModelConfig(
        family="llama",
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        bos_token_id=1,
        eos_token_ids=(0,),
    ),
    "tiny-qwen2": ModelConfig(
        family="qwen2",
        vocab_size=_VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=512,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        qkv_bias=True,
        tied_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(0,),
    ),
}


def initial_tensor(
    name: str, shape: tuple[int, ...], seed: int, config: ModelConfig, workers: Workers | None = None
) -> NDArray[np.float32]:
    """Norm weights are 1, biases 0. Matrices have deviation 1/sqrt(inputs), those that write into the residual
    stream that divided by sqrt(2 * layers); embeddings have deviation 1 untied, and 1/sqrt(hidden) tied."""
    if name.endswith("norm.weight"):
        return np.ones(shape, dtype=np.float32)
    if name.endswith(".bias"):
        return np.zeros(shape, dtype=np.float32)
    variance_divisor = float(shape[1])
    if name == "model.embed_tokens.weight" and not config.tied_embeddings:
        variance_divisor = 1.0
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        variance_divisor *= 2.0 * config.num_layers
    deviation = 1.0 / float(np.sqrt(np.float64(variance_divisor)))
    return near_normal(name, seed, int(np.prod(shape)), deviation, workers).reshape(shape)


def _tensor(values: NDArray[np.float32], dtype: Dtype, workers: Workers) -> torch.Tensor:
    """Values in a dtype: as they are, or rounded once to nearest even."""
    if dtype == "float32":
        return torch.from_numpy(values)
    bits = np.empty(values.shape, np.uint16)
    workers.run(_round, values.size, values.reshape(-1), bits.reshape(-1), grain=_PART)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def _round(first: int, last: int, values: NDArray[np.float32], bits: NDArray[np.uint16]) -> None:
    for start in range(first, last, _PART):  # what lies between fits a cache
        end = min(last, start + _PART)
        bits[start:end] = bfloat16_bits(values[start:end])


def random_model(config: ModelConfig, seed: int, dtype: Dtype, source: str) -> LoadedModel:
    """A model of any dimensions with random weights keyed by (seed, tensor name)."""
    check_dtype(dtype)
    if not 0 <= seed < 2**64:
        raise ModelError(f"a seed of {seed} is not possible: an integer from 0 to 2^64 - 1 is needed")
    workers = Workers()
    try:
        tensors = {
            name: _tensor(initial_tensor(name, shape, seed, config, workers), dtype, workers)
            for name, shape in config.weight_shapes().items()
        }
    finally:
        workers.close()
    return LoadedModel(config, tensors, dtype, source, dtype != "float32", ("F32",), {})


def preset(name: str, seed: int, dtype: Dtype, **overrides: Any) -> LoadedModel:
    """A preset with random weights; ``overrides`` replace fields of its :class:`ModelConfig`.

    Raises ModelError for an unknown name or field, or dimensions that do not fit together.
    """
    if name not in PRESETS:
        raise ModelError(f"preset {name!r} is unknown; there are {', '.join(PRESETS)}")
    config = PRESETS[name]
    fields = set(config.__dataclass_fields__)
    unknown = sorted(set(overrides) - fields)
    if unknown:
        raise ModelError(f"preset {name!r} has no field {', '.join(unknown)}; there are {', '.join(sorted(fields))}")
    return random_model(replace(config, **overrides), seed, dtype, f"preset:{name}")


def preset_tokenizer(config: ModelConfig) -> Tokenizer:
    """The character tokenizer of the presets. Raises ModelError if the vocabulary was overridden to fewer tokens."""
    tokenizer = character_tokenizer()
    tokenizer.check_fits(config)
    return tokenizer
