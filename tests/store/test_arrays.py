"""Arrays: every bit comes back, and whatever is missing or changed on disk is named."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray

import vime.store.arrays as module
from vime.errors import InputError, Interrupted, InvariantViolation
from vime.store.arrays import ArrayStore, WrittenArrays
from vime.store.digests import array_digest

NAN = np.asarray([0x7FC00001, 0xFFC00000, 0x80000000, 0x00000001], np.uint32).view(np.float32)


def some_arrays() -> dict[str, NDArray[Any]]:
    return {
        "logprobs": np.concatenate([NAN, np.linspace(-3, 0, 7, dtype=np.float32)]),
        "advantages": np.asarray([0.1, -0.0, np.inf], np.float64),
        "digests": np.arange(22, dtype=np.uint64).reshape(11, 2) << np.uint64(55),
        "tokens": np.arange(11, dtype=np.int64),
        "k": np.asarray([0, 1, 2], np.int32),
        "mask": np.asarray([True, False, True]),
        "zeros": np.zeros(5, np.float32),
        "empty": np.zeros((0, 2), np.uint64),
        "sampled_at": np.linspace(0, 1, 11),
    }


@pytest.fixture
def store(tmp_path: Path) -> ArrayStore:
    (tmp_path / "staging").mkdir()
    return ArrayStore.create(tmp_path / "arrays.zarr", tmp_path / "staging")


@pytest.fixture
def written(store: ArrayStore) -> WrittenArrays:
    return store.write(12, some_arrays(), observed=["sampled_at"])


def test_every_bit_comes_back(store: ArrayStore, written: WrittenArrays) -> None:
    back = store.read(12, written.stored)
    assert set(back) == set(some_arrays())
    for name, array in some_arrays().items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes(), name
    assert set(written.observed) == {"sampled_at"} and "sampled_at" not in written.arrays
    assert written.arrays["digests"] == {
        "digest": array_digest(some_arrays()["digests"]),
        "dtype": "uint64",
        "shape": [11, 2],
    }
    assert not list(store.staging.iterdir()) and store.steps() == [12]


def test_zarr_itself_reads_the_group(store: ArrayStore, written: WrittenArrays) -> None:
    group = zarr.open_group(str(store.root), mode="r")
    stored = group["step-000012/tokens"]
    assert isinstance(stored, zarr.Array)
    assert np.array_equal(np.asarray(stored[:]), some_arrays()["tokens"])


def test_digest_depends_on_dtype_shape_and_bits() -> None:
    a = np.zeros(4, np.float32)
    digests = [array_digest(x) for x in (a, -a, a.astype(np.float64), a.reshape(2, 2), a.view(np.int32), a[:3])]
    assert len(set(digests)) == len(digests)
    assert array_digest(np.arange(6).reshape(2, 3).T) == array_digest(
        np.ascontiguousarray(np.arange(6).reshape(2, 3).T)
    )
    assert array_digest(a.astype(">f4")) == array_digest(a)


def test_large_arrays_have_several_chunks(store: ArrayStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 8)
    array = np.arange(26, dtype=np.uint64).reshape(13, 2)
    facts = store.write(1, {"a": array}).arrays
    assert np.array_equal(store.read(1, facts)["a"], array)
    (store.root / "step-000001" / "a" / "c" / "2" / "0").unlink()
    with pytest.raises(InvariantViolation, match=r"step 1, array 'a': chunk c/2/0 is missing"):
        store.read(1, facts)


@pytest.mark.parametrize("name", ["tokens", "zeros", "sampled_at"])
def test_deleted_chunk(store: ArrayStore, written: WrittenArrays, name: str) -> None:
    (store.root / "step-000012" / name / "c" / "0").unlink()
    with pytest.raises(InvariantViolation, match=f"step 12, array '{name}': chunk c/0 is missing"):
        store.read(12, written.stored)


@pytest.mark.parametrize("name", ["logprobs", "sampled_at", "mask"])
def test_one_flipped_bit(store: ArrayStore, written: WrittenArrays, name: str) -> None:
    path = store.root / "step-000012" / name / "c" / "0"
    content = bytearray(path.read_bytes())
    content[1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvariantViolation, match=f"step 12, array '{name}': (its digest is|unreadable)"):
        store.read(12, written.stored)


def test_truncated_chunk_and_metadata(store: ArrayStore, written: WrittenArrays) -> None:
    os.truncate(store.root / "step-000012" / "tokens" / "c" / "0", 40)
    with pytest.raises(InvariantViolation, match="array 'tokens': unreadable"):
        store.read(12, written.stored)
    store.write(12, some_arrays(), observed=["sampled_at"])
    os.truncate(store.root / "step-000012" / "k" / "zarr.json", 20)
    with pytest.raises(InvariantViolation, match="array 'k': unreadable"):
        store.read(12, written.stored)


@pytest.mark.parametrize("place", [".", "tokens", "empty", "sampled_at"])
def test_every_bit_of_the_metadata_counts(store: ArrayStore, written: WrittenArrays, place: str) -> None:
    """Also where no value depends on it: in the group's, and in names and fill values of the arrays'."""
    path = store.root / "step-000012" / place / "zarr.json"
    content = path.read_bytes()
    assert store.read(12, written.stored, written.metadata)
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(InvariantViolation, match="step 12"):
            store.read(12, written.stored, written.metadata)
    path.unlink()
    with pytest.raises(InvariantViolation, match="step 12"):
        store.read(12, written.stored, written.metadata)
    path.write_bytes(content)
    assert store.read(12, written.stored, written.metadata)


def test_the_metadata_of_the_store_itself(store: ArrayStore) -> None:
    assert store.root_problem() is None
    path = store.root / "zarr.json"
    whole = path.read_text()
    for other in (whole.replace("attributes", "bttributes"), whole + " ", whole.replace("3", "3.0"), "[" * 100_000):
        path.write_text(other)
        assert "is not the metadata of this store's group" in str(store.root_problem())
    path.unlink()
    assert "cannot be read" in str(store.root_problem())


@pytest.mark.parametrize("damage", ["shape", "nested", "list"])
def test_metadata_of_any_form_are_a_sentence(store: ArrayStore, written: WrittenArrays, damage: str) -> None:
    path = store.root / "step-000012" / "tokens" / "zarr.json"
    data = json.loads(path.read_text())
    data["attributes"]["vime"]["shape"] = 5
    path.write_text({"shape": json.dumps(data), "nested": "[" * 100_000, "list": "[]"}[damage])
    with pytest.raises(InvariantViolation, match="array 'tokens'"):
        store.read(12, written.stored, written.metadata)


def test_changed_shape_in_the_metadata(store: ArrayStore, written: WrittenArrays) -> None:
    path = store.root / "step-000012" / "tokens" / "zarr.json"
    data = json.loads(path.read_text())
    data["shape"] = [10]
    path.write_text(json.dumps(data))
    with pytest.raises(InvariantViolation, match=r"array 'tokens': its shape is \[10\], but \[11\] was announced"):
        store.read(12, written.stored)


def test_missing_additional_and_unannounced(store: ArrayStore, written: WrittenArrays) -> None:
    with pytest.raises(InvariantViolation, match="step 13: its arrays were announced"):
        store.read(13, written.stored)
    less = {name: facts for name, facts in written.stored.items() if name != "k"}
    with pytest.raises(InvariantViolation, match="array 'k': stored, but no event announced it"):
        store.read(12, less)
    shutil.rmtree(store.root / "step-000012" / "k")
    with pytest.raises(InvariantViolation, match=r"announced arrays \['k'\] do not exist"):
        store.read(12, written.stored)


def test_arrays_of_wall_times_are_those_that_were_announced(store: ArrayStore, written: WrittenArrays) -> None:
    """What a folder says of itself counts for nothing: its arrays are those of the event, or foreign."""
    later = {**some_arrays(), "sampled_at": np.linspace(1, 2, 11)}
    store.write(13, later, observed=["sampled_at"])
    own, other = (store.root / name / "sampled_at" for name in ("step-000012", "step-000013"))
    shutil.rmtree(own)
    shutil.copytree(other, own)
    with pytest.raises(InvariantViolation, match=r"step 12, array 'sampled_at': its folder says that it holds float64"):
        store.read(12, written.stored)
    path = own / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["attributes"]["vime"] |= written.observed["sampled_at"]
    path.write_text(json.dumps(metadata))  # now the folder claims to be the announced one
    assert store.foreign(12, written.stored) is None
    with pytest.raises(InvariantViolation, match=r"step 12, array 'sampled_at': its digest is"):
        store.read(12, written.stored)


def test_the_folder_of_another_step_is_foreign(store: ArrayStore, written: WrittenArrays) -> None:
    store.write(13, some_arrays(), observed=["sampled_at"])
    for name in ("tokens", "sampled_at"):
        assert store.foreign(12, written.stored) is None and store.foreign(13, written.stored) is None, name
    shutil.rmtree(store.root / "step-000012")
    assert store.foreign(12, written.stored) is None and "does not exist" in str(store.missing(12, written.stored))
    shutil.copytree(store.root / "step-000013", store.root / "step-000012")
    with pytest.raises(InvariantViolation, match=r"step 12: .*step-000012 holds the arrays of step 13"):
        store.read(12, written.stored)


def test_what_nothing_announced_is_named(store: ArrayStore, written: WrittenArrays) -> None:
    for name in ("note.txt", "k/c/7", "k/.hidden"):
        stray = store.root / "step-000012" / name
        stray.write_text("x")
        with pytest.raises(InvariantViolation, match=rf"step 12.*{Path(name).name} in .*: nothing announced it"):
            store.read(12, written.stored)
        stray.unlink()
    assert set(store.read(12, written.stored)) == set(some_arrays())


def test_write_replaces_and_orphans_go(store: ArrayStore, written: WrittenArrays) -> None:
    other = store.write(12, {"tokens": np.asarray([7], np.int64)})
    assert store.read(12, other.arrays)["tokens"].tolist() == [7]
    store.write(13, {"tokens": np.asarray([7], np.int64)})
    assert store.remove_orphans({12}) == [13] and store.steps() == [12]
    assert not list(store.staging.iterdir())


def test_bad_arrays_are_refused(store: ArrayStore) -> None:
    with pytest.raises(InputError, match="array 'a' has dtype float16"):
        store.write(0, {"a": np.zeros(1, np.float16)})
    with pytest.raises(InputError, match="observed arrays"):
        store.write(0, {"a": np.zeros(1)}, observed=["b"])
    assert store.steps() == []


def test_full_disk_leaves_the_old_group(
    store: ArrayStore, written: WrittenArrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for target in ("_write_array", "publish_folder"):
        with monkeypatch.context() as patch:
            patch.setattr(module, target, full)
            with pytest.raises(Interrupted, match=r"arrays of step 12 .* the disk is full"):
                store.write(12, {"tokens": np.asarray([7], np.int64)})
        store.read(12, written.stored)
        assert not list(store.staging.iterdir())
