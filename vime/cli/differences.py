"""The first difference of two runs as lines: where it is, then one value below the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vime.timeline.diff import ArrayDifference, Difference

_LONGEST = 96
"""Characters of a value; ``--json`` has all of it."""


def difference_lines(difference: Difference) -> list[str]:
    """A difference in lines that a terminal of 120 columns takes."""
    if difference.consequence is None and not difference.settings:
        return ["the runs differ first at", *_event(difference)]
    lines = ["the runs were asked for different things, first at", *_event(difference, with_element=False)]
    if difference.settings:
        lines.append("settings that differ:")
        width = max(len(key) for key, _, _ in difference.settings)
        for key, left, right in difference.settings:
            lines += _pair(key.ljust(width), left, right)
    if difference.consequence is not None:
        lines += ["what was computed differs first at", *_event(difference.consequence)]
    elif difference.element is not None:
        lines += _element(difference.element)
    return lines


def _event(difference: Difference, *, with_element: bool = True) -> list[str]:
    from vime.timeline.event import decode_value

    step = "" if difference.step is None else f"step {difference.step}, "
    numbers = " and ".join("none" if seq is None else str(seq) for seq in (difference.left_seq, difference.right_seq))
    lines = [f"  {step}{difference.event} {difference.subject}(events {numbers})"]
    lines += _pair(difference.field, decode_value(difference.left), decode_value(difference.right))
    if with_element and difference.element is not None:
        lines += _element(difference.element)
    return lines


def _element(element: ArrayDifference) -> list[str]:
    place = [
        *([] if element.step is None else [f"step {element.step}"]),
        *([] if element.sample is None else [f"sample {element.sample}"]),
        *([] if element.position is None else [f"position {element.position}"]),
        f"array {element.array}{list(element.index)}",
        *([] if element.bit is None else [f"first at bit {element.bit}"]),
    ]
    return [
        "the first element of the arrays that differs:",
        f"  {', '.join(place)}",
        *_pair("", element.left, element.right),
    ]


def _pair(name: str, left: Any, right: Any) -> list[str]:
    """A name with two values, one below the other, so that the eye finds where they part."""
    start = f"    {name}  " if name else "    "
    return [start + _shown(left), " " * len(start) + _shown(right)]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
