"""Small runs, children in which they are killed, and what has to be equal afterwards."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.cli.main import invoke
from vime.errors import VimeError
from vime.pipeline.loading import load_pipeline
from vime.pipeline.prepare import prepare
from vime.runtime.observer import Observer, RunOutcome
from vime.runtime.run_loop import run
from vime.store.run_directory import RunView
from vime.store.steps import read_steps
from vime.store.verify import verify_run
from vime.timeline.diff import diff_runs
from vime.timeline.events import OBSERVED_IN_REPORTS, Decision, RewardGiven
from vime.timeline.manager import LOG_NAME

PIPELINE = """
name: crash
seed: 5
run_directory: {run_directory}
threads: 1
placement: {placement}
model:
  preset: tiny-qwen3
  overrides: {{num_layers: 1, hidden_size: 32, intermediate_size: 32, num_heads: 2, num_kv_heads: 1}}
data:
  source: complement_digits
  parameters: {{digits: 2, held_out: 4}}
stages:
  rollout:
    prompts_per_step: 2
    samples_per_prompt: 3
    sampling: {{temperature: 1.0, max_new_tokens: 3}}
    max_num_seqs: 4
  reward: {{function: {reward}, on_error: {on_error}}}
  filter: {{function: {keep}, incomplete_group: keep}}
  train:
    optimizer: {{learning_rate: 3e-3, schedule: linear}}
  sync: {{transport: {transport}}}
  evaluate: {{every: 1, prompts: 1, samples_per_prompt: 2, greedy: false}}
checkpoint: {{every: {every}, keep: {keep_checkpoints}}}
steps: {steps}
"""
USER_FUNCTIONS = "tests.runtime.crash.functions"


@dataclass(frozen=True)
class Scene:
    """A kind of run; runs of one scene have the same digest wherever and however they run."""

    steps: int = 3
    every: int = 2
    keep_checkpoints: int = 2
    user: bool = False
    on_error: str = "stop"
    placement: str = "colocated"
    transport: str = "memory"

    def pipeline(self, path: Path) -> str:
        """The YAML of a run in ``path``."""
        return PIPELINE.format(
            run_directory=path,
            placement=self.placement,
            transport=self.transport,
            reward=f"{USER_FUNCTIONS}.reward" if self.user else "complement_digits",
            keep=f"{USER_FUNCTIONS}.keep" if self.user else "null",
            on_error=self.on_error,
            every=self.every,
            keep_checkpoints=self.keep_checkpoints,
            steps=self.steps,
        )

    def file(self, path: Path) -> Path:
        """Write the pipeline of a run in ``path`` beside that folder; returns the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.parent.parent / f"{path.parent.name}.yaml"
        file.write_text(self.pipeline(path))
        return file

    def start(self, path: Path, observer: Observer | None = None) -> RunOutcome:
        """A new run in ``path``."""
        return run(prepare(load_pipeline(self.file(path))), observer=observer)

    def finish(self, path: Path, observer: Observer | None = None) -> RunOutcome:
        """Resume what is in ``path``; where the first process did not get as far as a log, start anew."""
        if not (path / LOG_NAME).is_file():
            return self.start(path, observer)
        override = [f"run_directory={path}"]
        prepared = prepare(load_pipeline(path / "pipeline.yaml", override), new_run=False)
        return run(prepared, resume=True, observer=observer)


PLAIN = Scene(steps=2, every=1, keep_checkpoints=1)
USER = Scene(user=True)
DROPPING = Scene(user=True, on_error="drop", steps=2, every=1)
OFTEN = Scene(every=1)
Whole = Callable[[Scene], RunOutcome]
"""Gives the undisturbed run of a scene."""


def other_digests(whole: RunOutcome, other: RunOutcome) -> list[str]:
    """Digests of the run and of its final weights that differ."""
    found = []
    if other.extra["run_digest"] != whole.extra["run_digest"]:
        found.append(f"run digest {other.extra['run_digest']}, not {whole.extra['run_digest']}")
    if other.manifest_digest != whole.manifest_digest:
        found.append(f"weights {other.manifest_digest}, not {whole.manifest_digest}")
    return found


def differences(whole: RunOutcome, other: RunOutcome) -> list[str]:
    """In what a run that was interrupted differs from one that was not; empty: in nothing.

    Compares digests, every event and array, and the reports; verifies the log, all arrays, checkpoints and views.
    Raises InvariantViolation for a run that is damaged.
    """
    found = other_digests(whole, other)
    difference = diff_runs(whole.run_directory, other.run_directory)
    if difference is not None:
        found.append(difference.sentence())
    verified = verify_run(other.run_directory)
    found += verified.problems
    if not verified.finished:
        found.append("the run is not finished")
    if (reports := _reports(other)) != _reports(whole):
        found.append(f"the step reports differ: {reports}")
    for name in ("contract.json", "evidence.json", "report.html"):
        if not (other.run_directory / name).is_file():
            found.append(f"{name} is missing")
    return found


def _reports(outcome: RunOutcome) -> list[list[dict[str, Any]]]:
    both = [dict(report) for report in outcome.reports], read_steps(outcome.run_directory / "steps.jsonl")
    return [[{k: v for k, v in r.items() if k not in OBSERVED_IN_REPORTS} for r in reports] for reports in both]


def logged_calls(path: Path) -> int:
    """How many rewards and filter answers the log of a run holds (0 without a log)."""
    if not (path / LOG_NAME).is_file():
        return 0
    events = [record.event for record in RunView.open(path).records]
    wanted = [e for e in events if isinstance(e, RewardGiven) or (isinstance(e, Decision) and e.kind == "filter")]
    decided = {e.key for e in events if isinstance(e, Decision) and e.kind == "reward"}
    if not decided:
        return len(wanted)
    return len(decided) + sum(isinstance(e, Decision) for e in wanted)


def in_child(work: Callable[[], Any], said: Path) -> int:
    """Do ``work`` in a forked child; returns its exit status as os.wait gives it. ``said`` gets its errors."""
    said.parent.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        code = 70
        try:
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = sys.stderr = open(descriptor, "w", closefd=False)  # noqa: SIM115
            result = work()
            code = result if isinstance(result, int) else 0
        except VimeError as error:
            print(error)
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1]


def vime_in_child(arguments: list[str], said: Path, before: Callable[[], None] = lambda: None) -> int:
    """The exit code of a command in a child."""

    def work() -> int:
        before()
        return invoke(arguments)

    status = in_child(work, said)
    assert os.WIFEXITED(status), said.read_text()
    return os.WEXITSTATUS(status)


def was_killed(status: int) -> bool:
    """Whether a child died of SIGKILL."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def kill_self() -> None:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class StageKiller:
    """An observer that kills the process when it is told something for the ``count``-th time; else it only notes."""

    what: str = ""
    count: int = 1
    told: list[str] = field(default_factory=list)

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what == self.what and self.told.count(what) == self.count:
            print(f"killed at {what}", flush=True)
            kill_self()

    def started(self, run_directory: Path, first_step: int, steps: int) -> None:
        self._tell("started")

    def step_started(self, step: int) -> None:
        self._tell(f"step {step}")

    def stage(self, name: str) -> None:
        self._tell(f"stage {name}")

    def progress(self, done: int, total: int) -> None:
        self._tell(f"sample {done} of {total}")

    def step_finished(self, report: Any) -> None:
        self._tell("step finished")

    def evaluated(self, evaluation: Any) -> None:
        self._tell("evaluated")

    def finished(self, outcome: RunOutcome) -> None:
        self._tell("finished")

    def stop_requested(self) -> bool:
        return False
