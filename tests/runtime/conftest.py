"""Fixtures of whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.runtime.helpers import Commands


@pytest.fixture
def vime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    """The command line in this process, with faults where a test plants them."""
    return Commands(tmp_path, monkeypatch, capsys)


@pytest.fixture
def intact_subnormals() -> Iterator[None]:
    """Whatever a test does to this thread's subnormals is undone."""
    yield
    torch.set_flush_denormal(False)
