"""Whole runs of a very small model through the run loop, with faults planted in either side."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vime.cli.main import invoke
from vime.errors import InvariantViolation
from vime.pipeline.loading import load_text
from vime.pipeline.prepare import Prepared, prepare
from vime.runtime import run_loop
from vime.runtime.assembly import Sides, assemble
from vime.runtime.observer import RunOutcome
from vime.store.run_directory import RunView
from vime.store.steps import step_reports
from vime.timeline.event import Event
from vime.types import GeneratedSample, Namespace, Prompt

ROWS = 6
PIPELINE = """\
name: small
seed: 7
run_directory: {directory}
model:
  preset: tiny-qwen3
  overrides: {{num_layers: 2, hidden_size: 32, intermediate_size: 48, num_heads: 4, num_kv_heads: 2, head_dim: 8}}
data: {{source: tests.runtime.helpers.rows, repeat: true}}
stages:
  rollout:
    prompts_per_step: 2
    samples_per_prompt: 4
    sampling: {{max_new_tokens: 5}}
    block_size: 8
  reward: {{function: tests.runtime.helpers.reward}}
  train:
    optimizer: {{learning_rate: 5e-3}}
steps: 2
threads: 1
"""


def rows(namespace: Namespace, *, count: int = ROWS) -> Sequence[Mapping[str, Any]]:
    """Prompts of 20 tokens and more, the first 16 of them common to all: two full KV blocks that are shared."""
    marks = "0123456789+01234" if namespace == "train" else "9876543210-98765"
    return [{"text": f"{marks}{'+' * (n % 3)}{n:03d}="} for n in range(count)]


class Judge:
    """What :func:`reward` adds for one sample; a test changes it to give one other reward."""

    generous_to: str = ""


def reward(prompt: Prompt, sample: GeneratedSample, text: str) -> float:
    """Something that differs between samples and depends on every token."""
    extra = 0.125 if str(sample.sample_id) == Judge.generous_to else 0.0
    return float(sum((place + 1) * token for place, token in enumerate(sample.token_ids)) % 7) / 7.0 + extra


def prepared(directory: Path, *overrides: str) -> Prepared:
    """The small pipeline, checked."""
    return prepare(load_text(PIPELINE.format(directory=directory), "small.yaml", overrides))


def run(directory: Path, *overrides: str, plant: Callable[[Sides], None] | None = None) -> RunOutcome:
    """Run the small pipeline in this process; ``plant`` alters the sides before anything has run."""
    return run_loop.run(prepared(directory, *overrides), sides=planting(plant))


def planting(plant: Callable[[Sides], None] | None) -> Callable[[Prepared, Path], Sides]:
    """A factory of sides that puts a fault into what :func:`assemble` builds."""

    def factory(ready: Prepared, run_directory: Path) -> Sides:
        sides = assemble(ready, run_directory)
        if plant is not None:
            plant(sides)
        return sides

    return factory


@dataclass(frozen=True)
class Ended:
    """How ``vime run`` ended: exit code, the last line on stderr, the error that stopped it, and the run directory."""

    code: int
    message: str
    error: Exception | None
    directory: Path

    @property
    def events(self) -> list[Event]:
        """The events of the log; none where the run was refused before its first one, which leaves no folder."""
        if not self.directory.exists():
            return []
        return [record.event for record in RunView.open(self.directory).records]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The step reports."""
        return list(step_reports(RunView.open(self.directory).records))

    def count(self, kind: str) -> int:
        """Events of a type."""
        return sum(event.type == kind for event in self.events)


class Commands:
    """Runs the command line in this process with planted faults."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self._number = 0

    def run(self, *overrides: str, plant: Callable[[Sides], None] | None = None) -> Ended:
        """``vime run`` of the small pipeline in a new run directory."""
        self._number += 1
        directory = self.folder / f"run{self._number}"
        file = self.folder / f"run{self._number}.yaml"
        file.write_text(PIPELINE.format(directory=directory))
        arguments = ["run", str(file), *(part for text in overrides for part in ("--set", text))]
        return self._drive(arguments, directory, plant)

    def resume(self, directory: Path, plant: Callable[[Sides], None] | None = None) -> Ended:
        """``vime resume``."""
        return self._drive(["resume", str(directory)], directory, plant)

    def _drive(self, arguments: list[str], directory: Path, plant: Callable[[Sides], None] | None) -> Ended:
        caught: list[Exception] = []
        whole = inspect.unwrap(run_loop.run)

        def watched(*args: Any, **kwargs: Any) -> RunOutcome:
            try:
                return whole(*args, **kwargs, sides=planting(plant))
            except Exception as error:
                caught.append(error)
                raise

        with self._monkeypatch.context() as patch:
            patch.setattr(run_loop, "run", watched)
            self._capsys.readouterr()
            code = invoke(arguments)
        lines = [line for line in self._capsys.readouterr().err.splitlines() if line.startswith("vime: ")]
        message = lines[-1].removeprefix("vime: ") if lines else ""
        return Ended(code, message, caught[-1] if caught else None, directory)

    def call(self, *arguments: str) -> tuple[int, str]:
        """Any other command: exit code and what it printed, stdout and stderr together."""
        self._capsys.readouterr()
        code = invoke(list(arguments))
        captured = self._capsys.readouterr()
        return code, captured.out + captured.err


def caught(ended: Ended, *texts: str, trained: int, kind: type[Exception] = InvariantViolation, code: int = 1) -> None:
    """Exit code, error type and sentence are right, and exactly ``trained`` steps were trained before it."""
    assert isinstance(ended.error, kind), (ended.error, ended.message)
    assert ended.code == code
    for text in texts:
        assert text in ended.message, ended.message
    assert ended.count("step_trained") == trained
    assert ended.count("run_finished") == 0
    # the log says why, so that whoever comes later can read it
    reasons = [event.reason for event in ended.events if event.type == "run_interrupted"]
    assert len(reasons) == 1 and all(text in reasons[0] for text in texts)


def clean(ended: Ended | RunOutcome, steps: int = 2) -> None:
    """The run ended well, every step compared all its tokens, and not one bit differed."""
    code = ended.code if isinstance(ended, Ended) else ended.exit_code
    assert code == 0, ended.message
    assert len(ended.reports) == steps
    for report in ended.reports:
        assert report["compared_tokens"] == report["num_tokens"] > 0
        assert (report["mismatch_count"], report["distribution_mismatch_count"], report["nonfinite_count"]) == (0, 0, 0)
        assert (report["ratio_min"], report["ratio_max"], report["diagnosis"]) == (1.0, 1.0, None)
