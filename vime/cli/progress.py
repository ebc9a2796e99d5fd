"""How a run is shown: a progress bar on a terminal, plain lines elsewhere, JSON lines on request."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from vime.cli.tables import evaluation_line, number, report_line, summary, summary_table
from vime.cli.words import counted
from vime.runtime.observer import RunOutcome
from vime.store.names import REPORT_NAME

PREPARING = (
    "preparing: data, weights, and kernels, which a first start on a machine compiles and compares with their contract"
)


def report_place(outcome: RunOutcome) -> str:
    """Where the run's page for people lies."""
    return f"report: {outcome.run_directory / REPORT_NAME}"


class StopSwitch:
    """Set by SIGINT and SIGTERM: the run stops at its next safe place. A second signal interrupts at once."""

    def __init__(self) -> None:
        self.set = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.set:
            raise KeyboardInterrupt
        self.set = True
        name = signal.Signals(number).name
        click.echo(f"vime: {name}: stopping at the next safe place; once more stops at once", err=True)


@contextmanager
def stop_on_signals() -> Iterator[StopSwitch]:
    """Install the switch for SIGINT and SIGTERM, and restore the previous handlers afterwards."""
    switch = StopSwitch()
    previous = {number: signal.signal(number, switch.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield switch
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_SLOW_STAGES = {
    "evaluate": "held-out samples are generated and rewarded",
    "rollout": "samples are generated",
    "score": "the trainer computes their log-probabilities again",
    "train": "gradients and updates",
}


class _Base:
    """What all observers share: the switch."""

    def __init__(self, switch: StopSwitch) -> None:
        self._switch = switch
        self.done = False

    def preparing(self) -> None:
        """Nothing to show."""

    def started(self, run_directory: Path, first_step: int, steps: int) -> None:
        """Nothing to show."""

    def step_started(self, step: int) -> None:
        """Nothing to show."""

    def stage(self, name: str) -> None:
        """Nothing to show."""

    def progress(self, done: int, total: int) -> None:
        """Nothing to show."""

    def step_finished(self, report: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def finished(self, outcome: RunOutcome) -> None:
        """Show the end, once."""
        self.done = True

    def stop_requested(self) -> bool:
        """Whether a signal came."""
        return self._switch.set


class PlainObserver(_Base):
    """One line a step: for logs and pipes."""

    def __init__(self, switch: StopSwitch, stream: TextIO | None = None) -> None:
        super().__init__(switch)
        self._stream = stream or sys.stdout
        self._steps = 0
        self._shown = False

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def preparing(self) -> None:
        """Say why nothing else comes for a while."""
        self._line(PREPARING)

    def stage(self, name: str) -> None:
        """Name the slow stages until the first step is done: with a large model they take minutes."""
        if not self._shown and name in _SLOW_STAGES:
            self._line(f"  {name}: {_SLOW_STAGES[name]}")

    def started(self, run_directory: Path, first_step: int, steps: int) -> None:
        """Say where the run is."""
        self._steps = steps
        resumed = f", from step {first_step}" if first_step else ""
        self._line(f"run {run_directory}: {counted(steps, 'step')}{resumed}")

    def step_finished(self, report: Mapping[str, Any]) -> None:
        """The step in one line."""
        self._shown = True
        self._line(report_line(report, self._steps))

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        """The evaluation in one line."""
        self._line(evaluation_line(evaluation))

    def finished(self, outcome: RunOutcome) -> None:
        """The final table."""
        super().finished(outcome)
        console = Console(file=self._stream, width=100, color_system=None)
        console.print(summary_table(outcome))
        self._line(report_place(outcome))


class JsonObserver(_Base):
    """One JSON object a line: ``{"event": ..., ...}``."""

    def __init__(self, switch: StopSwitch, stream: TextIO | None = None) -> None:
        super().__init__(switch)
        self._stream = stream or sys.stdout

    def _line(self, event: str, data: Mapping[str, Any]) -> None:
        print(json.dumps({"event": event, **data}, default=str), file=self._stream, flush=True)

    def started(self, run_directory: Path, first_step: int, steps: int) -> None:
        """``started``."""
        self._line("started", {"run_directory": str(run_directory), "first_step": first_step, "steps": steps})

    def stage(self, name: str) -> None:
        """``stage``."""
        self._line("stage", {"name": name})

    def step_finished(self, report: Mapping[str, Any]) -> None:
        """``step``: the whole per-step report."""
        self._line("step", report)

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        """``evaluation``."""
        self._line("evaluation", evaluation)

    def finished(self, outcome: RunOutcome) -> None:
        """``finished``: status, exit code, totals."""
        super().finished(outcome)
        data = {
            "status": outcome.status,
            "exit_code": outcome.exit_code,
            "run_directory": str(outcome.run_directory),
            "manifest_digest": outcome.manifest_digest,
            "message": outcome.message,
            "report": str(outcome.run_directory / REPORT_NAME),
            **summary(outcome),
        }
        self._line("finished", data)


class BarObserver(_Base):
    """A progress bar with the stage, tokens/s, reward and mismatches; the table at the end."""

    def __init__(self, switch: StopSwitch, console: Console | None = None) -> None:
        super().__init__(switch)
        self._console = console or Console()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[stage]:<16}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._shown = 0.0

    def preparing(self) -> None:
        """Say why nothing else comes for a while."""
        self._console.print(PREPARING, highlight=False)

    def started(self, run_directory: Path, first_step: int, steps: int) -> None:
        """Show the bar."""
        self._console.print(f"run {run_directory}", highlight=False, markup=False, soft_wrap=True)
        self._task = self._progress.add_task("", total=steps, completed=first_step, stage="", figures="")
        self._progress.start()

    def _update(self, **fields: Any) -> None:
        if self._task is not None:
            self._progress.update(self._task, **fields)

    def stage(self, name: str) -> None:
        """Name the stage."""
        self._stage = name
        self._update(stage=name)

    def progress(self, done: int, total: int) -> None:
        """Samples of the stage, at most ten times a second."""
        now = time.monotonic()
        if now - self._shown > 0.1 or done == total:
            self._shown = now
            self._update(stage=f"{self._stage} {done}/{total}")

    def step_finished(self, report: Mapping[str, Any]) -> None:
        """Advance; a mismatch is also printed above the bar."""
        mismatches = report["mismatch_count"]
        color = "yellow" if mismatches is None else "red" if mismatches else "green"
        shown = "unknown" if mismatches is None else str(mismatches)
        rate, reward = number(report["tokens_per_s"], 0), number(report["reward_mean"], 3)
        figures = f"{rate} tokens/s  reward {reward}  mismatch [{color}]{shown}[/{color}]"
        self._update(completed=report["step"] + 1, figures=figures)
        if mismatches is None or mismatches or report["distribution_mismatch_count"]:
            self._progress.console.print(report_line(report, 0), style="red", highlight=False)

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        """Print above the bar."""
        self._progress.console.print(evaluation_line(evaluation), highlight=False)

    def close(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def finished(self, outcome: RunOutcome) -> None:
        """Replace the bar by the final table."""
        super().finished(outcome)
        self.close()
        self._console.print(summary_table(outcome))
        self._console.print(report_place(outcome), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def observing(as_json: bool) -> Iterator[JsonObserver | PlainObserver | BarObserver]:
    """The observer that fits standard output, with signals switched to a clean stop."""
    with stop_on_signals() as switch:
        if as_json:
            yield JsonObserver(switch)
        elif not sys.stdout.isatty():
            yield PlainObserver(switch)
        else:
            bar = BarObserver(switch)
            try:
                yield bar
            finally:
                bar.close()
