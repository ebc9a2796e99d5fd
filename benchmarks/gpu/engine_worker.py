"""An engine in a process of its own that generates when it is asked to; :mod:`benchmarks.gpu.decode_peers` drives it.

    python -m benchmarks.gpu.engine_worker vime pipelines/qwen3-1.7b-shape-h200.yaml
    python -m benchmarks.gpu.engine_worker vllm FOLDER --option gpu_memory_utilization=0.3

One line of JSON in, one out. The first line out tells what was started. A question is ``{"sequences": N, "prompt": P,
"vocabulary": V, "tokens": T, "seed": S, "logprobs": true}``; the answer has the seconds between handing over N random
prompts of P tokens and having T tokens of each. What an engine prints goes to standard error. vLLM's process imports
nothing of this project: FOLDER has a ``config.json``, the weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Prompts = Sequence[Sequence[int]]


class Engine(Protocol):
    """What is timed."""

    def about(self) -> dict[str, Any]: ...

    def generate(self, prompts: Prompts, tokens: int, seed: int, logprobs: bool) -> int:
        """Generates ``tokens`` tokens for every prompt; returns how many came in all."""


class Vime:
    """The native engine, as a run builds it. Log-probability and digest of every token are always computed."""

    def __init__(self, file: Path, overrides: Sequence[str]) -> None:
        from rlkernel.kernels.cpu.threads import Workers
        from vime.pipeline.loading import load_pipeline
        from vime.pipeline.prepare import prepare
        from vime.runtime.models import load_pipeline_model
        from vime.runtime.sides import SideSpecification, build_engine

        prepared = prepare(load_pipeline(file, list(overrides)), new_run=False)
        pipeline = prepared.pipeline
        workers = Workers(pipeline.threads)
        side = SideSpecification(pipeline, prepared.config, prepared.num_blocks, prepared.longest_sequence)
        self._engine = build_engine(side, "vime", workers, prepared.tokenizer)
        self._digest = self._engine.stage_weights(0, load_pipeline_model(pipeline).tensors)
        self._engine.commit_weights(0, self._digest)

    def about(self) -> dict[str, Any]:
        """Engine and served weights."""
        return {"engine": "vime native", "weights": self._digest}

    def generate(self, prompts: Prompts, tokens: int, seed: int, logprobs: bool) -> int:
        """See :class:`Engine`. A sample's number is another in every call, so that other tokens are drawn."""
        from vime.types import RolloutRequest, SampleId, SamplingParams

        params = SamplingParams(temperature=1.0, max_new_tokens=tokens)
        requests = [
            RolloutRequest(SampleId("train", seed, k), tuple(prompt), params) for k, prompt in enumerate(prompts)
        ]
        return sum(len(sample.token_ids) for sample in self._engine.generate(requests))


class Vllm:
    """vLLM with random weights, its sampler at temperature 1."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        import vllm

        self._version, self._options = vllm.__version__, options
        self._llm = vllm.LLM(str(folder), skip_tokenizer_init=True, load_format="dummy", **options)
        self._params = vllm.SamplingParams

    def about(self) -> dict[str, Any]:
        """Version and options."""
        settings = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
        return {"engine": f"vllm {self._version}", "options": self._options, "environment": settings}

    def generate(self, prompts: Prompts, tokens: int, seed: int, logprobs: bool) -> int:
        """See :class:`Engine`."""
        params = self._params(
            max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0 if logprobs else None
        )
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def answer(engine: Engine, question: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one generation. Raises RuntimeError if it ended early."""
    sequences, tokens, seed = question["sequences"], question["tokens"], question["seed"]
    draw = np.random.default_rng(seed)
    prompts = draw.integers(0, question["vocabulary"], (sequences, question["prompt"])).tolist()
    start = time.perf_counter()
    came = engine.generate(prompts, tokens, seed, question["logprobs"])
    seconds = time.perf_counter() - start
    if came != sequences * tokens:
        raise RuntimeError(f"{came} tokens came instead of {sequences} x {tokens}")
    return {"seconds": seconds}


def option(text: str) -> tuple[str, Any]:
    """``name=value`` with a JSON value, or a string."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main() -> int:
    """Start, then answer until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("vime", "vllm"))
    parser.add_argument("model", type=Path, help="A pipeline for vime, a folder for vllm.")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--option", action="append", type=option, default=[], help="name=JSON for vLLM's LLM.")
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Engine
    engine = Vime(given.model, given.overrides) if given.engine == "vime" else Vllm(given.model, dict(given.option))
    print(json.dumps(engine.about()), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
