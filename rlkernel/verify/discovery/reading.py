"""Reads the compact notation of summation trees (see ``notation``)."""

from __future__ import annotations

import re

from rlkernel.errors import ContractError
from rlkernel.verify.discovery.notation import Expression
from rlkernel.verify.discovery.tree import Tree, TreeBuilder

_TOKEN = re.compile(r"\s*(-?\d+|\.\.|chain|tree|by|x|[(){},])")


def parse(text: str, leaves: int | None = None) -> Tree:
    """Read the compact notation.

    Args:
        text: for example ``tree(chain(0..24 by 8) x8 by 1)``.
        leaves: number of leaves; one more than the highest that is named, without it.

    Raises:
        ContractError: the text does not follow the notation, or a leaf is missing or named twice.
    """
    return _Reader(text).tree(leaves)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = []
        place = 0
        while place < len(text.rstrip()):
            match = _TOKEN.match(text, place)
            if match is None:
                raise ContractError(
                    f"a tree cannot have {text[place:].strip()[:12]!r} at character {place} of {text!r}"
                )
            self._tokens.append(match[1])
            place = match.end()
        self._next = 0

    def tree(self, leaves: int | None) -> Tree:
        expression = self._item()
        if self._next != len(self._tokens):
            raise self._error("the end")
        highest = max(_leaves(expression))
        builder = TreeBuilder(highest + 1 if leaves is None else leaves)
        return builder.build(_join(builder, expression))

    def _error(self, wanted: str) -> ContractError:
        found = self._tokens[self._next] if self._next < len(self._tokens) else "the end"
        return ContractError(f"{wanted} is expected where {found!r} stands (part {self._next + 1} of {self._text!r})")

    def _take(self, token: str) -> bool:
        if self._next < len(self._tokens) and self._tokens[self._next] == token:
            self._next += 1
            return True
        return False

    def _need(self, token: str) -> None:
        if not self._take(token):
            raise self._error(repr(token))

    def _number(self, least: int | None = 0) -> int:
        if self._next < len(self._tokens) and self._tokens[self._next].lstrip("-").isdigit():
            value = int(self._tokens[self._next])
            if least is None or value >= least:
                self._next += 1
                return value
        raise self._error("a number" if least is None else f"a number from {least} on")

    def _item(self) -> Expression:
        for kind, left, right in (("chain", "(", ")"), ("tree", "(", ")"), ("terms", "{", "}")):
            if kind == "terms" or self._take(kind):
                if kind == "terms" and not self._take(left):
                    break
                if kind != "terms":
                    self._need(left)
                items = self._run()
                while self._take(","):
                    items += self._run()
                self._need(right)
                return Expression(kind, tuple(items))
        return Expression("leaf", leaf=self._number())

    def _run(self) -> list[Expression]:
        first = self._item()
        if first.kind == "leaf" and self._take(".."):
            last = self._number()
            step = self._number(None) if self._take("by") else 1
            if step == 0 or (last - first.leaf) % step or (last - first.leaf) // step < 0:
                raise ContractError(
                    f"the range {first.leaf}..{last} by {step} of {self._text!r} does not end at {last}"
                )
            return [Expression("leaf", leaf=k) for k in range(first.leaf, last + (1 if step > 0 else -1), step)]
        if self._take("x"):
            count = self._number(1)
            self._need("by")
            shift = self._number(None)
            return [_moved(first, shift * k) for k in range(count)]
        return [first]


def _moved(expression: Expression, shift: int) -> Expression:
    items = tuple(_moved(item, shift) for item in expression.items)
    return Expression(expression.kind, items, expression.leaf + shift if expression.kind == "leaf" else -1)


def _leaves(expression: Expression) -> list[int]:
    if expression.kind == "leaf":
        return [expression.leaf]
    return [leaf for item in expression.items for leaf in _leaves(item)]


def _join(builder: TreeBuilder, expression: Expression) -> int:
    if expression.kind == "leaf":
        if expression.leaf >= builder.leaves:
            raise ContractError(f"leaf {expression.leaf} is named, but there are only {builder.leaves} leaves")
        return expression.leaf
    if expression.kind == "chain":
        total = _join(builder, expression.items[0])
        for item in expression.items[1:]:
            added = item.items if item.kind == "terms" else (item,)
            total = builder.join(total, *(_join(builder, part) for part in added))
        return total
    items = [_join(builder, item) for item in expression.items]
    return builder.join(*items) if expression.kind == "terms" else builder.balanced(items)
