"""What the next training step depends on, as files: weights, master, moments, counters.

model.safetensors     logical tensors in the contract's dtype
master.safetensors    the float32 master of the optimizer
moment1.safetensors   AdamW's m, float32
moment2.safetensors   AdamW's v, float32
trainer.json          counters, powers of the betas (hexadecimal floats), identities, SHA-256 of the others
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlkernel.contract.identity import Identities
from rlkernel.contract.schedules import BetaPowers
from vime.errors import InputError, Interrupted
from vime.train.native.optimizer import AdamW, AdamWState

FORMAT = 1
STATE_FILE = "trainer.json"
WEIGHTS = "model"
"""The weights' file has the name that Hugging Face folders use: with a config.json beside it, transformers loads it."""
TENSOR_FILES = (WEIGHTS, "master", "moment1", "moment2")
_KEYS = ("format", "dtype", "steps", "updates", "beta_powers", "optimizer", "identities", "sha256")


@dataclass(frozen=True)
class LoadedState:
    """What :func:`load` read, beside the optimizer's own state."""

    steps: int
    tensors: dict[str, torch.Tensor]


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    optimizer: AdamW,
    *,
    steps: int,
    identities: Identities,
    dtype: str,
) -> dict[str, str]:
    """Write all files, each synced to the disk; returns file name -> SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    state = optimizer.state()
    groups = {
        WEIGHTS: dict(tensors),
        "master": _torch(state.master),
        "moment1": _torch(state.moment1),
        "moment2": _torch(state.moment2),
    }
    with ThreadPoolExecutor(len(TENSOR_FILES)) as pool:  # while the next file is written, the last one is hashed
        hashed = {}
        for name in TENSOR_FILES:
            path = folder / f"{name}.safetensors"
            _write(path, groups[name])
            hashed[path.name] = pool.submit(file_sha256, path)
    digests = {name: found.result() for name, found in hashed.items()}
    content = {
        "format": FORMAT,
        "dtype": dtype,
        "steps": steps,
        "updates": state.powers.updates,
        "beta_powers": [state.powers.power1.hex(), state.powers.power2.hex()],
        "optimizer": optimizer.config.as_json(),
        # not the deployment: equal runs on two machines write equal checkpoints
        "identities": {name: getattr(identities, name) for name in ("semantic", "numerical_policy")},
        "sha256": digests,
    }
    path = folder / STATE_FILE
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _sync(path)
    _sync(folder)
    return {**digests, STATE_FILE: file_sha256(path)}


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one file, synced to the disk."""
    try:
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:  # a full disk, of which safetensors keeps only the words
        raise Interrupted(f"{path} cannot be written ({error}): make room, then resume") from error
    _sync(path)


def load(
    folder: Path,
    expected: Mapping[str, torch.Tensor],
    optimizer: AdamW,
    *,
    identities: Identities,
    dtype: str,
) -> LoadedState:
    """Read and verify everything, then set the optimizer's state.

    ``expected`` gives names, shapes and dtypes. Raises InputError that names every file or tensor which is missing,
    damaged or unfitting; nothing is changed then.
    """
    content = _read_state(folder)
    for name in ("semantic", "numerical_policy"):
        saved, own = content["identities"].get(name), getattr(identities, name)
        if saved != own:
            raise InputError(
                f"{folder / STATE_FILE}: the checkpoint's {name} identity is {saved}, this run's is {own}: it "
                "belongs to another model or contract"
            )
    if content["dtype"] != dtype:
        raise InputError(f"{folder / STATE_FILE}: dtype {content['dtype']}, this run's contract says {dtype}")
    if content["optimizer"] != optimizer.config.as_json():
        raise InputError(
            f"{folder / STATE_FILE}: the optimizer was configured as {content['optimizer']}, this run's is "
            f"{optimizer.config.as_json()}: a resumed run keeps its configuration"
        )
    with ThreadPoolExecutor(len(TENSOR_FILES)) as pool:
        read = pool.map(lambda name: _read_tensors(folder, name, content["sha256"]), TENSOR_FILES)
        groups = dict(zip(TENSOR_FILES, read, strict=True))
    problems: list[str] = []
    for name, tensors in groups.items():
        problems += _problems(f"{name}.safetensors", tensors, expected, float32=name != WEIGHTS)
    if problems:
        raise InputError(f"{folder}: {len(problems)} tensors do not fit: " + "; ".join(problems))
    try:
        power1, power2 = (float.fromhex(value) for value in content["beta_powers"])
        steps, updates = int(content["steps"]), int(content["updates"])
        powers = BetaPowers(optimizer.config.beta1, optimizer.config.beta2, updates, power1, power2)
    except (TypeError, ValueError) as error:
        raise InputError(f"{folder / STATE_FILE}: counters or beta powers cannot be read: {error}") from error
    state = AdamWState(_numpy(groups["master"]), _numpy(groups["moment1"]), _numpy(groups["moment2"]), powers)
    optimizer.restore(state)
    return LoadedState(steps, groups[WEIGHTS])


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing: this folder is no checkpoint of the trainer") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    missing = [key for key in _KEYS if not isinstance(content, dict) or key not in content]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}: it is damaged or of another version")
    if content["format"] != FORMAT:
        raise InputError(f"{path} has format {content['format']}; this version reads {FORMAT}")
    return dict(content)


def _read_tensors(folder: Path, name: str, digests: Mapping[str, str]) -> dict[str, torch.Tensor]:
    path = folder / f"{name}.safetensors"
    if not path.is_file():
        raise InputError(f"{path} is missing: the checkpoint is incomplete")
    found = file_sha256(path)
    if found != digests.get(path.name):
        raise InputError(
            f"{path} ({path.stat().st_size} bytes) has SHA-256 {found}, {STATE_FILE} says {digests.get(path.name)}: "
            "the file is truncated or was changed"
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is no safetensors file: {error}") from error


def _problems(
    file: str, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, float32: bool
) -> list[str]:
    problems = [f"{file}: {name} is missing" for name in expected if name not in tensors]
    problems += [f"{file}: {name} is not a tensor of this model" for name in tensors if name not in expected]
    for name, tensor in tensors.items():
        if name not in expected:
            continue
        dtype = torch.float32 if float32 else expected[name].dtype
        if tensor.shape != expected[name].shape or tensor.dtype != dtype:
            problems.append(
                f"{file}: {name} is {tensor.dtype} {list(tensor.shape)}, needed is {dtype} {list(expected[name].shape)}"
            )
    return problems


def _torch(arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _numpy(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray[np.float32]]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
