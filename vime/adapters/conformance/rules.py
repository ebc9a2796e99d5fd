"""Rules, and the report of which were kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vime.errors import InvariantViolation


class ConformanceError(InvariantViolation):
    """An adapter breaks rules; the message names each rule and what was found."""


class Broken(Exception):
    """What was found that a rule forbids."""


@dataclass(frozen=True)
class Rule:
    """One thing that holds of every adapter. ``check(harness)`` raises :class:`Broken` where it does not."""

    name: str
    sentence: str
    check: Callable[[Any], None]

    def __str__(self) -> str:
        return self.name

    def problem(self, harness: Any) -> str | None:
        """What is wrong, or None. An exception that the rule does not expect is wrong too."""
        try:
            self.check(harness)
        except Broken as found:
            return str(found)
        except Exception as error:  # an adapter may raise anything, and the other rules are still to be checked
            return f"it raised {type(error).__name__}: {error}"
        return None

    def verify(self, harness: Any) -> None:
        """Raise ConformanceError where the rule is broken."""
        found = self.problem(harness)
        if found is not None:
            raise ConformanceError(f"{self.name} ({self.sentence}): {found}")


@dataclass(frozen=True)
class Outcome:
    """A rule, and what is wrong (None: it is kept)."""

    rule: Rule
    problem: str | None


@dataclass(frozen=True)
class ConformanceReport:
    """The outcome of every rule."""

    outcomes: tuple[Outcome, ...]

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """Rules that are not kept."""
        return tuple(outcome for outcome in self.outcomes if outcome.problem is not None)

    def require(self) -> None:
        """Raise ConformanceError with one sentence for each broken rule."""
        if self.broken:
            lines = [f"{o.rule.name} ({o.rule.sentence}): {o.problem}" for o in self.broken]
            raise ConformanceError(f"{len(lines)} of {len(self.outcomes)} rules are broken:\n" + "\n".join(lines))


def check_rules(rules: Sequence[Rule], harness: Any) -> ConformanceReport:
    """Check every rule, each on adapters of its own."""
    return ConformanceReport(tuple(Outcome(rule, rule.problem(harness)) for rule in rules))


def expect(condition: bool, found: str) -> None:
    """Raise :class:`Broken` unless the condition holds."""
    if not condition:
        raise Broken(found)


def expect_raises(kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any], what: str) -> None:
    """Raise :class:`Broken` unless the call raises an error of these kinds."""
    names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    try:
        call()
    except kinds:
        return
    except Exception as error:  # of the wrong kind, which is what has to be said
        raise Broken(f"{what} raised {type(error).__name__} ({error}); {names} is due") from error
    raise Broken(f"{what} was accepted; {names} is due")
