"""Draws a summation tree as SVG: leaves at the bottom in tree order, the sum at the top."""

from __future__ import annotations

from html import escape

from rlkernel.verify.discovery.notation import summary
from rlkernel.verify.discovery.tree import Tree

_HEIGHT, _MARGIN, _FOOT = 460.0, 28.0, 46.0
_MOST_LABELS, _MOST_DOTS = 64, 320


def draw_svg(tree: Tree, title: str) -> str:
    """An SVG document. The hue of a leaf's mark is its index, so that strides are seen where labels would not fit.

    Args:
        tree: any tree; more than a few thousand leaves give a large file.
        title: the heading, as text.
    """
    width = max(420.0, min(1680.0, 18.0 * tree.leaves)) + 2 * _MARGIN
    x, y = _places(tree, width)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {_HEIGHT + 2 * _MARGIN + _FOOT:.0f}" '
        f'width="{width:.0f}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_MARGIN:.0f}" y="20" font-weight="bold">{escape(title)}</text>',
        f'<text x="{_MARGIN:.0f}" y="36" fill="#555555">{escape(summary(tree))}</text>',
        f'<path d="{_edges(tree, x, y)}" fill="none" stroke="#4a5a6a" stroke-width="{_stroke(tree):.2f}"/>',
    ]
    for k, children in enumerate(tree.nodes):
        item = tree.leaves + k
        if len(children) > 2:
            lines.append(f'<rect x="{x[item] - 3:.1f}" y="{y[item] - 3:.1f}" width="6" height="6" fill="#b03a2e"/>')
        elif tree.leaves <= _MOST_DOTS:
            lines.append(f'<circle cx="{x[item]:.1f}" cy="{y[item]:.1f}" r="2" fill="#4a5a6a"/>')
    mark = min(8.0, (width - 2 * _MARGIN) / tree.leaves)
    bottom = _MARGIN + _FOOT + _HEIGHT
    for leaf in range(tree.leaves):
        hue = 300 * leaf // max(1, tree.leaves - 1)
        lines.append(
            f'<rect x="{x[leaf] - mark / 2:.2f}" y="{bottom - 8:.1f}" width="{mark:.2f}" height="8" '
            f'fill="hsl({hue},70%,50%)"/>'
        )
        if tree.leaves <= _MOST_LABELS:
            lines.append(f'<text x="{x[leaf]:.1f}" y="{bottom + 13:.1f}" text-anchor="middle">{leaf}</text>')
    if tree.leaves > _MOST_LABELS:
        lines.append(
            f'<text x="{_MARGIN:.0f}" y="{bottom + 14:.1f}" fill="#555555">leaves in tree order; hue: index 0 (red) to '
            f"{tree.leaves - 1} (magenta)</text>"
        )
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _stroke(tree: Tree) -> float:
    return 1.2 if tree.leaves <= 128 else 0.5


def _places(tree: Tree, width: float) -> tuple[list[float], list[float]]:
    items = tree.leaves + len(tree.nodes)
    x, y = [0.0] * items, [0.0] * items
    step = (width - 2 * _MARGIN) / tree.leaves
    place = 0
    stack = [tree.root]
    while stack:
        item = stack.pop()
        children = tree.children(item)
        if not children:
            x[item] = _MARGIN + (place + 0.5) * step
            place += 1
        stack += reversed(children)
    tallest = max(1, tree.heights[tree.root])
    for item in range(items):
        if children := tree.children(item):
            x[item] = (x[children[0]] + x[children[-1]]) / 2
        y[item] = _MARGIN + _FOOT + (_HEIGHT - 12) * (1 - tree.heights[item] / tallest)
    return x, y


def _edges(tree: Tree, x: list[float], y: list[float]) -> str:
    parts = []
    for k, children in enumerate(tree.nodes):
        item = tree.leaves + k
        for child in children:
            parts.append(f"M{x[child]:.1f} {y[child]:.1f}L{x[item]:.1f} {y[item]:.1f}")
    return "".join(parts)
