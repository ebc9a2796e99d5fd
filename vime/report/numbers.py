"""Numbers as people read them; what is unknown is a dash, never a zero."""

from __future__ import annotations

import math

DASH = "–"


def count(value: int | None) -> str:
    """An integer with thousands separated."""
    return DASH if value is None else f"{value:,}"


def decimal(value: float | None, digits: int = 4) -> str:
    """A few significant digits; exact zero is ``0``; very small and large numbers in scientific notation."""
    if value is None or math.isnan(value):
        return DASH
    if value == 0:
        return "0"
    if digits == 0:
        return f"{value:,.0f}"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    return f"{value:,.{digits - 1}f}" if abs(value) < 10 else f"{value:,.{max(0, digits - 3)}f}"


def seconds(value: float | None) -> str:
    """A duration."""
    if value is None:
        return DASH
    if value >= 90:
        minutes, rest = divmod(round(value), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def size(value: int | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return DASH
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values that cover ``low`` to ``high``."""
    if not high > low:
        high = low + 1.0
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_label(value: float) -> str:
    """A short axis label."""
    if value == 0:
        return "0"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.0e}"
