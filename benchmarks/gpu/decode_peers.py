"""Generation by the native engine and by real vLLM, resident on one GPU, in turn: tokens a second.

    python -m benchmarks.gpu.decode_peers --out benchmarks/results/gpu_decode_peers_h200.json \\
        --peer-python /tmp/vllm/bin/python --arms vime vllm vllm-logprobs vllm-batch-invariant

Each arm is a process of its own (:mod:`benchmarks.gpu.engine_worker`); one computes at a time. A round asks every arm
for every number of sequences; the first round is not counted. ``decode``: tokens after the first of every sequence,
over the time that T tokens take longer than one. ``ratio``: the native engine's median over the peer's, above 1 the
native engine is faster.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine
from rlkernel.models.hf_config import config_json
from vime.pipeline.loading import load_pipeline
from vime.pipeline.prepare import Prepared, prepare

MODULE = "benchmarks.gpu.decode_peers"
PIPELINE = "pipelines/qwen3-1.7b-shape-h200.yaml"
SHAPE = ("data.parameters.length=512", "stages.rollout.max_num_seqs=256", "stages.rollout.max_batched_tokens=16384")
OURS = "vime"
FLASH = 'attention_config={"backend": "FLASH_ATTN"}'


@dataclass(frozen=True)
class Kind:
    """How a peer is started. ``worker``: arms of one worker differ in what they ask it for."""

    worker: str
    logprobs: bool = True
    environment: tuple[tuple[str, str], ...] = ()


KINDS: Mapping[str, Kind] = {
    OURS: Kind("vime"),
    "vllm": Kind("vllm", logprobs=False),
    "vllm-logprobs": Kind("vllm"),
    "vllm-batch-invariant": Kind("vllm-batch-invariant", environment=(("VLLM_BATCH_INVARIANT", "1"),)),
}


class Worker:
    """A process with an engine. Raises RuntimeError, with what it was, when it ends without an answer."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.about = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def seconds(self, question: Mapping[str, Any]) -> float:
        """Of one generation."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {"median": statistics.median(values), "least": min(values), "largest": max(values)}


def command(worker: str, given: argparse.Namespace, prepared: Prepared, folder: Path) -> list[str]:
    """How a worker is started."""
    module = ["-m", "benchmarks.gpu.engine_worker"]
    if worker == OURS:
        overrides = [f"--set={override}" for override in given.overrides or SHAPE]
        return [sys.executable, *module, "vime", given.pipeline, *overrides]
    rollout = prepared.pipeline.stages.rollout
    options = (
        f"dtype={prepared.pipeline.contract.dtype}",
        f"max_model_len={prepared.longest_sequence}",
        f"max_num_seqs={rollout.max_num_seqs}",
        f"max_num_batched_tokens={max(rollout.max_batched_tokens, prepared.longest_sequence)}",
        "enable_prefix_caching=false",
        *(given.options or (FLASH, "gpu_memory_utilization=0.3")),
    )
    return [given.peer_python, *module, "vllm", str(folder), *(f"--option={option}" for option in options)]


def measure(workers: Mapping[str, Worker], given: argparse.Namespace, prepared: Prepared) -> list[dict[str, Any]]:
    """A row for every number of sequences."""
    prompt = prepared.longest_prompt
    times: dict[tuple[int, str], list[tuple[float, float]]] = {}
    seed = 0
    for number in range(given.rounds + 1):
        for sequences in given.sequences:
            for arm in given.arms:
                worker, took = workers[KINDS[arm].worker], []
                for tokens in (1, given.tokens):
                    seed += 1
                    question = {
                        "sequences": sequences, "prompt": prompt, "vocabulary": prepared.config.vocab_size,
                        "tokens": tokens, "seed": seed, "logprobs": KINDS[arm].logprobs,
                    }  # fmt: skip
                    took.append(worker.seconds(question))
                one, whole = took
                print(f"round {number} {sequences:4d} sequences {arm:22s} {one:8.4f} s {whole:8.4f} s", flush=True)
                if number:
                    times.setdefault((sequences, arm), []).append((one, whole))
    rows = []
    for sequences in given.sequences:
        row: dict[str, Any] = {"sequences": sequences, "prompt_tokens": prompt, "new_tokens": given.tokens, "arms": {}}
        for arm in given.arms:
            pairs = times[sequences, arm]
            row["arms"][arm] = {
                "tokens_per_s": spread([sequences * given.tokens / whole for _, whole in pairs]),
                "decode": spread([sequences * (given.tokens - 1) / (whole - one) for one, whole in pairs]),
            }
        ours = row["arms"].get(OURS)
        row["ratio"] = {
            arm: {key: ours[key]["median"] / other[key]["median"] for key in other}
            for arm, other in row["arms"].items()
            if ours is not None and arm != OURS
        }
        rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Start the arms, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", default=PIPELINE)
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has vLLM.")
    parser.add_argument("--arms", nargs="+", choices=list(KINDS), default=[OURS, "vllm", "vllm-logprobs"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="Rounds that are counted.")
    parser.add_argument("--set", dest="overrides", action="append", help=f"Instead of {' '.join(SHAPE)}.")
    parser.add_argument("--option", dest="options", action="append", help="name=JSON for vLLM, instead of the usual.")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    prepared = prepare(load_pipeline(Path(given.pipeline), list(given.overrides or SHAPE)), new_run=False)
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = config_json(prepared.config, prepared.pipeline.contract.dtype)
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        try:
            for arm in given.arms:
                kind = KINDS[arm]
                if kind.worker not in workers:
                    line = command(kind.worker, given, prepared, Path(folder))
                    workers[kind.worker] = Worker(kind.worker, line, dict(kind.environment))
                    print(kind.worker, json.dumps(workers[kind.worker].about), flush=True)
            rows = measure(workers, given, prepared)
            about = {name: worker.about for name, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.close()
    for row in rows:
        for arm, figures in row["arms"].items():
            ratio = row["ratio"].get(arm)
            print(
                f"{row['sequences']:4d} sequences {arm:22s} {figures['tokens_per_s']['median']:10.0f} tokens/s, decode "
                f"{figures['decode']['median']:10.0f}"
                + (f"   ratio {ratio['tokens_per_s']:.2f}, decode {ratio['decode']:.2f}" if ratio else "")
            )
    if given.out is not None:
        head = recorded(sys.argv[1:] if arguments is None else arguments)
        result = {**head, "workers": about, "rounds": given.rounds, "rows": rows}
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def recorded(arguments: Sequence[str]) -> dict[str, Any]:
    """Date, command, device and versions."""
    if torch.cuda.is_available():
        from benchmarks.gpu.timing import about

        return about(MODULE, arguments)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m", MODULE, *arguments]),
        "device": dict(machine(torch.get_num_threads())),
    }


if __name__ == "__main__":
    sys.exit(main())
