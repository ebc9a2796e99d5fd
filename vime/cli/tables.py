"""Reports as text: one line a step, and the table at the end of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from vime.cli.words import counted
from vime.runtime.observer import RunOutcome


def report_line(report: Mapping[str, Any], steps: int) -> str:
    """One step's report in one line. A step that compared nothing says so instead of '0 mismatches'."""
    compared = report["compared_tokens"]
    if compared:
        bits = (
            f"{report['mismatch_count']:,} log-probabilities and {report['distribution_mismatch_count']:,} whole "
            f"distributions of {counted(compared, 'token')} differ"
        )
    else:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in report["incomparable_tokens"].items())
        bits = "nothing compared" + (f": {reasons}" if reasons else "")
    count = f"step {report['step']}" + (f" ({report['step'] + 1:,} of {steps:,})" if steps else "")
    return (
        f"{count}  reward {number(report['reward_mean'], 3)}  {bits}  loss {number(report['loss'], 4)}  "
        f"grad {number(report['grad_norm'], 3)}  {number(report['tokens_per_s'], 0)} tokens/s{_again(report)}"
    )


def evaluation_line(evaluation: Mapping[str, Any]) -> str:
    """A held-out evaluation in one line. Where every reward failed, it says that nothing was evaluated."""
    after = f"after {counted(evaluation['step'], 'step')}"
    failed = evaluation.get("dropped_samples", 0)
    if evaluation["reward_mean"] is None:
        text = f"held-out reward unknown {after}: nothing was evaluated, {counted(failed, 'reward')} failed"
        return text + _again(evaluation)
    text = f"held-out reward {number(evaluation['reward_mean'], 3)} {after}"
    if failed:
        text += f" ({counted(failed, 'reward')} failed, {counted(evaluation['num_samples'], 'sample')} evaluated)"
    return text + _again(evaluation)


def _again(report: Mapping[str, Any]) -> str:
    """What tells a step that the log of a resumed run held already from one that was run now."""
    return "  (repeated: as in the log)" if report.get("repeated") else ""


def number(value: Any, digits: int) -> str:
    """A figure with so many digits after the point; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" if isinstance(value, int | float) and math.isfinite(value) else str(value)


def _count(value: int | None) -> str:
    return "unknown: nothing was compared" if value is None else f"{value:,}"


def _held_out(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """The mean reward of an evaluation; a dash where there was none."""
    if evaluations and evaluations[0]["reward_mean"] is None:
        return "unknown: nothing was evaluated"
    return number(evaluations[0]["reward_mean"], 3) if evaluations else "-"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _total(reports: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """Sum over the steps that compared something; None where none did."""
    values = [int(report[name]) for report in reports if report[name] is not None]
    return sum(values) if values else None


def summary(outcome: RunOutcome) -> dict[str, Any]:
    """Figures of a whole run: rewards of the first and last steps, held-out before and after, totals.

    The first and the last ``reward_window`` steps, at most five, have none in common, save the only one of a run.
    """
    reports = outcome.reports
    rewards = [float(report["reward_mean"]) for report in reports if report["reward_mean"] is not None]
    edge = min(len(rewards), max(1, min(5, len(rewards) // 2)))
    held_out = [item["reward_mean"] for item in outcome.evaluations]
    tokens = sum(int(report["num_tokens"]) for report in reports)
    busy = sum(float(report["time_s"]["total"]) for report in reports)
    return {
        "steps_done": len(reports),
        "steps": outcome.steps,
        "steps_recalled": outcome.recalled,
        "steps_repeated": outcome.repeated,
        "reward_first": _mean(rewards[:edge]),
        "reward_last": _mean(rewards[len(rewards) - edge :]),
        "reward_window": edge,
        "held_out_before": held_out[0] if held_out else None,
        "held_out_after": held_out[-1] if len(held_out) > 1 else None,
        "evaluations_of_nothing": sum(value is None for value in held_out),
        "num_tokens": tokens,
        "compared_tokens": sum(int(report["compared_tokens"]) for report in reports),
        "steps_without_comparison": sum(not report["compared_tokens"] for report in reports),
        "mismatch_count": _total(reports, "mismatch_count"),
        "distribution_mismatch_count": _total(reports, "distribution_mismatch_count"),
        "nonfinite_count": _total(reports, "nonfinite_count"),
        "tokens_per_s": tokens / busy if busy else None,
        "seconds": outcome.seconds,
        "seconds_in_steps": busy,
    }


def summary_table(outcome: RunOutcome) -> Table:
    """The table at the end of ``vime run``."""
    figures = summary(outcome)
    table = Table(title=f"{outcome.status}: {outcome.run_directory}", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    window = figures["reward_window"]
    edge = "step" if window == 1 else f"{window} steps"
    rows = [
        ("steps", f"{figures['steps_done']} of {figures['steps']}"),
        (f"reward, first {edge}", number(figures["reward_first"], 3)),
        (f"reward, last {edge}", number(figures["reward_last"], 3)),
        ("held-out reward, before", _held_out(outcome.evaluations[:1])),
        ("held-out reward, after", _held_out(outcome.evaluations[1:][-1:])),
        ("tokens compared", f"{figures['compared_tokens']:,} of {figures['num_tokens']:,}"),
        ("tokens whose log-probability differs in any bit", _count(figures["mismatch_count"])),
        ("tokens whose whole distribution differs in any bit", _count(figures["distribution_mismatch_count"])),
        ("values that are not finite", _count(figures["nonfinite_count"])),
        ("tokens/s (all stages)", number(figures["tokens_per_s"], 0)),
        ("seconds", number(figures["seconds"], 1)),
        ("weights", outcome.manifest_digest[:16] or "-"),
    ]
    if figures["steps_without_comparison"]:
        at = [name for name, _ in rows].index("tokens compared") + 1
        rows.insert(at, ("steps that compared nothing", str(figures["steps_without_comparison"])))
    if figures["steps_done"] == 1:
        rows[1:3] = [("reward", number(figures["reward_first"], 3))]
    if outcome.recalled or outcome.repeated:
        now = figures["steps_done"] - outcome.recalled - outcome.repeated
        shares = {"run now": now, "repeated": outcome.repeated, "read from the log": outcome.recalled}
        rows.insert(1, ("of these", ", ".join(f"{count} {what}" for what, count in shares.items() if count)))
        at = [name for name, _ in rows].index("seconds")
        rows[at] = ("seconds of this call", rows[at][1])
        rows.insert(at + 1, ("seconds in all steps, when they first ran", number(figures["seconds_in_steps"], 1)))
    for name, value in rows:
        table.add_row(name, value)
    return table
