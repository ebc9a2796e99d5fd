"""report.html: one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from vime.mismatch.report import STAGES, StepReport
from vime.report import sections
from vime.report.charts import Bars, Series, legend, line_chart, stacked_bars
from vime.report.numbers import count, decimal, seconds, size
from vime.report.style import CSS
from vime.report.summary import RunSummary

_STAGE_STYLE = {"rollout": "c1", "reward": "c4", "score": "c5", "train": "c2", "sync": "c3", "other": "c6"}


def render_html(summary: RunSummary) -> str:
    """The page as text. It loads nothing, runs no script and reads the same in light and dark."""
    body = [_header(summary), _verdict(summary)]
    if summary.steps:
        body += [_tiles(summary), _main_charts(summary), _small_charts(summary.steps), sections.steps(summary.steps)]
    body += [
        sections.compared(summary),
        sections.identities(summary),
        sections.contract(summary),
        sections.evidence(summary),
        "<footer>Written by vime. Bits were compared as integers; no tolerance was used anywhere.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(summary.name)} · {escape(summary.verdict().headline)}</title><style>{CSS}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _header(summary: RunSummary) -> str:
    facts = "".join(f"<span><b>{escape(k)}</b>{escape(v)}</span>" for k, v in summary.facts.items())
    style = summary.status + (" native" if summary.native else "")
    return (
        f'<header><h1>{escape(summary.name)}</h1><span class="chip {style}">{escape(summary.heading)}</span>'
        f'<div class="facts">{facts}</div></header>'
    )


def _verdict(summary: RunSummary) -> str:
    verdict = summary.verdict()
    items = "".join(f"<li>{escape(item[:1].upper() + item[1:])}.</li>" for item in verdict.details)
    return (
        f'<section class="card verdict {verdict.tone}"><p class="big">{escape(verdict.headline)}</p>'
        f"<ul>{items}</ul></section>"
    )


def _tiles(summary: RunSummary) -> str:
    steps = summary.steps
    first, last = summary.edges()
    few = len(first)
    rates = sorted(step.tokens_per_s for step in steps if step.tokens_per_s is not None)
    held_out = [item.reward_mean for item in summary.evaluations]
    tiles = [("steps", count(len(steps)))]
    if len(steps) == 1:
        tiles.append(("reward", decimal(summary.reward_of(steps), 3)))
    else:
        name = f"reward, first → last {few} steps" if few > 1 else "reward, first → last step"
        tiles.append((name, _change(summary.reward_of(first), summary.reward_of(last))))
    if held_out:
        change = _change(held_out[0], held_out[-1]) if len(held_out) > 1 else decimal(held_out[0], 3)
        tiles.append(("held-out reward", change))
    tiles += [
        ("tokens generated", count(sum(step.num_tokens for step in steps))),
        ("tokens/s, median", decimal(rates[len(rates) // 2], 0) if rates else "–"),
        ("time in steps", seconds(sum(step.time_s["total"] for step in steps))),
        ("peak memory", size(max(step.peak_memory_bytes for step in steps))),
    ]
    cells = "".join(
        f'<div class="card tile"><div class="v">{value}</div><div class="k">{escape(name)}</div></div>'
        for name, value in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _change(first: float | None, last: float | None) -> str:
    return f'<span class="from">{decimal(first, 3)} →</span> {decimal(last, 3)}'


def _main_charts(summary: RunSummary) -> str:
    steps = summary.steps
    train = Series("training reward", [(step.step, step.reward_mean) for step in steps], "c1")
    lines = [train]
    keys = [("training", "c1")]
    if summary.evaluations:
        held = [(item.step, item.reward_mean) for item in summary.evaluations]
        lines.append(Series("held-out reward", held, "c2", dots=True))
        keys.append(("held out", "c2"))
    rewards = line_chart("Mean reward by step", lines, bounds=(0.0, 0.0))
    xs = [step.step for step in steps]
    proof = stacked_bars(
        "Tokens compared by step",
        xs,
        [
            Bars("same bits", [step.compared_tokens - _differing(step) for step in steps], "good"),
            Bars("differing", [_differing(step) for step in steps], "bad"),
            Bars("not comparable", [sum(step.incomparable_tokens.values()) for step in steps], "none"),
        ],
        unit=" tokens",
    )
    layers = [Bars(s, [step.time_s[s] for step in steps], _STAGE_STYLE[s]) for s in STAGES if s != "total"]
    layers.append(Bars("other", [step.other_time_s for step in steps], "c6"))
    layers = [layer for layer in layers if any(value > 0 for value in layer.values)]
    times = stacked_bars("Seconds by stage and step", xs, layers, unit=" s")
    speed = line_chart("Generated tokens per second", [Series("tokens/s", _points(steps, "tokens_per_s"), "c1")],
                       bounds=(0.0, 0.0), area=True)  # fmt: skip
    return (
        '<h2>The run</h2><div class="grid2">'
        + _figure("Mean reward", rewards, legend(keys))
        + _figure(
            "Tokens compared",
            proof,
            legend([("same bits on both sides", "good"), ("differing", "bad"), ("not comparable", "none")]),
        )
        + _figure("Seconds by stage", times, legend([(layer.name, layer.style) for layer in layers]))
        + _figure("Generated tokens per second", speed, legend([("rollout", "c1")]))
        + "</div>"
    )


def _small_charts(steps: Sequence[StepReport]) -> str:
    charts = [
        ("Entropy (nats)", "entropy", "c4"),
        ("Gradient norm", "grad_norm", "c2"),
        ("Loss", "loss", "c1"),
        ("Response length (tokens)", "response_length_mean", "c5"),
        ("Standard deviation of rewards", "reward_std", "c3"),
        ("Learning rate", "learning_rate", "c1"),
    ]
    figures = [
        _figure(title, line_chart(title, [Series(title, _points(steps, name), style)], width=360, height=160), "")
        for title, name, style in charts
        if any(getattr(step, name) is not None for step in steps)
    ]
    return f'<div class="grid3">{"".join(figures)}</div>'


def _points(steps: Sequence[StepReport], name: str) -> list[tuple[float, float | None]]:
    return [(float(step.step), getattr(step, name)) for step in steps]


def _differing(step: StepReport) -> int:
    return max(step.mismatch_count or 0, step.distribution_mismatch_count or 0)


def _figure(title: str, chart: str, key: str) -> str:
    return f'<div class="card"><h3>{escape(title)}</h3>{chart}{key}</div>'
