"""The arrays of a run: one zarr group a step, written whole, synced, announced by an event, verified on every read.

A group is written beside its place and renamed into it. zarr reads a missing chunk as zeros and syncs nothing itself:
so every chunk is stored (also one of zeros), its file is looked for on every read, and the digest is compared with the
announced one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import LocalStore

from vime.errors import InputError, InvariantViolation
from vime.store.digests import array_digest
from vime.store.files import disk_errors, fsync_tree, publish_folder, retire_folder
from vime.store.names import step_folder, step_of

DTYPES = ("float32", "float64", "uint64", "uint32", "int64", "int32", "uint8", "bool")
CHUNK_ELEMENTS = 1 << 20
_ATTRIBUTE = "vime"


@dataclass(frozen=True)
class WrittenArrays:
    """What ``arrays_written`` announces: name -> {digest, dtype, shape}; ``observed`` apart, as nothing compares it."""

    arrays: dict[str, dict[str, Any]]
    observed: dict[str, dict[str, Any]] = field(default_factory=dict)


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

        ``observed`` names arrays of wall times and the like: stored and verified, but not announced for comparison.
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
        )

    def read(self, step: int, announced: Mapping[str, Mapping[str, Any]]) -> dict[str, NDArray[Any]]:
        """All arrays of a step, each verified against what was announced (observed ones against the group's own facts).

        Raises InvariantViolation naming step and array for anything missing, additional or changed.
        """
        folder = self.root / step_folder(step)
        if not folder.is_dir():
            raise InvariantViolation(f"step {step}: its arrays were announced, but {folder} does not exist")
        present = {entry.name for entry in folder.iterdir() if entry.is_dir()}
        if missing := sorted(set(announced) - present):
            raise InvariantViolation(f"step {step}: the announced arrays {missing} do not exist in {folder}")
        return {name: self._read_one(step, name, announced.get(name)) for name in sorted(present)}

    def read_array(self, step: int, name: str, announced: Mapping[str, Any] | None) -> NDArray[Any]:
        """One verified array; ``announced`` is None for an observed one. Raises as :meth:`read`."""
        if not (self.root / step_folder(step) / name).is_dir():
            raise InvariantViolation(f"step {step}: array {name!r} does not exist in {self.root / step_folder(step)}")
        return self._read_one(step, name, announced)

    def _read_one(self, step: int, name: str, announced: Mapping[str, Any] | None) -> NDArray[Any]:
        where = f"step {step}, array {name!r}"
        folder = self.root / step_folder(step) / name
        try:
            array = zarr.open_array(store=LocalStore(folder, read_only=True), mode="r", zarr_format=3)
            facts: Any = array.attrs[_ATTRIBUTE]
            if announced is None:
                if facts.get("observed") is not True:
                    raise InvariantViolation(f"{where}: stored, but no event announced it")
                announced = facts
            for chunk in _chunks(array.shape, array.chunks):
                if not (folder / chunk).is_file():
                    raise InvariantViolation(f"{where}: chunk {chunk} is missing (it would read as zeros)")
            values = np.asarray(array[...])
        except InvariantViolation:
            raise
        except Exception as error:  # zarr raises errors of many families for damaged metadata and short chunks
            raise InvariantViolation(f"{where}: unreadable ({type(error).__name__}: {error})") from error
        found = describe_array(values)
        for key in ("dtype", "shape", "digest"):
            due = list(announced[key]) if key == "shape" else announced[key]
            if found[key] != due:
                raise InvariantViolation(f"{where}: its {key} is {found[key]}, but {due} was announced")
        return values

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


def stored_step(folder: Path) -> int | None:
    """The step that a group says it belongs to; None where its metadata cannot be read."""
    try:
        step = json.loads((folder / "zarr.json").read_text())["attributes"]["step"]
    except (OSError, ValueError, KeyError):
        return None
    return int(step)
