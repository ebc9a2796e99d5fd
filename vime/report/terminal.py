"""Terminal tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vime.mismatch.report import STAGES, StepReport
from vime.report.numbers import count, decimal, seconds, size
from vime.report.summary import RunSummary

_STYLE = {"good": "bold green", "bad": "bold red", "unknown": "bold yellow"}
MOST_ROWS = 40


def render_terminal(summary: RunSummary, *, most_rows: int = MOST_ROWS) -> RenderableType:
    """The verdict, a table of steps (first and last where there are many) and held-out rewards."""
    verdict = summary.verdict()
    text = Text(verdict.headline, style=_STYLE[verdict.tone])
    for detail in verdict.details:
        text.append(f"\n{detail}", style="not bold default")
    if summary.status != "finished":
        text.append(f"\nthe run is {summary.status}{': ' + summary.reason if summary.reason else ''}", style="yellow")
    parts: list[RenderableType] = [Panel(text, title=summary.name, title_align="left", expand=False)]
    if summary.steps:
        parts.append(steps_table(summary.steps, most_rows=most_rows))
        parts.append(time_table(summary.steps))
    if summary.evaluations:
        table = Table("after step", "held-out reward", "samples", title="Evaluation", title_justify="left")
        for item in summary.evaluations:
            table.add_row(str(item.step), decimal(item.reward_mean), count(item.num_samples))
        parts.append(table)
    return Group(*parts)


def steps_table(steps: Sequence[StepReport], *, most_rows: int = MOST_ROWS) -> Table:
    """One row a step."""
    table = Table(title="Steps", title_justify="left", pad_edge=False)
    for name in ("step", "version", "reward", "compared", "differ", "distr.", "max |diff|", "entropy", "length", "loss",
                 "grad norm", "tok/s", "time"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    rows = list(steps)
    cut = len(rows) > most_rows
    head = rows[: most_rows // 2] if cut else rows
    for step in head:
        table.add_row(*_row(step))
    if cut:
        table.add_row("...", *[""] * 12)
        for step in rows[-(most_rows - len(head)) :]:
            table.add_row(*_row(step))
    return table


def _row(step: StepReport) -> list[Text]:
    return [
        Text(str(step.step)),
        Text(str(step.weight_version)),
        Text(decimal(step.reward_mean)),
        _compared(step),
        _mismatches(step.mismatch_count),
        _mismatches(step.distribution_mismatch_count),
        Text(decimal(step.max_abs_diff)),
        Text(decimal(step.entropy)),
        Text(decimal(step.response_length_mean, 3)),
        Text(decimal(step.loss)),
        Text(decimal(step.grad_norm)),
        Text(decimal(step.tokens_per_s, 0)),
        Text(seconds(step.time_s.get("total"))),
    ]


def _compared(step: StepReport) -> Text:
    missing = sum(step.incomparable_tokens.values())
    text = Text(count(step.compared_tokens), style="" if step.compared_tokens else "yellow")
    return text.append(f" (+{missing:,} not)", style="yellow") if missing else text


def _mismatches(value: int | None) -> Text:
    if value is None:
        return Text("unknown", style="yellow")
    return Text(count(value), style="green" if value == 0 else "bold red")


def time_table(steps: Sequence[StepReport]) -> Table:
    """Where the time went, over all steps."""
    table = Table("stage", "seconds", "share", title="Time", title_justify="left")
    total = sum(step.time_s["total"] for step in steps)
    for stage in STAGES:
        value = sum(step.time_s[stage] for step in steps)
        table.add_row(stage, seconds(value), f"{100 * value / total:.0f} %" if total else "")
    table.caption = f"peak memory {size(max(step.peak_memory_bytes for step in steps))}"
    return table
