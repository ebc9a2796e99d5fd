"""Evidence of what ran: counts per (region, case, implementation), graphs, caches, refusals."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Evidence:
    """Mutable counters that one engine or trainer owns; ``as_json`` is what evidence.json holds."""

    owner: str
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    facts: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def ran(self, region: str, case: str, implementation: str, tokens: int = 0, times: int = 1) -> None:
        """Count ``times`` executions of a region kind in a case by an implementation, each over ``tokens``."""
        self.calls[(region, case, implementation)] += times
        self.tokens[(region, case)] += times * tokens

    def cases(self) -> set[str]:
        """Cases in which anything ran."""
        return {case for _, case, _ in self.calls}

    def as_json(self) -> dict[str, Any]:
        """Plain data, sorted."""
        return {
            "owner": self.owner,
            "calls": [
                {"region": r, "case": c, "implementation": i, "count": n, "tokens": self.tokens[(r, c)]}
                for (r, c, i), n in sorted(self.calls.items())
            ],
            "facts": dict(sorted(self.facts.items())),
            "refused": list(self.refused),
        }
