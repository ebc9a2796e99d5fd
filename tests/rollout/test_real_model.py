"""The engine over the real runner: every schedule gives the bits that the trainer's whole-sequence forward gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkernel.kernels.cpu.threads import Workers
from rlkernel.kernels.torch_native.weights import TorchWeightSet
from rlkernel.models.definition import define_model
from rlkernel.models.presets import preset
from rlkernel.ops.composition import Numerics, without_certificates
from rlkernel.ops.host import TokenBatch
from rlkernel.ops.runner import ModelRunner
from rlkernel.ops.weights import WeightSet
from rlkernel.verify.evidence import Evidence
from tests.rollout.fake import IDENTITIES, collect
from vime.rollout.native import EngineConfig, KVShape, NativeEngine
from vime.train.interface import TrainSample
from vime.types import RolloutRequest, SampleId, SamplingParams

MAX_POSITION = 128


class Setting:
    """One preset with random weights, engines over it, and the trainer's view of it."""

    def __init__(self, name: str, dtype: str, threads: int = 2, numerics: Numerics = "exact") -> None:
        self.name = name
        loaded = preset(name, 3, dtype)
        self.model, self.tensors, self.dtype, self.numerics = loaded.config, dict(loaded.tensors), dtype, numerics
        self.workers = Workers(threads)
        self.definition = define_model(self.model)
        self.evidence = Evidence("e0")
        self.runner = ModelRunner(
            self.definition,
            self.pack(self.tensors),
            without_certificates(numerics),
            self.evidence,
            dtype=dtype,
            tp=1,
            workers=self.workers,
            max_position=MAX_POSITION,
        )

    def pack(self, tensors):
        if self.numerics == "native":
            return TorchWeightSet(self.definition, tensors, dtype=self.dtype, workers=self.workers)
        return WeightSet(self.definition, tensors, dtype=self.dtype, tp=1, workers=self.workers)

    def engine(self, tensors=None, **changes) -> NativeEngine:
        values = dict(
            engine_id="e0",
            max_num_seqs=16,
            max_batched_tokens=256,
            block_size=16,
            num_blocks=128,
            prefix_caching=True,
            max_position=MAX_POSITION,
            seed=11,
        )
        model = self.model
        engine = NativeEngine(
            EngineConfig(**{**values, **changes}),
            identities=IDENTITIES,
            kv_shape=KVShape(model.num_layers, model.num_kv_heads, model.head_dim),
            vocab_size=model.vocab_size,
            weights_factory=self.pack,
            model_factory=self.runner.with_weights,
            evidence=self.evidence,
        )
        engine.commit_weights(0, engine.stage_weights(0, self.tensors if tensors is None else tensors))
        return engine

    def requests(self) -> list[RolloutRequest]:
        rng = np.random.default_rng(1)
        beginning = rng.integers(0, self.model.vocab_size, 20).tolist()
        prompts = [beginning + rng.integers(0, self.model.vocab_size, n).tolist() for n in (0, 1, 13, 50)]
        return [
            RolloutRequest(
                SampleId("train", index, k),
                tuple(prompt),
                SamplingParams(temperature=(1.0, 0.7)[k % 2], max_new_tokens=8 + 5 * k),
            )
            for index, prompt in enumerate(prompts)
            for k in range(3)
        ]

    def trainer_scores(self, sample, temperature: float):
        tokens = np.array(sample.prompt_token_ids + sample.token_ids, np.int64)
        first, n = len(sample.prompt_token_ids) - 1, len(tokens)
        batch = TokenBatch(tokens, np.arange(n, dtype=np.int32), np.array([0, n], np.int32))
        hidden = self.runner.hidden(batch, None, "trainer_score")
        return self.runner.logprobs(
            np.ascontiguousarray(hidden[first : n - 1]), tokens[first + 1 :], temperature, "trainer_score"
        )


@pytest.fixture(scope="module", params=[("tiny-qwen3", "float32"), ("tiny-qwen2", "bfloat16")], ids=lambda p: p[0])
def setting(request) -> Setting:
    return Setting(*request.param)


@pytest.fixture(scope="module")
def samples(setting):
    return collect(setting.engine(), setting.requests())


def differing(setting, samples, other) -> list:
    return [
        s
        for s in samples
        if samples[s].token_ids != other[s].token_ids
        or not np.array_equal(samples[s].logprobs.view(np.uint32), other[s].logprobs.view(np.uint32))
        or not np.array_equal(samples[s].entropies.view(np.uint32), other[s].entropies.view(np.uint32))
        or not np.array_equal(samples[s].digests, other[s].digests)
    ]


def unequal_to_trainer(setting, samples) -> int:
    count = 0
    for sample_id, sample in samples.items():
        scores = setting.trainer_scores(sample, (1.0, 0.7)[sample_id.k % 2])
        count += int((sample.logprobs.view(np.uint32) != scores.logprob.view(np.uint32)).sum())
        count += int((sample.digests != scores.digest).any(axis=1).sum())
        count += int((sample.entropies.view(np.uint32) != scores.entropy.view(np.uint32)).sum())
    return count


def test_the_engine_equals_the_trainers_whole_sequence_forward(setting, samples) -> None:
    assert sum(len(s.token_ids) for s in samples.values()) == sum(r.params.max_new_tokens for r in setting.requests())
    assert len({token for s in samples.values() for token in s.token_ids}) > 20
    assert all(np.isfinite(s.logprobs).all() and (s.logprobs < 0).all() for s in samples.values())
    assert unequal_to_trainer(setting, samples) == 0
    assert {"rollout_prefill", "rollout_decode", "trainer_score"} <= setting.evidence.cases()


SCHEDULES = {
    "one at a time": {"max_num_seqs": 1},
    "small chunks, block 8": {"max_batched_tokens": 11, "block_size": 8},
    "block 64": {"block_size": 64},
    "no prefix cache": {"prefix_caching": False, "block_size": 24},
    "preemption": {"num_blocks": 20, "block_size": 8, "prefix_caching": False},
    "preemption with prefix cache": {"num_blocks": 12, "block_size": 8},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_changes_a_bit(setting, samples, name: str) -> None:
    engine = setting.engine(**SCHEDULES[name])
    assert differing(setting, samples, collect(engine, setting.requests()[::-1])) == []
    assert (engine.scheduler.preemptions > 0) == name.startswith("preemption")


def test_the_number_of_threads_changes_no_bit(setting, samples) -> None:
    other = Setting(setting.name, setting.dtype, threads=1)
    assert differing(setting, samples, collect(other.engine(), other.requests())) == []


def test_one_flipped_bit_of_one_weight_is_noticed(setting, samples) -> None:
    tensors = {name: tensor.clone() for name, tensor in setting.tensors.items()}
    bits, mask = (torch.int16, 1 << 3) if setting.dtype == "bfloat16" else (torch.int32, 1 << 12)
    tensors["model.layers.1.self_attn.v_proj.weight"].view(bits).view(-1)[5] ^= mask
    engine = setting.engine(tensors)
    other = collect(engine, setting.requests())
    assert engine.committed().digest != setting.engine().committed().digest
    assert unequal_to_trainer(setting, other) > 0


def test_a_swapped_block_is_noticed(setting, samples) -> None:
    engine = setting.engine()
    requests = setting.requests()
    engine.submit(requests)
    made = []
    for step in range(200):
        made += engine.step()
        if step == 3:
            keys, values = engine._kv.pages(1)
            first, second = engine.scheduler.running[-1].blocks[:2]
            for pages in (keys, values):
                pages[[first, second]] = pages[[second, first]]
        if not engine.unfinished:
            break
    by_id = {s.sample_id: s for s in made}
    assert differing(setting, samples, by_id)
    assert unequal_to_trainer(setting, by_id) > 0


def test_stock_kernels_run_under_the_same_scheduler_and_are_told_apart(setting) -> None:
    native = Setting(setting.name, setting.dtype, numerics="native")
    requests = native.requests()[::3]
    samples = collect(native.engine(max_batched_tokens=40), requests)
    assert [len(samples[r.sample_id].token_ids) for r in requests] == [r.params.max_new_tokens for r in requests]
    assert all(np.isfinite(s.logprobs).all() for s in samples.values())
    assert native.engine().committed().digest == setting.engine().committed().digest
    assert unequal_to_trainer(setting, samples) > 0


def test_the_engine_scores_a_given_sequence_by_a_forward_of_its_own(setting, samples) -> None:
    engine = setting.engine()
    sample = next(iter(samples.values()))
    given = TrainSample(
        sample.sample_id, sample.prompt_token_ids, sample.token_ids, np.ones(len(sample.token_ids), np.bool_)
    )
    scored = engine.score(given, 1.0)
    assert np.array_equal(scored.logprobs.view(np.uint32), sample.logprobs.view(np.uint32))
    assert np.array_equal(scored.digests, sample.digests)
    other = engine.score(given, 0.7)
    assert not np.array_equal(other.digests, sample.digests)
