"""Writing of Hugging Face folders that transformers loads: whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from rlkernel.errors import ModelError
from rlkernel.models.config import ModelConfig
from rlkernel.models.dtypes import TORCH_DTYPES
from rlkernel.models.hf_config import config_json, generation_json
from rlkernel.models.loading import check_tensors

if TYPE_CHECKING:
    from rlkernel.models.tokenizer import Tokenizer

DEFAULT_SHARD_BYTES = 4 * 1024**3


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Tensor names in their given order, cut so that a shard has at most ``shard_bytes`` (or one tensor)."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_shard(path: Path, tensors: Mapping[str, torch.Tensor], names: list[str]) -> None:
    save_file({name: tensors[name].contiguous() for name in names}, path, {"format": "pt"})
    path.chmod(0o644)  # safetensors creates files that only their owner can read


def _write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> None:
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    shards = plan_shards(sizes, shard_bytes)
    if len(shards) == 1:
        _write_shard(folder / "model.safetensors", tensors, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, tensors, names)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def write_description(folder: Path, config: ModelConfig, dtype: str, tokenizer: Tokenizer | None) -> None:
    """Write everything of a Hugging Face folder but the weights: configuration, generation defaults, tokenizer."""
    _write_json(folder / "config.json", config_json(config, dtype))
    _write_json(folder / "generation_config.json", generation_json(config))
    if tokenizer is not None:
        tokenizer.save(folder)


def save_model(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer | None = None,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write ``config.json``, ``generation_config.json``, the weights, and the tokenizer's files.

    ``tensors`` are those of ``config.weight_shapes()``, all float32 or all bfloat16. The folder appears whole
    (written beside its place, synced, renamed) or not at all; an existing one is never touched.

    Raises:
        ModelError: the folder exists; tensors are missing, unexpected, of another shape or of mixed types.
        OSError: the disk is full or cannot be written; nothing is left at ``folder``.
    """
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    described = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    problems = check_tensors(described, config, tuple(TORCH_DTYPES))
    problems += [f"{name} is unexpected" for name in tensors if name not in config.weight_shapes()]
    if len(dtypes) > 1:
        problems.append(f"the tensors have several types, {', '.join(dtypes)}: one is needed")
    if problems:
        raise ModelError(f"these weights cannot be written to {folder}:\n  " + "\n  ".join(problems))
    if folder.exists():
        raise ModelError(f"{folder} exists already: name a folder that does not exist")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        write_description(partial, config, dtypes[0], tokenizer)
        _write_weights(partial, tensors, shard_bytes)
        for path in sorted(partial.iterdir()):
            _sync(path)
        _sync(partial)
        os.rename(partial, folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
