"""steps.jsonl: the per-step reports, a view of the log that can be rebuilt from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vime.errors import InputError
from vime.store.files import disk_errors, write_file
from vime.timeline.events import Evaluated, StepFinished
from vime.timeline.log import Record

STEPS_NAME = "steps.jsonl"
REPORT_FIELDS = (
    "step", "weight_version", "num_samples", "num_tokens", "compared_tokens", "incomparable_tokens", "mismatch_count",
    "max_abs_diff", "mean_abs_diff", "nonfinite_count", "distribution_mismatch_count", "worst_token", "k1", "k2", "k3",
    "ratio_min", "ratio_max", "clip_fraction", "entropy", "reward_mean", "reward_std", "zero_variance_groups",
    "response_length_mean", "truncated_fraction", "loss", "grad_norm", "learning_rate", "tokens_per_s",
    "peak_memory_bytes", "time_s",
)  # fmt: skip
"""The order of a report's fields in the file; others follow by name."""


def step_report(event: StepFinished) -> dict[str, Any]:
    """The report of a step as plain data, what a clock measured included. Numbers that JSON lacks are null."""
    values = {**event.report, **event.observed.get("report", {})}
    order = [*(name for name in REPORT_FIELDS if name in values), *sorted(set(values) - set(REPORT_FIELDS))]
    return {name: _plain(values[name]) for name in order}


def evaluation_report(event: Evaluated) -> dict[str, Any]:
    """An evaluation as plain data; ``reward_mean`` is None where no sample has a reward."""
    return {
        "step": event.step,
        "reward_mean": event.reward_mean,
        "num_samples": event.num_samples,
        "dropped_samples": event.metrics.get("dropped_samples", 0),
        "weight_version": event.version,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def step_reports(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """The reports of all finished steps of a log."""
    for record in records:
        if isinstance(record.event, StepFinished):
            yield step_report(record.event)


class StepsWriter:
    """Appends reports as steps finish. Not synced: the log is what counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, record: Record) -> None:
        """Take a record of the log as it is written."""
        for report in step_reports([record]):
            with disk_errors(str(self.path)), open(self.path, "a") as file:
                file.write(_line(report))


def rebuild_steps(records: Iterable[Record], path: Path) -> None:
    """Write steps.jsonl anew from the log."""
    write_file(path, steps_text(records).encode())


def steps_text(records: Iterable[Record]) -> str:
    """What steps.jsonl holds of a log."""
    return "".join(map(_line, step_reports(records)))


def _line(report: Mapping[str, Any]) -> str:
    """Fields in their order, what is in them by name: the same bytes from an event as it is made and as it is read."""
    fields = (f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in report.items())
    return "{" + ", ".join(fields) + "}\n"


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The reports in the file. Raises InputError naming a line that is not JSON."""
    reports = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise InputError(f"the step reports {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            reports.append(json.loads(line))
        except ValueError as error:
            raise InputError(
                f"line {number} of {path} is not JSON ({error}); the file can be rebuilt from the event log"
            ) from error
    return reports
