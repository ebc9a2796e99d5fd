"""Small models with random weights, the same bits on every machine.

Numbers come from Philox4x32-10 in integer operations, keyed by (seed, tensor name, element), so that they depend
neither on the order in which tensors are made nor on any library's generator.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlkernel.errors import ModelError
from rlkernel.models.config import ModelConfig, RopeConfig
from rlkernel.models.dtypes import Dtype, check_dtype, convert
from rlkernel.models.loading import LoadedModel
from rlkernel.models.tokenizer import Tokenizer, character_tokenizer

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

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., 2011). ``counter`` [4, N] and the result [4, N] hold 32-bit words in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * _M0, c2 * _M1
        c0 = (second >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c1 = second & _LOW
        c2 = (first >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c3 = first & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def near_normal(name: str, seed: int, count: int, deviation: float) -> NDArray[np.float32]:
    """``count`` float32 of mean 0 and the given standard deviation, nearly normal, from (seed, name, index).

    Each is the sum of the eight 16-bit halves of one Philox block, an exact integer (Irwin-Hall, bounded at 4.9
    standard deviations), times one float64 constant, rounded once to float32.
    """
    label = hashlib.sha256(name.encode()).digest()
    index = np.arange(count, dtype=np.uint64)
    counter = np.stack(
        [
            index & _LOW,
            index >> _SHIFT,
            np.full(count, int.from_bytes(label[:4], "little"), dtype=np.uint64),
            np.full(count, int.from_bytes(label[4:8], "little"), dtype=np.uint64),
        ]
    )
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    total = ((words & np.uint64(0xFFFF)) + (words >> np.uint64(16))).sum(axis=0).astype(np.int64)
    # a 16-bit uniform has mean 65535/2 and variance (2^32 - 1)/12; twice the sum is centred by an integer
    centred = (2 * total - 8 * 65535).astype(np.float64)
    unit = 0.5 / float(np.sqrt(np.float64(8.0 * 4294967295.0 / 12.0)))
    result: NDArray[np.float32] = (centred * (unit * deviation)).astype(np.float32)
    return result


def initial_tensor(name: str, shape: tuple[int, ...], seed: int, config: ModelConfig) -> NDArray[np.float32]:
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
    return near_normal(name, seed, int(np.prod(shape)), deviation).reshape(shape)


def random_model(config: ModelConfig, seed: int, dtype: Dtype, source: str) -> LoadedModel:
    """A model of any dimensions with random weights keyed by (seed, tensor name)."""
    check_dtype(dtype)
    if not 0 <= seed < 2**64:
        raise ModelError(f"a seed of {seed} is not possible: an integer from 0 to 2^64 - 1 is needed")
    tensors = {
        name: convert(torch.from_numpy(initial_tensor(name, shape, seed, config)), dtype)
        for name, shape in config.weight_shapes().items()
    }
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
