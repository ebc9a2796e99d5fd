"""Loading of models: Hugging Face folders (safetensors) and GGUF files, checked in full before they are used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlkernel.errors import ModelError
from rlkernel.models.config import ModelConfig
from rlkernel.models.dtypes import TORCH_DTYPES, Dtype, check_dtype, convert
from rlkernel.models.hf_config import parse_config

_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model in the contract's dtype.

    ``tensors`` are contiguous CPU tensors under their Hugging Face names, exactly those of
    ``config.weight_shapes()``. ``converted`` says that the source's numbers were of another type than ``dtype``
    (widened exactly, dequantised, or rounded once to nearest even); ``stored_dtypes`` are the source's types.
    ``files`` maps each file that was read to its SHA-256.
    """

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    dtype: Dtype
    source: str
    converted: bool
    stored_dtypes: tuple[str, ...]
    files: Mapping[str, str]


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies, as the header of its file says."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's contents (hex)."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError if it is missing, damaged or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}; an object is needed")
    return value


def _header(path: Path) -> dict[str, _Stored]:
    """Names, types and shapes of a safetensors file, checked against its size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > size - 8:
                raise ModelError(
                    f"{path} is truncated or damaged: {size} bytes are too few for the header it announces"
                )
            header = json.loads(handle.read(length))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a readable safetensors file: {error}") from error
    header.pop("__metadata__", None)
    try:
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        stored = {name: _Stored(path, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{path} has a damaged safetensors header: {error!r}") from error
    if size != 8 + length + end:
        kind = "truncated" if size < 8 + length + end else "longer than its header says"
        raise ModelError(f"{path} is {kind}: {size} bytes, and its header describes {8 + length + end}")
    return stored


def _stored_tensors(folder: Path) -> tuple[dict[str, _Stored], list[Path], list[str]]:
    """Every tensor of a folder, the files read, and what is wrong with them."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists() and index.exists():
        raise ModelError(f"{folder} holds both {single.name} and {index.name}: remove the stale one")
    if single.exists():
        return _header(single), [single], []
    if not index.exists():
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
        raise ModelError(
            f"{folder} holds neither {single.name} nor {index.name}"
            + (f"; it holds {found}, which cannot be read" if found else "")
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no 'weight_map' from tensor names to file names")
    problems: list[str] = []
    stored: dict[str, _Stored] = {}
    files = [index]
    for name in sorted(set(weight_map.values())):
        path = folder / name
        if Path(name).name != name:
            problems.append(f"{index.name} names the file {name!r}: a plain file name is needed")
        elif not path.exists():
            count = list(weight_map.values()).count(name)
            problems.append(f"{name} does not exist ({count} tensors of {index.name} lie in it)")
        else:
            files.append(path)
            try:
                entries = _header(path)
            except ModelError as error:
                problems.append(str(error))
                continue
            listed = {tensor for tensor, file in weight_map.items() if file == name}
            problems += [
                f"{tensor} is not in {name}, where {index.name} says" for tensor in sorted(listed - set(entries))
            ]
            problems += [f"{tensor} is in {name}, but not in {index.name}" for tensor in sorted(set(entries) - listed)]
            stored.update(entries)
    return stored, files, problems


def check_tensors(
    stored: Mapping[str, tuple[str, tuple[int, ...]]], config: ModelConfig, accepted_dtypes: tuple[str, ...]
) -> list[str]:
    """What is wrong with a set of (dtype, shape) under Hugging Face names: missing, unexpected, wrong shape or type.

    ``lm_head.weight`` beside tied embeddings and ``rotary_emb.inv_freq`` buffers are not reported as unexpected.
    """
    expected = config.weight_shapes()
    allowed_extra = {"lm_head.weight"} if config.tied_embeddings else set()
    problems = [f"{name} is missing: shape {list(expected[name])}" for name in expected if name not in stored]
    for name in sorted(stored):
        dtype, shape = stored[name]
        if name in expected or name in allowed_extra:
            wanted = expected.get(name) or expected["model.embed_tokens.weight"]
            if shape != wanted:
                problems.append(f"{name} has shape {list(shape)}; the configuration needs {list(wanted)}")
            if dtype not in accepted_dtypes:
                problems.append(f"{name} has type {dtype}; accepted are {', '.join(accepted_dtypes)}")
        elif not name.endswith("rotary_emb.inv_freq"):
            problems.append(f"{name} is unexpected: shape {list(shape)}, no tensor of a {config.family} model")
    return problems


def load_hf(folder: Path, dtype: Dtype) -> LoadedModel:
    """Load a Hugging Face folder in the contract's dtype.

    Raises:
        ModelError: one message with everything that is wrong: configuration, missing, unexpected or misshapen
            tensors, types, truncated files.
    """
    check_dtype(dtype)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder: a Hugging Face folder with config.json is needed")
    config_path, generation_path = folder / "config.json", folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else None
    config = parse_config(read_json(config_path), str(config_path), generation)
    stored, files, problems = _stored_tensors(folder)
    if not problems:
        described = {name: (entry.dtype, entry.shape) for name, entry in stored.items()}
        problems = check_tensors(described, config, tuple(_SAFETENSORS_DTYPES))
    if problems:
        raise ModelError(f"the checkpoint {folder} cannot be used:\n  " + "\n  ".join(problems))
    tensors = _read(stored, config, dtype)
    used = [config_path, *([generation_path] if generation is not None else []), *files]
    types = {stored[name].dtype for name in tensors}
    return LoadedModel(
        config=config,
        tensors=tensors,
        dtype=dtype,
        source=str(folder),
        converted=any(_SAFETENSORS_DTYPES[name] != TORCH_DTYPES[dtype] for name in types),
        stored_dtypes=tuple(sorted(types)),
        files={path.name: file_sha256(path) for path in used},
    )


def _read(stored: Mapping[str, _Stored], config: ModelConfig, dtype: Dtype) -> dict[str, torch.Tensor]:
    raw: dict[str, torch.Tensor] = {}
    wanted = set(config.weight_shapes()) | ({"lm_head.weight"} if config.tied_embeddings else set())
    for file in sorted({entry.file for entry in stored.values()}):
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in sorted(wanted):
                    if name in stored and stored[name].file == file:
                        # a copy: a file that is replaced later must not change the weights
                        raw[name] = reader.get_tensor(name).clone()
        except SafetensorError as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    if config.tied_embeddings and "lm_head.weight" in raw:
        head, embedding = raw.pop("lm_head.weight"), raw["model.embed_tokens.weight"]
        if head.dtype != embedding.dtype or not torch.equal(_bits(head), _bits(embedding)):
            raise ModelError(
                "lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings is true: "
                "set it to false, or remove lm_head.weight"
            )
    return {name: convert(raw[name], dtype).contiguous() for name in config.weight_shapes()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def load_model(path: Path, dtype: Dtype) -> LoadedModel:
    """Load a Hugging Face folder or a GGUF file, whichever ``path`` is. Raises ModelError."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{path} is a file that does not end in .gguf: a Hugging Face folder or a GGUF file is needed"
            )
        from rlkernel.models.gguf import load_gguf

        return load_gguf(path, dtype)
    if not path.exists():
        raise ModelError(f"{path} does not exist: a Hugging Face folder or a GGUF file is needed")
    return load_hf(path, dtype)
