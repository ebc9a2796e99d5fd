"""Checkpoints: whole or not there, verified, the last few kept."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from vime.errors import InputError, Interrupted, InvariantViolation
from vime.store.checkpoints import CheckpointStore
from vime.timeline.log import Head

HEAD = Head(41, "a" * 64)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "staging").mkdir()
    return CheckpointStore(tmp_path / "checkpoints", tmp_path / "staging", keep=2)


def save(folder: Path) -> dict[str, str]:
    (folder / "sub").mkdir()
    contents = {"weights.bin": b"w" * 1000, "sub/state.json": b"{}"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def test_write_and_verify(store: CheckpointStore) -> None:
    made = store.write(3, HEAD, save)
    found = store.verify(3, made.files, HEAD)
    assert found == made and found.sizes == {"sub/state.json": 2, "weights.bin": 1000}
    assert sorted(p.name for p in found.folder.iterdir()) == ["manifest.json", "sub", "weights.bin"]
    assert store.steps() == [3] and not list(store.staging.iterdir())


def test_damage_is_named(store: CheckpointStore) -> None:
    made = store.write(3, HEAD, save)
    path = made.folder / "weights.bin"
    path.write_bytes(b"w" * 999 + b"x")
    with pytest.raises(
        InputError, match=rf"step 3 .*weights.bin has SHA-256 \w+, expected {made.files['weights.bin']}"
    ):
        store.verify(3, made.files)
    path.write_bytes(b"w" * 10)
    with pytest.raises(InputError, match=r"weights.bin has 10 bytes, expected 1000"):
        store.verify(3, made.files)
    path.unlink()
    with pytest.raises(InputError, match=r"weights.bin cannot be read \(No such file.*expected 1000 bytes, SHA-256"):
        store.verify(3, made.files)
    (made.folder / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"manifest.json is damaged"):
        store.verify(3, made.files)
    (made.folder / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"manifest.json cannot be read"):
        store.verify(3, made.files)


@pytest.mark.parametrize("name", ["extra.safetensors", "sub/extra.json", ".hidden", "link"])
def test_a_file_that_nothing_announced_is_named(store: CheckpointStore, name: str) -> None:
    made = store.write(3, HEAD, save)
    if name == "link":
        (made.folder / name).symlink_to("nowhere")
    else:
        (made.folder / name).write_text("x")
    with pytest.raises(InvariantViolation, match=rf"step 3 .*holds {name}, which nothing announced"):
        store.verify(3, made.files, HEAD)
    (made.folder / name).unlink()
    assert store.verify(3, made.files, HEAD) == made


def test_log_and_manifest_have_to_agree(store: CheckpointStore) -> None:
    made = store.write(3, HEAD, save)
    with pytest.raises(InputError, match="belongs to another log"):
        store.verify(3, made.files, Head(41, "b" * 64))
    with pytest.raises(InputError, match=r"disagree about weights\.bin"):
        store.verify(3, {**made.files, "weights.bin": "0" * 64})
    with pytest.raises(InputError, match="disagree about extra"):
        store.verify(3, {**made.files, "extra": "0" * 64})
    os.rename(made.folder, store.folder(4))
    with pytest.raises(InputError, match="is that of step 3"):
        store.verify(4, made.files)


def test_what_is_declared_is_checked(store: CheckpointStore) -> None:
    def wrong(folder: Path) -> dict[str, str]:
        return {**save(folder), "weights.bin": "0" * 64}

    def missing(folder: Path) -> dict[str, str]:
        return {**save(folder), "more": "0" * 64}

    with pytest.raises(InputError, match="declared with SHA-256 000"):
        store.write(3, HEAD, wrong)
    with pytest.raises(InputError, match="was declared with the files"):
        store.write(3, HEAD, missing)
    with pytest.raises(InputError, match="restores nothing"):
        store.write(3, HEAD, lambda folder: {})
    assert store.steps() == [] and not list(store.staging.iterdir())


def test_the_last_stay(store: CheckpointStore) -> None:
    for step in (1, 3, 5):
        store.write(step, HEAD, save)
    assert store.prune() == [1] and store.steps() == [3, 5]
    assert store.remove_orphans({3}) == [5] and store.steps() == [3]
    with pytest.raises(InputError, match="keep is 0"):
        CheckpointStore(store.root, store.staging, keep=0)


def test_full_disk(store: CheckpointStore) -> None:
    made = store.write(3, HEAD, save)

    def full(folder: Path) -> dict[str, str]:
        (folder / "half").write_text("x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(Interrupted, match=r"checkpoint of step 3 .* the disk is full"):
        store.write(3, HEAD, full)
    assert store.verify(3, made.files, HEAD) == made and not list(store.staging.iterdir())
