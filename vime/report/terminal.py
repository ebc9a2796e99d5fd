"""Terminal tables, as wide as the terminal and no number cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vime.mismatch.report import STAGES, StepReport
from vime.report.numbers import count, decimal, seconds, size
from vime.report.summary import RunSummary

_STYLE = {"good": "bold green", "bad": "bold red", "unknown": "bold yellow"}
MOST_ROWS = 40
_ALWAYS = 0


@dataclass(frozen=True)
class Column:
    """One figure of a step. Columns of a low ``rank`` stay when the terminal is narrow; rank 0 stays always."""

    name: str
    rank: int
    cell: Callable[[StepReport], Text]


def render_terminal(summary: RunSummary, *, most_rows: int = MOST_ROWS) -> RenderableType:
    """The verdict, a table of steps (first and last where there are many) and held-out rewards."""
    verdict = summary.verdict()
    text = Text(verdict.headline, style=_STYLE[verdict.tone])
    for detail in verdict.details:
        text.append(f"\n{detail}", style="not bold default")
    if summary.status != "finished":
        text.append(f"\nthe run is {summary.heading}", style="yellow")
    parts: list[RenderableType] = [Panel(text, title=summary.name, title_align="left", expand=False)]
    if summary.steps:
        parts.append(StepsTable(tuple(summary.steps), most_rows))
        parts.append(time_table(summary.steps))
    if summary.evaluations:
        table = Table("after step", "held-out reward", "samples", title="Evaluation", title_justify="left")
        for item in summary.evaluations:
            reward = decimal(item.reward_mean) if item.reward_mean is not None else "unknown: nothing was evaluated"
            table.add_row(str(item.step), reward, count(item.num_samples))
        parts.append(table)
    return Group(*parts)


@dataclass(frozen=True)
class StepsTable:
    """One row a step, in as many columns as fit whole; one paragraph a step where not even the first few do."""

    steps: tuple[StepReport, ...]
    most_rows: int = MOST_ROWS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = self._rows()
        widths = {
            column.name: max(len(column.name), *(column.cell(step).cell_len for step in rows if step is not None))
            for column in COLUMNS
        }
        chosen: list[Column] = []
        for column in sorted(COLUMNS, key=lambda column: self._rank(column)):
            # a column takes its padding and the line after it; the table takes the line before it
            if 1 + sum(widths[other.name] + 3 for other in (*chosen, column)) <= options.max_width:
                chosen.append(column)
        if any(column not in chosen for column in COLUMNS if column.rank == _ALWAYS):
            yield from self._paragraphs(rows)
            return
        table = Table(title="Steps", title_justify="left")
        shown = [column for column in COLUMNS if column in chosen]
        for column in shown:
            table.add_column(column.name, justify="right", no_wrap=True)
        for step in rows:
            table.add_row(*(["..."] + [""] * (len(shown) - 1) if step is None else [c.cell(step) for c in shown]))
        yield table
        hidden = [column.name for column in COLUMNS if column not in chosen]
        if hidden:
            yield Text(f"a wider terminal shows {', '.join(hidden)} too; --json and report.html have all", style="dim")

    def _rank(self, column: Column) -> float:
        """The largest difference moves to the front as soon as there is one."""
        if column.name == "max |diff|" and any(step.max_abs_diff for step in self.steps):
            return _ALWAYS + 0.5
        return column.rank

    def _rows(self) -> list[StepReport | None]:
        if len(self.steps) <= self.most_rows:
            return list(self.steps)
        head = self.most_rows // 2
        return [*self.steps[:head], None, *self.steps[-(self.most_rows - head) :]]

    def _paragraphs(self, rows: Sequence[StepReport | None]) -> RenderResult:
        yield Text("Steps", style="italic")
        for step in rows:
            if step is None:
                yield Text("...")
                continue
            line = Text()
            for column in COLUMNS:
                line.append(f"{', ' if line else ''}{column.name} ").append_text(column.cell(step))
            yield line


def _compared(step: StepReport) -> Text:
    missing = sum(step.incomparable_tokens.values())
    text = Text(count(step.compared_tokens), style="" if step.compared_tokens else "yellow")
    return text.append(f" (+{missing:,} not)", style="yellow") if missing else text


def _mismatches(value: int | None) -> Text:
    if value is None:
        return Text("unknown", style="yellow")
    return Text(count(value), style="green" if value == 0 else "bold red")


COLUMNS = (
    Column("step", _ALWAYS, lambda step: Text(str(step.step))),
    Column("version", 8, lambda step: Text(str(step.weight_version))),
    Column("reward", _ALWAYS, lambda step: Text(decimal(step.reward_mean))),
    Column("compared", _ALWAYS, _compared),
    Column("differ", _ALWAYS, lambda step: _mismatches(step.mismatch_count)),
    Column("distr.", _ALWAYS, lambda step: _mismatches(step.distribution_mismatch_count)),
    Column("max |diff|", 7, lambda step: Text(decimal(step.max_abs_diff))),
    Column("entropy", 4, lambda step: Text(decimal(step.entropy))),
    Column("length", 6, lambda step: Text(decimal(step.response_length_mean, 3))),
    Column("loss", 3, lambda step: Text(decimal(step.loss))),
    Column("grad norm", 5, lambda step: Text(decimal(step.grad_norm))),
    Column("tok/s", 1, lambda step: Text(decimal(step.tokens_per_s, 0))),
    Column("time", 2, lambda step: Text(seconds(step.time_s.get("total")))),
)


def time_table(steps: Sequence[StepReport]) -> Table:
    """Where the time went, over all steps."""
    table = Table("stage", "seconds", "share", title="Time", title_justify="left")
    total = sum(step.time_s["total"] for step in steps)
    for stage in STAGES:
        value = sum(step.time_s[stage] for step in steps)
        if stage == "total":
            rest = sum(step.other_time_s for step in steps)
            table.add_row("comparison, other", seconds(rest), f"{100 * rest / total:.0f} %" if total else "")
        table.add_row(stage, seconds(value), f"{100 * value / total:.0f} %" if total else "")
    table.caption = f"peak memory {size(max(step.peak_memory_bytes for step in steps))}"
    return table
