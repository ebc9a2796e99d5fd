"""A deterministic model of integer hashes, and the samples it must give, computed without an engine.

Each token writes a hash into the KV pages and reads its visible prefix back through the block table, in two layers, so
that a wrong table, a stale block or a missed token changes everything after it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlkernel.contract.identity import Identities, TensorEntry, manifest_digest
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import TokenBatch
from vime.rollout.native import EngineConfig, KVShape, NativeEngine
from vime.types import RolloutRequest, SampleId, SamplingParams

VOCAB = 97
SHAPE = KVShape(num_layers=2, num_kv_heads=1, head_dim=2)
IDENTITIES = Identities("0" * 64, "1" * 64, "2" * 64)
LOW = np.uint64(0xFFFFFF)


def mix(x) -> np.ndarray:
    """A bijective hash of uint64 values (splitmix64's finalizer)."""
    x = np.atleast_1d(np.asarray(x)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def combine(*values) -> np.ndarray:
    """A hash of several columns of integers."""
    result = np.zeros(1, np.uint64)
    for value in values:
        result = mix(result * np.uint64(0x9E3779B97F4A7C15) + mix(value))
    return result


def prefix_hash(keys: np.ndarray, values: np.ndarray) -> np.uint64:
    """Hash of a visible prefix: float32 keys and values of positions 0 .. p, by their bits."""
    bits = np.ascontiguousarray(keys).view(np.uint32).astype(np.uint64) << np.uint64(32)
    bits |= np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    return np.add.reduce(combine(bits, np.arange(len(keys))))


class FakeWeights:
    """A copy of one tensor; its hash enters everything that the model computes."""

    def __init__(self, tensors) -> None:
        self.data = tensors["w"].numpy().copy()

    def manifest(self) -> list[TensorEntry]:
        hashed = hashlib.sha256(self.data.tobytes()).digest()
        lanes = int.from_bytes(hashed[:8], "big"), int.from_bytes(hashed[8:16], "big")
        return [TensorEntry("w", self.data.shape, str(self.data.dtype), lanes)]

    def manifest_digest(self) -> str:
        return manifest_digest(self.manifest())

    @property
    def seed(self) -> int:
        return int(self.data[0])


@dataclass
class Statistics:
    logprob: np.ndarray
    entropy: np.ndarray
    digest: np.ndarray


def draw(hidden: np.ndarray, keys: SamplingKeys, temperature: float) -> tuple[np.ndarray, Statistics]:
    row = combine(hidden, int(temperature * 1024))
    noise = combine(row, keys.seeds, keys.prompt_index, keys.k, keys.namespace, keys.position, keys.top_k)
    tokens = (np.where(keys.greedy, row, noise) % np.uint64(VOCAB)).astype(np.int64)
    return tokens, Statistics(
        logprob=-(combine(row, tokens) >> np.uint64(44)).astype(np.float32) / np.float32(65536),
        entropy=(row >> np.uint64(44)).astype(np.float32),
        digest=np.stack([row, mix(row)], axis=1),
    )


class FakeModel:
    """The hash model over KV pages."""

    def __init__(self, weights: FakeWeights) -> None:
        self.weights = weights
        self.cases: list[str] = []

    def read(self, state, layer: int, row: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        k_pages, v_pages = state.pages(layer)
        at = np.arange(position + 1)
        block, offset = state.block_table[row, at // state.page_size], at % state.page_size
        return k_pages[block, 0, 0, offset], v_pages[block, 0, offset, 1]

    def hidden(self, batch: TokenBatch, state, case: str) -> np.ndarray:
        assert batch.tokens.dtype == np.int64 and batch.positions.dtype == np.int32
        assert batch.starts.dtype == np.int32 and state.block_table.dtype == np.int32 and state.slots.dtype == np.int64
        assert len(set(state.slots.tolist())) == len(batch.tokens), "two tokens write one slot"
        self.cases.append(case)
        owner = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))
        stream = combine(self.weights.seed, batch.tokens, batch.positions)
        for layer in range(SHAPE.num_layers):
            k_pages, v_pages = state.pages(layer)
            page, offset = state.slots // state.page_size, state.slots % state.page_size
            k_pages[page, 0, 0, offset] = (stream & LOW).astype(np.float32)
            v_pages[page, 0, offset, 1] = ((stream >> np.uint64(24)) & LOW).astype(np.float32)
            seen = [
                prefix_hash(*self.read(state, layer, s, p))
                for s, p in zip(owner, batch.positions.tolist(), strict=True)
            ]
            stream = combine(self.weights.seed, np.array(seen, np.uint64))
        return stream

    def sample(self, hidden, keys: SamplingKeys, temperature: float, case: str):
        assert case == self.cases[-1] and len(hidden) == len(keys.k)
        return draw(hidden, keys, temperature)


def reference(request: RolloutRequest, weight_seed: int, *, seed: int, limit: int) -> dict[str, np.ndarray]:
    """What a request must give under one weight version: no engine, no pages, the whole sequence from its start."""
    tokens = list(request.prompt_token_ids)
    params, sample = request.params, request.sample_id
    layers: list[list[np.ndarray]] = [[] for _ in range(SHAPE.num_layers)]
    out: dict[str, list] = {"tokens": [], "logprobs": [], "entropies": [], "digests": []}
    while True:
        for position in range(len(layers[0]), len(tokens)):
            stream = combine(weight_seed, tokens[position], position)
            for layer in layers:
                low = (stream & LOW).astype(np.float32)
                high = ((stream >> np.uint64(24)) & LOW).astype(np.float32)
                layer.append(np.concatenate([low, high]))
                pairs = np.array(layer)
                stream = combine(weight_seed, prefix_hash(pairs[:, 0].copy(), pairs[:, 1].copy()))
        keys = SamplingKeys(
            seeds=np.array([seed], np.uint64),
            prompt_index=np.array([sample.prompt_index]),
            k=np.array([sample.k]),
            namespace=np.array([int(sample.namespace == "eval")]),
            position=np.array([len(tokens)]),
            greedy=np.array([params.greedy]),
            top_k=np.array([params.top_k]),
            top_p=np.array([params.top_p]),
        )
        drawn, statistics = draw(stream, keys, params.temperature)
        tokens.append(int(drawn[0]))
        out["tokens"].append(int(drawn[0]))
        out["logprobs"].append(statistics.logprob[0])
        out["entropies"].append(statistics.entropy[0])
        out["digests"].append(statistics.digest[0])
        done = len(out["tokens"]) == params.max_new_tokens or len(tokens) == limit
        if done or tokens[-1] in params.stop_token_ids:
            return {name: np.array(values) for name, values in out.items()}


CONFIG = EngineConfig(
    engine_id="e0",
    max_num_seqs=8,
    max_batched_tokens=64,
    block_size=8,
    num_blocks=200,
    prefix_caching=True,
    max_position=64,
    seed=5,
)


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([seed, 7])}


def commit(engine: NativeEngine, version: int) -> None:
    """Commit the weights that the tests use for a version."""
    engine.commit_weights(version, engine.stage_weights(version, weights_of(1000 + version)))


def make_engine(config: EngineConfig = CONFIG, *, model=FakeModel, version: int | None = 0, **changes) -> NativeEngine:
    names = {name: changes.pop(name) for name in list(changes) if name in EngineConfig.__dataclass_fields__}
    engine = NativeEngine(
        replace(config, **names),
        identities=IDENTITIES,
        kv_shape=SHAPE,
        vocab_size=VOCAB,
        weights_factory=FakeWeights,
        model_factory=model,
        clock=lambda: 1.0,
        **changes,
    )
    if version is not None:
        commit(engine, version)
    return engine


def make_requests(prompts: int = 5, group: int = 4, **params) -> list[RolloutRequest]:
    """Groups over prompts of several lengths that share a common beginning, some longer than a block."""
    result = []
    for index in range(prompts):
        length = (3, 17, 33, 8, 25)[index % 5]
        prompt = tuple((i * 7 + (index if i >= 16 else 0)) % VOCAB for i in range(length))
        for k in range(group):
            settings = {"max_new_tokens": 5 + 3 * k + index, "stop_token_ids": (3,), **params}
            result.append(RolloutRequest(SampleId("train", index, k), prompt, SamplingParams(**settings)))
    return result


def collect(engine: NativeEngine, requests) -> dict[SampleId, object]:
    """Generate and check that nothing is held afterwards."""
    samples = {sample.sample_id: sample for sample in engine.generate(requests)}
    assert set(samples) == {request.sample_id for request in requests}
    assert engine.blocks.in_use == 0 and not engine.scheduler.running and not engine.scheduler.waiting
    engine.blocks.check()
    return samples


def same(sample, expected: dict[str, np.ndarray]) -> bool:
    """Equality of every array, bits as integers."""
    return (
        sample.token_ids == tuple(expected["tokens"].tolist())
        and sample.logprobs.dtype == np.float32
        and np.array_equal(sample.logprobs.view(np.uint32), expected["logprobs"].astype(np.float32).view(np.uint32))
        and np.array_equal(sample.entropies.view(np.uint32), expected["entropies"].astype(np.float32).view(np.uint32))
        and np.array_equal(sample.digests, expected["digests"])
    )
