"""How a rule says that it is broken."""

from __future__ import annotations


class Broken(Exception):
    """A rule does not hold. The message is the rest of a sentence that names the event."""


def require(holds: bool, otherwise: str) -> None:
    """Raise Broken with the sentence unless the rule holds."""
    if not holds:
        raise Broken(otherwise)
