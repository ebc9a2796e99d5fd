"""Scenes of the crash tests, and their undisturbed runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.runtime.crash.disk import operations
from tests.runtime.crash.scene import (
    PLAIN,
    Scene,
    Whole,
)
from vime.runtime.observer import RunOutcome


@pytest.fixture(scope="package", autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of this module's own, and the current one: calls of user functions are noted there."""
    folder = tmp_path_factory.mktemp("crash")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="package")
def whole(base: Path) -> Whole:
    """The uninterrupted run of a scene."""
    made = 0

    @cache
    def of(scene: Scene) -> RunOutcome:
        nonlocal made
        made += 1
        return scene.start(base / f"whole-{made}" / "run")

    return of


@pytest.fixture(scope="package")
def listed(base: Path, whole: Whole) -> list[str]:
    """The operations on files of the plain run."""
    whole(PLAIN)  # compiles; a child would do it again
    return operations(PLAIN, base / "operations")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"
