"""Presets: the same bits everywhere, keyed by seed and name alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from rlkernel.errors import ModelError
from rlkernel.kernels.cpu.threads import Workers
from rlkernel.models.near_normal import near_normal
from rlkernel.models.presets import PRESETS, preset


def philox4x32(counter, key):
    """Philox4x32-10 over arrays: counter [4, N] and the result [4, N] hold 32-bit words in uint64."""
    c0, c1, c2, c3 = counter
    (k0, k1), low = key, np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0), second & low
        c2, c3 = (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1), first & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def defined(name, seed, index, deviation):
    """Elements of near_normal at uint64 places, from the definition."""
    label = hashlib.sha256(name.encode()).digest()
    high = [np.full(len(index), int.from_bytes(label[i : i + 4], "little"), np.uint64) for i in (0, 4)]
    counter = np.stack([index & np.uint64(0xFFFFFFFF), index >> np.uint64(32), *high])
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    total = ((words & np.uint64(0xFFFF)) + (words >> np.uint64(16))).sum(axis=0).astype(np.int64)
    unit = 0.5 / float(np.sqrt(np.float64(8.0 * 4294967295.0 / 12.0)))
    return ((2 * total - 8 * 65535).astype(np.float64) * (unit * deviation)).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_numbers_are_those_of_the_definition(threads):
    workers, count, seed = Workers(threads), 200_003, 0x1234_5678_9ABC_DEF0
    found = near_normal("model.x", seed, count, 0.02, workers)
    expected = defined("model.x", seed, np.arange(count, dtype=np.uint64), 0.02)
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()
    assert len(near_normal("model.x", seed, 0, 0.02, workers)) == 0
    workers.close()


def test_philox_known_answers():
    """The three vectors published with the algorithm (Random123's kat_vectors)."""
    ones = 0xFFFFFFFF
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    cases = [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, (ones, ones), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi, (0xA4093822, 0x299F31D0), [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]
    for counter, key, expected in cases:
        words = philox4x32(np.array(counter, dtype=np.uint64)[:, None], key)
        assert words[:, 0].tolist() == expected


def test_distribution():
    values = near_normal("x", 1, 200_000, 0.5).astype(np.float64)
    assert abs(values.mean()) < 0.005
    assert abs(values.std() - 0.5) < 0.005
    assert abs((np.abs(values) < 0.5).mean() - 0.683) < 0.01
    assert np.abs(values).max() < 0.5 * 4.9


def test_elements_depend_on_nothing_else():
    long, short = near_normal("x", 1, 1000, 0.5), near_normal("x", 1, 10, 0.5)
    assert (long[:10] == short).all()
    assert (long != near_normal("y", 1, 1000, 0.5)).mean() > 0.99
    assert (long != near_normal("x", 2, 1000, 0.5)).mean() > 0.99
    assert (long != near_normal("x", 1 + 2**32, 1000, 0.5)).mean() > 0.99


def test_bits_are_pinned():
    digest = hashlib.sha256()
    for name in sorted(PRESETS):
        for tensor_name, tensor in preset(name, 0, "float32").tensors.items():
            digest.update(tensor_name.encode() + tensor.numpy().astype("<f4").tobytes())
    assert digest.hexdigest() == "6296e3776a906468af416a18598bf588f9f6806d8891e5aea9d724c3c56012b1"


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    model = preset(name, 7, "bfloat16")
    wide = preset(name, 7, "float32")
    assert {n: tuple(t.shape) for n, t in model.tensors.items()} == model.config.weight_shapes()
    assert all(torch.equal(t, wide.tensors[n].bfloat16()) for n, t in model.tensors.items())
    other = preset(name, 8, "float32")
    assert not torch.equal(other.tensors["model.norm.weight"] * 0 + 1, other.tensors["model.embed_tokens.weight"][0])
    assert not torch.equal(other.tensors["model.embed_tokens.weight"], wide.tensors["model.embed_tokens.weight"])


def test_overrides_and_refusals():
    deeper = preset("tiny-qwen3", 7, "float32", num_layers=3)
    base = preset("tiny-qwen3", 7, "float32")
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(deeper.tensors[name], base.tensors[name])
    with pytest.raises(ModelError, match="'tiny' is unknown; there are tiny-qwen3, tiny-llama, tiny-qwen2"):
        preset("tiny", 0, "float32")
    with pytest.raises(ModelError, match="has no field depth"):
        preset("tiny-qwen3", 0, "float32", depth=3)
    with pytest.raises(ModelError, match="num_heads = 4 is not a multiple of num_kv_heads = 3"):
        preset("tiny-qwen3", 0, "float32", num_kv_heads=3)
    with pytest.raises(ModelError, match="seed of -1"):
        preset("tiny-qwen3", -1, "float32")
