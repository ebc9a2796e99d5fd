"""The arrays of a run: one zarr group a step, written whole, synced, announced by an event, verified on every read.

A group is written beside its place and renamed into it. zarr reads a missing chunk as zeros and syncs nothing itself:
so every chunk is stored (also one of zeros), its file is looked for on every read, and the digest is compared with the
announced one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import LocalStore

from vime.errors import InputError, InvariantViolation
from vime.store.digests import array_digest
from vime.store.files import disk_errors, fsync_tree, parse_json, publish_folder, retire_folder
from vime.store.names import step_folder, step_of

DTYPES = ("float32", "float64", "uint64", "uint32", "int64", "int32", "uint8", "bool")
CHUNK_ELEMENTS = 1 << 20
_ATTRIBUTE = "vime"
_METADATA = "zarr.json"
_ROOT = {"attributes": {}, "zarr_format": 3, "node_type": "group"}
_FACTS = ("dtype", "shape", "digest")


@dataclass(frozen=True)
class WrittenArrays:
    """What ``arrays_written`` announces: name -> {digest, dtype, shape}; ``observed`` apart, as nothing compares it
    between runs. ``metadata`` is the SHA-256 (hex) over the metadata files of the group and its arrays."""

    arrays: dict[str, dict[str, Any]]
    observed: dict[str, dict[str, Any]] = field(default_factory=dict)
    metadata: str = ""

    @property
    def stored(self) -> dict[str, dict[str, Any]]:
        """Both."""
        return {**self.arrays, **self.observed}


def describe_array(array: NDArray[Any]) -> dict[str, Any]:
    """Digest, dtype and shape as announced."""
    return {"digest": array_digest(array), "dtype": array.dtype.name, "shape": list(array.shape)}


class ArrayStore:
    """``arrays.zarr``. ``staging`` is a folder of the same file system for groups that are being written."""

    def __init__(self, root: Path, staging: Path) -> None:
        self.root = root
        self.staging = staging

    @classmethod
    def create(cls, root: Path, staging: Path) -> ArrayStore:
        """An empty store."""
        with disk_errors(str(root)):
            zarr.create_group(store=LocalStore(root), zarr_format=3)
            fsync_tree(root)
        return cls(root, staging)

    def write(self, step: int, arrays: Mapping[str, NDArray[Any]], observed: Collection[str] = ()) -> WrittenArrays:
        """Write a step's group, replacing one that is there; durable on return.

        ``observed`` names arrays of wall times and the like: announced and verified, but never compared between runs.
        Data of variable length is flat, with offsets in an array of its own. Raises InputError for a dtype
        outside ``DTYPES`` or an unknown observed name; Interrupted when the disk refuses.
        """
        if unknown := sorted(set(observed) - set(arrays)):
            raise InputError(f"step {step}: the observed arrays {unknown} are not among the arrays {sorted(arrays)}")
        for name, array in arrays.items():
            if array.dtype.name not in DTYPES:
                raise InputError(f"step {step}: array {name!r} has dtype {array.dtype}; stored are {', '.join(DTYPES)}")
        facts = {name: describe_array(array) for name, array in arrays.items()}
        staged = self.staging / f"arrays-{step_folder(step)}"
        with disk_errors(f"the arrays of step {step} to {self.root}"):
            try:
                shutil.rmtree(staged, ignore_errors=True)
                group = zarr.create_group(store=LocalStore(staged), zarr_format=3, attributes={"step": step})
                for name in sorted(arrays):
                    _write_array(group, name, arrays[name], {**facts[name], "observed": name in observed})
                publish_folder(staged, self.root / step_folder(step))
            except OSError:
                shutil.rmtree(staged, ignore_errors=True)
                raise
        return WrittenArrays(
            {name: facts[name] for name in sorted(arrays) if name not in observed},
            {name: facts[name] for name in sorted(observed)},
            _metadata_digest(self.root / step_folder(step), sorted(arrays)),
        )

    def read(
        self, step: int, announced: Mapping[str, Mapping[str, Any]], metadata: str | None = None
    ) -> dict[str, NDArray[Any]]:
        """All arrays of a step, each verified against what an event announced, arrays of wall times included.

        ``metadata`` is the announced digest of the metadata files; None (older runs announced none): only what a value
        depends on is verified. Raises InvariantViolation naming step and array for anything missing, additional or
        changed.
        """
        if found := self.missing(step, announced) or self.foreign(step, announced):
            raise InvariantViolation(found)
        folder = self.root / step_folder(step)
        if additional := sorted(entry.name for entry in folder.iterdir() if entry.name not in {*announced, _METADATA}):
            raise InvariantViolation(f"step {step}: {', '.join(additional)} in {folder}: nothing announced it")
        values = {name: self._read_one(step, name, announced[name]) for name in sorted(announced)}
        if metadata is not None:
            self._check_metadata(step, sorted(announced), metadata)
        return values

    def _check_metadata(self, step: int, arrays: Sequence[str], due: str) -> None:
        folder = self.root / step_folder(step)
        try:
            found = _metadata_digest(folder, arrays)
        except OSError as error:
            raise InvariantViolation(f"step {step}: {error.filename} cannot be read ({error.strerror})") from error
        if found != due:
            raise InvariantViolation(
                f"step {step}: a {_METADATA} in {folder} is not the one that was written, though every value is"
            )

    def missing(self, step: int, announced: Collection[str]) -> str | None:
        """A sentence where a step's folder, or an array in it, does not exist; None else."""
        folder = self.root / step_folder(step)
        if not folder.is_dir():
            return f"step {step}: its arrays were announced, but {folder} does not exist"
        if missing := [name for name in sorted(announced) if not (folder / name).is_dir()]:
            return f"step {step}: the announced arrays {missing} do not exist in {folder}"
        return None

    def foreign(
        self, step: int, announced: Mapping[str, Mapping[str, Any]], renewed: Collection[str] = ()
    ) -> str | None:
        """What says that a step's folder is that of another step or run, without reading a value; None: nothing.

        A folder that is missing or damaged is not foreign: :meth:`read` finds that. Arrays named in ``renewed`` may be
        others than the announced ones: a crash can come between their second writing and its announcement.
        """
        folder = self.root / step_folder(step)
        if not folder.is_dir():
            return None
        found = _attributes(folder).get("step")
        if isinstance(found, int) and found != step:
            return f"step {step}: {folder} holds the arrays of step {found}"
        for name in sorted(entry.name for entry in folder.iterdir() if entry.is_dir()):
            if name not in announced:
                return f"step {step}, array {name!r}: stored, but no event announced it"
            written, due = _attributes(folder / name).get(_ATTRIBUTE), announced[name]
            if name not in renewed and isinstance(written, dict) and _differ(written, due):
                return (
                    f"step {step}, array {name!r}: its folder says that it holds {_shown(written)}, but {_shown(due)} "
                    "was announced: these are the arrays of another step or run"
                )
        return None

    def _read_one(self, step: int, name: str, announced: Mapping[str, Any]) -> NDArray[Any]:
        where = f"step {step}, array {name!r}"
        folder = self.root / step_folder(step) / name
        try:
            array = zarr.open_array(store=LocalStore(folder, read_only=True), mode="r", zarr_format=3)
            chunks = _chunks(array.shape, array.chunks)
            for chunk in chunks:
                if not (folder / chunk).is_file():
                    raise InvariantViolation(f"{where}: chunk {chunk} is missing (it would read as zeros)")
            files = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
            if additional := sorted(files - {_METADATA, *chunks}):
                raise InvariantViolation(f"{where}: {', '.join(additional)} in {folder}: nothing announced it")
            values = np.asarray(array[...])
        except InvariantViolation:
            raise
        except Exception as error:  # zarr raises errors of many families for damaged metadata and short chunks
            raise InvariantViolation(f"{where}: unreadable ({type(error).__name__}: {error})") from error
        found = describe_array(values)
        for key in _differ(found, announced):
            due_fact = list(announced[key]) if key == "shape" else announced[key]
            raise InvariantViolation(f"{where}: its {key} is {found[key]}, but {due_fact} was announced")
        return values

    def root_problem(self) -> str | None:
        """A sentence if the store's own metadata are not those of an empty group; None else."""
        path = self.root / _METADATA
        try:
            found = path.read_text()
        except (OSError, ValueError) as error:
            return f"{path} cannot be read: {error}"
        if found not in (json.dumps(_ROOT, indent=2), json.dumps(_ROOT)):
            return f"{path} is not the metadata of this store's group"
        return None

    def steps(self) -> list[int]:
        """Steps that have a folder, announced or not, ascending."""
        found = (step_of(entry.name) for entry in self.root.iterdir())
        return sorted(step for step in found if step is not None)

    def remove_orphans(self, announced: Collection[int]) -> list[int]:
        """Delete groups that no event announced; returns their steps."""
        orphans = [step for step in self.steps() if step not in announced]
        for step in orphans:
            with disk_errors(f"{self.root} (removing the arrays of step {step}, which were not announced)"):
                retire_folder(self.root / step_folder(step), self.staging)
        return orphans


def _write_array(group: zarr.Group, name: str, array: NDArray[Any], facts: dict[str, Any]) -> None:
    chunks = _chunk_shape(array.shape)
    stored = group.create_array(
        name,
        shape=array.shape,
        dtype=array.dtype,
        chunks=chunks,
        compressors=None,
        fill_value=0,
        config={"write_empty_chunks": True},
        attributes={_ATTRIBUTE: facts},
    )
    if array.size:
        stored[...] = array


def _chunk_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Whole rows of the first axis, about ``CHUNK_ELEMENTS`` elements a chunk."""
    if not shape:
        return ()
    row = max(1, math.prod(shape[1:]))
    return (max(1, min(shape[0], CHUNK_ELEMENTS // row)), *(max(1, n) for n in shape[1:]))


def _chunks(shape: tuple[int, ...], chunks: tuple[int, ...]) -> list[str]:
    """Paths of the chunk files that an array of this shape consists of."""
    if 0 in shape:
        return []
    counts = [math.ceil(n / c) for n, c in zip(shape, chunks, strict=True)]
    return [os.path.join("c", *(str(i) for i in index)) for index in np.ndindex(*counts)] if counts else ["c"]


def _metadata_digest(folder: Path, arrays: Sequence[str]) -> str:
    """SHA-256 (hex) over the metadata files of a step's group and its arrays, each with its length before it."""
    hasher = hashlib.sha256()
    for path in (folder / _METADATA, *(folder / name / _METADATA for name in arrays)):
        content = path.read_bytes()
        hasher.update(len(content).to_bytes(8, "little") + content)
    return hasher.hexdigest()


def _attributes(folder: Path) -> Mapping[str, Any]:
    """Attributes of a group or array; none where its metadata cannot be read."""
    try:
        found = parse_json((folder / _METADATA).read_text())["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _differ(found: Mapping[str, Any], due: Mapping[str, Any]) -> list[str]:
    """The facts that differ; a shape may be a list or a tuple."""
    return [key for key in _FACTS if _plain(found.get(key)) != _plain(due.get(key))]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def _shown(facts: Mapping[str, Any]) -> str:
    return f"{facts.get('dtype')}{_plain(facts.get('shape', ()))} with the digest {str(facts.get('digest'))[:16]}..."
