"""Charts as inline SVG; colours come from the page's style sheet by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from vime.report.numbers import decimal, tick_label, ticks

LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 12.0, 26.0
Point = tuple[float, float | None]


@dataclass(frozen=True)
class Series:
    """A named line; a point whose value is None interrupts it. ``style`` is a CSS class (a colour)."""

    name: str
    points: Sequence[Point]
    style: str = "c1"
    dots: bool = False


@dataclass(frozen=True)
class Bars:
    """One layer of stacked bars: a value for each x."""

    name: str
    values: Sequence[float]
    style: str = "c1"


class _Frame:
    """Maps data to the drawing and writes axes."""

    def __init__(self, xs: Sequence[float], low: float, high: float, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.y_ticks = ticks(low, high, 4)
        self.low, self.high = self.y_ticks[0], self.y_ticks[-1]
        self.first, self.last = (min(xs), max(xs)) if xs else (0.0, 1.0)

    def x(self, value: float) -> float:
        span = self.last - self.first
        inner = self.width - LEFT - RIGHT
        return LEFT + (inner * (value - self.first) / span if span else inner / 2)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * (value - self.low) / (self.high - self.low)

    def axes(self, x_of: Sequence[tuple[float, float]]) -> str:
        parts = []
        for value in self.y_ticks:
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{tick_label(value)}</text>'
            )
        every = max(1, -(-len(x_of) // 9))
        for value, x in x_of[::every]:
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{self.height - 8:.1f}" text-anchor="middle">{value:g}</text>'
            )
        return "".join(parts)

    def svg(self, label: str, content: str) -> str:
        return (
            f'<svg viewBox="0 0 {self.width:g} {self.height:g}" role="img" aria-label="{escape(label, quote=True)}">'
            f"{content}</svg>"
        )


def line_chart(
    label: str,
    series: Sequence[Series],
    *,
    width: float = 500,
    height: float = 220,
    bounds: tuple[float, float] | None = None,
    area: bool = False,
) -> str:
    """Lines over a shared x axis; ``bounds`` are values that the y axis has to include."""
    values = [v for s in series for _, v in s.points if v is not None]
    values += list(bounds or ())
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == high:
        low, high = (0.0, low) if low > 0 else (low - 0.5, low + 0.5)
    xs = sorted({x for s in series for x, _ in s.points})
    frame = _Frame(xs, low, high, width, height)
    parts = [frame.axes([(x, frame.x(x)) for x in xs])]
    for item in series:
        for run in _runs(item.points):
            path = "M" + "L".join(f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in run)
            if area and len(run) > 1:
                floor = frame.y(frame.low)
                closed = f"{path}L{frame.x(run[-1][0]):.1f} {floor:.1f}L{frame.x(run[0][0]):.1f} {floor:.1f}Z"
                parts.append(f'<path class="area {item.style}" d="{closed}"/>')
            parts.append(f'<path class="line {item.style}" d="{path}"/>')
            shown = item.dots or len(run) == 1 or len(item.points) <= 24
            radius = 4 if item.dots else 2.5 if shown else 6
            kind = "dot" if shown else "dot hidden"
            for x, y in run:
                parts.append(
                    f'<circle class="{kind} {item.style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius}">'
                    f"<title>{escape(item.name)}, step {x:g}: {decimal(y)}</title></circle>"
                )
    return frame.svg(label, "".join(parts))


def stacked_bars(
    label: str, xs: Sequence[int], layers: Sequence[Bars], *, width: float = 500, height: float = 220, unit: str = ""
) -> str:
    """One bar a step, layers from the bottom up."""
    totals = [sum(layer.values[i] for layer in layers) for i in range(len(xs))]
    frame = _Frame([], 0.0, max(totals, default=1.0) or 1.0, width, height)
    slot = (width - LEFT - RIGHT) / max(1, len(xs))
    bar = min(slot * 0.78, 44.0)
    middles = [LEFT + slot * (i + 0.5) for i in range(len(xs))]
    parts = [frame.axes(list(zip(xs, middles, strict=True)))]
    for i, x in enumerate(xs):
        base = 0.0
        for layer in layers:
            value = layer.values[i]
            if value <= 0:
                continue
            top, bottom = frame.y(base + value), frame.y(base)
            # a single differing token among thousands must be visible
            tall = max(bottom - top, 4.0 if layer.style == "bad" else 0.3)
            parts.append(
                f'<rect class="bar {layer.style}" x="{middles[i] - bar / 2:.1f}" y="{bottom - tall:.1f}" '
                f'width="{bar:.1f}" height="{tall:.1f}"><title>step {x}, {escape(layer.name)}: '
                f"{decimal(value, 0 if float(value).is_integer() else 4)}{escape(unit)}</title></rect>"
            )
            base += value
    return frame.svg(label, "".join(parts))


def legend(items: Sequence[tuple[str, str]]) -> str:
    """(name, style) pairs with a swatch each."""
    return (
        '<div class="legend">'
        + "".join(f'<span><i class="{style}"></i>{escape(name)}</span>' for name, style in items)
        + "</div>"
    )


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]
