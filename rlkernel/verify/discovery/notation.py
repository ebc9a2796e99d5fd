"""Summation trees as text: a lossless compact notation with its reader, an indented listing, and a summary in words.

The notation, by example (ranges are inclusive; ``x8 by 1``: 8 copies, each with leaves 1 higher than the one before)::

    chain(0..63)                           ((0 + 1) + 2) + ...
    tree(0..7)                             ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
    chain(0..56 by 8)                      every eighth leaf
    tree(chain(0..1016 by 8) x8 by 1)      a tree of 8 strided chains
    chain({0..15} x4 by 16)                fused adders of 16 terms and the sum so far

Braces are terms that one fused adder adds at once: alone, or in a chain together with the sum so far.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from rlkernel.verify.discovery.tree import Tree


@dataclass(frozen=True)
class Expression:
    """``kind`` is ``leaf`` (``leaf`` names it), ``chain``, ``tree`` or ``terms`` (braces)."""

    kind: str
    items: tuple[Expression, ...] = field(default=(), repr=False)
    leaf: int = -1


def expression_of(tree: Tree) -> Expression:
    """The shortest of the expressions that this module knows for a tree."""
    return _Writer(tree).expression(tree.root)


class _Writer:
    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._known: dict[int, Expression] = {}

    def expression(self, item: int) -> Expression:
        if item not in self._known:
            self._known[item] = self._shortest(item)
        return self._known[item]

    def _shortest(self, item: int) -> Expression:
        children = self._tree.children(item)
        if not children:
            return Expression("leaf", leaf=item)
        chain = self._chain(item)
        if len(children) > 2:
            return chain
        choices = []
        for level in range(2, self._tree.heights[item] + 1):
            found = [self._padded(item, level, set(), by_shape) for by_shape in (True, False)]
            if all(parts is None or len(parts) <= 2 ** (level - 1) for parts in found):
                break
            for parts in found:
                if parts is None or 2 * max(self._tree.sizes[part] for part in parts) > self._tree.sizes[item]:
                    continue  # lopsided: a chain says it better, and keeps nesting (and recursion) shallow
                choices.append(Expression("tree", tuple(self.expression(part) for part in parts)))
        return min([chain, *choices], key=_cost)

    def _padded(self, item: int, level: int, shapes: set[int], by_shape: bool) -> list[int] | None:
        """Items of a balanced tree of at most 2^level items whose left halves are full; None where it is none.

        ``by_shape``: what has the form of an item further left is one item, rather than a tree of several.
        """
        tree = self._tree
        if level == 0 or (by_shape and tree.shapes[item] in shapes):
            return [item]
        children = tree.children(item)
        left = self._full(children[0], level - 1) if len(children) == 2 else None
        if left is None:
            if tree.shapes[item] in shapes or len(children) != 2:
                return [item] if shapes else None
            return self._padded(item, level - 1, shapes, by_shape) if shapes else None
        right = self._padded(children[1], level - 1, shapes | {tree.shapes[part] for part in left}, by_shape)
        return None if right is None else left + right

    def _full(self, item: int, level: int) -> list[int] | None:
        parts = [item]
        for _ in range(level):
            below = [self._tree.children(part) for part in parts]
            if any(len(children) != 2 for children in below):
                return None
            parts = [child for children in below for child in children]
        return parts

    def _chain(self, item: int) -> Expression:
        steps, start = self._spine(item)
        if not steps:
            return Expression("terms", tuple(self.expression(child) for child in self._tree.children(item)))
        items = [self.expression(start), *(self._step(added) for added in steps)]
        if len(steps) > 1 and len(steps[0]) == 1:
            onward = _shift(items[0], items[2])
            if onward is not None and _shift(items[1], items[0]) == onward:
                items[0], items[1] = items[1], items[0]  # the first two commute: the order that continues
        return Expression("chain", tuple(items))

    def _step(self, added: tuple[int, ...]) -> Expression:
        if len(added) > 1:
            return Expression("terms", tuple(self.expression(item) for item in added))
        single = self.expression(added[0])
        # braces would say that its terms and the sum so far are added at once
        return Expression("tree", (single,)) if single.kind == "terms" else single

    def _spine(self, item: int) -> tuple[list[tuple[int, ...]], int]:
        """What is added, step by step, to a first item: (items of each step, first item)."""
        tree = self._tree
        steps: list[tuple[int, ...]] = []
        while True:
            children = tree.children(item)
            if not children:
                break
            largest = max(children, key=lambda child: (tree.sizes[child], -tree.first_leaves[child]))
            others = tuple(child for child in children if child != largest)
            alike = all(tree.shapes[child] == tree.shapes[largest] for child in others)
            if alike and len(children) > 2:
                break  # a fused adder of equal terms: the first item
            steps.append(others)
            item = largest
            if alike and tree.children(item) and len(steps) > 1:
                # a balanced tree, or the first two items of a chain of such items
                if tree.shapes[item] != tree.shapes[steps[-2][0]] or len(steps[-2]) > 1:
                    steps.pop()
                    item = tree.parents[item]
                break
            if alike and tree.children(item):
                break
        return steps[::-1], item


def _cost(choice: Expression) -> int:
    """Length of the text; a tree of items of different forms must save more, because it is harder to read."""
    forms = len({_summary(item, False) for item in choice.items}) if choice.kind == "tree" else 1
    return len(compact(choice)) - len(choice.kind) + 40 * (forms - 1)


def _shift(one: Expression, other: Expression) -> int | None:
    """By how much all leaves of ``other`` lie above those of ``one``; None where the two differ in more."""
    shift: int | None = None
    stack = [(one, other)]
    while stack:
        a, b = stack.pop()
        if a.kind != b.kind or len(a.items) != len(b.items):
            return None
        if a.kind == "leaf":
            if shift is not None and b.leaf - a.leaf != shift:
                return None
            shift = b.leaf - a.leaf
        stack += list(zip(a.items, b.items, strict=True))
    return shift


def _runs(items: tuple[Expression, ...]) -> list[tuple[Expression, int, int]]:
    """Consecutive items that are shifted copies: (first, count, shift)."""
    shifts = [_shift(a, b) for a, b in itertools.pairwise(items)]
    result: list[tuple[Expression, int, int]] = []
    k = 0
    while k < len(items):
        end = k
        while end < len(shifts) and shifts[end] is not None and shifts[end] == shifts[k]:
            end += 1
        count = end - k + 1
        least = 3 if items[k].kind == "leaf" else 2
        if count >= least:
            result.append((items[k], count, shifts[k] or 0))
            k = end + 1
        else:
            result.append((items[k], 1, 0))
            k += 1
    return result


def compact(tree: Tree | Expression) -> str:
    """The tree in the compact notation; :func:`rlkernel.verify.discovery.reading.parse` is its inverse."""
    expression = expression_of(tree) if isinstance(tree, Tree) else tree
    if expression.kind == "leaf":
        return str(expression.leaf)
    inner = ", ".join(_run_text(*run) for run in _runs(expression.items))
    return f"{{{inner}}}" if expression.kind == "terms" else f"{expression.kind}({inner})"


def _run_text(first: Expression, count: int, shift: int) -> str:
    if count == 1:
        return compact(first)
    if first.kind == "leaf":
        last = first.leaf + shift * (count - 1)
        return f"{first.leaf}..{last}" + (f" by {shift}" if shift != 1 else "")
    return f"{compact(first)} x{count} by {shift}"


def indented(tree: Tree, most: int = 40) -> str:
    """The tree as an indented listing, one item a line, runs of shifted copies folded; cut after ``most`` lines."""
    lines: list[str] = []

    def write(expression: Expression, depth: int, suffix: str) -> None:
        pad = "  " * depth
        nested = any(item.kind != "leaf" for item in expression.items)
        if expression.kind == "leaf" or not nested:
            lines.append(f"{pad}{compact(expression)}{suffix}")
            return
        lines.append(f"{pad}{_word(expression.kind)}{suffix}")
        for first, count, shift in _runs(expression.items):
            if first.kind == "leaf":
                lines.append(f"{pad}  {_run_text(first, count, shift)}")
            else:
                write(first, depth + 1, f"   x{count}, leaves {shift} higher each time" if count > 1 else "")

    write(expression_of(tree), 0, "")
    if len(lines) > most:
        lines = [*lines[:most], f"... ({len(lines) - most} more lines)"]
    return "\n".join(lines)


def _word(kind: str) -> str:
    return {"chain": "chain, one after the other:", "tree": "balanced tree of:", "terms": "added at once:"}[kind]


def summary(tree: Tree) -> str:
    """The form in words, leaves left out: ``tree of 8 chains of 128``."""
    return _summary(expression_of(tree), False)


def _summary(expression: Expression, plural: bool) -> str:
    if expression.kind == "leaf":
        return "inputs" if plural else "input"
    noun = {"chain": "chain", "tree": "tree", "terms": "fused sum"}[expression.kind] + ("s" if plural else "")
    counts: dict[str, int] = {}
    forms: dict[str, Expression] = {}
    for item in expression.items:
        key = _summary(item, False)
        counts[key] = counts.get(key, 0) + 1
        forms.setdefault(key, item)
    if set(counts) == {"input"}:
        return f"{noun} of {counts['input']}"
    parts = [f"{count} {_summary(forms[key], count > 1)}" for key, count in counts.items()]
    if len(parts) > 3:
        return f"{noun} of {len(expression.items)} parts of {len(parts)} forms"
    text = f"{noun} of {' and '.join(parts)}"
    return f"{text}" if len(parts) == 1 else f"{noun} of ({' and '.join(parts)})"
