"""Speed of whole steps on an H200: decode, a scoring forward and a training step at the shape of Qwen3-1.7B.

    python -m benchmarks.gpu.model_step --out benchmarks/results/gpu_model_step_h200.json
    python -m benchmarks.gpu.model_step --layers 1 --only decode-32      # compiles the kernels of one section

Profile hopper, random weights made on the GPU, 512 tokens of context in decode, sequences of 1,024 tokens in training.
``limit_ms`` is what the weights' bytes (decode) or the products' operations (training) need at the GPU's peak. The peer
of the training step is transformers' model in bfloat16 with PyTorch's attention, without an optimizer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.timing import BF16_FLOPS, MEMORY_BYTES_A_SECOND, about
from rlkernel.contract.build import build_contract
from rlkernel.contract.schedules import Schedule
from rlkernel.models.config import ModelConfig
from rlkernel.models.definition import define_model
from rlkernel.ops.composition import Composition
from rlkernel.ops.device.gradients import DeviceGradients
from rlkernel.ops.device.head import LinearLogprob
from rlkernel.ops.device.linear import products
from rlkernel.ops.device.regions import device_ops
from rlkernel.ops.device.runner import DeviceRunner
from rlkernel.ops.device.weights import DeviceWeights
from rlkernel.ops.head import SamplingKeys
from rlkernel.ops.host import TokenBatch
from rlkernel.verify.evidence import Evidence
from vime.rollout.native.device import DevicePagedKV
from vime.rollout.native.model import BatchState, KVShape
from vime.train.native.device import DeviceAdamW
from vime.train.native.optimizer import OptimizerConfig

MODULE = "benchmarks.gpu.model_step"
DEVICE = torch.device("cuda", 0)
PAGE, CONTEXT, BLOCKS, LENGTH, SEQUENCES = 16, 512, 64, 1024, 4
RNG = np.random.default_rng(0)


def config(layers: int) -> ModelConfig:
    """Qwen3-1.7B with another number of layers."""
    return ModelConfig(
        family="qwen3", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_layers=layers, num_heads=16,
        num_kv_heads=8, head_dim=128, max_position=2048, rms_norm_eps=1e-6, qk_norm=True, tied_embeddings=True,
    )  # fmt: skip


def clock() -> float:
    """Seconds, when the GPU has done everything."""
    torch.cuda.synchronize()
    return time.perf_counter()


class Model:
    """The model, its runner, and its KV pages."""

    def __init__(self, layers: int) -> None:
        self.config, self.definition = config(layers), define_model(config(layers))
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.tensors = {
            name: (
                torch.randn(shape, generator=generator, device=DEVICE) * (0.02 if len(shape) > 1 else 0.1)
                + ("norm" in name)
            ).to(torch.bfloat16)
            for name, shape in self.config.weight_shapes().items()
        }
        contract = build_contract(self.config, profile="hopper", dtype="bfloat16")
        self.evidence = Evidence("benchmark")
        self.runner = DeviceRunner(
            self.definition,
            DeviceWeights(self.definition, self.tensors, dtype="bfloat16", tp=1, device=DEVICE),
            Composition("exact", device_ops(), LinearLogprob()),
            self.evidence,
            contract,
            max_position=2048,
        )
        self.parameters = sum(tensor.numel() for tensor in self.tensors.values())
        self._pages: DevicePagedKV | None = None

    @property
    def pages(self) -> DevicePagedKV:
        """Pages for 256 sequences, full of keys."""
        if self._pages is None:
            shape = KVShape(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
            self._pages = DevicePagedKV(shape, 256 * BLOCKS, PAGE, dtype=torch.bfloat16, device=DEVICE)
            for layer in range(self.config.num_layers):
                for pages in self._pages.pages(layer):
                    pages[1:] = torch.randn(pages.shape[1:], device=DEVICE).to(pages.dtype)
        return self._pages


def decode(model: Model, rows: int) -> dict[str, Any]:
    """Steps of ``rows`` sequences: the graph and the drawing of a token, as an engine does both."""
    table = (1 + np.arange(rows * BLOCKS)).astype(np.int32).reshape(rows, BLOCKS)
    owner = np.arange(rows)

    def step(number: int, stops: bool) -> float:
        positions = np.full(rows, CONTEXT + number, np.int32)
        slots = table[owner, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        batch = TokenBatch(RNG.integers(0, 151936, rows), positions, np.arange(rows + 1, dtype=np.int32))
        state = BatchState(model.pages, np.ascontiguousarray(table[:, : (CONTEXT + number) // PAGE + 1]), slots)
        nothing = np.zeros(rows, np.int64)
        keys = SamplingKeys(
            np.full(rows, 7, np.uint64), owner, nothing, nothing, positions.astype(np.int64) + 1,
            np.zeros(rows, np.bool_), nothing, np.ones(rows),
        )  # fmt: skip
        start = clock()
        hidden = model.runner.hidden(batch, state, "rollout_decode")
        if stops:
            return clock() - start
        model.runner.sample(hidden, keys, 1.0, "rollout_decode")
        return clock() - start

    start = clock()
    step(0, False)
    first = clock() - start
    whole = statistics.median(step(number, False) for number in range(1, 31))
    body = statistics.median(step(number, True) for number in range(31, 46))
    limit = 2 * model.parameters / MEMORY_BYTES_A_SECOND
    return {
        "sequences": rows,
        "step_ms": 1e3 * whole,
        "body_ms": 1e3 * body,
        "tokens_per_s": rows / whole,
        "limit_ms": 1e3 * limit,
        "share": limit / whole,
        "first_step_s": first,
    }


def sequences() -> TokenBatch:
    """Whole sequences of a training batch."""
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), SEQUENCES)
    starts = (np.arange(SEQUENCES + 1) * LENGTH).astype(np.int32)
    return TokenBatch(RNG.integers(0, 151936, LENGTH * SEQUENCES), positions, starts)


def score(model: Model) -> dict[str, Any]:
    """A forward of whole sequences and their log-probabilities."""
    batch, tokens = sequences(), LENGTH * SEQUENCES
    targets = RNG.integers(0, 151936, tokens)
    times = []
    for _ in range(4):
        start = clock()
        hidden = model.runner.hidden(batch, None, "trainer_score")
        middle = clock()
        model.runner.logprobs(hidden, targets, 1.0, "trainer_score")
        times.append((middle - start, clock() - start))
    whole = statistics.median(both for _, both in times[1:])
    limit = 2 * model.parameters * tokens / BF16_FLOPS
    body = statistics.median(b for b, _ in times[1:])
    return {
        "tokens": tokens, "ms": 1e3 * whole, "body_ms": 1e3 * body, "tokens_per_s": tokens / whole,
        "limit_ms": 1e3 * limit, "share": limit / whole,
    }  # fmt: skip


def train(model: Model, checkpointing: bool) -> dict[str, Any]:
    """A training step with one update: forward, backward, AdamW, and the weights' fused form."""
    optimizer = DeviceAdamW(OptimizerConfig(Schedule(1e-5)), model.tensors, "bfloat16", DEVICE, Evidence("optimizer"))
    batch, tokens = sequences(), LENGTH * SEQUENCES
    rows, targets = np.arange(tokens), RNG.integers(0, 151936, tokens)
    coefficient = (RNG.standard_normal(tokens) / tokens).astype(np.float32)
    names = ("gradients", "forward", "backward", "finish", "adamw", "weights")
    times: list[list[float]] = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        at = [clock()]
        gradients = DeviceGradients(
            model.config.weight_shapes(), DEVICE, tied_embedding=model.definition.regions[0].weights[0]
        )
        at.append(clock())
        tape = model.runner.forward(batch, rows, targets, 1.0, checkpointing=checkpointing)
        at.append(clock())
        model.runner.backward(tape, coefficient, gradients)
        at.append(clock())
        gradients.end_leaf()
        finished = gradients.finish()
        at.append(clock())
        _, _, weights = optimizer.update(finished)
        at.append(clock())
        model.runner.weights.update(weights)
        at.append(clock())
        times.append([1e3 * (b - a) for a, b in pairwise(at)])
        del tape, gradients, finished
    best = min(times[1:], key=sum)
    limit = 6 * model.parameters * tokens / BF16_FLOPS
    return {
        "tokens": tokens, "checkpointing": checkpointing, "ms": sum(best),
        "parts_ms": dict(zip(names, best, strict=True)), "tokens_per_s": 1e3 * tokens / sum(best),
        "limit_ms": 1e3 * limit, "share": 1e3 * limit / sum(best),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "first_step_s": sum(times[0]) / 1e3,
    }  # fmt: skip


def peer(layers: int) -> dict[str, Any]:
    """Forward and backward of transformers' Qwen3 over the same batch, with the loss over all tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    c = config(layers)
    settings = Qwen3Config(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(DEVICE):
        other = Qwen3ForCausalLM(settings).to(torch.bfloat16)
    ids = torch.from_numpy(sequences().tokens.reshape(SEQUENCES, LENGTH)).to(DEVICE)
    times = []
    for _ in range(3):
        start = clock()
        loss = other(input_ids=ids, labels=ids).loss
        middle = clock()
        loss.backward()
        times.append((1e3 * (middle - start), 1e3 * (clock() - middle)))
    forward, backward = min(times[1:], key=sum)
    return {"tokens": SEQUENCES * LENGTH, "forward_ms": forward, "backward_ms": backward}


def sections(model: Model, layers: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> measurement, in the order in which they run."""
    return {
        "decode-32": lambda: decode(model, 32),
        "decode-1": lambda: decode(model, 1),
        "decode-256": lambda: decode(model, 256),
        "decode-8": lambda: decode(model, 8),
        "decode-64": lambda: decode(model, 64),
        "train": lambda: train(model, False),
        "score": lambda: score(model),
        "train-checkpointing": lambda: train(model, True),
        "transformers": lambda: peer(layers),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the sections; each is written as soon as it is there, and a failure is a line of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args(arguments)
    model = Model(given.layers)
    result: dict[str, Any] = {
        **about(MODULE, sys.argv[1:] if arguments is None else arguments),
        "layers": given.layers,
        "parameters": model.parameters,
    }
    failed = False
    for name, measure in sections(model, given.layers).items():
        if given.only and name not in given.only:
            continue
        try:
            result[name] = measure()
        except Exception as error:
            result[name], failed = {"failed": f"{type(error).__name__}: {error}"}, True
        torch.cuda.empty_cache()
        print(name, json.dumps(result[name]), flush=True)
        result["facts"] = {**model.evidence.facts, "vendor": products(DEVICE).counts()}
        if given.out is not None:
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
