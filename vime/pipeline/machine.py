"""What a run finds on this machine: a place for its directory, enough disk and memory, processors for its threads."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import torch

from rlkernel.kernels.cpu.threads import available_cpus
from rlkernel.models.config import ModelConfig
from vime.errors import InputError
from vime.pipeline.loading import LoadedPipeline
from vime.pipeline.paths import unusable_path
from vime.pipeline.problems import Problem
from vime.pipeline.schema import Pipeline
from vime.pipeline.sizes import bytes_per_block, kv_blocks, longest_sequence
from vime.store.lock import holder_of

_BYTES_PER_TOKEN = 64  # token, mask, version, both sides' log-probability, entropy and digest, and the log's share
_BYTES_PER_SAMPLE = 4096
_SPARE = 64 * 2**20
_BYTES_PER_PARAMETER = 28  # master, both moments, gradient; weights of trainer and engine; what was loaded
_GPU_BYTES_PER_PARAMETER = 8  # master, gradient
_MOMENTS = 8
_COPIES = 4  # of the weights on a GPU: the trainer's two, the served and the staged ones
_LAST_BYTES = 2**16  # of the log; its last line, that of a finished run, has a few hundred
_BYTES_PER_SEQUENCE = 96  # bookkeeping of one running sequence, beside its table of blocks


def check_run_directory(loaded: LoadedPipeline, *, new_run: bool) -> list[Problem]:
    """The run directory can be made; for a new run it does not exist yet, or is empty."""
    name, key = loaded.pipeline.run_directory, "run_directory"
    message = unusable_path(name)
    if message is None and not Path(name).absolute().name:
        message = f"{name!r} has no name of its own: a folder inside of it is needed"
    if message is not None:
        return [loaded.problem(key, message)]
    path = Path(name)
    if path.exists() and not path.is_dir():
        return [loaded.problem(key, f"{name!r} is a file; a new folder is needed")]
    if path.is_dir() and any(path.iterdir()):
        if not holds_run(path):
            message = f"{name!r} is not empty and holds no run: name a folder that does not exist"
            return [loaded.problem(key, message)]
        return [loaded.problem(key, _in_the_way(name))] if new_run else []
    parent = _existing(path)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return [loaded.problem(key, f"{name!r} cannot be made: {str(parent)!r} is not a writable folder")]
    return []


def _in_the_way(name: str) -> str:
    """What a new run finds in its folder, and what can be done."""
    path, quoted = Path(name), shlex.quote(name)
    if holder := holder_of(path):
        return (
            f"{name!r} holds a run that is alive ({holder} works on it): wait until it ends, or start beside it: "
            "--set run_directory=OTHER"
        )
    again = "Keep it and start again beside it: --set run_directory=OTHER. Move it aside and start again: --fresh"
    if is_finished(path):
        return f"{name!r} holds a run that is finished. See it: vime report {quoted}. {again}"
    return f"{name!r} holds a run already. Continue it: vime resume {quoted}. {again}"


def is_finished(folder: Path) -> bool:
    """Whether the last line of a run's log is that of its end. Only that line is read, and nothing is verified."""
    try:
        with (folder / "timeline.jsonl").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            last = log.read().rstrip(b"\n").rpartition(b"\n")[2]
        event = json.loads(last)
    except (OSError, ValueError):
        return False
    return isinstance(event, dict) and event.get("type") == "run_finished"


def holds_run(folder: Path) -> bool:
    """Whether a run was begun in a folder."""
    return (folder / "timeline.jsonl").exists() or (folder / "pipeline.yaml").exists()


def check_threads(loaded: LoadedPipeline) -> list[Problem]:
    """More threads than this machine can make anything of."""
    threads, cpus = loaded.pipeline.threads, available_cpus()
    most = max(64, 4 * cpus)
    if threads is None or threads <= most:
        return []
    message = (
        f"{threads} threads on {cpus} processor{'s' if cpus != 1 else ''} would wait for each other: at most {most} "
        "are possible here, and null takes one a processor. The number changes no bit"
    )
    return [loaded.problem("threads", message)]


def check_device(loaded: LoadedPipeline) -> list[Problem]:
    """``device: cuda`` needs a GPU of a known target that executes the contract's profile, and Triton."""
    pipeline = loaded.pipeline
    if pipeline.device == "cpu":
        return []
    from rlkernel.verify.vectors.gpu import gpu_backend

    backend = gpu_backend()
    if isinstance(backend, str):
        return [loaded.problem("device", f"'cuda' cannot be used: {backend}; 'cpu' can")]
    pair = (pipeline.contract.profile, pipeline.contract.dtype)
    if pair not in backend.profiles:
        have = ", ".join(f"{profile} with {dtype}" for profile, dtype in backend.profiles)
        message = f"{pair[0]} with {pair[1]} has no kernels on {backend.device} ({backend.name}); it executes {have}"
        return [loaded.problem("contract.profile", message)]
    return []


def check_kernels(loaded: LoadedPipeline, config: ModelConfig) -> list[Problem]:
    """The attention kernels of a GPU take heads in whole steps of their matrix products."""
    if loaded.pipeline.device == "cpu" or config.head_dim % 16 == 0:
        return []
    message = f"the model's head_dim = {config.head_dim} is no multiple of 16, which attention on a GPU needs"
    return [loaded.problem("device", message)]


def _memory(device: str) -> tuple[str, int]:
    """What holds weights and KV cache, in words, and its bytes."""
    if device == "cuda":
        return "the GPU", int(torch.cuda.get_device_properties(0).total_memory)
    return "this machine", total_memory()


def bytes_per_parameter(pipeline: Pipeline) -> int:
    """Of weights, gradients and optimizer, where both sides compute."""
    if pipeline.device == "cpu":
        return _BYTES_PER_PARAMETER
    width = 2 if pipeline.contract.dtype == "bfloat16" else 4
    moments = _MOMENTS if pipeline.stages.train.moments == "device" else 0
    return _GPU_BYTES_PER_PARAMETER + moments + _COPIES * width


def estimated_bytes(pipeline: Pipeline, config: ModelConfig) -> int:
    """Disk that a run may take: checkpoints (one is written before the oldest is removed) and per-token arrays."""
    checkpoint = _parameters(config) * (4 + 4 + 4 + 4)  # master, both moments, weights
    every = pipeline.checkpoint.every
    kept = min(pipeline.checkpoint.keep + 1, -(-pipeline.steps // every) + 1) if every else 0
    rollout, evaluate = pipeline.stages.rollout, pipeline.stages.evaluate
    samples = pipeline.steps * rollout.prompts_per_step * rollout.samples_per_prompt
    evaluations = 2 + (pipeline.steps // evaluate.every if evaluate.every else 0)
    samples += evaluations * evaluate.prompts * evaluate.samples_per_prompt
    per_sample = _BYTES_PER_SAMPLE + _BYTES_PER_TOKEN * rollout.sampling.max_new_tokens
    return checkpoint * kept + samples * per_sample + _SPARE


def check_disk(loaded: LoadedPipeline, config: ModelConfig) -> list[Problem]:
    """Disk space where the run directory will be."""
    if unusable_path(loaded.pipeline.run_directory) is not None:
        return []
    parent = _existing(Path(loaded.pipeline.run_directory))
    needed, free = estimated_bytes(loaded.pipeline, config), shutil.disk_usage(parent).free
    if free < needed:
        message = f"the run may write {_size(needed)}, and {str(parent)!r} has {_size(free)} free"
        return [loaded.problem("run_directory", message)]
    return []


def check_memory(loaded: LoadedPipeline, config: ModelConfig, longest_prompt: int) -> list[Problem]:
    """Weights with their optimizer, and the KV cache, each against the whole memory of what computes."""
    pipeline = loaded.pipeline
    if pipeline.device == "cuda" and not torch.cuda.is_available():
        return []  # reported with the device
    where, memory = _memory(pipeline.device)
    weights = _parameters(config) * bytes_per_parameter(pipeline)
    if weights > memory:
        message = f"weights, gradients and optimizer take {_size(weights)}, and {where} has {_size(memory)}"
        return [loaded.problem("model", message)]
    rollout = pipeline.stages.rollout
    sequence_blocks = -(-longest_sequence(pipeline, config, longest_prompt) // rollout.block_size)
    try:
        blocks = kv_blocks(pipeline, config, longest_prompt)
    except InputError:
        return []  # no block fits: reported with the sequences' sizes
    cache = (blocks + 1) * bytes_per_block(pipeline, config)
    rows = rollout.max_num_seqs * (_BYTES_PER_SEQUENCE + 4 * sequence_blocks)
    if rows > total_memory():
        message = (
            f"the tables of {rollout.max_num_seqs} sequences take {_size(rows)}, and this machine has "
            f"{_size(total_memory())}: "
            "no more run at a time than a step has samples"
        )
        return [loaded.problem("stages.rollout.max_num_seqs", message)]
    if cache > memory:
        sized = [name for name in ("num_blocks", "kv_memory_bytes") if getattr(rollout, name) is not None]
        message = (
            f"the KV cache of {blocks} blocks, {rollout.block_size} tokens each, takes {_size(cache)}, and "
            f"{where} has {_size(memory)}; its size follows from num_blocks or kv_memory_bytes, else from "
            "max_num_seqs, and from block_size"
        )
        return [loaded.problem(f"stages.rollout.{sized[0] if sized else 'max_num_seqs'}", message)]
    return []


def total_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(count: int) -> str:
    """Decimal bytes for people; Python's floats end at 1e308, and this does not."""
    return f"{count / 1e9:,.2f} GB" if count < 10**15 else f"more than {min(count, 10**30) // 10**12:,} TB"


def _existing(path: Path) -> Path:
    """The nearest ancestor that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _parameters(config: ModelConfig) -> int:
    result = 0
    for shape in config.weight_shapes().values():
        product = 1
        for size in shape:
            product *= size
        result += product
    return result
