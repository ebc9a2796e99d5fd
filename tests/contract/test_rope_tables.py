"""RoPE tables: against mpmath bit for bit, against transformers' definitions, and the digest that guards them."""

from __future__ import annotations

from dataclasses import replace

import mpmath
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rlkernel.contract import rope_tables as module
from rlkernel.contract.rope_tables import attention_factor, inverse_frequencies, rope_digest, rope_tables
from rlkernel.errors import ContractError, ModelError
from rlkernel.models.config import ModelConfig, RopeConfig

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 2048.0}
KINDS = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 3.0}),
    "llama3": ("llama3", LLAMA3),
    "yarn": ("yarn", YARN),
    "yarn-given-factor": ("yarn", {**YARN, "attention_factor": 1.25}),
    "yarn-mscale": ("yarn", {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}),
    "yarn-betas": ("yarn", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": 0.0}),
}


def make(kind: str, parameters: dict[str, float], theta: float = 5e5, head_dim: int = 128) -> ModelConfig:
    rope = RopeConfig(theta=theta, kind=kind, parameters=tuple(sorted(parameters.items())))
    return ModelConfig("llama", 32, 4 * head_dim, 8, 1, 4, 4, head_dim, 8192, rope=rope)


@pytest.mark.parametrize("name", KINDS)
def test_definitions_are_those_of_transformers(name):
    kind, parameters = KINDS[name]
    config = make(kind, parameters)
    hf_parameters = {
        key: bool(v) if key == "truncate" else int(v) if key.startswith("original") else v
        for key, v in parameters.items()
    }
    hf = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=512,
            num_attention_heads=4,
            max_position_embeddings=8192,
            rope_parameters={"rope_type": kind, "rope_theta": 5e5, **hf_parameters},
        )
    )
    # transformers computes in float32: its own roundings, a few ulp, are the tolerance
    difference = np.abs(hf.inv_freq.double().numpy() / inverse_frequencies(config) - 1.0)
    assert difference.max() < 4e-7
    assert attention_factor(config) == pytest.approx(hf.attention_scaling, rel=1e-14)


@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 16), (1e5, 64), (5e5, 128), (1e6, 80)])
def test_tables_are_the_correctly_rounded_values(theta, head_dim):
    """Not one of 2,000 sampled entries differs from mpmath's exact cos and sin of the float64 angle."""
    config = make("default", {}, theta, head_dim)
    cosine, sine = rope_tables(config, 8192)
    frequencies = inverse_frequencies(config)
    generator = np.random.default_rng(head_dim)
    for position, i in zip(generator.integers(0, 8192, 500), generator.integers(0, head_dim // 2, 500), strict=True):
        with mpmath.workprec(150):
            angle = mpmath.mpf(float(np.float64(position) * frequencies[i]))
            exact = mpmath.cos(angle), mpmath.sin(angle)
        with mpmath.workprec(24):
            assert (float(cosine[position, i]), float(sine[position, i])) == (float(+exact[0]), float(+exact[1]))


def test_positions_up_to_a_million():
    config = make("default", {}, 1e6)
    positions = np.array([65535.0, 262144.0, 1e6])
    cosine, _ = module._rows(config, positions)
    frequencies = inverse_frequencies(config)
    for row, position in enumerate(positions):
        for i in range(0, 64, 7):
            with mpmath.workprec(150):
                exact = mpmath.cos(mpmath.mpf(float(position * frequencies[i])))
            with mpmath.workprec(24):
                assert float(cosine[row, i]) == float(+exact)


@pytest.mark.parametrize("name", KINDS)
def test_rows_do_not_depend_on_the_length_of_the_table(name):
    config = make(*KINDS[name], head_dim=64)
    short, long = rope_tables(config, 5), rope_tables(config, 3000)
    for a, b in zip(short, long, strict=True):
        assert a.dtype == np.float32
        assert a.shape == (5, 32)
        assert a.flags.c_contiguous
        assert (a.view(np.uint32) == b[:5].view(np.uint32)).all()
    factor = np.float32(attention_factor(config))
    assert short[0][0].tolist() == [factor] * 32  # cos 0 times the attention factor


def test_digest_changes_with_every_parameter():
    base = make("yarn", {**YARN, "beta_fast": 16.0})
    changed = [
        make("yarn", {**YARN, "beta_fast": 17.0}),
        make("yarn", {**YARN, "factor": 4.5, "beta_fast": 16.0}),
        make("yarn", {**YARN, "beta_fast": 16.0, "attention_factor": 1.0}),
        make("yarn", {**YARN, "beta_fast": 16.0}, theta=500001.0),
        make("yarn", {**YARN, "beta_fast": 16.0}, head_dim=64),
        make("default", {}),
        make("linear", {"factor": 1.0}),
        replace(base, max_position=4096),
    ]
    digests = [rope_digest(config) for config in (base, *changed)]
    assert len(set(digests)) == len(digests)
    assert rope_digest(make("yarn", {**YARN, "beta_fast": 16.0})) == digests[0]


def test_digest_changes_with_one_bit_of_the_sine(monkeypatch):
    config = make("default", {})
    before = rope_digest(config)
    genuine = module.hostmath.sin_cos

    def off(x):
        sine, cosine = genuine(x)
        sine = sine.copy()
        sine[3, 1] = np.nextafter(np.float32(sine[3, 1]), np.float32(2))
        return sine, cosine

    monkeypatch.setattr(module.hostmath, "sin_cos", off)
    assert rope_digest(config) != before


def test_refusals():
    with pytest.raises(ContractError, match=r"'longrope' is not defined; accepted are default, linear, llama3, yarn"):
        rope_tables(make("longrope", {}), 4)
    with pytest.raises(ModelError, match="needs the parameter 'factor'"):
        rope_tables(make("linear", {}), 4)
    with pytest.raises(ContractError, match="0 positions"):
        rope_tables(make("default", {}), 0)
    with pytest.raises(ContractError, match="must exceed"):
        rope_tables(make("llama3", {**LLAMA3, "high_freq_factor": 1.0}), 4)
